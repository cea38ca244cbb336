"""Which cached leaf goes first when blocks are needed."""

from __future__ import annotations

from collections.abc import Iterator

from sortedcontainers import SortedDict

from radixkv.cache.radix_tree import Node

__all__ = ["LRUEvictor"]


class LRUEvictor:
    """Owns the evictable leaves, least recently used first.

    The clock is a counter, so two accesses never tie by chance. A node's key must not change
    while it is in here: the cache adds and discards through one place, `RadixCache._refresh`.
    """

    def __init__(self) -> None:
        self._leaves: SortedDict = SortedDict()  # (last_access, node_id) -> node

    def __len__(self) -> int:
        return len(self._leaves)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._leaves.values())

    def __contains__(self, node: Node) -> bool:
        return (node.last_access, node.node_id) in self._leaves

    def add(self, node: Node) -> None:
        """Make a leaf evictable. Cost: O(log leaves)."""
        self._leaves[node.last_access, node.node_id] = node

    def discard(self, node: Node) -> None:
        """Make a leaf not evictable, if it was. Cost: O(log leaves)."""
        self._leaves.pop((node.last_access, node.node_id), None)

    def peek(self) -> Node | None:
        """Return the leaf that goes next, or None. Cost: O(1)."""
        node: Node | None = self._leaves.peekitem(0)[1] if self._leaves else None
        return node
