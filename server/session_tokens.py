"""Token ids of conversations as bytes, little-endian int32, and what they have in common."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from radixkv.request import Namespace

__all__ = ["TOKEN_BYTES", "common_tokens", "pack_tokens", "shared_tokens", "unpack_tokens"]

TOKEN_BYTES = 4


def pack_tokens(ids: Sequence[int]) -> bytes:
    """Return ids as bytes.

    >>> pack_tokens([1, 258])
    b'\\x01\\x00\\x00\\x00\\x02\\x01\\x00\\x00'
    """
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_tokens(tokens: bytes) -> array[int]:
    """Return the ids that `pack_tokens` was called on.

    >>> unpack_tokens(pack_tokens([1, 258])).tolist()
    [1, 258]
    """
    return array("i", np.frombuffer(tokens, dtype="<i4").astype("=i4").tobytes())


def common_tokens(a: bytes, b: bytes) -> int:
    """Return how many tokens two conversations have in common from their start.

    >>> common_tokens(pack_tokens([1, 2, 3]), pack_tokens([1, 2, 4, 5]))
    2
    """
    count = min(len(a), len(b)) // TOKEN_BYTES
    size = count * TOKEN_BYTES
    if a[:size] == b[:size]:
        return count
    differ = np.frombuffer(a, "<i4", count) != np.frombuffer(b, "<i4", count)
    return int(differ.argmax())


def shared_tokens(paths: Sequence[tuple[Namespace, bytes]], block_size: int = 1) -> list[int]:
    """Return of each conversation how many tokens of its beginning another one needs, too.

    Where two go on differently within a block, each has a block of its own for that; so of what
    they have in common, whole blocks count. All of it counts where one is the other's beginning.

    Args:
        paths: namespace and ids of each, packed.
        block_size: tokens in a block.

    >>> paths = [((), pack_tokens(ids)) for ids in ([1, 2, 3, 4, 5], [1, 2, 3, 9], [1], [8])]
    >>> paths.append((("other",), pack_tokens([1, 2, 3, 4, 5])))
    >>> shared_tokens(paths), shared_tokens(paths, 2), shared_tokens(paths, 4)
    ([3, 3, 1, 0, 0], [2, 2, 1, 0, 0], [1, 1, 1, 0, 0])

    Cost: O(n log n) comparisons: in sorted order the longest common beginning is with a neighbour.
    """
    # Any order that keeps equal beginnings together will do, so the bytes may be compared as such.
    order = sorted(range(len(paths)), key=paths.__getitem__)
    shared = [0] * len(paths)
    for i, j in pairwise(order):
        (name, a), (other_name, b) = paths[i], paths[j]
        if name == other_name:
            common = common_tokens(a, b)
            if common * TOKEN_BYTES not in (len(a), len(b)):
                common -= common % block_size
            shared[i], shared[j] = max(shared[i], common), max(shared[j], common)
    # A beginning of its own need not be a neighbour.
    beginnings: list[int] = []
    for i in order:
        name, tokens = paths[i]
        while beginnings and not (
            paths[beginnings[-1]][0] == name and tokens.startswith(paths[beginnings[-1]][1])
        ):
            beginnings.pop()
        if beginnings:
            shared[i] = max(shared[i], len(paths[beginnings[-1]][1]) // TOKEN_BYTES)
        beginnings.append(i)
    return shared
