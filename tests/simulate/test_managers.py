"""Each manager against cases computed by hand."""

from __future__ import annotations

import pytest
from sim_helpers import BLOCK, manager, request

from radixkv.errors import ConfigError
from radixkv.simulate.managers import MANAGERS, Usage
from radixkv.simulate.managers.radix import RadixTreeBlocks


def test_static_gives_each_answer_the_longest_length() -> None:
    static = manager("static", 200)
    assert [static.admit(request(0, 10, 5)) is not None for _ in range(4)] == [True] * 3 + [False]
    usage = static.usage(generated=6, is_blocked=True)
    assert usage == Usage(used=36, cached=0, reserved=9, internal=147, external=8, free=0)


def test_static_lets_nobody_join_and_gives_nothing_back_before_the_batch_ends() -> None:
    static = manager("static", 200)
    first, second = static.admit(request(0, 10, 5)), static.admit(request(0, 10, 5))
    assert first is not None
    assert second is not None
    static.seal()
    assert static.admit(request(0, 1, 1)) is None
    static.release(first)
    assert static.admit(request(0, 1, 1)) is None
    assert static.usage(0, is_blocked=False).internal == 64 + 64 - 15
    static.release(second)
    assert static.usage(0, is_blocked=False).free == 200
    assert static.admit(request(0, 1, 1)) is not None


@pytest.mark.parametrize(
    ("name", "usage"),
    [
        # 10 + 9 = 19 tokens in a region of 32: 13 are rounded up.
        ("orca-oracle", Usage(12, 0, 7, 0, 13, 32)),
        # 10 + 16 = 26 in a region of 32.
        ("orca-pow2", Usage(12, 0, 7, 7, 6, 32)),
        # All 64.
        ("orca-max", Usage(12, 0, 7, 45, 0, 0)),
    ],
)
def test_orca_reserves_what_its_variant_takes_the_answer_for(name: str, usage: Usage) -> None:
    orca = manager(name, 64)
    assert orca.admit(request(0, 10, 9)) is not None
    assert orca.usage(generated=2, is_blocked=False) == usage


def test_orca_pow2_reserves_no_more_than_the_longest_length() -> None:
    orca = manager("orca-pow2", 128)
    allocation = orca.admit(request(0, 30, 33))
    assert allocation is not None
    assert allocation.limit == 64


def test_orca_gives_every_sample_its_own_copy() -> None:
    orca = manager("orca-oracle", 64)
    allocation = orca.admit(request(0, 10, 6, samples=3))
    assert allocation is not None
    assert allocation.slots == 48
    assert orca.admit(request(0, 10, 6, samples=2)) is None
    assert orca.usage(0, is_blocked=True).external == 16


def test_a_request_longer_than_the_longest_length_is_refused() -> None:
    for name in ("static", "orca-max", "orca-pow2", "orca-oracle"):
        assert manager(name, 1000).admit(request(0, 60, 5)) is None


def test_contiguous_grows_in_place_and_moves_only_where_it_must() -> None:
    growing = manager("contiguous", 256 * 8)
    first, second = growing.admit(request(0, 200, 600)), growing.admit(request(0, 200, 600))
    assert first is not None
    assert second is not None
    assert growing.grow(second)
    assert growing.num_moved == 0
    assert growing.grow(first)
    assert growing.num_moved == 256
    assert (first.limit, second.limit) == (512, 512)
    # The hole that the first one left is free again, and counts as such.
    assert growing.usage(0, is_blocked=False).free == 256 * 4


def test_contiguous_cannot_grow_where_no_region_is_long_enough() -> None:
    growing = manager("contiguous", 256 * 4)
    first = growing.admit(request(0, 200, 600))
    second = growing.admit(request(0, 500, 600))
    assert first is not None
    assert second is not None
    assert not growing.grow(first)
    assert first.limit == 256
    assert growing.usage(0, is_blocked=False).free == 256


@pytest.mark.parametrize("freed", [(0, 2, 1), (0, 2)])
def test_contiguous_grows_all_samples_or_none(freed: tuple[int, ...]) -> None:
    growing = manager("contiguous", 256 * 5 + 100)
    held = [growing.admit(request(0, 256, 1)) for _ in range(5)]
    for index in freed[:2]:
        growing.release(held[index])  # type: ignore[arg-type]
    both = growing.admit(request(0, 200, 600, samples=2))
    assert both is not None
    for index in freed[2:]:  # now the first sample could grow in place, but not the second
        growing.release(held[index])  # type: ignore[arg-type]
    before = growing.extents.free_extents()  # type: ignore[attr-defined]
    assert not growing.grow(both)
    assert both.limit == 256
    assert growing.extents.free_extents() == before  # type: ignore[attr-defined]


def test_paged_takes_blocks_as_they_fill() -> None:
    paged = manager("paged", 40)
    allocation = paged.admit(request(0, 9, 8))
    assert allocation is not None
    assert (allocation.limit, allocation.slots) == (12, 12)
    assert paged.usage(1, is_blocked=False) == Usage(10, 0, 2, 0, 0, 28)
    assert paged.grow(allocation)
    assert paged.grow(allocation)
    # 17 tokens in the end; the last block has 3 slots that nobody will use.
    assert paged.usage(5, is_blocked=False) == Usage(14, 0, 3, 3, 0, 20)
    paged.release(allocation)
    assert paged.usage(0, is_blocked=False).free == 40


def test_paged_samples_share_the_whole_blocks_of_the_prompt() -> None:
    paged = manager("paged", 80)
    allocation = paged.admit(request(0, 10, 4, samples=3))
    assert allocation is not None
    assert allocation.slots == 2 * BLOCK + 3 * BLOCK
    assert paged.usage(0, is_blocked=False).used == 8 + 3 * 2


def test_paged_keeps_a_block_free_for_those_that_run() -> None:
    paged = manager("paged", 16)
    assert paged.admit(request(0, 4, 4)) is not None
    assert paged.admit(request(0, 12, 4)) is None
    assert manager("paged", 16).admit(request(0, 16, 1)) is not None


def test_vattention_maps_pages_that_tokens_may_straddle() -> None:
    virtual = manager("vattention", 100, page=6.4)
    allocation = virtual.admit(request(0, 10, 20))
    assert allocation is not None
    assert (allocation.limit, allocation.slots) == (12, 12.8)
    assert virtual.grow(allocation)
    assert allocation.limit == 19
    usage = virtual.usage(0, is_blocked=False)
    assert sum(usage) == pytest.approx(100)
    assert usage.free == pytest.approx(100 - 3 * 6.4)


def test_vattention_maps_several_pages_where_one_holds_less_than_a_token() -> None:
    virtual = manager("vattention", 100, page=0.4)
    allocation = virtual.admit(request(0, 3, 5))
    assert allocation is not None
    assert allocation.limit == 3
    assert virtual.grow(allocation)
    assert allocation.limit == 4


@pytest.mark.parametrize("name", ["hash-blocks", "radix"])
def test_a_prefix_is_found_once_it_is_computed(name: str) -> None:
    cache = manager(name, 80)
    first = cache.admit(request(0, 13, 4, [1, 2, 3]))
    early = cache.admit(request(0, 9, 4, [1, 2]))
    assert first is not None
    assert early is not None
    assert early.num_cached == 0
    cache.computed(first)
    late = cache.admit(request(0, 13, 4, [1, 2, 9]))
    assert late is not None
    assert late.num_cached == 8
    # The shared blocks are counted once, the private ones each; the early one keeps its own.
    assert cache.usage(0, is_blocked=False).used == 13 + 9 + (13 - 8)


@pytest.mark.parametrize("name", ["hash-blocks", "radix"])
def test_what_a_prompt_leaves_is_cached_until_memory_is_needed(name: str) -> None:
    cache = manager(name, 48)
    first = cache.admit(request(0, 12, 1, [1, 2, 3]))
    assert first is not None
    cache.computed(first)
    cache.release(first)
    assert cache.usage(0, is_blocked=False) == Usage(0, 12, 0, 0, 0, 36)
    big = cache.admit(request(0, 40, 1, list(range(10, 20))))
    assert big is not None
    # Two blocks were free, so only the last of the three had to go.
    assert cache.usage(0, is_blocked=False) == Usage(40, 8, 0, 0, 0, 0)
    cache.release(big)
    again = cache.admit(request(0, 12, 1, [1, 2, 3]))
    assert again is not None
    assert again.num_cached == 8


@pytest.mark.parametrize("name", ["hash-blocks", "radix"])
def test_the_prompt_used_longest_ago_goes_first(name: str) -> None:
    cache = manager(name, 32)
    for keys in ([1, 2], [3, 4], [1, 2]):
        allocation = cache.admit(request(0, 8, 1, keys))
        assert allocation is not None
        cache.computed(allocation)
        cache.release(allocation)
    blocker = cache.admit(request(0, 20, 1, [5, 6, 7, 8, 9]))
    assert blocker is not None
    cache.release(blocker)
    hit = [cache.admit(request(0, 8, 1, keys)) for keys in ([1, 2], [3, 4])]
    assert [a and a.num_cached for a in hit] == [8, 4]


def test_radix_leaves_the_cache_whole() -> None:
    radix = manager("radix", 80)
    assert isinstance(radix, RadixTreeBlocks)
    held = [radix.admit(request(0, 13, 9, [1, 2, n])) for n in (3, 4)]
    for allocation in held:
        assert allocation is not None
        radix.computed(allocation)
        assert radix.grow(allocation)
        radix.cache.check_integrity()
    for allocation in held:
        assert allocation is not None
        radix.release(allocation)
        radix.cache.check_integrity()


@pytest.mark.parametrize("name", MANAGERS)
def test_everything_is_free_or_cached_after_the_last_release(name: str) -> None:
    memory = manager(name, 2048)
    held = [memory.admit(request(0, n, 10)) for n in (3, 20, 50)]
    for allocation in held:
        assert allocation is not None
        memory.computed(allocation)
    for allocation in held:
        assert allocation is not None
        memory.release(allocation)
    usage = memory.usage(0, is_blocked=False)
    assert usage.free + usage.cached == 2048


def test_an_unknown_manager_is_refused() -> None:
    with pytest.raises(ConfigError, match="hash-blocks"):
        manager("magic", 10)
