from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import numpy as np
import pytest
from cache_helpers import compute, hit, store
from cache_model import common

from radixkv.cache import RadixCache
from radixkv.cache.hashing import default_digest
from radixkv.cache.radix_tree import MAX_UNINDEXED_EDGES, RadixTree

Digest = Callable[[bytes], bytes]


def constant(data: bytes) -> bytes:
    return bytes(16)


def low_bits(data: bytes) -> bytes:
    return bytes(15) + bytes([default_digest(data)[0] & 15])


def prompts(count: int, length: int) -> list[list[int]]:
    rng = random.Random(7)
    made: list[list[int]] = []
    for _ in range(count):
        start = rng.choice(made)[: rng.randrange(length)] if made and rng.random() < 0.7 else []
        made.append(start + [rng.randrange(50) for _ in range(length - len(start))])
    return made


@pytest.mark.parametrize("digest", [constant, low_bits])
def test_hits_are_the_same_with_a_hash_that_collides(digest: Digest) -> None:
    """A block found by its hash alone served one prompt's KV to another."""
    real, weak = RadixCache(400, 4), RadixCache(400, 4, digest=digest)
    for tokens in prompts(200, 64):
        expected = store(real, tokens)
        assert store(weak, tokens) == expected
        assert weak.tree.num_nodes == real.tree.num_nodes
    assert real.stats.blocks_evicted == weak.stats.blocks_evicted > 0


@pytest.mark.parametrize("digest", [constant, low_bits])
def test_two_prompts_with_one_hash_share_nothing(digest: Digest) -> None:
    cache = RadixCache(64, 16, digest=digest)
    assert store(cache, range(64)) == 0
    assert store(cache, range(100, 164)) == 0
    assert hit(cache, range(64)) == hit(cache, range(100, 164)) == 64


def test_collision_survives_the_removal_of_its_first_holder() -> None:
    cache = RadixCache(3, 1, digest=constant)
    for token in (1, 2, 3):
        store(cache, [token])
    cache.evict(1)
    cache.check_integrity()
    assert [hit(cache, [t]) for t in (1, 2, 3)] == [0, 1, 1]
    store(cache, [1])
    cache.evict(1)
    cache.check_integrity()
    assert [hit(cache, [t]) for t in (1, 2, 3)] == [1, 0, 1]


def test_match_continues_into_a_partial_block() -> None:
    cache = RadixCache(16, 4)
    store(cache, range(12))
    for length in range(12):
        tokens = [*range(length), 99, 99]
        handle = cache.match_prefix(tokens)
        assert handle.num_cached_tokens == length
        assert handle.match is not None
        assert handle.match.num_blocks == length // 4
        assert handle.match.num_partial_tokens == length % 4


def test_match_is_limited_by_max_tokens() -> None:
    cache = RadixCache(16, 4)
    store(cache, range(12))
    assert [cache.match_prefix(range(12), (), n).num_cached_tokens for n in (-1, 0, 5, 8, 11)] == [
        0,
        0,
        5,
        8,
        11,
    ]


def test_tail_is_found_and_replaced_by_a_longer_one() -> None:
    cache = RadixCache(16, 4)
    store(cache, [1, 2, 3, 4, 5])
    store(cache, [1, 2, 3, 4, 5, 6])
    assert (cache.num_tree_blocks, hit(cache, [1, 2, 3, 4, 5, 6])) == (2, 6)
    store(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    assert (cache.num_tree_blocks, hit(cache, range(1, 9))) == (2, 8)


def test_tail_that_a_block_covers_is_not_kept() -> None:
    cache = RadixCache(16, 4)
    store(cache, range(8))
    store(cache, range(6))
    assert cache.num_tree_blocks == 2


def test_tails_that_part_ways_are_both_kept() -> None:
    cache = RadixCache(16, 4)
    store(cache, [1, 2])
    store(cache, [1, 3])
    assert [hit(cache, t) for t in ([1, 2], [1, 3], [1, 4])] == [2, 2, 1]


def test_many_siblings_give_the_same_partial_match_as_few() -> None:
    """Beyond a number of edges an index replaces the search; the answer must not change."""
    rng = random.Random(3)
    cache = RadixCache(600, 4)
    known: list[list[int]] = []
    for _ in range(120):
        tokens = [rng.randrange(4) for _ in range(rng.randint(1, 4))]
        store(cache, tokens)
        known.append(tokens)
        for _ in range(5):
            query = [rng.randrange(4) for _ in range(4)]
            assert hit(cache, query) == max(common(tuple(k), tuple(query)) for k in known)
    root = cache.tree.roots[()]
    assert root.edges is not None
    assert len(root.edges) > MAX_UNINDEXED_EDGES


class CountingDigest:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, data: bytes) -> bytes:
        self.calls += 1
        return default_digest(data)


def test_digests_of_a_warm_match_are_bounded_by_depth() -> None:
    digest = CountingDigest()
    cache = RadixCache(8000, 16, digest=digest)
    tokens = list(range(100_000))
    sequence = compute(cache, tokens)
    sequence.free()
    digest.calls = 0
    assert hit(cache, [*tokens, 5]) == 100_000
    assert digest.calls <= cache.tree.num_nodes + 1 == 2


def test_digests_of_a_new_turn_are_bounded_by_its_blocks() -> None:
    digest = CountingDigest()
    cache = RadixCache(8000, 16, digest=digest)
    compute(cache, range(50_000)).free()
    sequence = cache.create_sequence(range(50_064))
    digest.calls = 0
    sequence.reuse()
    sequence.reserve(50_064)
    cache.take_copies()
    sequence.commit(50_064)
    # One lookup and one miss, one lookup to publish, one hash per new block.
    assert digest.calls <= 4 + 3


@pytest.mark.parametrize(
    "make", [list, tuple, lambda t: array("i", t), np.array, lambda t: np.array(t, np.int64), iter]
)
def test_match_is_the_same_for_every_container(make: Callable[[list[int]], object]) -> None:
    cache = RadixCache(16, 4)
    store(cache, range(10))
    tokens = [*range(9), 50]
    assert cache.match_prefix(make(tokens)).num_cached_tokens == 9  # type: ignore[arg-type]


def test_split_keeps_the_object_as_the_lower_part() -> None:
    tree = RadixTree(1)
    root = tree.get_root(())
    hashes = b"".join(bytes([i]) * 16 for i in range(4))
    node = tree.add_child(root, hashes, np.arange(4, dtype="<i4").tobytes(), [10, 11, 12, 13])
    node.ref_count, node.last_access = 2, 7
    upper = tree.split(node, 1)
    assert (list(upper.block_ids), list(node.block_ids)) == ([10], [11, 12, 13])
    assert (upper.ref_count, upper.last_access, node.parent) == (2, 7, upper)
    assert list(root.children.values()) == [upper]


def test_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size"):
        RadixTree(0)
