"""Pins, and flushes of one namespace: what people and requests may ask of the cache."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from radixkv.cache import RadixCache
from radixkv.cache.pins import Pin
from radixkv.cache.radix_tree import Node
from radixkv.engine.session_cache import (
    SessionKV,
    SessionUsage,
    release_session,
    session_usage,
)
from radixkv.errors import RequestRejectedError
from radixkv.request import Namespace, check_pin_ttl

if TYPE_CHECKING:
    import numpy as np

    from radixkv.engine.engine import Engine

__all__ = ["CacheControl", "PinReport", "pin_computed"]

T = TypeVar("T")

USAGE_BATCH = 32  # conversations looked up between two steps
REQUEST = "request "  # a source that begins so is a request's `cache_pin_ttl`


class Call(Protocol):
    """Runs a function on the engine's thread; see `AsyncEngine`."""

    def __call__(self, function: Callable[[], T], /) -> Awaitable[T]: ...


@dataclass(frozen=True, slots=True)
class PinReport:
    """A pin as it stands.

    Attributes:
        pin_id: unique as long as the server runs.
        namespace: where it holds blocks.
        source: who asked for it.
        num_tokens: tokens whose KV it keeps, from the start of the prompt.
        num_blocks: the same in blocks.
        ttl_s: seconds it lasts after its last use.
        expires_in_s: seconds it lasts from now, unless it is used or has to give way.
    """

    pin_id: int
    namespace: Namespace
    source: str
    num_tokens: int
    num_blocks: int
    ttl_s: float
    expires_in_s: float


class CacheControl:
    """What may be asked of the cache beside running requests; each call runs between two steps."""

    def __init__(self, engine: Engine, call: Call) -> None:
        self._engine = engine
        self._cache = engine.cache
        self._call = call

    async def pin(
        self,
        token_ids: Sequence[int],
        namespace: Namespace,
        ttl_s: float,
        *,
        source: str = "",
    ) -> PinReport | None:
        """Pin what is cached of a prompt's beginning; see `RadixCache.pin`.

        Args:
            token_ids: ids of the vocabulary.
            namespace: only what is cached there is found.
            ttl_s: seconds.
            source: who asks, for reports.

        Returns:
            The pin, or None if no whole block of the prompt is cached.

        Raises:
            RequestRejectedError: `ttl_s` is out of range, or pins are off.
        """
        check_pin_ttl("ttl_seconds", ttl_s)

        def work() -> PinReport | None:
            if not self._cache.pins.max_blocks:
                raise RequestRejectedError(
                    "pins are off: --pin-share leaves them no block", code="pins_off"
                )
            pin = _pin(self._cache, token_ids, namespace, ttl_s, source)
            return None if pin is None else _report(self._cache, pin)

        return await self._call(work)

    async def unpin(self, pin_id: int) -> bool:
        """Give up a pin; return False if it is gone already."""
        return await self._call(lambda: self._cache.unpin(pin_id))

    async def pins(self) -> list[PinReport]:
        """Return the pins, most recently used first."""

        def work() -> list[PinReport]:
            self._cache.pins.expire()
            return [_report(self._cache, pin) for pin in self._cache.pins][::-1]

        return await self._call(work)

    async def flush_namespace(self, namespace: Namespace) -> int:
        """Drop what is cached of one namespace, in every tier; return how many blocks became free.

        Raises:
            RequestRejectedError: requests of the namespace hold blocks (code "busy").
        """

        def work() -> int:
            cache, tiers = self._cache, self._engine.tiers
            held = sum(sequence.namespace == namespace for sequence in cache.sequences)
            if held:
                raise RequestRejectedError(
                    f"the namespace is in use: {held} of its requests hold blocks", code="busy"
                )
            freed = cache.reset_namespace(namespace)
            if tiers is not None:
                tiers.drop_namespace(namespace)
            return freed

        return await self._call(work)

    async def session_usage(self, sessions: Sequence[SessionKV]) -> list[SessionUsage]:
        """Return what conversations have cached; a few are looked up between two steps."""
        usage: list[SessionUsage] = []
        for start in range(0, len(sessions), USAGE_BATCH):
            part = sessions[start : start + USAGE_BATCH]
            usage += await self._call(partial(self._usage, part))
        return usage

    async def release_session(self, session: SessionKV) -> int:
        """Free what only this conversation uses, see `release_session`; return how many blocks."""
        return await self._call(lambda: release_session(self._engine, session))

    def _usage(self, sessions: Sequence[SessionKV]) -> list[SessionUsage]:
        return [session_usage(self._engine, session) for session in sessions]


def pin_computed(
    cache: RadixCache,
    token_ids: Sequence[int] | np.ndarray,
    namespace: Namespace,
    ttl_s: float,
    request_id: str,
) -> None:
    """Pin a prompt that was just computed, because its request asked for it.

    The pin takes the place of those that requests made of the same prompt before, so that repeating
    a prompt doesn't pile up pins; it lasts as long as the longest of them.
    """
    pin = _pin(cache, token_ids, namespace, ttl_s, REQUEST + request_id)
    if pin is None:
        return
    others = [p for p in cache.pins.at(pin.node) if p is not pin and p.source.startswith(REQUEST)]
    longest = max((p.ttl_s for p in others), default=ttl_s)
    if longest > ttl_s:
        others.append(pin)
        _pin(cache, token_ids, namespace, longest, pin.source)
    for other in others:
        cache.unpin(other.pin_id)


def _pin(
    cache: RadixCache,
    token_ids: Sequence[int] | np.ndarray,
    namespace: Namespace,
    ttl_s: float,
    source: str,
) -> Pin | None:
    pin_id = cache.pin(token_ids, namespace, ttl_s)
    pin = None if pin_id is None else cache.pins.get(pin_id)
    if pin is not None:
        pin.source = source
    return pin


def _report(cache: RadixCache, pin: Pin) -> PinReport:
    num_blocks = 0
    node: Node | None = pin.node
    while node is not None:
        num_blocks += node.num_blocks
        node = node.parent
    return PinReport(
        pin.pin_id,
        pin.node.root.namespace,
        pin.source,
        num_blocks * cache.block_size,
        num_blocks,
        pin.ttl_s,
        pin.expires_at - cache.clock(),
    )
