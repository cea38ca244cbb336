"""A sequence of tokens and the blocks that hold their KV."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from radixkv.cache.hashing import TOKEN_BYTES
from radixkv.cache.int_vector import Int32Array, IntVector
from radixkv.cache.radix_tree import Node, Root
from radixkv.errors import OutOfBlocksError
from radixkv.request import Namespace

if TYPE_CHECKING:
    from radixkv.cache.radix_cache import RadixCache

__all__ = ["Sequence"]


class Sequence:
    """Token ids plus block table; made by `RadixCache.create_sequence`.

    Who owns which block, by position in the block table::

        [0, num_tree_blocks)        the tree; `node`, the last of them, is locked by this sequence
        [num_tree_blocks, ...)      this sequence (and forks, until they write)

    The KV of the first `num_computed` tokens is written. Whole computed blocks are always in the
    tree; the partly filled one stays private until `free` leaves it in the tree as a tail.

    Attributes:
        num_cached_tokens: tokens that the last `reuse` found.
    """

    def __init__(
        self, cache: RadixCache, token_ids: Int32Array, namespace: Namespace, priority: int = 0
    ) -> None:
        self.cache = cache
        self.namespace = namespace
        self.priority = priority
        self.num_computed = 0
        self.num_cached_tokens = 0
        self.num_tree_blocks = 0
        self.node: Node | None = None
        self._tokens = IntVector(token_ids)
        self._blocks = IntVector()
        self._num_held = 0  # as counted in the namespace's root

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def token_ids(self) -> Int32Array:
        """`[len]` int32; stale after the next append."""
        return self._tokens.view

    @property
    def block_table(self) -> Int32Array:
        """`[num_blocks]` int32, the block ids in order; stale after the next change."""
        return self._blocks.view

    @property
    def num_blocks(self) -> int:
        """Blocks in the table."""
        return len(self._blocks)

    @property
    def is_open(self) -> bool:
        """Whether the sequence holds a lock (between `reuse` and `free`)."""
        return self.node is not None

    def reuse(self, max_tokens: int | None = None, *, partial: bool = True) -> int:
        """Take over the longest cached prefix; return its length in tokens.

        Whole blocks are shared by a lock. A partly matching block is copied into a block of this
        sequence, so that the next one finds it too; if no block can be had for the copy, an
        unshared tail that matches as a whole is taken over in place, and anything else left out.

        Args:
            max_tokens: take no more than this (default: all but the last token).
            partial: False takes whole blocks only; they need no block of this sequence's own.

        Cost: O(depth) digests, one memcmp over the matched tokens.
        """
        if self.is_open:
            raise ValueError("the sequence holds blocks already; free it first")
        limit = len(self) - 1 if max_tokens is None else max_tokens
        handle = self.cache.match_bytes(self._tokens.to_bytes(), self.namespace, limit)
        match = handle.match
        source = -1
        if match is not None and match.partial is not None:
            source = match.partial.block_ids[match.partial_index]
        self.node = self.cache.lock(handle, self.namespace, self.priority)
        self.cache.sequences.add(self)
        if match is not None:
            self._blocks.extend(_path_blocks(self.node))
            self.num_tree_blocks = self.num_blocks
            self.num_computed = self.num_blocks * self.cache.block_size
            if partial and match.partial is not None:
                self._take_partial(match.partial, source, match.num_partial_tokens)
        self.num_cached_tokens = self.num_computed
        self._count_held(self.node.root)
        return self.num_computed

    def reserve(self, num_tokens: int) -> None:
        """Make sure that the first `num_tokens` tokens have slots this sequence may write.

        A partly filled block that a fork shares is copied first (copy-on-write).

        Raises:
            OutOfBlocksError: too few blocks; the sequence is unchanged.
        """
        block_size = self.cache.block_size
        missing = -(-num_tokens // block_size) - self.num_blocks
        position, filled = divmod(self.num_computed, block_size)
        shared = -1
        if filled and num_tokens > self.num_computed:
            last = self._blocks[position]
            # The last of those that shared a block has it to itself: the others' copies are made
            # before it writes.
            readers = self.cache.copies.num_readers(last)
            if self.cache.pool.ref_count(last) - readers > 1:
                shared = last
        if missing <= 0 and shared < 0:
            return
        # All at once, so that a failure leaves nothing half done.
        before = position if shared >= 0 else self.num_blocks
        after = self._blocks[before - 1] if before else None
        root = self.node.root if self.node is not None else None
        blocks = self.cache.allocate(max(missing, 0) + (shared >= 0), after, root)
        if shared >= 0:
            self._blocks[position] = blocks.pop(0)
            self.cache.copies.add(shared, self._blocks[position])
            self.cache.pool.release((shared,))
        self._blocks.extend(blocks)
        if root is not None:
            self._count_held(root)

    def append(self, token_ids: Iterable[int]) -> None:
        """Add tokens, not yet computed."""
        self._tokens.extend(list(token_ids))

    def commit(self, num_computed: int) -> None:
        """Note that the KV of the first `num_computed` tokens is written.

        Blocks that are full now enter the tree at once, so that others can reuse them. Where the
        tree got an equal block first, this sequence switches to that one.
        """
        block_size = self.cache.block_size
        if not self.num_computed <= num_computed <= min(len(self), self.num_blocks * block_size):
            raise ValueError(
                f"num_computed must be in {self.num_computed}.."
                f"{min(len(self), self.num_blocks * block_size)}, got {num_computed}"
            )
        self.num_computed = num_computed
        full = num_computed // block_size
        first = self.num_tree_blocks
        if full == first or not self.cache.enabled:
            return
        assert self.node is not None
        tokens = self._tokens.to_bytes(first * block_size, full * block_size)
        own = self.block_table[first:full].tolist()
        self.node, used = self.cache.publish(self.node, tokens, own, self.priority)
        self._blocks.view[first:full] = used
        self.num_tree_blocks = full
        self._count_held(self.node.root)

    def fork(self) -> Sequence:
        """Return a sequence with the same tokens that shares every computed block.

        Takes no block: a shared partly filled block is copied when one of the two writes to it.
        """
        child = Sequence(self.cache, self.token_ids, self.namespace, self.priority)
        if self.node is None:
            return child
        child.num_computed = self.num_computed
        child.num_cached_tokens = self.num_computed
        child.num_tree_blocks = self.num_tree_blocks
        child.node = self.node
        self.cache.lock_node(self.node)
        used = -(-self.num_computed // self.cache.block_size)
        child._blocks.extend(self.block_table[:used])
        for block_id in self.block_table[self.num_tree_blocks : used].tolist():
            self.cache.pool.share(block_id)
        self.cache.sequences.add(child)
        child._count_held(self.node.root)
        return child

    def free(self, *, keep_tail: bool = True) -> None:
        """Give everything back; what was computed stays in the tree, evictable. Idempotent.

        Args:
            keep_tail: False drops the partly filled block, whose content may not have been written.
        """
        if self.node is None:
            return
        cache, node = self.cache, self.node
        start, filled = divmod(self.num_computed, cache.block_size)
        private = self.block_table[self.num_tree_blocks :].tolist()
        self.node = None
        cache.sequences.discard(self)
        position = start - self.num_tree_blocks  # of the partly filled block
        if filled and cache.pool.ref_count(private[position]) == 1:
            # A copy that was never made means that nothing is in the block yet.
            written = not cache.copies.cancel(private[position])
            if written and keep_tail and cache.enabled:
                tokens = self._tokens.to_bytes(start * cache.block_size, self.num_computed)
                cache.keep_tail(node, tokens, private.pop(position), self.priority)
        cache.pool.release(private)
        self._blocks.truncate(0)
        self.num_computed = self.num_tree_blocks = 0
        self._count_held(node.root)
        cache.unlock(node)

    def _count_held(self, root: Root) -> None:
        """Tell the quotas how many blocks this sequence holds privately."""
        if not self.cache.quotas.enabled:
            return
        held = self.num_blocks - self.num_tree_blocks
        root.num_held += held - self._num_held
        self._num_held = held
        self.cache.quotas.update(root)

    def _take_partial(self, partial: Node, source: int, num_tokens: int) -> None:
        """Get a block that holds the first `num_tokens` of block `source`, if one can be had."""
        cache = self.cache
        after = self._blocks[-1] if self.num_blocks else None
        try:
            self._blocks.append(cache.copy_on_write(source, after, partial.root))
        except OutOfBlocksError:
            whole = partial.is_tail and len(partial.tokens) == num_tokens * TOKEN_BYTES
            if not whole or cache.pool.ref_count(source) != 1:
                return
            self._blocks.append(cache.take_tail(partial))
        self.num_computed += num_tokens


def _path_blocks(node: Node) -> Int32Array:
    """Return `[num_blocks]` int32, the blocks from the root to the end of a node's run."""
    runs = []
    current = node
    while current.parent is not None:
        runs.append(np.frombuffer(current.block_ids, dtype=np.int32))
        current = current.parent
    return np.concatenate(runs[::-1]) if runs else np.empty(0, dtype=np.int32)
