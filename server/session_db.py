"""Sessions in a SQLite file: opened by one server, read once, written a batch at a time."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from radixkv.errors import ConfigError
from radixkv.server.session_state import SessionRecord, Turn
from radixkv.server.session_tokens import TOKEN_BYTES

__all__ = ["SCHEMA_VERSION", "Key", "SessionDb"]

logger = logging.getLogger(__name__)

APPLICATION_ID = 0x52584B56  # "RXKV"
SCHEMA_VERSION = 1
WAL_LIMIT_BYTES = 16 * 1024**2

Key = tuple[str, str]  # tenant and id of a session

SCHEMA = """
CREATE TABLE sessions (
    pk INTEGER PRIMARY KEY,
    tenant TEXT NOT NULL,
    id TEXT NOT NULL,
    namespace TEXT NOT NULL,
    created REAL NOT NULL,
    last_used REAL NOT NULL,
    parent TEXT,
    system TEXT NOT NULL,
    tools TEXT NOT NULL,
    metadata TEXT NOT NULL,
    pin_ttl_s REAL,
    pinned_until REAL NOT NULL,
    vocabulary BLOB NOT NULL,
    model TEXT NOT NULL,
    UNIQUE (tenant, id)
);
CREATE TABLE turns (
    session INTEGER NOT NULL REFERENCES sessions (pk) ON DELETE CASCADE,
    turn INTEGER NOT NULL,
    messages TEXT NOT NULL,
    start INTEGER NOT NULL,
    ids BLOB NOT NULL,
    ended_by_token INTEGER NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (session, turn)
);
"""

SAVE_SESSION = """
INSERT INTO sessions (
    tenant, id, namespace, created, last_used, parent, system, tools, metadata, pin_ttl_s,
    pinned_until, vocabulary, model
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (tenant, id) DO UPDATE SET
    last_used = excluded.last_used, system = excluded.system, tools = excluded.tools,
    metadata = excluded.metadata, pin_ttl_s = excluded.pin_ttl_s,
    pinned_until = excluded.pinned_until, vocabulary = excluded.vocabulary, model = excluded.model
RETURNING pk
"""


class SessionDb:
    """Owns the connection to one file, and knows which turns are in it.

    A turn takes a row with the ids and messages that it added, so that a commit costs what is new
    and not the history. The tenant is what `auth` makes of a key: the key itself is never here.
    Whatever is written in one call of `write` is in the file as a whole or not at all.

    Not thread-safe, but it may be opened on one thread and used on another.
    """

    def __init__(self, path: str | Path) -> None:
        """Open the file, or make it, readable for its owner alone.

        Raises:
            ConfigError: it can't be opened, is damaged, is used by another server, or isn't a file
                of this program or version.
        """
        self.path = Path(path).expanduser()
        self._saved: dict[Key, tuple[int, tuple[Turn, ...]]] = {}
        try:
            # SQLite would make it readable for others; its log takes over the mode of the file.
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise ConfigError(f"--session-db {self.path} can't be used: {error.strerror}") from None
        with self._reading():
            self._db = sqlite3.connect(
                self.path, timeout=0.0, isolation_level=None, check_same_thread=False
            )
            try:
                self._begin()
            except BaseException:
                self._db.close()
                raise

    def load(self) -> list[SessionRecord]:
        """Return every session in the file. Call it once, before the first `write`.

        Raises:
            ConfigError: the file is damaged.
        """
        with self._reading():
            turns: dict[int, list[Turn]] = {}
            for pk, number, messages, start, ids, ended, checksum in self._db.execute(
                "SELECT session, turn, messages, start, ids, ended_by_token, checksum "
                "FROM turns ORDER BY session, turn"
            ):
                before = turns.setdefault(pk, [])
                last = before[-1] if before else None
                if (
                    number != len(before)
                    or checksum != _checksum(messages, start, ids, ended)
                    or len(ids) % TOKEN_BYTES
                    or start > (0 if last is None else last.num_tokens)
                ):
                    raise self._damaged(f"turn {number} of session {pk} is not what was written")
                added = tuple(json.loads(messages))
                before.append(
                    Turn(
                        added,
                        len(added) + (0 if last is None else last.num_messages),
                        start,
                        ids,
                        start + len(ids) // TOKEN_BYTES,
                        bool(ended),
                    )
                )
            return [
                self._record(row, tuple(turns.get(row[0], ())))
                for row in self._db.execute(
                    "SELECT pk, id, namespace, created, last_used, parent, system, tools, "
                    "metadata, pin_ttl_s, pinned_until, vocabulary, model FROM sessions"
                )
            ]

    def write(self, changes: Mapping[Key, SessionRecord | None]) -> list[Key]:
        """Bring the file to the given state of some sessions, in one transaction.

        Args:
            changes: what becomes of each session; None deletes it.

        Returns:
            Sessions that can't be written as JSON; they are left as they were.

        Raises:
            sqlite3.Error: nothing was written.

        Cost: that of what is new.
        """
        saved = dict(self._saved)
        unwritable = []
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for key, record in changes.items():
                if record is None:
                    if (known := saved.pop(key, None)) is not None:
                        self._db.execute("DELETE FROM sessions WHERE pk = ?", (known[0],))
                    continue
                try:
                    row, new = _session_row(record), _new_turns(record, saved.get(key))
                except (TypeError, ValueError, RecursionError):
                    unwritable.append(key)
                    continue
                ((pk,),) = self._db.execute(SAVE_SESSION, row).fetchall()
                self._save_turns(pk, len(record.turns) - len(new), new)
                saved[key] = (pk, record.turns)
            self._db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise
        self._saved = saved
        return unwritable

    def close(self) -> None:
        """Put everything into the one file, and let others open it. Idempotent."""
        self._db.close()

    def _save_turns(self, pk: int, first: int, rows: list[tuple[Any, ...]]) -> None:
        """Replace all turns from `first` on."""
        self._db.execute("DELETE FROM turns WHERE session = ? AND turn >= ?", (pk, first))
        self._db.executemany(
            "INSERT INTO turns VALUES (?, ?, ?, ?, ?, ?, ?)",
            [(pk, first + i, *row) for i, row in enumerate(rows)],
        )

    def _begin(self) -> None:
        """Take the file for this process, and see that it is in order."""
        # Exclusive from the first read to the end: a second server is refused, and a crash leaves
        # nothing behind but what SQLite recovers from.
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._db.execute("BEGIN EXCLUSIVE")
        (tables,) = self._db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        (application,) = self._db.execute("PRAGMA application_id").fetchone()
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if not tables and not application:
            for statement in SCHEMA.split(";"):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        elif application != APPLICATION_ID:
            raise ConfigError(f"--session-db {self.path} is another program's database")
        elif version != SCHEMA_VERSION:
            raise ConfigError(
                f"--session-db {self.path} has version {version} of the schema, and this version "
                f"of RadixKV knows version {SCHEMA_VERSION}"
            )
        self._db.execute("COMMIT")
        self._db.execute("PRAGMA journal_mode = WAL")
        # What a client was told is on the disk is there after a power cut, too.
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}")
        self._db.execute("PRAGMA foreign_keys = ON")
        # Overwrites what is deleted.
        self._db.execute("PRAGMA secure_delete = ON")
        problems = [row[0] for row in self._db.execute("PRAGMA quick_check(1)")]
        if problems != ["ok"]:
            raise self._damaged(problems[0])

    def _record(self, row: tuple[Any, ...], turns: tuple[Turn, ...]) -> SessionRecord:
        record = SessionRecord(
            id=row[1],
            namespace=tuple(json.loads(row[2])),
            created=row[3],
            last_used=row[4],
            parent=row[5],
            system=json.loads(row[6]),
            tools=json.loads(row[7]),
            metadata=json.loads(row[8]),
            turns=turns,
            pin_ttl_s=row[9],
            pinned_until=row[10],
            vocabulary=row[11],
            model=row[12],
        )
        self._saved[record.key] = (row[0], turns)
        return record

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Say what is wrong with the file in the words of the option that names it."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise ConfigError(f"--session-db {self.path} is in use by another server") from None
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise self._damaged(error) from None
            raise ConfigError(f"--session-db {self.path} can't be used: {error}") from None
        except (ValueError, TypeError) as error:  # JSON or text that isn't
            raise self._damaged(error) from None

    def _damaged(self, detail: object) -> ConfigError:
        return ConfigError(
            f"--session-db {self.path} is damaged: {detail}. Put a copy in its place, or move it "
            "away to start without its sessions"
        )


def _session_row(record: SessionRecord) -> tuple[Any, ...]:
    tenant, session_id = record.key
    return (
        tenant,
        session_id,
        json.dumps(record.namespace),
        record.created,
        record.last_used,
        record.parent,
        json.dumps(record.system),
        json.dumps(record.tools),
        json.dumps(record.metadata),
        record.pin_ttl_s,
        record.pinned_until,
        record.vocabulary,
        record.model,
    )


def _new_turns(
    record: SessionRecord, saved: tuple[int, tuple[Turn, ...]] | None
) -> list[tuple[Any, ...]]:
    """Return the rows of the turns after those that are in the file already."""
    known = () if saved is None else saved[1]
    first = 0
    # Turns never change, so the same object is the same turn.
    while first < min(len(known), len(record.turns)) and known[first] is record.turns[first]:
        first += 1
    rows = []
    for turn in record.turns[first:]:
        # Not orjson: tool calls may have numbers of any size, and texts half of a surrogate pair.
        messages = json.dumps(turn.messages)
        ended = int(turn.ended_by_token)
        checksum = _checksum(messages, turn.start, turn.ids, ended)
        rows.append((messages, turn.start, turn.ids, ended, checksum))
    return rows


def _checksum(messages: str, start: int, ids: bytes, ended: int) -> int:
    """Return a checksum of a turn: SQLite has none, and an id that changed is still an id."""
    return zlib.crc32(ids, zlib.crc32(f"{start} {ended} {messages}".encode()))
