"""The door to the cache: find, lock, publish and evict blocks, and make sequences of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from radixkv.cache.explain import EvictionMemory, Explanation, explain_bytes
from radixkv.cache.hashing import TOKEN_BYTES, Digest, default_digest, hash_blocks
from radixkv.cache.inspection import Decode, SessionTokens, tree_report
from radixkv.cache.int_vector import Int32Array, as_int32
from radixkv.cache.integrity import check_cache
from radixkv.cache.locked_tree import LockedTree, PrefixHandle
from radixkv.cache.pins import Pins
from radixkv.cache.policies import make_policy
from radixkv.cache.quotas import Quotas
from radixkv.cache.radix_tree import Node, Root
from radixkv.cache.sequence import Sequence
from radixkv.errors import OutOfBlocksError
from radixkv.request import Namespace

__all__ = ["PrefixHandle", "RadixCache"]

TokenIds = Iterable[int] | Int32Array


class RadixCache(LockedTree):
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
        policy: str = "lru",
        pin_share: float = 0.5,
        quotas: Mapping[Namespace, float] | None = None,
        default_quota: float = 1.0,
    ) -> None:
        """Make an empty cache.

        Args:
            num_blocks: blocks in the pool.
            block_size: tokens a block holds.
            enabled: False keeps nothing after its sequence ends (nothing ever hits).
            digest: hash function of `HASH_BYTES` bytes.
            clock: seconds, for pins, ages, and the windows of the statistics.
            policy: which leaf is evicted first; a name in `POLICIES`.
            pin_share: the part of the pool that pins may hold.
            quotas: namespace to its share of the pool; see `Quotas`.
            default_quota: the share of a namespace that `quotas` doesn't name.

        Raises:
            ValueError: an argument is out of range.
        """
        if not 0 <= pin_share < 1:
            raise ValueError(f"pin_share must be at least 0 and under 1, got {pin_share}")
        shares = Quotas(num_blocks, quotas, default_quota)
        evictor = make_policy(policy, clock, by_namespace=shares.enabled)
        super().__init__(num_blocks, block_size, evictor, shares, digest=digest, clock=clock)
        self.pins = Pins(self, int(pin_share * num_blocks))
        self.enabled = enabled
        self.evictions = EvictionMemory(num_blocks, clock, evictor.name)
        self.observers.append(self.evictions)
        self.sequences: set[Sequence] = set()

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

    def lock(self, handle: PrefixHandle, namespace: Namespace = (), priority: int = 0) -> Node:
        """Protect a match, see `LockedTree.lock`; restart the time of the pins it covers."""
        self.pins.expire()
        node = super().lock(handle, namespace, priority)
        if self.pins:
            current: Node | None = node
            while current is not None:
                self.pins.touch(current)
                current = current.parent
        return node

    def evict(self, num_blocks: int, root: Root | None = None, more: int = 0) -> int:
        """Free cached blocks, see `LockedTree.evict`; pins that have expired don't protect."""
        self.pins.expire()
        return super().evict(num_blocks, root, more)

    def reset(self) -> int:
        """Give up the pins and evict all that can be; return how many blocks became free."""
        self.pins.clear()
        with self.evictions.blaming("flush"):
            freed = self.evict(self.num_blocks)
        for observer in self.observers:
            observer.on_cleared()
        return freed

    def reset_namespace(self, namespace: Namespace) -> int:
        """Do for one namespace what `reset` does for all; what its sequences hold stays.

        Observers are told of each block, but nothing by `on_cleared`. Cost: O(its nodes + pins).
        """
        top = self.tree.roots.get(namespace)
        if top is None:
            return 0
        for pin in [pin for pin in self.pins if pin.node.root is top.root]:
            self.pins.drop(pin.pin_id)
        nodes = [top]
        for node in nodes:  # grows meanwhile: parents come before their children
            nodes += [*node.children.values(), *node.tails]
        with self.evictions.blaming("flush"):
            return sum(
                self._evict_from(node, node.num_blocks)
                for node in reversed(nodes[1:])
                if not node.ref_count and node.is_leaf
            )

    def allocate(self, count: int, after: int | None = None, root: Root | None = None) -> list[int]:
        """Take `count` blocks, evicting if need be.

        Args:
            count: blocks wanted.
            after: continue right behind this block id if possible.
            root: of the namespace they are for; it gives first if it gets over its quota.

        Raises:
            OutOfBlocksError: free and evictable blocks together are too few; nothing changes but
                that pins may lapse.
        """
        self.pins.expire()
        if count > self.num_available_blocks:
            self.pins.give_way(count)
        if count > self.num_available_blocks:
            raise OutOfBlocksError(f"{count} blocks wanted, {self.num_available_blocks} available")
        if count > self.pool.num_free:
            self.evict(count - self.pool.num_free, root, count)
        return self.pool.allocate(count, after)

    # --- pins -----------------------------------------------------------------------------------

    def pin(
        self, token_ids: TokenIds, namespace: Namespace = (), ttl_s: float = 3600.0
    ) -> int | None:
        """Keep what is cached of a prompt's beginning for a while, whoever needs blocks.

        The time restarts whenever a lookup covers all of it. Only whole blocks are kept, and no
        more than fit into the pins' share of the pool; over it the pin used longest ago lapses.
        Pins also lapse, oldest first, where a sequence that is alone could not go on without.

        Args:
            token_ids: `[n]` token ids.
            namespace: as for `match_prefix`.
            ttl_s: seconds, over 0.

        Returns:
            The pin's id for `unpin`, or None if no whole block is cached.

        Cost: that of a lookup, and O(log pins).
        """
        return self.pins.add(as_int32(token_ids).tobytes(), namespace, ttl_s)

    @property
    def num_pinned_blocks(self) -> int:
        """Cached blocks that pins hold; they count as referenced."""
        return self.pins.num_blocks

    def unpin(self, pin_id: int) -> bool:
        """Give up a pin; return False if it is gone already. Cost: O(depth + log pins)."""
        return self.pins.drop(pin_id)

    # --- sequences ------------------------------------------------------------------------------

    def create_sequence(
        self, token_ids: TokenIds, namespace: Namespace = (), *, priority: int = 0
    ) -> Sequence:
        """Make a sequence of these tokens; it holds no blocks yet (see `Sequence.reuse`).

        Args:
            token_ids: `[n]` token ids.
            namespace: what it shares blocks with.
            priority: for the policy "priority": what it uses goes after what is lower.
        """
        return Sequence(self, as_int32(token_ids), namespace, priority)

    def publish(
        self, node: Node, tokens: bytes, block_ids: list[int], priority: int = 0
    ) -> tuple[Node, list[int]]:
        """File whole blocks below a locked node and move the lock down to them.

        Where the tree holds equal blocks already, its own are used and the caller's are released.

        Args:
            node: locked by the caller, the run that these blocks continue.
            tokens: the blocks' ids, little-endian int32.
            block_ids: blocks held by the caller alone; the tree takes them over.
            priority: of the sequence that computed them.

        Returns:
            The node now locked, whose run ends with the last block, and the block ids to use.

        Cost: one digest per new block, O(log leaves).
        """
        used: list[int] = []
        while len(used) < len(block_ids):
            offset = len(used) * self.tree.block_bytes
            child = self.tree.child(node, tokens, offset)
            if child is None:
                node = self._append(node, tokens[offset:], block_ids[len(used) :], priority)
                used += block_ids[len(used) :]
                break
            common = self.tree.common_blocks(child, tokens, offset)
            if common < child.num_blocks:
                child = self.split(child, common)
            self._lock_child(child, priority)
            node = child
            self.pool.release(block_ids[len(used) : len(used) + common])
            used += child.block_ids[:common]
        return node, used

    def keep_tail(self, node: Node, tokens: bytes, block_id: int, priority: int = 0) -> None:
        """File a partly filled block behind a locked node, or release it if it adds nothing."""
        if self.tree.is_covered(node, tokens):
            self.pool.release((block_id,))
            return
        self._drop_tails(node, tokens)
        tail = self.tree.add_tail(node, tokens, block_id)
        self.num_tree_blocks += 1
        tail.last_access, tail.accessed_at = self.next_tick(), self.clock()
        tail.priority = priority
        self.evictor.on_created(tail)
        self.refresh(tail)
        self.count_use(node.root)
        for observer in self.observers:
            observer.on_stored(tail, 0, 1)

    def shorten(self, leaf: Node, tokens: bytes) -> None:
        """Make the last block of an unlocked leaf a tail of fewer tokens.

        Args:
            leaf: a run or a tail.
            tokens: of the block, those that stay; at least one, and not all.
        """
        block_id, priority, parent = leaf.block_ids[-1], leaf.priority, leaf.parent
        assert parent is not None
        self.pool.share(block_id)
        if leaf.num_blocks > 1:
            self.drop_end(leaf, 1)
            self._add_lock(node := leaf)
        else:
            # Held, since it may have nothing but this leaf.
            self._add_lock(node := parent)
            self.drop_end(leaf, 1)
        self.keep_tail(node, tokens, block_id, priority)
        self.release_hold(node)

    def take_tail(self, tail: Node) -> int:
        """Take a tail out of the tree; return its block, which the caller now holds."""
        block_id = tail.block_ids[0]
        self.evictor.discard(tail)
        self.remove(tail)
        return block_id

    # --- copies ---------------------------------------------------------------------------------

    def copy_on_write(self, source: int, after: int | None = None, root: Root | None = None) -> int:
        """Take a block and note that `source` is to be copied into it before the next write.

        Args:
            source: a cached block; it stays readable until `take_copies`.
            after, root: as for `allocate`.

        Raises:
            OutOfBlocksError: no block can be had; nothing changes.
        """
        # The source can't be given away to hold its own copy, so a second block must be evictable.
        if not self.num_free_blocks and self.num_available_blocks < 2:
            raise OutOfBlocksError(f"no block is available for a copy of block {source}")
        self.pool.share(source)
        try:
            (own,) = self.allocate(1, after, root)
        except OutOfBlocksError:
            self.pool.release((source,))
            raise
        self.copies.add_cached(source, own)
        return own

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the pending (source, destination) copies; the caller does them at once."""
        copies = self.copies.take()
        self.stats.blocks_copied += len(copies)
        return copies

    @property
    def pending_copies(self) -> dict[int, int]:
        """Copies not yet taken, destination to source."""
        return self.copies.pending

    def explain(
        self, token_ids: TokenIds, namespace: Namespace = (), max_tokens: int | None = None
    ) -> Explanation:
        """Say what a lookup would find and why no more; arguments as for `match_prefix`.

        Changes nothing. Cost: that of a lookup, and a digest per other namespace (bounded).
        """
        tokens = as_int32(token_ids).tobytes()
        return explain_bytes(self, tokens, namespace, max_tokens, memory=self.evictions)

    def tree_report(
        self,
        max_depth: int = 8,
        max_breadth: int = 16,
        *,
        decode: Decode | None = None,
        namespace: Namespace | None = None,
        sessions: Iterable[SessionTokens] = (),
    ) -> dict[str, Any]:
        """Return the tree as nested dicts of plain types; see `inspection.tree_report`."""
        return tree_report(
            self, max_depth, max_breadth, decode=decode, namespace=namespace, sessions=sessions
        )

    def check_integrity(self) -> None:
        """Recompute every count from scratch.

        Raises:
            CacheCorruptionError: something differs; the message says what, and shows the tree.

        Cost: O(blocks).
        """
        check_cache(self)

    def _append(self, node: Node, tokens: bytes, block_ids: list[int], priority: int) -> Node:
        hashes = hash_blocks(node.last_hash, tokens, self.tree.block_bytes, self.tree.digest)
        self.num_tree_blocks += len(block_ids)
        self.num_locked_blocks += len(block_ids)
        first = 0
        self._drop_tails(node, tokens)
        if node.ref_count == 1 and node.is_leaf and not node.is_root:
            # Only the caller holds it, so its run grows in place.
            first = node.num_blocks
            self.tree.extend(node, hashes, tokens, block_ids)
        else:
            parent = node
            node = self.tree.add_child(parent, hashes, tokens, block_ids)
            node.ref_count = 1
            node.last_access, node.accessed_at = parent.last_access, parent.accessed_at
            self.evictor.on_created(node)
        node.priority = max(node.priority, priority)
        self.count_use(node.root)
        for observer in self.observers:
            observer.on_stored(node, first, len(block_ids))
        return node

    def _lock_child(self, child: Node, priority: int) -> None:
        """Move a lock from a node to its child: the ancestors are counted already."""
        if child.ref_count == 0:
            self.evictor.discard(child)
            self.num_locked_blocks += child.num_blocks
        child.ref_count += 1
        child.priority = max(child.priority, priority)
        child.last_access, child.accessed_at = self.next_tick(), self.clock()

    def _drop_tails(self, node: Node, tokens: bytes) -> None:
        """Drop tails that a longer block makes superfluous."""
        for tail in self.tree.tails_within(node, tokens):
            self.pool.release((self.take_tail(tail),))
