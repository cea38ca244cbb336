"""What happens to the cache and to its tiers, as KV events for routers."""

from __future__ import annotations

import numpy as np

from radixkv.cache import RadixCache
from radixkv.cache.events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVEventLog,
)
from radixkv.cache.hashing import namespace_seed
from radixkv.cache.radix_tree import Node
from radixkv.engine.kv_publisher import ZmqEventPublisher
from radixkv.engine.tiering import Tiering
from radixkv.engine.tiering_labels import BlockLabel

__all__ = ["KVEventStream"]

MEDIA = {"host": MEDIUM_CPU, "disk": MEDIUM_STORAGE}


class KVEventStream:
    """Follows a cache and its tiers, and publishes what happens to them.

    The engine flushes what happens to the pool after each step. What happens to a tier is published
    by itself, since the disk's thread goes on while the engine has nothing to do. A flush of the
    cache is published at once, so that no block that a tier takes afterwards can overtake it.
    """

    def __init__(
        self, cache: RadixCache, publisher: ZmqEventPublisher, tiers: Tiering | None = None
    ) -> None:
        """Follow from now on; what is cached already comes first.

        Args:
            cache: gets two observers.
            publisher: closed by `close`.
            tiers: the tiers below the cache's pool, if there are any.
        """
        self._cache = cache
        self._publisher = publisher
        self._log = KVEventLog(cache, publisher.publish)
        cache.observers.append(self)
        self._default_seed = namespace_seed((), cache.tree.digest)
        if tiers is not None:
            tiers.follow(self._on_tier)

    def flush(self) -> None:
        """Publish what happened since the last call as one batch. Never blocks."""
        self._log.flush()

    def close(self) -> None:
        """Publish the rest, then stop. Idempotent."""
        self._log.flush()
        self._log.close()
        if self in self._cache.observers:
            self._cache.observers.remove(self)
        self._publisher.close()

    def counters(self) -> dict[str, int]:
        """Return the batches published, dropped unsent, and sent again on request."""
        publisher = self._publisher
        return {
            "published": publisher.published,
            "dropped": publisher.dropped,
            "replayed": publisher.replayed,
        }

    def on_stored(self, node: Node, first: int, count: int) -> None:
        """See `CacheObserver`; the log notes it."""

    def on_removed(self, node: Node, first: int, count: int) -> None:
        """See `CacheObserver`; the log notes it."""

    def on_cleared(self) -> None:
        """Publish the flush, which the log has noted just before."""
        self._log.flush()

    def _on_tier(self, tier: str, stored: bool, packed: bytes) -> None:
        """Publish that a block came to a tier or left it. Called by any thread."""
        label, medium = BlockLabel.unpack(packed), MEDIA[tier]
        if not stored:
            self._publisher.add(BlockRemoved([label.hash], medium))
            return
        self._publisher.add(
            BlockStored(
                [label.hash],
                None if label.parent == label.seed else label.parent,
                np.frombuffer(label.tokens, dtype="<i4").tolist(),
                self._cache.block_size,
                medium=medium,
                namespace_key="" if label.seed == self._default_seed else label.seed.hex(),
            )
        )
