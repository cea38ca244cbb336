"""The tree, the pool and the order of eviction together: what is locked stays, the rest may go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from radixkv.cache.block_pool import BlockPool
from radixkv.cache.copies import CopyQueue
from radixkv.cache.eviction import EvictionPolicy
from radixkv.cache.hashing import Digest
from radixkv.cache.observer import CacheObserver
from radixkv.cache.quotas import Quotas
from radixkv.cache.radix_tree import Match, Node, RadixTree, Root
from radixkv.cache.stats import CacheStats
from radixkv.errors import CacheCorruptionError
from radixkv.request import Namespace

__all__ = ["LockedTree", "PrefixHandle"]


@dataclass(frozen=True, slots=True)
class PrefixHandle:
    """A cached prefix that was found. Lock it before anything else changes the cache.

    Attributes:
        num_cached_tokens: whole blocks' tokens plus `match.num_partial_tokens`.
        match: where it lies in the tree, or None if the namespace is empty.
    """

    num_cached_tokens: int
    match: Match | None


class LockedTree:
    """Owns the pool, the tree, the evictable leaves, and the counts of what is locked.

    The part of `RadixCache` that knows nothing of sequences and pins.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        evictor: EvictionPolicy,
        quotas: Quotas,
        *,
        digest: Digest,
        clock: Callable[[], float],
    ) -> None:
        self.clock = clock
        self.stats = CacheStats(clock)
        self.pool = BlockPool(num_blocks)
        self.tree = RadixTree(block_size, digest)
        self.evictor = evictor
        self.quotas = quotas
        self.copies = CopyQueue(self.pool)
        self.observers: list[CacheObserver] = []
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_tree_blocks = 0
        self.num_locked_blocks = 0
        self._tick = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that hold nothing."""
        return self.pool.num_free

    @property
    def num_evictable_blocks(self) -> int:
        """Cached blocks that nothing in use depends on."""
        return self.num_tree_blocks - self.num_locked_blocks

    @property
    def num_available_blocks(self) -> int:
        """Blocks that an allocation is sure to get: free ones and evictable ones.

        A cached block that a pending copy reads may be evicted from the tree but not handed out,
        so each such read is taken off, whether or not its block is evictable.
        """
        held = len(self.copies.cached_reads)
        return self.num_free_blocks + max(0, self.num_evictable_blocks - held)

    @property
    def num_referenced_blocks(self) -> int:
        """Blocks that some sequence or pending copy depends on."""
        return self.num_blocks - self.num_free_blocks - self.num_evictable_blocks

    def lock(self, handle: PrefixHandle, namespace: Namespace = (), priority: int = 0) -> Node:
        """Protect the whole blocks of a match from eviction; return the node to unlock.

        A run that matched only in part is split, so that no more than the match is protected.
        The partial block is not protected. It counts as a hit of all nodes on the path and raises
        them to `priority`.

        Raises:
            CacheCorruptionError: the handle is stale, since the cache changed after the match.

        Cost: O(depth).
        """
        node = self._matched_node(handle, namespace)
        tick, now = self.next_tick(), self.clock()
        current: Node | None = node
        while current is not None:
            if current.ref_count == 0:
                self.evictor.discard(current)
                self.num_locked_blocks += current.num_blocks
            current.hits += 1
            self.evictor.on_hit(current)
            current.ref_count += 1
            current.last_access = tick
            current.accessed_at = now
            if priority > current.priority:
                current.priority = priority
            current = current.parent
        return node

    def hold(self, handle: PrefixHandle, namespace: Namespace = ()) -> Node:
        """Protect a match as `lock` does, but without counting it as used; see `release_hold`."""
        node = self._matched_node(handle, namespace)
        self._add_lock(node)
        return node

    def lock_node(self, node: Node) -> None:
        """Protect a node and all above it. Cost: O(depth)."""
        self._add_lock(node)
        tick, now = self.next_tick(), self.clock()
        current: Node | None = node
        while current is not None:
            current.last_access = tick
            current.accessed_at = now
            current = current.parent

    def unlock(self, node: Node) -> None:
        """Give back one lock of a node and of all above it.

        Raises:
            CacheCorruptionError: the node isn't locked.

        Cost: O(depth + log leaves).
        """
        self._drop_lock(node, self.next_tick(), self.clock())

    def release_hold(self, node: Node) -> None:
        """Give back a `hold`; when the path was last used stays as it was."""
        self._drop_lock(node, None, 0.0)

    def evict(self, num_blocks: int, root: Root | None = None, more: int = 0) -> int:
        """Free cached blocks until `num_blocks` more are free; return how many were freed.

        Who is over a quota gives first. Then the policy says which unlocked leaf goes, each from
        its end; ancestors of locked nodes never go. Fewer are freed only if nothing evictable is
        left.

        Args:
            num_blocks: blocks wanted.
            root: of the namespace they are for, if any.
            more: blocks that it is about to take.

        Cost: O(log leaves) per leaf.
        """
        freed = 0
        if self.quotas.enabled:
            if root is not None:
                freed += self._evict_excess(root, more, num_blocks)
            while freed < num_blocks and (other := self._next_over()) is not None:
                freed += self._evict_excess(other, 0, num_blocks - freed)
        while freed < num_blocks and (leaf := self.evictor.peek()) is not None:
            freed += self._evict_from(leaf, num_blocks - freed)
        return freed

    def drop_end(self, leaf: Node, num_blocks: int) -> int:
        """Free the last `num_blocks` blocks of an unlocked leaf; return how many became free.

        Cost: O(log leaves + blocks).
        """
        return self._evict_from(leaf, num_blocks)

    def split(self, node: Node, num_blocks: int) -> Node:
        """Cut a run and return its upper part."""
        self.evictor.discard(node)
        upper = self.tree.split(node, num_blocks)
        self.evictor.on_split(upper, node)
        self.refresh(node)
        return upper

    def next_tick(self) -> int:
        """Advance the access clock."""
        self._tick += 1
        return self._tick

    def remove(self, leaf: Node) -> None:
        """Take a leaf that isn't in the evictable set out of the tree."""
        parent = leaf.parent
        assert parent is not None
        self.num_tree_blocks -= leaf.num_blocks
        self.tree.remove(leaf)
        self.count_use(parent.root)
        self.refresh(parent)

    def count_use(self, root: Root) -> None:
        """Note that a namespace's use of blocks has changed."""
        if self.quotas.enabled:
            self.quotas.update(root)

    def refresh(self, node: Node) -> None:
        """Put a node into, or keep it out of, the evictable set; forget an empty root."""
        if node.ref_count or not node.is_leaf:
            return
        if node.is_root:
            self.tree.drop_root(node)
        else:
            self.evictor.add(node)

    def _drop_lock(self, node: Node, tick: int | None, now: float) -> None:
        current: Node | None = node
        while current is not None:
            if current.ref_count < 1:
                raise CacheCorruptionError(f"node {current.node_id} is unlocked without a lock")
            parent = current.parent
            current.ref_count -= 1
            if tick is not None:
                current.last_access = tick
                current.accessed_at = now
            if current.ref_count == 0:
                self.num_locked_blocks -= current.num_blocks
                self.refresh(current)
            current = parent

    def _add_lock(self, node: Node) -> None:
        current: Node | None = node
        while current is not None:
            if current.ref_count == 0:
                self.evictor.discard(current)
                self.num_locked_blocks += current.num_blocks
            current.ref_count += 1
            current = current.parent

    def _matched_node(self, handle: PrefixHandle, namespace: Namespace) -> Node:
        match = handle.match
        if match is None:
            return self.tree.get_root(namespace)
        if self._is_stale(match, namespace):
            raise CacheCorruptionError("the prefix handle is stale: lock it right after match")
        if match.num_node_blocks < match.node.num_blocks:
            return self.split(match.node, match.num_node_blocks)
        return match.node

    def _is_stale(self, match: Match, namespace: Namespace) -> bool:
        top, num_blocks = match.node, match.num_node_blocks
        while top.parent is not None:
            top = top.parent
            num_blocks += top.num_blocks
        return (
            top is not self.tree.roots.get(namespace)
            or num_blocks != match.num_blocks
            or match.node.num_blocks < match.num_node_blocks
        )

    def _evict_excess(self, root: Root, more: int, wanted: int) -> int:
        """Free what a namespace has over its quota, once it has `more`."""
        freed = 0
        while freed < wanted and (excess := self.quotas.excess(root, more)) > 0:
            leaf = self.evictor.peek(root)
            if leaf is None:
                break
            freed += self._evict_from(leaf, min(wanted - freed, excess))
        return freed

    def _next_over(self) -> Root | None:
        """Return the namespace most over its quota of those that have evictable leaves."""
        over = self.quotas.over()
        return next((root for root in over if self.evictor.peek(root) is not None), None)

    def _evict_from(self, leaf: Node, wanted: int) -> int:
        count = min(wanted, leaf.num_blocks)
        root = leaf.root
        for observer in self.observers:
            observer.on_removed(leaf, leaf.num_blocks - count, count)
        self.evictor.on_evicted(leaf, count)
        if leaf.num_blocks > wanted:
            dropped = self.tree.trim(leaf, wanted)
            self.num_tree_blocks -= len(dropped)
        else:
            dropped = list(leaf.block_ids)
            self.evictor.discard(leaf)
            self.remove(leaf)
        self.count_use(root)
        self.stats.blocks_evicted += len(dropped)
        return self.pool.release(dropped)
