"""What sessions hold in the cache, told and given back."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from radixkv.engine import SessionKV, SessionPath, SessionUsage
from radixkv.errors import EngineClosedError
from radixkv.request import Namespace
from radixkv.server.session_state import Draft, Session, Turn, join_turns
from radixkv.server.session_tokens import TOKEN_BYTES, shared_tokens

if TYPE_CHECKING:
    from radixkv.server.state import ServerState

__all__ = ["SessionPast", "release_past", "usage_of"]

# Sessions used latest that are compared with each other. Beyond them, what is shared is known only
# as far as the tree shows it.
MAX_COMPARED = 2000
# A step that hangs must not keep those waiting who only look, or who delete a session.
ENGINE_WAIT_S = 10.0

Path = tuple[Namespace, bytes]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SessionPast:
    """What a session has put into the cache; a snapshot that may be read on any thread."""

    key: tuple[str, str]
    namespace: Namespace
    turns: tuple[Turn, ...]
    drafts: tuple[Draft, ...]
    pin_id: int | None
    request_id: str | None

    @classmethod
    def of(cls, session: Session) -> SessionPast:
        """Return that of a session now."""
        return cls(
            session.key,
            session.namespace,
            tuple(session.turns),
            tuple(session.drafts),
            session.pin_id,
            None if session.active is None else session.active.id,
        )

    def path(self) -> Path:
        """Return its history. Cost: O(tokens), a copy."""
        return self.namespace, join_turns(self.turns)

    def kv(self, history: SessionPath, others: Sequence[Path], block_size: int) -> SessionKV:
        """Return it as the engine takes it.

        Args:
            history: its own.
            others: histories of other sessions; needed where there are drafts.
            block_size: of the engine.
        """
        drafts = [
            SessionPath(tokens, shared_tokens([(self.namespace, tokens), *others], block_size)[0])
            for tokens in (draft.tokens(self.turns) for draft in self.drafts)
        ]
        return SessionKV(
            self.namespace, history, tuple(drafts), pin_id=self.pin_id, request_id=self.request_id
        )


async def usage_of(state: ServerState, sessions: Sequence[Session]) -> list[SessionUsage | None]:
    """Return what each session has in the KV pool; None for all if the engine has ended.

    Cost: a lookup for each, a few of them between two steps of the engine; and a comparison of all
    sessions, on a thread.
    """
    if not sessions:
        return []
    wanted = [SessionPast.of(session) for session in sessions]
    known = {past.key for past in wanted}
    others = [past for past in _relatives(state, wanted) if past.key not in known]
    block_size = state.engine.block_size

    def work() -> list[SessionKV]:
        paths = [past.path() for past in (*wanted, *others)]
        shared = shared_tokens(paths, block_size)
        return [
            past.kv(
                SessionPath(paths[i][1], shared[i]),
                [*paths[:i], *paths[i + 1 :]] if past.drafts else (),
                block_size,
            )
            for i, past in enumerate(wanted)
        ]

    kvs = await asyncio.to_thread(work)
    usage = await _ask_engine(state.engine.control.session_usage(kvs))
    return [None] * len(sessions) if usage is None else [*usage]


async def release_past(state: ServerState, past: SessionPast) -> int:
    """Free what only this past of a session uses in the cache; return how many blocks.

    Sessions in the store keep what they need. So delete the session before, or roll it back. It is
    done to its end though the caller is cancelled; an engine that is stuck does it later.
    """
    others, block_size = _relatives(state, [past]), state.engine.block_size

    def work() -> SessionKV:
        paths = [other.path() for other in others]
        namespace, tokens = past.path()
        (shared, *_) = shared_tokens([(namespace, tokens), *paths], block_size)
        return past.kv(SessionPath(tokens, shared), paths, block_size)

    async def release() -> int:
        kv = await asyncio.to_thread(work)
        return await _ask_engine(state.engine.control.release_session(kv)) or 0

    return await asyncio.shield(asyncio.create_task(release()))


def _relatives(state: ServerState, wanted: Sequence[SessionPast]) -> list[SessionPast]:
    """Return the sessions used latest that may begin as one of `wanted` does."""
    block_bytes = state.engine.block_size * TOKEN_BYTES
    starts = {(past.namespace, past.turns[0].ids[:block_bytes]) for past in wanted if past.turns}
    starts |= {
        (past.namespace, draft.tokens(past.turns)[:block_bytes])
        for past in wanted
        for draft in past.drafts
    }
    if not starts:
        return []
    # Those that are shorter than a block may end within the first one of another.
    return [
        SessionPast.of(session)
        for session in islice(state.sessions, MAX_COMPARED)
        if session.turns
        and (
            session.num_tokens * TOKEN_BYTES < block_bytes
            or (session.namespace, session.turns[0].ids[:block_bytes]) in starts
        )
    ]


async def _ask_engine(call: Coroutine[Any, Any, T]) -> T | None:
    """Return what a call of the engine returns; None if that has ended, or doesn't answer."""
    task = asyncio.create_task(call)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    done, _ = await asyncio.wait({task}, timeout=ENGINE_WAIT_S)
    if not done:
        return None
    try:
        return task.result()
    except EngineClosedError:
        return None
