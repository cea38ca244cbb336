"""Sessions: conversations whose exact token ids the server keeps.

A session is only a label over ordinary cache: it pins nothing by itself, so an idle one costs no KV
and can wedge nothing; if its blocks were evicted, its next turn computes them again.
"""

from __future__ import annotations

import secrets
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from radixkv.request import Namespace
from radixkv.server.errors import ApiError
from radixkv.server.generation import Generation
from radixkv.server.messages import TemplateMessage

__all__ = ["Session", "SessionStore", "Turn"]

# Expired sessions looked at per call, so that no single request pays for thousands of them.
SWEEP_LIMIT = 32


@dataclass(frozen=True, slots=True)
class Turn:
    """Where the history stood after one answered turn.

    Attributes:
        num_messages: messages up to and with the answer.
        num_tokens: token ids up to and with the answer.
        ended_by_token: the last of these ids is an end token, not text.
    """

    num_messages: int
    num_tokens: int
    ended_by_token: bool = False


@dataclass(slots=True)
class Session:
    """One conversation, kept as text and as the very ids that the model saw and produced.

    Attributes:
        id: "sess_" and 32 hex digits.
        namespace: the cache namespace, fixed at creation; its tenant owns the session.
        messages: the history in the template's form, the system prompt not included.
        token_ids: int32 ids of every turn; empty before the first.
        turns: one mark per answered turn.
        busy: a turn is being answered.
        active: the running generation of that turn, once the engine accepted it.
        deleted: set by `SessionStore.delete`; a running turn then must not commit.
        pin_id: the pin made of it last, which may be gone.
    """

    id: str
    namespace: Namespace
    created: int
    parent: str | None = None
    system: str | None = None
    tools: list[dict[str, Any]] | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    messages: list[TemplateMessage] = field(default_factory=list)
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    turns: list[Turn] = field(default_factory=list)
    busy: bool = False
    active: Generation | None = None
    deleted: bool = False
    last_used: float = 0.0
    pin_id: int | None = None

    @property
    def tenant(self) -> str:
        """The tenant that made the session."""
        return self.namespace[0] if self.namespace else ""

    def begin_turn(self) -> None:
        """Take the session for one turn.

        Raises:
            ApiError: 409, when another turn is being answered.
        """
        if self.busy:
            raise ApiError(
                409,
                "Another turn of this session is being answered; wait for it or fork the session",
                code="session_busy",
            )
        self.busy = True

    def commit_turn(
        self,
        messages: Sequence[TemplateMessage],
        prompt_ids: Sequence[int],
        ids: Sequence[int],
        *,
        ended_by_token: bool,
    ) -> Turn:
        """Append an answered turn: its messages with the answer, and all ids up to its end.

        Args:
            messages: the new messages, the assistant's answer last.
            prompt_ids: the whole prompt of the turn; replaces the ids kept so far.
            ids: the ids of the answer.
            ended_by_token: the last of `ids` is an end token.

        Raises:
            ApiError: 409, when the session was deleted meanwhile.
        """
        if self.deleted:
            raise session_deleted()
        self.token_ids = array("i", prompt_ids)
        self.token_ids.extend(array("i", ids))
        self.messages.extend(messages)
        turn = Turn(len(self.messages), len(self.token_ids), ended_by_token)
        self.turns.append(turn)
        return turn

    def end_turn(self) -> None:
        """Give the session back, whether or not the turn was committed."""
        self.busy = False
        self.active = None

    def history(self) -> list[TemplateMessage]:
        """Return the system prompt and every message so far, as a new list."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages]


class SessionStore:
    """All sessions, in memory, least recently used first.

    Bounded: at `max_sessions` a new one is refused rather than an old one thrown away. Sessions
    idle for `idle_s` are dropped lazily, a few per call. Not thread-safe: event loop only.
    """

    def __init__(
        self,
        *,
        max_sessions: int,
        idle_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._max_sessions = max_sessions
        self._idle_s = idle_s
        self._clock = clock

    def __len__(self) -> int:
        return len(self._sessions)

    def create(
        self,
        namespace: Namespace,
        *,
        system: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        metadata: dict[str, str] | None = None,
        parent: str | None = None,
    ) -> Session:
        """Return a new session without turns.

        Raises:
            ApiError: 429, when the store is full.
        """
        self._sweep(SWEEP_LIMIT)
        if len(self._sessions) >= self._max_sessions:
            raise ApiError(
                429,
                f"There are already {self._max_sessions} sessions; delete one, or wait until idle "
                f"ones expire after {self._idle_s:g} s",
                code="too_many_sessions",
                headers={"Retry-After": "60"},
            )
        session = Session(
            id=f"sess_{secrets.token_hex(16)}",
            namespace=namespace,
            created=int(time.time()),
            parent=parent,
            system=system,
            tools=tools,
            metadata=metadata or {},
            last_used=self._clock(),
        )
        self._sessions[session.id] = session
        return session

    def get(self, session_id: str, tenant: str) -> Session:
        """Return a session of `tenant` and mark it used.

        Raises:
            ApiError: 404, when there is none such: never made, deleted, expired, another tenant's.
        """
        self._sweep(SWEEP_LIMIT)
        session = self._sessions.get(session_id)
        if session is not None and self._expired(session):
            del self._sessions[session_id]
            session = None
        if session is None or session.tenant != tenant:
            raise ApiError(
                404,
                f"There is no session {session_id[:64]!r}; it may have expired",
                param="session_id",
                code="session_not_found",
            )
        self.touch(session)
        return session

    def touch(self, session: Session) -> None:
        """Mark a session used, so that it expires later. O(1)."""
        session.last_used = self._clock()
        if session.id in self._sessions:
            self._sessions.move_to_end(session.id)

    def list(self, tenant: str) -> list[Session]:
        """Return the tenant's sessions, most recently used first. O(sessions)."""
        self._sweep(SWEEP_LIMIT)
        return [
            session
            for session in reversed(self._sessions.values())
            if session.tenant == tenant and not self._expired(session)
        ]

    def fork(
        self, session: Session, *, at_turn: int | None, metadata: dict[str, str] | None
    ) -> Session:
        """Return a new session with the state of `session` after `at_turn` turns (None: all).

        A turn that is being answered is not part of it. The fork is independent of its parent; the
        shared prefix of ids is what makes both share KV.

        Raises:
            ApiError: 400 for a turn that does not exist, 429 when the store is full.
        """
        count = len(session.turns) if at_turn is None else at_turn
        if not 0 <= count <= len(session.turns):
            raise ApiError(
                400,
                f"at_turn must be between 0 and {len(session.turns)}, got {count}",
                param="at_turn",
                code="invalid_value",
            )
        child = self.create(
            session.namespace,
            system=session.system,
            tools=session.tools,
            metadata=dict(session.metadata) if metadata is None else metadata,
            parent=session.id,
        )
        if count:
            last = session.turns[count - 1]
            child.turns = session.turns[:count]
            child.messages = session.messages[: last.num_messages]
            child.token_ids = session.token_ids[: last.num_tokens]
        return child

    def delete(self, session: Session) -> None:
        """Forget a session and abort its running turn."""
        self._sessions.pop(session.id, None)
        session.deleted = True
        if session.active is not None:
            session.active.abort(session_deleted())

    def _expired(self, session: Session) -> bool:
        return not session.busy and self._clock() - session.last_used >= self._idle_s

    def _sweep(self, limit: int) -> None:
        for _ in range(limit):
            if not self._sessions:
                return
            oldest = next(iter(self._sessions.values()))
            if oldest.busy:
                # In use, so not idle; out of the way of those behind it.
                self.touch(oldest)
            elif self._expired(oldest):
                del self._sessions[oldest.id]
            else:
                return


def session_deleted() -> ApiError:
    """Return the error of a turn whose session was deleted while it was being answered."""
    return ApiError(
        409, "The session was deleted while this turn was being answered", code="session_deleted"
    )
