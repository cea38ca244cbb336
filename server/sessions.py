"""Sessions: conversations whose exact token ids the server keeps.

A session is only a label over ordinary cache: it pins nothing by itself, so an idle one costs no KV
and can wedge nothing; if its blocks were evicted, its next turn computes them again.
"""

from __future__ import annotations

import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from radixkv.request import Namespace
from radixkv.server.errors import ApiError
from radixkv.server.session_state import Session, SessionRecord, Turn, session_deleted

if TYPE_CHECKING:
    from radixkv.server.session_saver import SessionSaver

__all__ = ["OWN_PREFIX", "Session", "SessionStore", "Turn", "session_deleted", "session_not_found"]

# What ids begin with that the server makes; clients can't choose such names.
OWN_PREFIX = "sess_"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~:@-]{0,127}")
# Expired sessions looked at per call, so that no single request pays for thousands of them.
SWEEP_LIMIT = 32
# How far the time of the last use on the disk may lag behind, for sessions that are only read.
TOUCH_LAG_S = 60.0


class SessionStore:
    """All sessions, in memory, least recently used first; with a saver, on disk as well.

    Bounded: at `max_sessions` a new one is refused rather than an old one thrown away. Sessions
    that were idle for `idle_s`, and whose pin has run out, are dropped. Whoever changes a session
    says so by `changed`. Not thread-safe: event loop only.
    """

    def __init__(
        self,
        *,
        max_sessions: int,
        idle_s: float,
        clock: Callable[[], float] = time.time,
        saver: SessionSaver | None = None,
        vocabulary: bytes = b"",
        model: str = "",
    ) -> None:
        """Make a store; `restore` fills it.

        Args:
            max_sessions: held at most.
            idle_s: seconds after which an unused one is dropped.
            clock: seconds since 1970, since times outlive the process.
            saver: writes changes down; None keeps sessions in memory only.
            vocabulary, model: of new sessions, see `SessionRecord`.
        """
        self._sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()
        self._max_sessions = max_sessions
        self._idle_s = idle_s
        self._clock = clock
        self._saver = saver
        self._vocabulary = vocabulary
        self._model = model
        self._started = clock()
        self._written: dict[tuple[str, str], float] = {}  # last use as it is on the disk

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        """Iterate over all tenants' sessions, most recently used first."""
        return (s for s in reversed(self._sessions.values()) if not self._expired(s))

    def restore(self, records: Iterable[SessionRecord]) -> None:
        """Take over what was written down before a restart, however long that was.

        More than `max_sessions` are kept, too; a pin has to be made anew, see `Session.pin_ttl_s`.
        """
        for record in sorted(records, key=lambda record: record.last_used):
            session = Session.restored(record)
            self._sessions[session.key] = session
            self._written[session.key] = session.last_used

    def create(
        self,
        namespace: Namespace,
        *,
        session_id: str | None = None,
        system: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        metadata: dict[str, str] | None = None,
        parent: str | None = None,
        save: bool = True,
    ) -> Session:
        """Return a new session without turns.

        Args:
            namespace: of the cache; its tenant owns the session.
            session_id: a name that `find` didn't know; None makes one up.
            system, tools, metadata, parent: see `Session`.
            save: False waits for the first `changed` before it is written down.

        Raises:
            ApiError: 429, when the store is full.
        """
        self.sweep(SWEEP_LIMIT)
        if len(self._sessions) >= self._max_sessions:
            raise ApiError(
                429,
                f"There are already {self._max_sessions} sessions; delete one, or wait until idle "
                f"ones expire after {self._idle_s:g} s",
                code="too_many_sessions",
                headers={"Retry-After": "60"},
            )
        now = self._clock()
        session = Session(
            id=session_id or f"{OWN_PREFIX}{secrets.token_hex(16)}",
            namespace=namespace,
            created=now,
            vocabulary=self._vocabulary,
            model=self._model,
            parent=parent,
            system=system,
            tools=tools,
            metadata=metadata or {},
            last_used=now,
        )
        self._sessions[session.key] = session
        if save:
            self.changed(session)
        return session

    def get(self, session_id: str, tenant: str) -> Session:
        """Return a session of `tenant` and mark it used.

        Raises:
            ApiError: 404, when there is none such: never made, deleted, expired, another tenant's.
        """
        session = self.find(session_id, tenant)
        if session is None:
            raise session_not_found(session_id)
        return session

    def find(self, session_id: str, tenant: str) -> Session | None:
        """Return a session of `tenant` and mark it used; None if there is none such."""
        self.sweep(SWEEP_LIMIT)
        session = self._sessions.get((tenant, session_id))
        if session is None:
            return None
        if self._expired(session):
            self._forget(session)
            return None
        self.touch(session)
        return session

    def touch(self, session: Session) -> None:
        """Mark a session used, so that it expires later. O(1)."""
        session.last_used = self._clock()
        if session.key in self._sessions:
            self._sessions.move_to_end(session.key)

    def changed(self, session: Session) -> None:
        """Mark a session used, and have it written down as it is now."""
        self.touch(session)
        self._save(session)

    async def saved(self, session: Session) -> bool | None:
        """Wait until the latest change of a session is on the disk, but not for long.

        Returns:
            False if the disk is too slow or fails: it is tried again later. None if sessions are
            kept in memory only.
        """
        return None if self._saver is None else await self._saver.saved(session.key)

    def list(self, tenant: str) -> list[Session]:
        """Return the tenant's sessions, most recently used first. O(sessions)."""
        self.sweep(SWEEP_LIMIT)
        return [session for session in self if session.tenant == tenant]

    def expires_at(self, session: Session) -> float:
        """Return when the session is dropped unless it is used; a restart counts as a use."""
        return max(max(session.last_used, self._started) + self._idle_s, session.pinned_until)

    def is_foreign(self, session: Session) -> bool:
        """Whether the ids of the session mean something else in the model that is served now."""
        return bool(session.turns) and session.vocabulary != self._vocabulary

    def fork(
        self, session: Session, *, at_turn: int | None, metadata: dict[str, str] | None
    ) -> Session:
        """Return a new session with the state of `session` after `at_turn` turns (None: all).

        A turn that is being answered is not part of it. The fork is independent of its parent; the
        shared prefix of ids is what makes both share KV.

        Raises:
            ApiError: 400 for a turn that does not exist, 429 when the store is full.
        """
        count = _checked_turn(session, "at_turn", at_turn)
        child = self.create(
            session.namespace,
            system=session.system,
            tools=session.tools,
            metadata=dict(session.metadata) if metadata is None else metadata,
            parent=session.id,
            save=False,
        )
        child.turns = session.turns[:count]
        child.vocabulary, child.model = session.vocabulary, session.model
        self.changed(child)
        return child

    def roll_back(self, session: Session, *, to_turn: int) -> None:
        """Take a session back to its state after `to_turn` turns; the later ones are gone.

        Raises:
            ApiError: 400 for a turn that does not exist, 409 while a turn is being answered.
        """
        count = _checked_turn(session, "to_turn", to_turn)
        session.end_turn(session.begin_turn())
        del session.turns[count:]
        session.drafts.clear()
        self.changed(session)

    def pinned(self, session: Session, pin_id: int | None, ttl_s: float | None) -> None:
        """Note a session's pin, or with None that it has none any more."""
        session.pin_id, session.pin_ttl_s = pin_id, ttl_s
        session.pinned_until = 0.0 if ttl_s is None else self._clock() + ttl_s
        self.changed(session)

    def wants_pin(self, session: Session) -> bool:
        """Whether a session was pinned for longer than until now, and a restart took the pin."""
        return session.pin_id is None and session.pinned_until > self._clock()

    def answered(self, session: Session) -> None:
        """Note that a turn was committed, which has used the pin, too."""
        if session.pin_id is not None and session.pin_ttl_s is not None:
            session.pinned_until = self._clock() + session.pin_ttl_s
        session.vocabulary, session.model = self._vocabulary, self._model
        self.changed(session)

    def delete(self, session: Session) -> None:
        """Forget a session and abort its running turn."""
        self._forget(session)
        session.deleted = True
        if session.active is not None:
            session.active.abort(session_deleted())

    def sweep(self, limit: int | None = None) -> int:
        """Drop what has expired among the `limit` sessions unused for longest; return how many."""
        expired = []
        for index, session in enumerate(self._sessions.values()):
            if index == limit:
                break
            if self._expired(session):
                expired.append(session)
            elif not session.busy and session.pinned_until <= self._clock():
                break  # those behind it were used later
        for session in expired:
            self._forget(session)
        return len(expired)

    def save_uses(self, lag_s: float = TOUCH_LAG_S) -> None:
        """Write down when sessions were used, where the disk lags behind by more than `lag_s`."""
        if self._saver is None:
            return
        for session in reversed(self._sessions.values()):
            written = self._written.get(session.key)
            if written is not None and session.last_used - written > lag_s:
                self._save(session)

    def _save(self, session: Session) -> None:
        if self._saver is not None and session.key in self._sessions:
            self._written[session.key] = session.last_used
            self._saver.put(session.key, session.record())

    def _forget(self, session: Session) -> None:
        if self._sessions.get(session.key) is not session:
            return
        del self._sessions[session.key]
        if self._written.pop(session.key, None) is not None and self._saver is not None:
            self._saver.put(session.key, None)

    def _expired(self, session: Session) -> bool:
        return not session.busy and self._clock() >= self.expires_at(session)


def session_not_found(session_id: str) -> ApiError:
    """Return the error of an id that stands for no session of the caller."""
    return ApiError(
        404,
        f"There is no session {session_id[:64]!r}; it may have expired",
        param="session_id",
        code="session_not_found",
    )


def check_name(session_id: str) -> None:
    """Refuse an id that can't be a session's.

    Raises:
        ApiError: 400.
    """
    if NAME.fullmatch(session_id) is None:
        raise ApiError(
            400,
            "session_id must have 1 to 128 letters, digits and characters of ._~:@- and begin "
            "with a letter or digit",
            param="session_id",
            code="invalid_value",
        )


def _checked_turn(session: Session, name: str, turn: int | None) -> int:
    count = len(session.turns) if turn is None else turn
    if not 0 <= count <= len(session.turns):
        raise ApiError(
            400,
            f"{name} must be between 0 and {len(session.turns)}, got {count}",
            param=name,
            code="invalid_value",
        )
    return count
