from __future__ import annotations

import random

from radixkv.simulate.managers.buddy import Buddy
from radixkv.simulate.managers.contiguous import Extents


def test_buddy_splits_a_total_that_is_no_power_of_two() -> None:
    buddy = Buddy(15_728)
    lengths = [length for _, length in buddy.free_regions()]
    assert lengths == [8192, 4096, 2048, 1024, 256, 64, 32, 16]


def test_buddy_rounds_up_to_a_power_of_two() -> None:
    buddy = Buddy(64)
    assert buddy.allocate(9) == (0, 16)
    assert buddy.allocate(16) == (16, 16)
    assert buddy.allocate(1) == (32, 1)
    assert buddy.num_free == 31


def test_buddy_refuses_what_no_region_holds_although_enough_is_free() -> None:
    buddy = Buddy(64)
    regions = [buddy.allocate(16) for _ in range(4)]
    for region in regions[::2]:
        assert region is not None
        buddy.release(*region)
    assert buddy.num_free == 32
    assert buddy.allocate(32) is None


def test_buddy_merges_back_to_the_beginning_after_random_use() -> None:
    rng = random.Random(0)
    buddy = Buddy(200)
    before = buddy.free_regions()
    held: list[tuple[int, int]] = []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            buddy.release(*held.pop(rng.randrange(len(held))))
        elif (region := buddy.allocate(rng.randint(1, 40))) is not None:
            held.append(region)
        slots = sorted(held + buddy.free_regions())
        # Every slot once: regions in order touch without gap or overlap.
        assert [s for s, _ in slots] == [0, *(s + n for s, n in slots[:-1])]
        assert slots[-1][0] + slots[-1][1] == 200
        assert buddy.num_free == sum(n for _, n in buddy.free_regions())
    for region in held:
        buddy.release(*region)
    assert buddy.free_regions() == before


def test_extents_take_the_smallest_that_fits() -> None:
    extents = Extents(100)
    assert [extents.allocate(n) for n in (10, 30, 10, 20)] == [0, 10, 40, 50]
    extents.release(10, 30)
    extents.release(50, 20)  # touches the free end: 50 slots
    assert extents.allocate(25) == 10
    assert extents.free_extents() == [(35, 5), (50, 50)]


def test_extents_grow_in_place_only_into_free_slots() -> None:
    extents = Extents(100)
    extents.allocate(10)
    extents.allocate(10)
    assert not extents.extend(0, 10, 5)
    assert extents.extend(10, 10, 80)
    assert extents.num_free == 0


def test_extents_agree_with_a_bitmap_after_random_use() -> None:
    rng = random.Random(1)
    extents = Extents(120)
    taken = [False] * 120
    held: list[tuple[int, int]] = []

    def mark(start: int, length: int, value: bool) -> None:
        for slot in range(start, start + length):
            assert taken[slot] is not value
            taken[slot] = value

    for _ in range(2000):
        choice = rng.random()
        if held and choice < 0.4:
            region = held.pop(rng.randrange(len(held)))
            extents.release(*region)
            mark(*region, False)
        elif held and choice < 0.6:
            index = rng.randrange(len(held))
            start, length = held[index]
            more = rng.randint(1, 5)
            end = start + length
            fits = end + more <= 120 and not any(taken[end : end + more])
            assert extents.extend(start, length, more) == fits
            if fits:
                mark(end, more, True)
                held[index] = (start, length + more)
        else:
            length = rng.randint(1, 30)
            start = extents.allocate(length)
            free = "".join("x" if slot else "." for slot in taken)
            assert (start is not None) == ("." * length in free)
            if start is not None:
                mark(start, length, True)
                held.append((start, length))
        assert extents.num_free == taken.count(False)
