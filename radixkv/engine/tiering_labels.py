"""What the tiers note down of a block beside its content."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from radixkv.cache.hashing import HASH_BYTES, hash_blocks, namespace_seed
from radixkv.cache.radix_tree import Match, Node, RadixTree
from radixkv.cache.tiers import node_prefix, prefix_keys
from radixkv.request import Namespace

__all__ = ["LABEL_BYTES", "BlockLabel", "node_blocks", "prompt_blocks"]

LABEL_BYTES = 3 * HASH_BYTES


@dataclass(frozen=True, slots=True)
class BlockLabel:
    """What identifies a block to those outside: kept with it, since a tier knows no tree.

    A tier stores it in the place of the block's tokens, packed: seed, parent, hash, tokens. So
    events tell of blocks that were found on disk after a restart, and a flush of one namespace
    finds that namespace's blocks.

    Attributes:
        seed: hash seed of the namespace.
        parent: chained hash of the block before; the seed at the start of a prompt.
        hash: chained hash of the block.
        tokens: int32 ids, little-endian.
    """

    seed: bytes
    parent: bytes
    hash: bytes
    tokens: bytes

    def pack(self) -> bytes:
        """Return `LABEL_BYTES` more bytes than the tokens have."""
        return self.seed + self.parent + self.hash + self.tokens

    @classmethod
    def unpack(cls, packed: bytes) -> BlockLabel:
        """Return what `pack` was called on."""
        seed, parent = packed[:HASH_BYTES], packed[HASH_BYTES : 2 * HASH_BYTES]
        return cls(seed, parent, packed[2 * HASH_BYTES : LABEL_BYTES], packed[LABEL_BYTES:])


def node_blocks(
    node: Node, first: int, count: int, block_bytes: int
) -> Iterator[tuple[bytes, bytes, int]]:
    """Yield (key, packed label, block id) of blocks `first` to `first + count` of a node.

    Cost: O(tokens from the root on).
    """
    end = first + count
    if first:
        parent = node.hashes[(first - 1) * HASH_BYTES : first * HASH_BYTES]
    else:
        parent = node.root.seed if node.parent is None else node.parent.last_hash
    hashes = node.hashes[first * HASH_BYTES : end * HASH_BYTES]
    tokens = node.tokens[first * block_bytes : end * block_bytes]
    labels = _labels(node.root.seed, parent, hashes, tokens, block_bytes)
    prefix = node_prefix(node)
    start = len(prefix) // block_bytes - node.num_blocks + first
    keys = prefix_keys(node.root.namespace, prefix, block_bytes, start, start + count)
    yield from zip(keys, labels, node.block_ids[first:end], strict=True)


def prompt_blocks(
    tree: RadixTree, namespace: Namespace, tokens: bytes, match: Match | None
) -> Iterator[tuple[bytes, bytes]]:
    """Yield (key, packed label) of a prompt's whole blocks that follow what the tree has of it.

    Args:
        tree: unchanged since the match.
        namespace: of the prompt.
        tokens: int32 ids of whole blocks, little-endian, from the start of the prompt.
        match: what the tree has, None if nothing.

    Cost: two digests per block yielded, one pass over the rest.
    """
    parent = seed = namespace_seed(namespace, tree.digest)
    first = 0
    if match is not None and match.num_blocks:
        first, end = match.num_blocks, match.num_node_blocks * HASH_BYTES
        parent = match.node.hashes[end - HASH_BYTES : end]
    new = tokens[first * tree.block_bytes :]
    hashes = hash_blocks(parent, new, tree.block_bytes, tree.digest)
    labels = _labels(seed, parent, hashes, new, tree.block_bytes)
    last = len(tokens) // tree.block_bytes
    keys = prefix_keys(namespace, tokens, tree.block_bytes, first, last)
    yield from zip(keys, labels, strict=True)


def _labels(
    seed: bytes, parent: bytes, hashes: bytes, tokens: bytes, block_bytes: int
) -> Iterator[bytes]:
    for index in range(len(hashes) // HASH_BYTES):
        own = hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]
        ids = tokens[index * block_bytes : (index + 1) * block_bytes]
        yield BlockLabel(seed, parent, own, ids).pack()
        parent = own
