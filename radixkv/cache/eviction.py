"""Which cached leaf goes first when blocks are needed: the interface of all policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar

from sortedcontainers import SortedDict

from radixkv.cache.radix_tree import Node, Root

__all__ = ["EvictionPolicy"]

Key = tuple[float, ...]


class EvictionPolicy(ABC):
    """Owns the evictable leaves, in the order of `key`.

    A key is made of the node's own fields, and none of them may change while the leaf is in here:
    the cache adds and discards through one place, `RadixCache._refresh`. The access clock is a
    counter, so two accesses never tie by chance. `Node.rank` is the policy's own to write, in the
    hooks, where the node is not in here.
    """

    name: ClassVar[str]

    def __init__(self, clock: Callable[[], float], *, by_namespace: bool = False) -> None:
        """Make an empty order.

        Args:
            clock: seconds, for policies that look at time.
            by_namespace: also keep an order per namespace, for `peek(root)`.
        """
        self._clock = clock
        self._leaves: SortedDict = SortedDict()  # key -> node
        self._own: dict[int, SortedDict] | None = {} if by_namespace else None  # by id of the root

    def __len__(self) -> int:
        return len(self._leaves)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._leaves.values())

    def __contains__(self, node: Node) -> bool:
        key = self.key(node)
        if self._own is not None and self._own.get(id(node.root), {}).get(key) is not node:
            return False
        return self._leaves.get(key) is node

    @abstractmethod
    def key(self, node: Node) -> Key:
        """Return the place of a leaf: the smallest goes first. Ends with the node's id."""

    def add(self, node: Node) -> None:
        """Make a leaf evictable. Cost: O(log leaves)."""
        key = self.key(node)
        self._leaves[key] = node
        if self._own is not None:
            own = self._own.get(id(node.root))
            if own is None:
                own = self._own[id(node.root)] = SortedDict()
            own[key] = node

    def discard(self, node: Node) -> None:
        """Make a leaf not evictable, if it was. Cost: O(log leaves)."""
        key = self.key(node)
        if self._leaves.pop(key, None) is not None and self._own is not None:
            own = self._own[id(node.root)]
            del own[key]
            if not own:
                del self._own[id(node.root)]

    def peek(self, root: Root | None = None) -> Node | None:
        """Return the leaf that goes next, of one namespace or of all, or None.

        Cost: at most O(log leaves).
        """
        leaves = self._leaves
        if root is not None:
            assert self._own is not None
            leaves = self._own.get(id(root))
        return self.choose(leaves) if leaves else None

    def choose(self, leaves: SortedDict) -> Node:
        """Return the leaf of a non-empty order that goes next."""
        node: Node = leaves.peekitem(0)[1]
        return node

    def on_created(self, node: Node) -> None:  # noqa: B027
        """A run or tail was filed below `node.parent`."""

    def on_hit(self, node: Node) -> None:  # noqa: B027
        """A lookup came back to the whole node, and `hits` counts it already.

        Called for every node of the path, from its end to the root; `ref_count`, `last_access` and
        `accessed_at` are still as they were before.
        """

    def on_split(self, upper: Node, lower: Node) -> None:  # noqa: B027
        """A lookup agreed with a run's beginning only: `lower` is what it left behind."""

    def on_evicted(self, node: Node, num_blocks: int) -> None:  # noqa: B027
        """The last blocks of a leaf are evicted; the leaf may still be in here."""
