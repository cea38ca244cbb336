from __future__ import annotations

import pytest
from cache_helpers import compute, hit, store

from radixkv.cache import RadixCache

A, B, C = ("a",), ("b",), ("c",)


def test_namespace_over_its_quota_evicts_its_own() -> None:
    cache = RadixCache(10, 2, quotas={A: 0.4})
    store(cache, range(12), B)
    for start in range(100, 140, 4):
        store(cache, range(start, start + 4), A)
    assert hit(cache, range(12), B) == 12
    assert cache.tree.roots[A].root.num_blocks == 4
    assert hit(cache, range(136, 140), A) == 4


def test_free_blocks_may_be_borrowed_and_are_given_back() -> None:
    cache = RadixCache(10, 2, quotas={A: 0.4})
    store(cache, range(20), A)
    assert hit(cache, range(20), A) == 20
    store(cache, range(8), B)
    store(cache, range(50, 54), B)
    assert (hit(cache, range(8), B), hit(cache, range(20), A)) == (8, 8)


def test_a_third_namespace_does_not_pay_for_the_excess_of_another() -> None:
    cache = RadixCache(12, 2, default_quota=1 / 3)
    store(cache, range(6), C)
    store(cache, range(18), A)
    store(cache, range(8), B)
    assert [hit(cache, range(18), n) for n in (A, B, C)] == [10, 8, 6]


def test_private_blocks_of_running_sequences_count() -> None:
    cache = RadixCache(8, 2, quotas={A: 0.5})
    store(cache, range(8), B)
    first = cache.create_sequence(range(100, 108), A)
    first.reuse()
    first.reserve(8)
    cache.check_integrity()
    assert cache.tree.roots[A].root.num_held == 4
    first.commit(8)
    first.free()
    second = compute(cache, range(200, 204), A)
    assert hit(cache, range(8), B) == 8
    second.free()
    cache.check_integrity()


def test_namespace_is_over_its_quota_by_what_its_sequences_hold() -> None:
    cache = RadixCache(10, 2, quotas={A: 0.4})
    store(cache, range(8), B)
    store(cache, range(4), A)
    running = cache.create_sequence(range(100, 106), A)
    running.reuse()
    running.reserve(6)
    store(cache, range(4), C)
    assert [hit(cache, range(8), n) for n in (A, B)] == [2, 8]


def test_forks_and_copies_keep_the_count() -> None:
    cache = RadixCache(12, 4, quotas={A: 0.5})
    sequence = compute(cache, range(6), A)
    child = sequence.fork()
    child.append([9])
    child.reserve(7)
    cache.check_integrity()
    sequence.free()
    child.free()
    store(cache, [*range(5), 77], A)
    cache.check_integrity()
    assert cache.tree.roots[A].root.num_held == 0


def test_quota_yields_where_own_blocks_are_in_use() -> None:
    """A quota orders evictions; it never makes an allocation fail."""
    cache = RadixCache(4, 2, quotas={A: 0.25})
    store(cache, range(4), B)
    running = compute(cache, range(8), A)
    assert running.num_blocks == 4


def test_the_namespace_with_most_excess_gives_first() -> None:
    cache = RadixCache(20, 2, quotas={A: 0.1, B: 0.1})
    store(cache, range(12), B)
    store(cache, range(28), A)
    store(cache, range(8), C)
    assert [hit(cache, range(28), n) for n in (A, B)] == [20, 12]


def test_each_fork_counts_what_it_shares() -> None:
    cache = RadixCache(8, 4, quotas={A: 0.5})
    sequence = compute(cache, range(6), A)
    root = cache.tree.roots[A].root
    child = sequence.fork()
    assert root.num_held == 2
    child.free()
    assert root.num_held == 1
    sequence.free()
    assert root.num_held == 0


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "priority", "session"])
def test_quotas_work_with_every_policy(policy: str) -> None:
    cache = RadixCache(20, 1, policy=policy, quotas={A: 0.3}, default_quota=0.7)
    store(cache, range(10), B)
    for start in range(100, 160):
        store(cache, [start, start + 1], A)
    assert hit(cache, range(10), B) == 10


@pytest.mark.parametrize("quotas", [{A: 0.0}, {A: 1.5}])
def test_a_quota_out_of_range_is_refused(quotas: dict[tuple[str, ...], float]) -> None:
    with pytest.raises(ValueError, match="quota must be"):
        RadixCache(4, quotas=quotas)


def test_no_more_than_the_excess_is_taken() -> None:
    cache = RadixCache(10, 2, quotas={A: 0.4})
    store(cache, range(10), B)
    store(cache, range(10), A)
    store(cache, range(6), C)
    assert [hit(cache, range(10), n) for n in (A, B, C)] == [8, 6, 6]
