from __future__ import annotations

import pytest
from cache_helpers import compute, hit, lock, store

from radixkv.cache import RadixCache
from radixkv.errors import OutOfBlocksError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(num_blocks: int = 10) -> tuple[RadixCache, Clock]:
    clock = Clock()
    return RadixCache(num_blocks, 2, clock=clock), clock


def test_pinned_prefix_is_not_evicted() -> None:
    cache, _ = make()
    store(cache, [1, 2, 3, 4])
    store(cache, [5, 6, 7, 8])
    assert cache.pin([1, 2, 3, 4]) is not None
    assert cache.evict(10) == 2
    assert (hit(cache, [1, 2, 3, 4]), hit(cache, [5, 6, 7, 8])) == (4, 0)
    assert cache.pins.num_blocks == 2


def test_pin_of_half_a_run_protects_no_more() -> None:
    cache, _ = make()
    store(cache, range(8))
    cache.pin([0, 1, 2, 3, 99])
    cache.evict(10)
    assert hit(cache, range(8)) == 4
    cache.check_integrity()


def test_splitting_a_pinned_run_keeps_all_of_it_pinned() -> None:
    cache, _ = make()
    store(cache, range(6))
    pin_id = cache.pin(range(6))
    store(cache, [0, 1, 9, 9])
    assert cache.pins.num_blocks == 3
    cache.evict(10)
    assert hit(cache, range(6)) == 6
    assert pin_id is not None
    cache.unpin(pin_id)
    cache.check_integrity()
    assert cache.evict(10) == 3


def test_pin_ends_with_unpin_once() -> None:
    cache, _ = make()
    store(cache, [1, 2])
    pin_id = cache.pin([1, 2])
    assert pin_id is not None
    assert (cache.unpin(pin_id), cache.unpin(pin_id)) == (True, False)
    assert cache.evict(1) == 1


def test_nothing_cached_gives_no_pin() -> None:
    cache, _ = make()
    store(cache, [1, 2, 3])
    assert cache.pin([9, 9]) is None
    assert cache.pin([1, 9]) is None  # agrees with less than a block
    assert cache.pin([1, 2], ("a",)) is None
    assert len(cache.pins) == 0


def test_pin_expires_at_its_time_and_not_before() -> None:
    cache, clock = make()
    store(cache, [1, 2])
    cache.pin([1, 2], ttl_s=10)
    clock.now = 9.9
    assert cache.evict(1) == 0
    clock.now = 10.0
    assert cache.evict(1) == 1
    assert (cache.pins.num_expired, len(cache.pins)) == (1, 0)


def test_hit_restarts_the_time() -> None:
    cache, clock = make()
    store(cache, [1, 2])
    cache.pin([1, 2], ttl_s=10)
    clock.now = 9.0
    store(cache, [1, 2, 3])
    clock.now = 18.9
    cache.evict(10)
    assert hit(cache, [1, 2]) == 2
    clock.now = 19.0
    cache.evict(10)
    assert hit(cache, [1, 2]) == 0


def test_new_pin_makes_none_lapse_for_those_that_expired() -> None:
    cache, clock = make()
    for start in (10, 20):
        store(cache, range(start, start + 6))
    cache.pin(range(10, 16), ttl_s=1)
    clock.now = 2.0
    cache.pin(range(20, 26))
    assert (len(cache.pins), cache.pins.num_expired, cache.pins.num_lapsed) == (1, 1, 0)


def test_lookup_does_not_revive_an_expired_pin() -> None:
    cache, clock = make()
    store(cache, [1, 2])
    cache.pin([1, 2], ttl_s=1)
    clock.now = 5.0
    cache.unlock(lock(cache, [1, 2]))
    assert (len(cache.pins), cache.pins.num_expired) == (0, 1)


def test_expiry_leaves_the_order_of_use_alone() -> None:
    cache, clock = make()
    store(cache, [1, 2])
    cache.pin([1, 2], ttl_s=1)
    store(cache, [3, 4])
    clock.now = 2.0
    cache.evict(1)
    assert (hit(cache, [1, 2]), hit(cache, [3, 4])) == (0, 2)


def test_over_the_budget_the_least_recently_used_pin_lapses() -> None:
    cache, _ = make(10)
    for start in (10, 20, 30):
        store(cache, range(start, start + 4))
    for start in (10, 20):
        cache.pin(range(start, start + 4))
    store(cache, [*range(10, 14), 99])
    cache.pin(range(30, 34))
    cache.check_integrity()
    cache.evict(10)
    assert [hit(cache, range(s, s + 4)) for s in (10, 20, 30)] == [4, 0, 4]
    assert cache.pins.num_lapsed == 1


def test_pin_longer_than_the_budget_keeps_the_beginning() -> None:
    cache, _ = make(10)
    store(cache, range(16))
    cache.pin(range(16))
    cache.evict(10)
    assert hit(cache, range(16)) == 10


def test_shared_blocks_count_once() -> None:
    cache, _ = make(10)
    store(cache, [1, 2, 3, 4, 5, 6])
    first = cache.pin([1, 2, 3, 4])
    cache.pin([1, 2, 3, 4, 5, 6])
    assert cache.pins.num_blocks == 3
    assert first is not None
    cache.unpin(first)
    assert cache.pins.num_blocks == 3
    cache.check_integrity()


def test_pins_give_way_to_a_sequence_that_is_alone() -> None:
    """A pinned set that a long prompt needs would hold it up for ever."""
    cache, _ = make(10)
    store(cache, [1, 2, 3, 4])
    store(cache, [5, 6, 7, 8])
    cache.pin([1, 2, 3, 4])
    cache.pin([5, 6, 7, 8])
    sequence = compute(cache, range(100, 116))
    assert sequence.num_blocks == 8
    assert [hit(cache, p) for p in ([1, 2, 3, 4], [5, 6, 7, 8])] == [0, 4]


def test_pins_hold_while_another_sequence_will_free_blocks() -> None:
    cache, _ = make(10)
    store(cache, [1, 2, 3, 4])
    cache.pin([1, 2, 3, 4])
    other = compute(cache, [50, 51])
    sequence = cache.create_sequence(range(100, 116))
    sequence.reuse()
    with pytest.raises(OutOfBlocksError):
        sequence.reserve(16)
    assert len(cache.pins) == 1
    other.free()
    sequence.reserve(16)
    assert len(cache.pins) == 1


def test_pins_stay_where_giving_way_would_not_help() -> None:
    cache, _ = make(4)
    store(cache, [1, 2])
    cache.pin([1, 2])
    sequence = cache.create_sequence(range(100, 116))
    sequence.reuse()
    with pytest.raises(OutOfBlocksError):
        sequence.reserve(16)
    assert len(cache.pins) == 1


def test_reset_gives_up_pins() -> None:
    cache, _ = make()
    store(cache, [1, 2])
    cache.pin([1, 2])
    assert cache.reset() == 1
    assert (len(cache.pins), cache.num_free_blocks) == (0, 10)


@pytest.mark.parametrize("ttl", [0, -1.0, float("nan")])
def test_pin_refuses_a_time_that_is_over(ttl: float) -> None:
    cache, _ = make()
    with pytest.raises(ValueError, match="ttl_s must be over 0"):
        cache.pin([1, 2], ttl_s=ttl)


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_pin_share_must_leave_blocks(share: float) -> None:
    with pytest.raises(ValueError, match="pin_share"):
        RadixCache(4, pin_share=share)
