"""The file of sessions: what comes back, and what is refused."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from radixkv.errors import ConfigError
from radixkv.server.session_db import SCHEMA_VERSION, SessionDb
from radixkv.server.session_state import Session, SessionRecord


def session(name: str = "s", tenant: str = "t", turns: int = 0) -> Session:
    made = Session(name, (tenant, "salt"), 1.5, b"v" * 16, "m", system="S", metadata={"k": "v"})
    for number in range(turns):
        add_turn(made, number)
    return made


def add_turn(made: Session, number: int = 0, **fields: Any) -> None:
    messages = [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": "a"}]
    messages[1] |= fields
    prompt = [*made.token_ids, number, 70_000]
    made.commit_turn(messages, prompt, [5, 6], ended_by_token=bool(number % 2))


def key_values(record: SessionRecord) -> dict[str, Any]:
    fields = {name: getattr(record, name) for name in SessionRecord.__slots__ if name != "turns"}
    turns = [
        (t.messages, t.num_messages, t.start, t.ids, t.num_tokens, t.ended_by_token)
        for t in record.turns
    ]
    return {**fields, "turns": turns}


def stored(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    db = SessionDb(path)
    try:
        return {record.key: key_values(record) for record in db.load()}
    finally:
        db.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


def write(path: Path, *sessions: Session) -> None:
    db = SessionDb(path)
    db.load()
    db.write({made.key: made.record() for made in sessions})
    db.close()


def test_sessions_come_back_as_they_were(path: Path) -> None:
    huge = {"tool_calls": [{"function": {"name": "f", "arguments": {"n": 10**40, "t": "\ud800"}}}]}
    first, second, empty = session(turns=3), session("s", "u", 1), session("e")
    add_turn(first, 3, **huge)
    first.pin_ttl_s, first.pinned_until, first.tools = 5.0, 9.0, [{"type": "function"}]
    second.system = "half \ud800"
    write(path, first, second, empty)
    expected = {made.key: key_values(made.record()) for made in (first, second, empty)}
    assert stored(path) == expected


def test_turns_are_added_replaced_and_deleted(path: Path) -> None:
    db = SessionDb(path)
    made = session(turns=3)
    child = session("child")
    child.turns = made.turns[:2]
    db.write({made.key: made.record(), child.key: child.record()})
    del made.turns[1:]
    add_turn(made, 7)
    add_turn(made, 8)
    db.write({made.key: made.record()})
    db.close()
    assert stored(path)[made.key] == key_values(made.record())
    assert stored(path)[child.key] == key_values(child.record())
    db = SessionDb(path)
    (known,) = [record for record in db.load() if record.id == "s"]
    again = Session.restored(known)
    add_turn(again, 9)
    db.write({again.key: again.record(), child.key: None, ("t", "unknown"): None})
    db.close()
    assert stored(path) == {again.key: key_values(again.record())}
    with sqlite3.connect(path) as raw:
        assert raw.execute("SELECT count(*) FROM turns").fetchone() == (4,)
    raw.close()


def test_a_commit_writes_only_what_is_new(path: Path) -> None:
    db = SessionDb(path)
    made = session(turns=5)
    db.write({made.key: made.record()})
    statements: list[str] = []
    db._db.set_trace_callback(statements.append)
    add_turn(made, 5)
    db.write({made.key: made.record()})
    assert sum(s.startswith("INSERT INTO turns") for s in statements) == 1
    db.close()


def test_a_failing_write_changes_nothing_and_can_be_repeated(path: Path) -> None:
    db = SessionDb(path)
    made, other = session(turns=1), session("o", turns=1)
    db.write({made.key: made.record(), other.key: other.record()})
    before = {made.key: key_values(made.record()), other.key: key_values(other.record())}
    add_turn(made, 1)
    broken = replace(other.record(), last_used="\ud800")  # type: ignore[arg-type]
    with pytest.raises(UnicodeEncodeError):
        db.write({made.key: made.record(), other.key: broken})
    assert {record.key: key_values(record) for record in db.load()} == before
    add_turn(made, 2)
    with pytest.raises(UnicodeEncodeError):
        db.write({made.key: made.record(), other.key: broken})
    db.write({made.key: made.record()})
    db.close()
    assert stored(path)[made.key] == key_values(made.record())


def test_a_session_that_is_no_json_does_not_keep_others_from_being_written(path: Path) -> None:
    db = SessionDb(path)
    made, deep = session(turns=1), session("deep")
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    add_turn(deep, 0, deep=nested)
    assert db.write({deep.key: deep.record(), made.key: made.record()}) == [deep.key]
    db.close()
    assert set(stored(path)) == {made.key}


def test_file_is_for_its_owner_alone_and_holds_no_text_after_deletion(path: Path) -> None:
    db = SessionDb(path)
    made = session()
    add_turn(made, 0, content="a very secret answer")
    db.write({made.key: made.record()})
    modes = {stat.S_IMODE(os.stat(file).st_mode) for file in path.parent.iterdir()}
    assert modes == {0o600}
    db.write({made.key: None})
    db.close()
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert b"very secret" not in path.read_bytes()


def not_a_database(path: Path) -> None:
    path.write_bytes(b"these are no sessions " * 100)


def cut_off(path: Path) -> None:
    write(path, *(session(f"s{i}", turns=20) for i in range(20)))
    path.write_bytes(path.read_bytes()[:-4096])


def flipped_page(path: Path) -> None:
    write(path, *(session(f"s{i}", turns=20) for i in range(20)))
    data = bytearray(path.read_bytes())
    data[4096 * 4 : 4096 * 4 + 64] = b"\xff" * 64
    path.write_bytes(data)


def changed(statement: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        write(path, session(turns=3))
        with sqlite3.connect(path) as raw:
            raw.execute(statement)
        raw.close()

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (not_a_database, "is damaged: file is not a database"),
        (cut_off, "is damaged"),
        (flipped_page, "is damaged"),
        (changed("UPDATE turns SET ids = x'01000000' WHERE turn = 1"), "is damaged: turn 1"),
        (changed("UPDATE turns SET messages = '[]' WHERE turn = 2"), "is damaged: turn 2"),
        (changed("UPDATE turns SET ids = 'text' WHERE turn = 0"), "is damaged"),
        (changed("DELETE FROM turns WHERE turn = 0"), "is damaged: turn 1"),
        (changed("UPDATE sessions SET metadata = '{'"), "is damaged"),
        (changed(f"PRAGMA user_version = {SCHEMA_VERSION + 1}"), "has version 2 of the schema"),
        (changed("PRAGMA application_id = 7"), "is another program's database"),
        (lambda path: path.mkdir(), "can't be used: Is a directory"),
    ],
)
def test_file_that_is_not_in_order_is_refused_in_words(
    path: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(path)
    with pytest.raises(ConfigError, match=f"--session-db {path} {message}"):
        stored(path)


def test_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be used: No such file or directory"):
        SessionDb(tmp_path / "none" / "sessions.db")


def test_second_server_on_one_file_is_refused_until_the_first_ends(path: Path) -> None:
    first = SessionDb(path)
    with pytest.raises(ConfigError, match="is in use by another server"):
        SessionDb(path)
    made = session(turns=1)
    first.write({made.key: made.record()})
    first.close()
    assert set(stored(path)) == {made.key}
