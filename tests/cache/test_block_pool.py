from __future__ import annotations

import random

import pytest

from radixkv.cache import BlockPool
from radixkv.errors import CacheCorruptionError, OutOfBlocksError


def test_allocate_gives_consecutive_blocks() -> None:
    pool = BlockPool(16)
    blocks = pool.allocate(5)
    assert blocks == list(range(blocks[0], blocks[0] + 5))
    assert [pool.ref_count(b) for b in blocks] == [1] * 5
    assert pool.num_free == 11


def test_allocate_after_block_continues_its_run() -> None:
    pool = BlockPool(64)
    first = pool.allocate(2)
    pool.allocate(3)
    assert pool.allocate(2, after=first[-1]) == [first[-1] + 1, first[-1] + 2]


def test_two_growing_runs_do_not_meet() -> None:
    pool = BlockPool(64)
    runs = [pool.allocate(1), pool.allocate(1)]
    for _ in range(8):
        for run in runs:
            run += pool.allocate(1, after=run[-1])
    assert all(run == list(range(run[0], run[0] + 9)) for run in runs)


def test_allocate_over_several_extents_when_none_is_long_enough() -> None:
    pool = BlockPool(8)
    blocks = pool.allocate(8)
    pool.release([b for b in blocks if b % 2])
    assert sorted(pool.allocate(4)) == [1, 3, 5, 7]


def test_allocate_too_many_takes_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    before = pool.free_extents()
    with pytest.raises(OutOfBlocksError, match="3 blocks wanted, 2 free"):
        pool.allocate(3)
    assert pool.free_extents() == before
    assert pool.num_free == 2


def test_shared_block_is_free_only_after_its_last_holder() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.share(block)
    assert pool.release([block]) == 0
    assert pool.num_free == 3
    assert pool.release([block]) == 1
    assert pool.num_free == 4


def test_release_of_a_free_block_raises() -> None:
    pool = BlockPool(4)
    with pytest.raises(CacheCorruptionError, match="released twice"):
        pool.release([2])


def test_share_of_a_free_block_raises() -> None:
    with pytest.raises(CacheCorruptionError, match="is free"):
        BlockPool(4).share(0)


def test_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(0)


@pytest.mark.parametrize("seed", range(3))
def test_stress_extents_stay_maximal(seed: int) -> None:
    """Random takes and gives against a plain set; touching extents must have merged."""
    rng = random.Random(seed)
    pool, held = BlockPool(40), set[int]()
    for _ in range(1500):
        if rng.random() < 0.5 and pool.num_free:
            after = rng.choice(sorted(held)) if held and rng.random() < 0.5 else None
            taken = pool.allocate(rng.randint(1, min(6, pool.num_free)), after)
            assert not held & set(taken)
            held |= set(taken)
        elif held:
            given = rng.sample(sorted(held), rng.randint(1, min(6, len(held))))
            assert pool.release(given) == len(given)
            held -= set(given)
        pool.check_integrity()
        free = [b for b in range(40) if b not in held]
        assert [b for s, n in pool.free_extents() for b in range(s, s + n)] == free
        assert len(pool.free_extents()) == sum(b - 1 not in free for b in free)
