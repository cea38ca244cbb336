"""Each order of eviction against a plain reference that sorts everything, every time."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from cache_helpers import compute, hit, store

from radixkv.cache import POLICIES, RadixCache
from radixkv.cache.session_policy import NUM_BINS, NUM_CLASSES, SessionPolicy, return_values

NUM_BLOCKS = 40


@dataclass
class Leaf:
    """A cached block of one token, as the references see it."""

    used: int
    hits: int = 0
    priority: int = 0
    rank: float = 0.0


class Reference:
    """Least recently used first."""

    def __init__(self) -> None:
        self.leaves: dict[int, Leaf] = {}
        self.age = 0.0

    def use(self, token: int, now: int, priority: int) -> bool:
        leaf = self.leaves.get(token)
        if leaf is None and len(self.leaves) == NUM_BLOCKS:
            victim = min(self.leaves, key=lambda t: self.order(self.leaves[t]))
            self.evicted(self.leaves.pop(victim))
        if leaf is None:
            self.leaves[token] = leaf = Leaf(now)
            self.created(leaf)
            found = False
        else:
            self.hit(leaf)
            leaf.hits += 1
            found = True
        leaf.used = now
        leaf.priority = max(leaf.priority, priority)
        self.settle()
        return found

    def order(self, leaf: Leaf) -> tuple[float, ...]:
        return (leaf.used,)

    def created(self, leaf: Leaf) -> None: ...

    def hit(self, leaf: Leaf) -> None: ...

    def evicted(self, leaf: Leaf) -> None: ...

    def settle(self) -> None: ...


class LFU(Reference):
    def order(self, leaf: Leaf) -> tuple[float, ...]:
        return leaf.rank, leaf.used

    def created(self, leaf: Leaf) -> None:
        leaf.rank = self.age + 1

    def hit(self, leaf: Leaf) -> None:
        leaf.rank = self.age + leaf.hits + 2

    def evicted(self, leaf: Leaf) -> None:
        self.age = max(self.age, leaf.rank)


class SLRU(LFU):
    def created(self, leaf: Leaf) -> None: ...

    def hit(self, leaf: Leaf) -> None:
        leaf.rank = 1

    def evicted(self, leaf: Leaf) -> None: ...

    def settle(self) -> None:
        while len(hot := [v for v in self.leaves.values() if v.rank]) > 0.8 * len(self.leaves):
            min(hot, key=lambda v: v.used).rank = 0


class Priority(Reference):
    def order(self, leaf: Leaf) -> tuple[float, ...]:
        return leaf.priority, leaf.used


@pytest.mark.parametrize(
    ("policy", "reference"),
    [("lru", Reference), ("lfu", LFU), ("slru", SLRU), ("priority", Priority)],
)
@pytest.mark.parametrize("seed", range(3))
def test_order_equals_the_reference(policy: str, reference: type[Reference], seed: int) -> None:
    rng = random.Random(seed)
    cache, model = RadixCache(NUM_BLOCKS, 1, policy=policy), reference()
    for now in range(1500):
        token = int(rng.paretovariate(0.4)) % 150
        priority = rng.randrange(3)
        sequence = cache.create_sequence([token], priority=priority)
        found = sequence.reuse(1) == 1
        sequence.reserve(1)
        sequence.commit(1)
        sequence.free()
        assert found == model.use(token, now, priority)
    cache.check_integrity()
    assert {t for t in range(150) if hit(cache, [t])} == set(model.leaves)


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_keep_the_laws_under_random_traffic(policy: str) -> None:
    rng = random.Random(5)
    now = 0.0
    cache = RadixCache(60, 2, policy=policy, clock=lambda: now, default_quota=0.6)
    sessions: list[list[int]] = [[rng.randrange(3)] for _ in range(12)]
    for _ in range(150):
        now += rng.expovariate(1)
        index = rng.randrange(len(sessions))
        if len(sessions[index]) > 30:
            sessions[index] = [rng.randrange(3)]
        sessions[index] += [rng.randrange(4) for _ in range(rng.randrange(1, 6))]
        store(cache, sessions[index], (str(index % 2),))
        if rng.random() < 0.1:
            cache.evict(rng.randrange(9))
            cache.check_integrity()
    assert cache.stats.blocks_evicted > 100


def use(cache: RadixCache, *tokens: int) -> None:
    for token in tokens:
        compute(cache, [token], limit=1).free()


def test_slru_survives_a_scan_that_flushes_lru() -> None:
    kept = {}
    for policy in ("lru", "slru"):
        cache = RadixCache(20, 1, policy=policy)
        use(cache, *range(10), *range(10), *range(100, 200))
        kept[policy] = sum(hit(cache, [t]) for t in range(10))
    assert kept == {"lru": 0, "slru": 8}  # a fifth of the leaves are on probation


def test_lfu_forgets_old_fame() -> None:
    cache = RadixCache(4, 1, policy="lfu")
    use(cache, *[1] * 50)
    for token in range(10, 200):
        use(cache, token, token, token)
    assert hit(cache, [1]) == 0


def test_priority_of_a_sequence_covers_its_path_and_its_tail() -> None:
    cache = RadixCache(8, 2, policy="priority")
    sequence = cache.create_sequence([1, 2, 3], priority=5)
    sequence.reuse()
    sequence.reserve(3)
    sequence.commit(3)
    sequence.free()
    store(cache, [7, 8])
    store(cache, [5, 6])
    assert cache.evict(2) == 2
    assert [hit(cache, p) for p in ([1, 2, 3], [7, 8], [5, 6])] == [3, 0, 0]


def test_priority_of_a_sequence_covers_what_another_computed_first() -> None:
    cache = RadixCache(8, 2, policy="priority")
    low, high = (cache.create_sequence([1, 2], priority=p) for p in (0, 5))
    for sequence in (low, high):
        sequence.reuse()
    for sequence in (low, high):
        sequence.reserve(2)
        sequence.commit(2)
        sequence.free()
    store(cache, [7, 8])
    assert cache.evict(1) == 1
    assert [hit(cache, p) for p in ([1, 2], [7, 8])] == [2, 0]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be one of lru, lfu, slru, priority, session"):
        RadixCache(4, policy="fifo")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def talk(cache: RadixCache, clock: Clock, rounds: int) -> None:
    """Sessions of four turns, a minute apart, among prompts that never come back."""
    for i in range(rounds):
        for turn in range(4):
            clock.now += 15
            compute(cache, [i, *range(1000, 1003 + turn)], limit=4 + turn).free()
            for single in range(4):
                compute(cache, [10_000 + 16 * i + 4 * turn + single, 1], limit=2).free()
            clock.now += 45


def test_session_policy_keeps_sessions_before_singles_once_it_has_seen_some() -> None:
    hits = {}
    for policy in ("lru", "session"):
        clock = Clock()
        cache = RadixCache(12, 1, policy=policy, clock=clock)
        talk(cache, clock, 100)
        before = cache.stats.blocks_evicted
        clock.now += 15
        compute(cache, [5000, 1, 2], limit=3).free()
        compute(cache, [5000, 1, 2, 3], limit=4).free()
        for single in range(3):
            compute(cache, [50_000 + single, 1, 2], limit=3).free()
        assert cache.stats.blocks_evicted > before
        hits[policy] = hit(cache, [5000, 1, 2, 3])
    assert hits == {"lru": 3, "session": 4}


def test_session_policy_evicts_what_a_continuation_left_behind_first() -> None:
    clock = Clock()
    cache = RadixCache(20, 1, policy="session", clock=clock)
    for i in range(60):
        compute(cache, [i, 1, 2], limit=3).free()
        clock.now += 30
        compute(cache, [i, 1, 3, 4], limit=4).free()
        clock.now += 30
        compute(cache, [i, 1, 3, 4, 5], limit=5).free()
    cache.reset()
    compute(cache, [900, 1, 2], limit=3).free()
    clock.now += 30
    compute(cache, [901, 1, 2], limit=3).free()
    compute(cache, [901, 1, 3, 4], limit=4).free()
    cache.evict(1)
    assert (hit(cache, [900, 1, 2]), hit(cache, [901, 1, 2])) == (3, 2)


def test_session_policy_counts_turns_across_an_eviction() -> None:
    cache = RadixCache(8, 1, policy="session")
    compute(cache, [1, 2, 3], limit=3).free()
    compute(cache, [1, 2, 3, 4], limit=4).free()
    cache.reset()
    compute(cache, [1, 2, 3, 4, 5], limit=5).free()
    (leaf,) = cache.evictor
    assert leaf.rank == 2


def test_without_observations_the_session_policy_is_lru() -> None:
    clock = Clock()
    cache = RadixCache(8, 1, policy="session", clock=clock)
    for token in range(8):
        clock.now += 60 * (token + 1)
        compute(cache, [token], limit=1).free()
    cache.evict(3)
    assert [t for t in range(8) if hit(cache, [t])] == [3, 4, 5, 6, 7]


def test_return_values_follow_the_counts() -> None:
    returned, not_returned = np.zeros((NUM_CLASSES, NUM_BINS)), np.zeros((NUM_CLASSES, NUM_BINS))
    returned[2, 18] = 900  # at about 90 seconds
    not_returned[2, 30] = 100
    not_returned[1, 30] = 1000
    values = return_values(returned, not_returned)
    assert values[2][0] > 10 * values[1][0]
    assert values[2][17] > values[2][0]  # the closer the expected return
    assert values[2][25] < values[2][0]  # it is long overdue


def test_session_policy_counts_turns_that_end_in_a_partly_filled_block() -> None:
    cache = RadixCache(32, 4, policy="session")
    for length in (6, 11, 15):
        store(cache, range(length))
    run = next(n for n in cache.tree.nodes() if n.parent is not None and not n.is_tail)
    assert (run.num_blocks, run.rank) == (3, 2)
    assert isinstance(cache.evictor, SessionPolicy)
    assert cache.evictor.num_returns == 2


def test_session_policy_leaves_a_tail_behind_with_its_run() -> None:
    cache = RadixCache(32, 2, policy="session")
    store(cache, [1, 2, 3, 4, 5, 6, 7])
    store(cache, [1, 2, 3, 4, 9, 9, 9])
    ranks = {n.tokens: n.rank for n in cache.evictor}
    assert ranks[np.array([7], dtype=np.int32).tobytes()] == -1
    assert ranks[np.array([9], dtype=np.int32).tobytes()] >= 0


def test_session_policy_gives_no_turns_to_the_users_of_a_shared_prefix() -> None:
    cache = RadixCache(16, 1, policy="session")
    compute(cache, [1, 2], limit=2).free()
    for end in (5, 6, 7):
        compute(cache, [1, 2, end], limit=3).free()
    prefix = next(n for n in cache.tree.nodes() if len(n.children) > 1)
    assert [n.rank for n in prefix.children.values()][-1] == 0
    assert prefix.rank > 0
