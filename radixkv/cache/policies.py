"""The orders of eviction, by name."""

from __future__ import annotations

from collections.abc import Callable

from radixkv.cache.eviction import EvictionPolicy, Key
from radixkv.cache.radix_tree import Node
from radixkv.cache.session_policy import SessionPolicy

__all__ = ["POLICIES", "LFUPolicy", "LRUPolicy", "PriorityPolicy", "SLRUPolicy", "make_policy"]

PROTECTED_SHARE = 0.8


class LRUPolicy(EvictionPolicy):
    """Least recently used first."""

    name = "lru"

    def key(self, node: Node) -> Key:
        """Order by last access."""
        return node.last_access, node.node_id


class LFUPolicy(EvictionPolicy):
    """Least frequently used first, with ageing, so that past fame fades.

    A node's rank is how often it was used plus the rank of what had been evicted by its last use,
    so that an eviction ages all that is cached without touching it.
    Source: LFU-DA, Arlitt et al. 2000 (doi:10.1145/346000.346003).
    """

    name = "lfu"

    def __init__(self, clock: Callable[[], float], *, by_namespace: bool = False) -> None:
        super().__init__(clock, by_namespace=by_namespace)
        self._age = 0.0

    def key(self, node: Node) -> Key:
        """Order by aged frequency."""
        return node.rank, node.last_access, node.node_id

    def on_created(self, node: Node) -> None:
        """Start with one use at the present age."""
        node.rank = self._age + 1

    def on_hit(self, node: Node) -> None:
        """Lift the node above the present age by its uses."""
        node.rank = self._age + 1 + node.hits

    def on_evicted(self, node: Node, num_blocks: int) -> None:
        """Let time pass."""
        self._age = max(self._age, node.rank)


class SLRUPolicy(EvictionPolicy):
    """Segmented LRU: what was hit is protected from what was only seen once.

    New leaves are on probation and go first, so that a scan of prompts that never come back
    flushes nothing else. At most `PROTECTED_SHARE` of the leaves are protected; above it the least
    recently used of them goes back to probation.
    Source: Karedla et al. 1994 (doi:10.1109/2.268884).
    """

    name = "slru"

    def __init__(self, clock: Callable[[], float], *, by_namespace: bool = False) -> None:
        super().__init__(clock, by_namespace=by_namespace)
        self._num_protected = 0

    def key(self, node: Node) -> Key:
        """Order by segment, then last access."""
        return node.rank, node.last_access, node.node_id

    def add(self, node: Node) -> None:
        """Add to the leaf's segment, and demote what no longer fits the protected one."""
        if node not in self:
            self._num_protected += node.rank > 0
            super().add(node)
        while self._num_protected > PROTECTED_SHARE * len(self):
            oldest: Node = self._leaves[next(self._leaves.irange((1.0,)))]
            self.discard(oldest)
            oldest.rank = 0.0
            super().add(oldest)

    def discard(self, node: Node) -> None:
        """Take a leaf out of its segment."""
        self._num_protected -= node.rank > 0 and node in self
        super().discard(node)

    def on_hit(self, node: Node) -> None:
        """Protect the node."""
        node.rank = 1.0

    def on_split(self, upper: Node, lower: Node) -> None:
        """Put what a lookup left behind on probation."""
        lower.rank = 0.0


class PriorityPolicy(EvictionPolicy):
    """Lowest priority first, then least recently used.

    A node's priority is the highest of the sequences that used it.
    """

    name = "priority"

    def key(self, node: Node) -> Key:
        """Order by priority, then last access."""
        return node.priority, node.last_access, node.node_id


POLICIES: dict[str, type[EvictionPolicy]] = {
    policy.name: policy
    for policy in (LRUPolicy, LFUPolicy, SLRUPolicy, PriorityPolicy, SessionPolicy)
}


def make_policy(
    name: str, clock: Callable[[], float], *, by_namespace: bool = False
) -> EvictionPolicy:
    """Return a fresh policy.

    Raises:
        ValueError: there is no policy of that name; the message lists them.
    """
    if name not in POLICIES:
        raise ValueError(f"eviction policy must be one of {', '.join(POLICIES)}, got {name!r}")
    return POLICIES[name](clock, by_namespace=by_namespace)
