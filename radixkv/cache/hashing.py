"""Chained block hashes.

The hash of a block covers its namespace and every token up to its end, so that equal hashes mean
equal prefixes (up to collisions, which the tree rules out by comparing the tokens themselves).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from struct import Struct

from xxhash import xxh3_128_digest

from radixkv.request import Namespace

__all__ = [
    "HASH_BYTES",
    "TOKEN_BYTES",
    "Digest",
    "common_tokens",
    "default_digest",
    "hash_blocks",
    "namespace_seed",
]

HASH_BYTES = 16
TOKEN_BYTES = 4
CUT_BLOCKS = 256

Digest = Callable[[bytes], bytes]
"""Maps bytes to HASH_BYTES bytes."""

default_digest: Digest = xxh3_128_digest


def namespace_seed(namespace: Namespace, digest: Digest = default_digest) -> bytes:
    """Return the parent hash of a namespace's first blocks.

    Fields are length-prefixed: ("ab", "c") and ("a", "bc") give different seeds.
    """
    parts = [b"radixkv\0", len(namespace).to_bytes(4, "little")]
    for field in namespace:
        raw = field.encode()
        parts += [len(raw).to_bytes(4, "little"), raw]
    return digest(b"".join(parts))


def hash_blocks(
    parent: bytes, token_bytes: bytes, block_bytes: int, digest: Digest = default_digest
) -> bytes:
    """Return the packed hashes (HASH_BYTES each) of the whole blocks in `token_bytes`.

    Args:
        parent: hash of the block before, or a namespace seed.
        token_bytes: int32 token ids, little-endian; a rest shorter than a block is ignored.
        block_bytes: bytes of one block of ids, `block_size * TOKEN_BYTES`.

    Cost: one digest call per block.
    """
    count = len(token_bytes) // block_bytes
    hashes: list[bytes] = []
    for first in range(0, count, CUT_BLOCKS):
        # A slice costs as much as a digest, so many blocks are cut at once.
        cut = _cutter(block_bytes, min(CUT_BLOCKS, count - first))
        blocks = cut.unpack_from(token_bytes, first * block_bytes)
        hashes += [parent := digest(parent + block) for block in blocks]
    return b"".join(hashes)


def common_tokens(a: bytes, b: bytes) -> int:
    """Return how many leading int32 tokens two byte strings share.

    >>> common_tokens(b"\\1\\0\\0\\0\\2\\0\\0\\0", b"\\1\\0\\0\\0\\3\\0\\0\\0")
    1
    """
    length = min(len(a), len(b))
    a, b = a[:length], b[:length]
    if a == b:
        return length // TOKEN_BYTES
    difference = int.from_bytes(a, "little") ^ int.from_bytes(b, "little")
    first_bit = (difference & -difference).bit_length() - 1
    return first_bit // (8 * TOKEN_BYTES)


@lru_cache(maxsize=2 * CUT_BLOCKS)
def _cutter(block_bytes: int, count: int) -> Struct:
    """Return what cuts bytes into blocks."""
    return Struct(f"{block_bytes}s" * count)
