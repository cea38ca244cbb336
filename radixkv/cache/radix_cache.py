"""The door to the cache: find, lock, publish and evict blocks, and make sequences of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from radixkv.cache.block_pool import BlockPool
from radixkv.cache.eviction import LRUEvictor
from radixkv.cache.hashing import TOKEN_BYTES, Digest, default_digest, hash_blocks
from radixkv.cache.int_vector import Int32Array, as_int32
from radixkv.cache.integrity import check_cache
from radixkv.cache.observer import CacheObserver
from radixkv.cache.radix_tree import Match, Node, RadixTree
from radixkv.cache.sequence import Sequence
from radixkv.cache.stats import CacheStats
from radixkv.errors import CacheCorruptionError, OutOfBlocksError
from radixkv.request import Namespace

__all__ = ["PrefixHandle", "RadixCache"]

TokenIds = Iterable[int] | Int32Array


@dataclass(frozen=True, slots=True)
class PrefixHandle:
    """A cached prefix that was found. Lock it before anything else changes the cache.

    Attributes:
        num_cached_tokens: whole blocks' tokens plus `match.num_partial_tokens`.
        match: where it lies in the tree, or None if the namespace is empty.
    """

    num_cached_tokens: int
    match: Match | None


class RadixCache:
    """Owns the pool, the tree and the order of eviction; hands out blocks by id.

    Laws, recomputed by `check_integrity()`:
    - free + evictable + referenced blocks == all blocks, and each block is in one state;
    - a block's ref count is 1 if a node holds it, plus 1 per sequence that holds it privately,
      plus 1 per pending copy that reads it;
    - a node's ref count is the number of locks on it or below it;
    - evictable leaves are exactly the unlocked leaves.

    Not thread-safe: one thread owns a cache.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        enabled: bool = True,
        digest: Digest = default_digest,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an empty cache.

        Args:
            num_blocks: blocks in the pool.
            block_size: tokens a block holds.
            enabled: False keeps nothing after its sequence ends (nothing ever hits).
            digest: hash function of `HASH_BYTES` bytes.
            clock: seconds, for the windows of the statistics.
        """
        self.pool = BlockPool(num_blocks)
        self.tree = RadixTree(block_size, digest)
        self.evictor = LRUEvictor()
        self.stats = CacheStats(clock)
        self.enabled = enabled
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.observers: list[CacheObserver] = []
        self.sequences: set[Sequence] = set()
        self.num_tree_blocks = 0
        self.num_locked_blocks = 0
        self._copies: dict[int, int] = {}  # destination -> source
        self._cached_reads: set[int] = set()  # destinations whose source is a cached block
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
        held = len(self._cached_reads)
        return self.num_free_blocks + max(0, self.num_evictable_blocks - held)

    @property
    def num_referenced_blocks(self) -> int:
        """Blocks that some sequence or pending copy depends on."""
        return self.num_blocks - self.num_free_blocks - self.num_evictable_blocks

    # --- prefixes -------------------------------------------------------------------------------

    def match_prefix(
        self, token_ids: TokenIds, namespace: Namespace = (), max_tokens: int | None = None
    ) -> PrefixHandle:
        """Find the longest cached prefix; changes nothing.

        Args:
            token_ids: `[n]` token ids.
            namespace: only what was stored under an equal namespace is found.
            max_tokens: find no more than this; a prompt of n tokens asks for n - 1, since the
                model must compute at least one to produce logits.

        Cost: O(depth) digests, one memcmp over the matched tokens.
        """
        return self.match_bytes(as_int32(token_ids).tobytes(), namespace, max_tokens)

    def match_bytes(
        self, tokens: bytes, namespace: Namespace = (), max_tokens: int | None = None
    ) -> PrefixHandle:
        """Find the longest cached prefix of little-endian int32 ids; see `match_prefix`."""
        limit = len(tokens) // TOKEN_BYTES if max_tokens is None else max_tokens
        match = self.tree.find(tokens, limit, namespace) if self.enabled else None
        if match is None:
            return PrefixHandle(0, None)
        return PrefixHandle(match.num_blocks * self.block_size + match.num_partial_tokens, match)

    def lock(self, handle: PrefixHandle, namespace: Namespace = ()) -> Node:
        """Protect the whole blocks of a match from eviction; return the node to unlock.

        A run that matched only in part is split, so that no more than the match is protected.
        The partial block is not protected.

        Raises:
            CacheCorruptionError: the handle is stale, since the cache changed after the match.

        Cost: O(depth).
        """
        match = handle.match
        if match is None:
            node = self.tree.get_root(namespace)
        else:
            node = match.node
            if self._is_stale(match, namespace):
                raise CacheCorruptionError("the prefix handle is stale: lock it right after match")
            if match.num_node_blocks < node.num_blocks:
                node = self.tree.split(node, match.num_node_blocks)
        self.lock_node(node)
        return node

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

    def lock_node(self, node: Node) -> None:
        """Protect a node and all above it. Cost: O(depth)."""
        tick = self.next_tick()
        current: Node | None = node
        while current is not None:
            if current.ref_count == 0:
                self.evictor.discard(current)
                self.num_locked_blocks += current.num_blocks
            current.ref_count += 1
            current.last_access = tick
            current = current.parent

    def unlock(self, node: Node) -> None:
        """Give back one lock of a node and of all above it.

        Raises:
            CacheCorruptionError: the node isn't locked.

        Cost: O(depth + log leaves).
        """
        tick = self.next_tick()
        current: Node | None = node
        while current is not None:
            if current.ref_count < 1:
                raise CacheCorruptionError(f"node {current.node_id} is unlocked without a lock")
            parent = current.parent
            current.ref_count -= 1
            current.last_access = tick
            if current.ref_count == 0:
                self.num_locked_blocks -= current.num_blocks
                self._refresh(current)
            current = parent

    def evict(self, num_blocks: int) -> int:
        """Free cached blocks until `num_blocks` more are free; return how many were freed.

        Least recently used unlocked leaves go first, each from its end; ancestors of locked nodes
        never go. Fewer are freed only if nothing evictable is left.

        Cost: O(log leaves) per leaf.
        """
        freed = 0
        while freed < num_blocks:
            leaf = self.evictor.peek()
            if leaf is None:
                break
            freed += self._evict_from(leaf, num_blocks - freed)
        return freed

    def reset(self) -> int:
        """Evict everything that can be evicted; return how many blocks became free."""
        freed = self.evict(self.num_blocks)
        for observer in self.observers:
            observer.on_cleared()
        return freed

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` blocks, evicting if need be.

        Raises:
            OutOfBlocksError: free and evictable blocks together are too few; nothing changes.
        """
        if count > self.num_available_blocks:
            raise OutOfBlocksError(f"{count} blocks wanted, {self.num_available_blocks} available")
        if count > self.pool.num_free:
            self.evict(count - self.pool.num_free)
        return self.pool.allocate(count, after)

    # --- sequences ------------------------------------------------------------------------------

    def create_sequence(self, token_ids: TokenIds, namespace: Namespace = ()) -> Sequence:
        """Make a sequence of these tokens; it holds no blocks yet (see `Sequence.reuse`)."""
        return Sequence(self, as_int32(token_ids), namespace)

    def publish(self, node: Node, tokens: bytes, block_ids: list[int]) -> tuple[Node, list[int]]:
        """File whole blocks below a locked node and move the lock down to them.

        Where the tree holds equal blocks already, its own are used and the caller's are released.

        Args:
            node: locked by the caller, the run that these blocks continue.
            tokens: the blocks' ids, little-endian int32.
            block_ids: blocks held by the caller alone; the tree takes them over.

        Returns:
            The node now locked, whose run ends with the last block, and the block ids to use.

        Cost: one digest per new block, O(log leaves).
        """
        used: list[int] = []
        while len(used) < len(block_ids):
            offset = len(used) * self.tree.block_bytes
            child = self.tree.child(node, tokens, offset)
            if child is None:
                node = self._append(node, tokens[offset:], block_ids[len(used) :])
                used += block_ids[len(used) :]
                break
            common = self.tree.common_blocks(child, tokens, offset)
            if common < child.num_blocks:
                child = self.tree.split(child, common)
            self._lock_child(child)
            node = child
            self.pool.release(block_ids[len(used) : len(used) + common])
            used += child.block_ids[:common]
        return node, used

    def keep_tail(self, node: Node, tokens: bytes, block_id: int) -> None:
        """File a partly filled block behind a locked node, or release it if it adds nothing."""
        if self.tree.is_covered(node, tokens):
            self.pool.release((block_id,))
            return
        self._drop_tails(node, tokens)
        tail = self.tree.add_tail(node, tokens, block_id)
        self.num_tree_blocks += 1
        tail.last_access = self.next_tick()
        self._refresh(tail)
        for observer in self.observers:
            observer.on_stored(tail, 0, 1)

    def take_tail(self, tail: Node) -> int:
        """Take a tail out of the tree; return its block, which the caller now holds."""
        block_id = tail.block_ids[0]
        self.evictor.discard(tail)
        self._remove(tail)
        return block_id

    # --- copies ---------------------------------------------------------------------------------

    def copy_on_write(self, source: int, after: int | None = None) -> int:
        """Take a block and note that `source` is to be copied into it before the next write.

        Args:
            source: a cached block; it stays readable until `take_copies`.
            after: as for `allocate`.

        Raises:
            OutOfBlocksError: no block can be had; nothing changes.
        """
        # The source can't be given away to hold its own copy, so a second block must be evictable.
        if not self.num_free_blocks and self.num_available_blocks < 2:
            raise OutOfBlocksError(f"no block is available for a copy of block {source}")
        self.pool.share(source)
        (own,) = self.allocate(1, after)
        self._copies[own] = source
        self._cached_reads.add(own)
        return own

    def copy_later(self, source: int, destination: int) -> None:
        """Note that `source` is to be copied into `destination` before the next write.

        Args:
            source: a block that sequences hold, not a cached one; it stays readable until
                `take_copies`.
            destination: a block of the caller's.
        """
        if source in self._cached_reads:
            self._cached_reads.add(destination)
        # A source that itself waits for its content is replaced by where the content is.
        source = self._copies.get(source, source)
        self.pool.share(source)
        self._copies[destination] = source

    def cancel_copy(self, destination: int) -> bool:
        """Forget a pending copy; return whether there was one."""
        source = self._copies.pop(destination, None)
        if source is None:
            return False
        self._cached_reads.discard(destination)
        self.pool.release((source,))
        return True

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the pending (source, destination) copies; the caller does them at once."""
        copies = [(source, destination) for destination, source in self._copies.items()]
        self._copies.clear()
        self._cached_reads.clear()
        self.pool.release(source for source, _ in copies)
        self.stats.blocks_copied += len(copies)
        return copies

    @property
    def pending_copies(self) -> dict[int, int]:
        """Copies not yet taken, destination to source."""
        return self._copies

    def check_integrity(self) -> None:
        """Recompute every count from scratch.

        Raises:
            CacheCorruptionError: something differs; the message says what, and shows the tree.

        Cost: O(blocks).
        """
        check_cache(self)

    def next_tick(self) -> int:
        """Advance the access clock."""
        self._tick += 1
        return self._tick

    def _append(self, node: Node, tokens: bytes, block_ids: list[int]) -> Node:
        hashes = hash_blocks(node.last_hash, tokens, self.tree.block_bytes, self.tree.digest)
        self.num_tree_blocks += len(block_ids)
        self.num_locked_blocks += len(block_ids)
        first = 0
        if node.ref_count == 1 and node.is_leaf and not node.is_root:
            # Only the caller holds it, so its run grows in place.
            first = node.num_blocks
            self.tree.extend(node, hashes, tokens, block_ids)
        else:
            self._drop_tails(node, tokens)
            last_access = node.last_access
            node = self.tree.add_child(node, hashes, tokens, block_ids)
            node.ref_count = 1
            node.last_access = last_access
        for observer in self.observers:
            observer.on_stored(node, first, len(block_ids))
        return node

    def _lock_child(self, child: Node) -> None:
        """Move a lock from a node to its child: the ancestors are counted already."""
        if child.ref_count == 0:
            self.evictor.discard(child)
            self.num_locked_blocks += child.num_blocks
        child.ref_count += 1
        child.last_access = self.next_tick()

    def _drop_tails(self, node: Node, tokens: bytes) -> None:
        """Drop tails that a longer block makes superfluous."""
        for tail in self.tree.tails_within(node, tokens):
            self.pool.release((self.take_tail(tail),))

    def _evict_from(self, leaf: Node, wanted: int) -> int:
        count = min(wanted, leaf.num_blocks)
        for observer in self.observers:
            observer.on_removed(leaf, leaf.num_blocks - count, count)
        if leaf.num_blocks > wanted:
            dropped = self.tree.trim(leaf, wanted)
            self.num_tree_blocks -= len(dropped)
        else:
            dropped = list(leaf.block_ids)
            self.evictor.discard(leaf)
            self._remove(leaf)
        self.stats.blocks_evicted += len(dropped)
        return self.pool.release(dropped)

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        self.num_tree_blocks -= leaf.num_blocks
        self.tree.remove(leaf)
        self._refresh(parent)

    def _refresh(self, node: Node) -> None:
        """Put a node into, or keep it out of, the evictable set; forget an empty root."""
        if node.ref_count or not node.is_leaf:
            return
        if node.is_root:
            self.tree.drop_root(node)
        else:
            self.evictor.add(node)
