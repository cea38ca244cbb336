"""The radix tree: runs of blocks keyed by chained hashes, verified by their tokens.

Structure only: which run follows which, where runs split, and which partly filled blocks (tails)
hang where. Locks, eviction and the pool belong to `RadixCache`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from sortedcontainers import SortedDict

from radixkv.cache.hashing import (
    HASH_BYTES,
    TOKEN_BYTES,
    Digest,
    common_tokens,
    default_digest,
    namespace_seed,
)
from radixkv.request import Namespace

__all__ = ["Match", "Node", "RadixTree"]

# Up to this many edges are searched one by one for the longest common start; more are indexed.
MAX_UNINDEXED_EDGES = 16


@dataclass(slots=True, eq=False)
class Root:
    """One namespace's part of the tree."""

    namespace: Namespace
    seed: bytes
    num_blocks: int = 0
    num_held: int = 0  # blocks that sequences hold privately; counted where there are quotas


@dataclass(slots=True, eq=False)
class Node:
    """A run of blocks below its parent's last block.

    A *tail* is a node of one partly filled block: it has no hash, no children, and hangs at the
    end of its parent's run. A root node has no blocks and no parent.

    Attributes:
        hashes: HASH_BYTES per block, chained; empty for a tail.
        tokens: int32 ids, little-endian; whole blocks, or the filled part of a tail.
        block_ids: the block of each run position, int32.
        ref_count: locks held on this node or below it.
        pins: pins on this node or below it.
        last_access: tick of the last lock or unlock that passed through.
        accessed_at: the same in seconds of the cache's clock.
        hits: lookups that came back to the whole node.
        priority: the highest of the sequences that used the node.
        rank: the eviction policy's own.
        children: by hash of their first block (longer where two hashes collide).
        tails: partly filled blocks; none is the beginning of another or of a child.
        edges: index of children and tails by the tokens of their first block, once there are many.
    """

    root: Root
    parent: Node | None
    node_id: int
    hashes: bytes = b""
    tokens: bytes = b""
    block_ids: array[int] = field(default_factory=lambda: array("i"))
    ref_count: int = 0
    pins: int = 0
    last_access: int = 0
    accessed_at: float = 0.0
    hits: int = 0
    priority: int = 0
    rank: float = 0.0
    children: dict[bytes, Node] = field(default_factory=dict)
    tails: list[Node] = field(default_factory=list)
    edges: SortedDict | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks in the run (1 for a tail, 0 for a root)."""
        return len(self.block_ids)

    @property
    def is_root(self) -> bool:
        """Whether the node is the root of its namespace."""
        return not self.block_ids

    @property
    def is_tail(self) -> bool:
        """Whether the node is one partly filled block."""
        return not self.hashes and bool(self.block_ids)

    @property
    def is_leaf(self) -> bool:
        """Whether nothing hangs below the node."""
        return not self.children and not self.tails

    @property
    def last_hash(self) -> bytes:
        """Chained hash of everything up to the end of the run."""
        return self.hashes[-HASH_BYTES:] or self.root.seed


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached start of a prompt.

    Attributes:
        node: the deepest node matched; its root node when no whole block matched.
        num_node_blocks: blocks of `node` that matched, at least 1 unless it is the root.
        num_blocks: whole blocks matched, from the root.
        partial: node whose block `partial_index` agrees with the next `num_partial_tokens`
            tokens, or None.
    """

    node: Node
    num_node_blocks: int
    num_blocks: int
    partial: Node | None = None
    partial_index: int = 0
    num_partial_tokens: int = 0


class RadixTree:
    """Owns the nodes of all namespaces.

    Invariants: runs split at block boundaries only; a child's first hash chains from its parent's
    last; siblings differ in the tokens of their first block.
    """

    def __init__(self, block_size: int, digest: Digest = default_digest) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self.block_bytes = block_size * TOKEN_BYTES
        self.digest = digest
        self.roots: dict[Namespace, Node] = {}
        self.num_nodes = 0  # roots not counted
        self._collisions = 0  # children filed under a long key because their hash was taken
        self._ids = count()

    def find(self, tokens: bytes, max_tokens: int, namespace: Namespace) -> Match | None:
        """Return the longest cached start of at most `max_tokens` tokens; changes nothing.

        None if the namespace holds nothing. Hashes are computed at node boundaries only: a run is
        proven by comparing its tokens, and its stored last hash continues the chain.

        Cost: O(depth) digests, one memcmp over the matched tokens.
        """
        node = self.roots.get(namespace)
        if node is None:
            return None
        limit = max(0, min(len(tokens) // TOKEN_BYTES, max_tokens))
        max_blocks = limit // self.block_size
        num_blocks = 0
        matched = 0
        while num_blocks < max_blocks:
            child = self.child(node, tokens, num_blocks * self.block_bytes)
            if child is None:
                break
            node = child
            matched = self._common_blocks(node, tokens, num_blocks, max_blocks)
            num_blocks += matched
            if matched < node.num_blocks:
                break
        rest_start = num_blocks * self.block_bytes
        rest = tokens[rest_start : min(rest_start + self.block_bytes, limit * TOKEN_BYTES)]
        partial, index, shared = self._find_partial(node, matched, rest)
        return Match(node, matched, num_blocks, partial, index, shared)

    def child(self, node: Node, tokens: bytes, offset: int) -> Node | None:
        """Return the child whose first block holds the tokens at byte `offset`, or None."""
        first = tokens[offset : offset + self.block_bytes]
        key = self.digest(node.last_hash + first)
        child = node.children.get(key)
        if child is not None and child.tokens.startswith(first):
            return child
        return node.children.get(key + first) if self._collisions else None

    def common_blocks(self, node: Node, tokens: bytes, offset: int) -> int:
        """Return how many whole blocks of the run equal the tokens from byte `offset` on."""
        start = offset // self.block_bytes
        return self._common_blocks(node, tokens, start, len(tokens) // self.block_bytes)

    def get_root(self, namespace: Namespace) -> Node:
        """Return the namespace's root node, made if need be."""
        node = self.roots.get(namespace)
        if node is None:
            root = Root(namespace, namespace_seed(namespace, self.digest))
            node = self.roots[namespace] = Node(root, None, next(self._ids))
        return node

    def drop_root(self, node: Node) -> None:
        """Forget a namespace that holds nothing."""
        del self.roots[node.root.namespace]

    def add_child(self, parent: Node, hashes: bytes, tokens: bytes, block_ids: list[int]) -> Node:
        """Hang a new run below `parent`. No child may have the same first block already."""
        node = Node(parent.root, parent, next(self._ids), hashes, tokens, array("i", block_ids))
        self._link_child(parent, node)
        parent.root.num_blocks += node.num_blocks
        self.num_nodes += 1
        return node

    def add_tail(self, parent: Node, tokens: bytes, block_id: int) -> Node:
        """Hang a partly filled block at the end of `parent`'s run."""
        node = Node(parent.root, parent, next(self._ids), b"", tokens, array("i", [block_id]))
        parent.tails.append(node)
        if parent.edges is not None:
            parent.edges[tokens] = node
        self._index_edges(parent)
        parent.root.num_blocks += 1
        self.num_nodes += 1
        return node

    def extend(self, node: Node, hashes: bytes, tokens: bytes, block_ids: list[int]) -> None:
        """Lengthen a leaf's run."""
        node.hashes += hashes
        node.tokens += tokens
        node.block_ids.extend(block_ids)
        node.root.num_blocks += len(block_ids)

    def split(self, node: Node, num_blocks: int) -> Node:
        """Cut a run after `num_blocks` blocks and return the new upper part.

        The node object stays the lower part, so that whoever holds it still holds the same end.
        """
        parent = node.parent
        assert parent is not None
        assert 0 < num_blocks < node.num_blocks
        self._unlink(node)
        cut_hash, cut_token = num_blocks * HASH_BYTES, num_blocks * self.block_bytes
        upper = Node(
            node.root,
            parent,
            next(self._ids),
            node.hashes[:cut_hash],
            node.tokens[:cut_token],
            node.block_ids[:num_blocks],
            ref_count=node.ref_count,
            pins=node.pins,
            last_access=node.last_access,
            accessed_at=node.accessed_at,
            hits=node.hits,
            priority=node.priority,
            rank=node.rank,
        )
        node.hashes = node.hashes[cut_hash:]
        node.tokens = node.tokens[cut_token:]
        node.block_ids = node.block_ids[num_blocks:]
        node.parent = upper
        self._link_child(parent, upper)
        self._link_child(upper, node)
        self.num_nodes += 1
        return upper

    def trim(self, node: Node, num_blocks: int) -> list[int]:
        """Drop the last `num_blocks` blocks of a leaf's run (not all of it); return their ids."""
        keep = node.num_blocks - num_blocks
        assert keep > 0
        dropped = list(node.block_ids[keep:])
        node.hashes = node.hashes[: keep * HASH_BYTES]
        node.tokens = node.tokens[: keep * self.block_bytes]
        node.block_ids = node.block_ids[:keep]
        node.root.num_blocks -= num_blocks
        return dropped

    def remove(self, node: Node) -> None:
        """Take a leaf out of the tree."""
        assert node.is_leaf
        self._unlink(node)
        node.root.num_blocks -= node.num_blocks
        node.parent = None
        self.num_nodes -= 1

    def is_covered(self, parent: Node, tokens: bytes) -> bool:
        """Whether a child's or tail's first block begins with `tokens` already."""
        _, shared = self._closest_edge(parent, tokens)
        return shared * TOKEN_BYTES == len(tokens)

    def tails_within(self, parent: Node, tokens: bytes) -> list[Node]:
        """Return the tails of `parent` that are beginnings of `tokens`."""
        return [t for t in parent.tails if tokens.startswith(t.tokens)]

    def nodes(self) -> Iterator[Node]:
        """Yield every node, parents before children, roots and tails included."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
            stack.extend(node.tails)

    def _link_child(self, parent: Node, node: Node) -> None:
        key = node.hashes[:HASH_BYTES]
        if key in parent.children:
            # A sibling has this hash: a collision costs a longer key and nothing else.
            key += node.tokens[: self.block_bytes]
            self._collisions += 1
        parent.children[key] = node
        if parent.edges is not None:
            parent.edges[node.tokens[: self.block_bytes]] = node
        self._index_edges(parent)

    def _unlink(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        if node.is_tail:
            parent.tails.remove(node)
        else:
            key = node.hashes[:HASH_BYTES]
            if parent.children.get(key) is not node:
                key += node.tokens[: self.block_bytes]
                self._collisions -= 1
            del parent.children[key]
        if parent.edges is not None:
            del parent.edges[node.tokens[: self.block_bytes]]

    def _index_edges(self, parent: Node) -> None:
        if parent.edges is None and len(parent.children) + len(parent.tails) > MAX_UNINDEXED_EDGES:
            edges = [*parent.children.values(), *parent.tails]
            parent.edges = SortedDict({e.tokens[: self.block_bytes]: e for e in edges})

    def _common_blocks(self, node: Node, tokens: bytes, start: int, stop: int) -> int:
        """Blocks of the run that equal blocks `start` to `stop` of `tokens`."""
        offset = start * self.block_bytes
        limit = min(node.num_blocks, stop - start)
        if limit == node.num_blocks and tokens.startswith(node.tokens, offset):
            return limit
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            a, b = low * self.block_bytes, middle * self.block_bytes
            if node.tokens[a:b] == tokens[offset + a : offset + b]:
                low = middle
            else:
                high = middle - 1
        return low

    def _find_partial(self, node: Node, matched: int, rest: bytes) -> tuple[Node | None, int, int]:
        """Return the (node, block index, tokens) that agree longest with a rest under one block."""
        if not rest:
            return None, 0, 0
        if matched < node.num_blocks:
            start = matched * self.block_bytes
            shared = common_tokens(node.tokens[start : start + self.block_bytes], rest)
            return (node, matched, shared) if shared else (None, 0, 0)
        edge, shared = self._closest_edge(node, rest)
        return (edge, 0, shared) if shared else (None, 0, 0)

    def _closest_edge(self, parent: Node, rest: bytes) -> tuple[Node | None, int]:
        """Return the child or tail whose first block shares most leading tokens with `rest`."""
        candidates: list[Node]
        if parent.edges is None:
            candidates = [*parent.children.values(), *parent.tails]
        else:
            # In sorted order the longest common start is with a neighbour.
            index = parent.edges.bisect_left(rest)
            values = parent.edges.values()
            candidates = [values[i] for i in (index - 1, index) if 0 <= i < len(values)]
        best, most = None, 0
        for edge in candidates:
            shared = common_tokens(edge.tokens[: self.block_bytes], rest)
            if shared > most:
                best, most = edge, shared
        return best, most
