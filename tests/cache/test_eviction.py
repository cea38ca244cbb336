from __future__ import annotations

import random
from typing import Any

import pytest
from cache_helpers import compute, hit, lock, store
from sortedcontainers import SortedDict

from radixkv.cache import RadixCache
from radixkv.cache.policies import LRUPolicy
from radixkv.cache.radix_tree import RadixTree


def test_evict_takes_the_least_recently_used_first() -> None:
    cache = RadixCache(8, 2)
    for start in (10, 20, 30):
        store(cache, [start, start + 1])
    store(cache, [10, 11, 12])  # touches 10, 11; leaves the tail 12
    order = []
    for _ in range(4):
        assert cache.evict(1) == 1
        order.append([hit(cache, [s, s + 1, s + 2]) for s in (10, 20, 30)])
    assert order == [[3, 0, 2], [3, 0, 0], [2, 0, 0], [0, 0, 0]]


def test_lookup_without_lock_does_not_refresh() -> None:
    cache = RadixCache(4, 2)
    store(cache, [1, 2])
    store(cache, [3, 4])
    hit(cache, [1, 2])
    cache.evict(1)
    assert (hit(cache, [1, 2]), hit(cache, [3, 4])) == (0, 2)


def test_recency_counts_from_the_release() -> None:
    cache = RadixCache(4, 2)
    first, second = compute(cache, [1, 2]), compute(cache, [3, 4])
    second.free()
    first.free()
    cache.evict(1)
    assert (hit(cache, [1, 2]), hit(cache, [3, 4])) == (2, 0)


def test_evict_trims_a_run_from_its_end() -> None:
    cache = RadixCache(8, 2)
    store(cache, range(8))
    assert cache.evict(1) == 1
    assert hit(cache, range(8)) == 6
    assert cache.tree.num_nodes == 1


def test_lock_protects_the_matched_node_and_its_ancestors() -> None:
    """Once the walk stepped to the parent before counting, so the node in use could go."""
    cache = RadixCache(8, 2)
    store(cache, [1, 2, 3, 4])
    store(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    node = lock(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.evict(8) == 0
    assert cache.num_evictable_blocks == 0
    cache.unlock(node)
    assert cache.num_evictable_blocks == 4
    assert cache.evict(8) == 4


def test_lock_of_half_a_node_protects_no_more() -> None:
    """A match inside a run that did not split it pinned the whole run, for ever."""
    cache = RadixCache(16, 2)
    store(cache, range(16))
    node = lock(cache, range(6))
    assert cache.num_locked_blocks == 3
    store(cache, [*range(10), 90, 91, 92])
    assert cache.num_locked_blocks == 3
    cache.evict(16)
    assert cache.num_tree_blocks == 3
    cache.unlock(node)
    cache.evict(16)
    cache.check_integrity()
    assert (cache.num_tree_blocks, cache.num_free_blocks) == (0, 16)


def test_ancestor_becomes_evictable_after_its_last_child() -> None:
    cache = RadixCache(8, 2)
    store(cache, [1, 2, 3, 4])
    store(cache, [1, 2, 5, 6])
    assert [cache.evict(1) for _ in range(4)] == [1, 1, 1, 0]
    assert not cache.tree.roots


def test_reset_keeps_what_is_in_use() -> None:
    cache = RadixCache(8, 2)
    store(cache, [7, 8])
    sequence = compute(cache, [1, 2, 3])
    assert cache.reset() == 1
    assert hit(cache, [1, 2, 3]) == 2
    sequence.free()
    assert cache.reset() == 2


class CountingDict(SortedDict):  # type: ignore[misc]
    """Counts the operations that cost O(log n), and refuses walks."""

    operations = 0

    def __setitem__(self, key: Any, value: Any) -> None:
        type(self).operations += 1
        super().__setitem__(key, value)

    def pop(self, key: Any, *default: Any) -> Any:
        type(self).operations += 1
        return super().pop(key, *default)

    def __iter__(self) -> Any:
        raise AssertionError("a walk over all leaves")

    values = __iter__


def fill(num_leaves: int) -> RadixCache:
    cache = RadixCache(num_leaves, 1)
    cache.evictor._leaves = CountingDict()
    for i in range(num_leaves):
        sequence = cache.create_sequence([i])
        sequence.reuse(1)
        sequence.reserve(1)
        sequence.commit(1)
        sequence.free()
    return cache


@pytest.mark.parametrize("num_leaves", [400, 4000])
def test_eviction_work_is_independent_of_the_number_of_leaves(
    num_leaves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each eviction once walked the tree or rebuilt a heap of all leaves."""
    cache = fill(num_leaves)
    assert cache.num_free_blocks == 0

    def walk(self: RadixTree) -> None:
        raise AssertionError("a walk over the tree")

    monkeypatch.setattr(RadixTree, "nodes", walk)
    for i in range(0, num_leaves, 20):
        lock(cache, [i])
    CountingDict.operations = 0
    rounds = 300
    for i in range(rounds):
        assert cache.evict(4) == 4
        for j in range(4):
            sequence = cache.create_sequence([num_leaves + 4 * i + j])
            sequence.reuse(1)
            sequence.reserve(1)
            sequence.commit(1)
            sequence.free()
    assert CountingDict.operations <= rounds * 4 * 3
    assert len(cache.evictor) == num_leaves - num_leaves // 20


def test_eviction_order_equals_a_sorted_list() -> None:
    rng = random.Random(1)
    cache = RadixCache(200, 1)
    used: dict[int, int] = {}
    for clock in range(3000):
        token = rng.randrange(400)
        if token not in used and len(used) == 200:
            victim = min(used, key=lambda t: used[t])
            del used[victim]
        sequence = cache.create_sequence([token])
        assert sequence.reuse(1) == (token in used)
        sequence.reserve(1)
        sequence.commit(1)
        sequence.free()
        used[token] = clock
    assert all(hit(cache, [t]) == (t in used) for t in range(400))


def test_evictor_is_ordered_by_access() -> None:
    evictor, tree = LRUPolicy(lambda: 0.0), RadixTree(1)
    root = tree.get_root(())
    nodes = [tree.add_child(root, bytes([i]) * 16, bytes([i, 0, 0, 0]), [i]) for i in range(3)]
    for node, access in zip(nodes, (5, 2, 9), strict=True):
        node.last_access = access
        evictor.add(node)
    assert list(evictor) == [nodes[1], nodes[0], nodes[2]]
    assert evictor.peek() is nodes[1]
    evictor.discard(nodes[1])
    evictor.discard(nodes[1])
    assert (nodes[1] in evictor, evictor.peek(), len(evictor)) == (False, nodes[0], 2)
