"""Short ways to fill a cache in tests."""

from __future__ import annotations

from collections.abc import Iterable

from radixkv.cache import RadixCache, Sequence
from radixkv.cache.radix_tree import Node
from radixkv.request import Namespace


def compute(
    cache: RadixCache, tokens: Iterable[int], namespace: Namespace = (), *, limit: int | None = None
) -> Sequence:
    """Open a sequence and compute all its tokens, as an engine would."""
    sequence = cache.create_sequence(list(tokens), namespace)
    sequence.reuse(limit)
    sequence.reserve(len(sequence))
    cache.take_copies()
    sequence.commit(len(sequence))
    cache.check_integrity()
    return sequence


def store(cache: RadixCache, tokens: Iterable[int], namespace: Namespace = ()) -> int:
    """Compute tokens and free them; return how many were found cached."""
    sequence = compute(cache, tokens, namespace)
    sequence.free()
    cache.check_integrity()
    return sequence.num_cached_tokens


def hit(cache: RadixCache, tokens: Iterable[int], namespace: Namespace = ()) -> int:
    return cache.match_prefix(list(tokens), namespace).num_cached_tokens


def lock(cache: RadixCache, tokens: Iterable[int], namespace: Namespace = ()) -> Node:
    return cache.lock(cache.match_prefix(list(tokens), namespace), namespace)
