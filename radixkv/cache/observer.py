"""What a cache tells those who follow it: events, tiers, explanations."""

from __future__ import annotations

from typing import Protocol

from radixkv.cache.radix_tree import Node

__all__ = ["CacheObserver"]


class CacheObserver(Protocol):
    """Called by `RadixCache` as its tree changes, in its own thread. Must not change the cache.

    A tail (see `Node.is_tail`) is one partly filled block without a hash.
    """

    def on_stored(self, node: Node, first: int, count: int) -> None:
        """Blocks `first` to `first + count` of `node`'s run were filed."""
        ...

    def on_removed(self, node: Node, first: int, count: int) -> None:
        """Blocks `first` to `first + count` of `node`'s run are about to be evicted.

        Their content is still in place, and stays so until the caller of the cache writes to the
        blocks: an engine can copy it away before its next step writes anything.
        """
        ...

    def on_cleared(self) -> None:
        """`reset` has dropped all that could be dropped; each block was reported by itself."""
        ...
