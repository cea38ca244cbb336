"""What conversations hold in the cache, and giving it back when they end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from radixkv.cache.hashing import TOKEN_BYTES
from radixkv.cache.release import Release, path_locks
from radixkv.request import Namespace

if TYPE_CHECKING:
    from radixkv.engine.engine import Engine

__all__ = ["SessionKV", "SessionPath", "SessionUsage", "release_session", "session_usage"]


@dataclass(frozen=True, slots=True)
class SessionPath:
    """Token ids from the start of a prompt, little-endian int32.

    `shared_tokens` is how many of them other conversations begin with, too.
    """

    tokens: bytes
    shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SessionKV:
    """A conversation as the cache knows it.

    Attributes:
        namespace: where it runs.
        history: its ids so far.
        drafts: prompts whose answers were broken off, or are being made; how much of those is
            cached nobody knows.
        pin_id: of its own pin, if it has one.
        request_id: of the request that answers it now, if one does.
    """

    namespace: Namespace
    history: SessionPath
    drafts: tuple[SessionPath, ...] = ()
    pin_id: int | None = None
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class SessionUsage:
    """What a conversation has in the KV pool.

    Attributes:
        cached_tokens: of its beginning, those whose KV is there.
        cached_blocks: that hold them.
        private_blocks: those that nothing else uses: they become free when it is deleted. Drafts
            are counted here alone.
        pin_expires_in_s: seconds its pin lasts from now; None without one.
    """

    cached_tokens: int = 0
    cached_blocks: int = 0
    private_blocks: int = 0
    pin_expires_in_s: float | None = None


def session_usage(engine: Engine, session: SessionKV) -> SessionUsage:
    """Look a conversation up; changes nothing but that expired pins go. Cost: that of lookups."""
    cache = engine.cache
    cache.pins.expire()
    handle = cache.match_bytes(session.history.tokens, session.namespace)
    match = handle.match
    pin = None if session.pin_id is None else cache.pins.get(session.pin_id)
    return SessionUsage(
        handle.num_cached_tokens,
        0 if match is None else match.num_blocks + (match.partial is not None),
        _plan(engine, session).num_blocks,
        None if pin is None else pin.expires_at - cache.clock(),
    )


def release_session(engine: Engine, session: SessionKV) -> int:
    """Give up a conversation's pin, and free in every tier what only it used.

    Of the tiers below the pool, copies of shared blocks stay, as far as `shared_tokens` and what is
    left in the pool tell that they are shared.

    Returns:
        Blocks of the pool that became free.
    """
    cache = engine.cache
    if session.pin_id is not None:
        cache.unpin(session.pin_id)
    freed = _plan(engine, session).run()
    if engine.tiers is not None:
        for path in (*session.drafts, session.history):
            left = cache.match_bytes(path.tokens, session.namespace).match
            kept = path.shared_tokens // cache.block_size
            first = max(kept, 0 if left is None else left.num_blocks)
            engine.tiers.drop_path(session.namespace, path.tokens, first)
    return freed


def _plan(engine: Engine, session: SessionKV) -> Release:
    """Return what becomes free when the conversation, its pin and its request end."""
    cache = engine.cache
    pin = None if session.pin_id is None else cache.pins.get(session.pin_id)
    request = None if session.request_id is None else engine.requests.get(session.request_id)
    running = [] if request is None else [branch.sequence.node for branch in request.live]
    plan = Release(cache, path_locks(None if pin is None else pin.node, *running))
    for draft in session.drafts:
        if draft.shared_tokens < len(draft.tokens) // TOKEN_BYTES:
            plan.add_below(draft.tokens, session.namespace)
        plan.add(draft.tokens, session.namespace, draft.shared_tokens)
    plan.add(session.history.tokens, session.namespace, session.history.shared_tokens)
    return plan
