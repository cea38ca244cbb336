from __future__ import annotations

import pytest
from cache_helpers import compute, hit, store

from radixkv.cache import RadixCache
from radixkv.errors import OutOfBlocksError


def snapshot(cache: RadixCache) -> tuple[int, ...]:
    refs = [cache.pool.ref_count(b) for b in range(cache.num_blocks)]
    return (cache.num_free_blocks, cache.num_evictable_blocks, len(cache.pending_copies), *refs)


def test_reuse_leaves_the_last_token_to_compute() -> None:
    cache = RadixCache(8, 4)
    store(cache, range(8))
    sequence = cache.create_sequence(range(8))
    assert sequence.reuse() == sequence.num_cached_tokens == 7
    assert sequence.num_tree_blocks == 1


def test_reuse_of_a_tail_copies_it_so_that_forks_find_it_too() -> None:
    """Taking it in place left a second turn at the same time without it."""
    cache = RadixCache(8, 4)
    store(cache, range(6))
    forks = [cache.create_sequence(range(10)) for _ in range(3)]
    assert [fork.reuse() for fork in forks] == [6, 6, 6]
    assert len(cache.take_copies()) == 3


def test_reuse_of_an_unshared_tail_takes_it_in_place_when_no_block_is_left() -> None:
    cache = RadixCache(3, 4)
    store(cache, range(6))
    holder = compute(cache, range(50, 54))
    sequence = cache.create_sequence(range(10))
    assert sequence.reuse() == 6
    assert not cache.pending_copies
    assert cache.num_tree_blocks == 2
    holder.free()


def test_tail_that_a_copy_reads_is_not_taken_in_place() -> None:
    cache = RadixCache(2, 4)
    store(cache, [1, 2, 3])
    first, second = cache.create_sequence([1, 2, 9]), cache.create_sequence([1, 2, 3, 9])
    assert (first.reuse(), second.reuse()) == (2, 0)
    assert len(cache.take_copies()) == 1


def test_reuse_of_half_a_block_copies_it() -> None:
    cache = RadixCache(8, 4)
    first = compute(cache, range(8))
    source = first.block_table[1]
    first.free()
    sequence = cache.create_sequence([*range(6), 50, 51])
    assert sequence.reuse() == 6
    assert cache.take_copies() == [(source, sequence.block_table[1])]
    assert cache.stats.blocks_copied == 1


def test_reuse_without_partial_takes_whole_blocks_only() -> None:
    cache = RadixCache(8, 4)
    store(cache, range(8))
    sequence = cache.create_sequence([*range(6), 50])
    assert sequence.reuse(partial=False) == 4
    assert not cache.pending_copies


def test_reuse_twice_raises() -> None:
    sequence = compute(RadixCache(4, 2), [1, 2])
    with pytest.raises(ValueError, match="free it first"):
        sequence.reuse()


def test_reuse_takes_half_a_block_with_one_free_block() -> None:
    """A copy's source was counted as lost even when a free block could hold the copy."""
    cache = RadixCache(3, 4)
    holder = compute(cache, range(8))
    sequence = cache.create_sequence([*range(6), 50])
    assert sequence.reuse() == 6
    sequence.reserve(7)
    holder.free()


def test_reserve_of_nothing_more_succeeds_in_a_full_pool() -> None:
    cache = RadixCache(3, 4)
    holder = compute(cache, range(8))
    sequence = cache.create_sequence([*range(6), 50])
    sequence.reuse()
    before = snapshot(cache)
    sequence.reserve(7)
    assert snapshot(cache) == before
    holder.free()


def test_reserve_too_much_changes_nothing() -> None:
    cache = RadixCache(4, 4)
    parent = compute(cache, range(6))
    child = parent.fork()
    before, table = snapshot(cache), child.block_table.tolist()
    with pytest.raises(OutOfBlocksError):
        child.reserve(20)
    assert snapshot(cache) == before
    assert child.block_table.tolist() == table
    cache.check_integrity()


def test_reserve_with_a_copy_and_a_block_fits_exactly() -> None:
    """Half the reservation was made when the copy's source was taken off what is available."""
    cache = RadixCache(4, 4)
    parent = compute(cache, range(6))
    child = parent.fork()
    child.reserve(12)
    assert cache.num_free_blocks == 0
    cache.check_integrity()


def test_commit_publishes_full_blocks_at_once() -> None:
    cache = RadixCache(8, 4)
    sequence = cache.create_sequence(range(10))
    sequence.reuse()
    sequence.reserve(10)
    assert hit(cache, range(10)) == 0
    sequence.commit(7)
    assert hit(cache, range(10)) == 4
    sequence.commit(10)
    assert hit(cache, range(10)) == 8


@pytest.mark.parametrize("count", [3, 9, 13])
def test_commit_out_of_range_raises(count: int) -> None:
    cache = RadixCache(8, 4)
    sequence = cache.create_sequence(range(12))
    sequence.reuse()
    sequence.reserve(8)
    sequence.commit(4)
    with pytest.raises(ValueError, match="num_computed"):
        sequence.commit(count)


def test_loser_of_a_race_switches_to_the_blocks_of_the_tree() -> None:
    """The loser's copy was freed while its block table still named it."""
    cache = RadixCache(16, 4)
    first, second = (cache.create_sequence(range(10)) for _ in range(2))
    for sequence in (first, second):
        sequence.reuse()
        sequence.reserve(10)
    assert not set(first.block_table) & set(second.block_table)
    first.commit(10)
    second.commit(10)
    cache.check_integrity()
    assert first.block_table[:2].tolist() == second.block_table[:2].tolist()
    assert (cache.num_tree_blocks, cache.num_free_blocks) == (2, 16 - 4)


def test_loser_of_a_race_switches_over_a_split() -> None:
    cache = RadixCache(32, 2)
    long, short = cache.create_sequence(range(12)), cache.create_sequence([*range(8), 90, 91])
    for sequence in (long, short):
        sequence.reuse()
        sequence.reserve(len(sequence))
    long.commit(12)
    short.commit(10)
    cache.check_integrity()
    assert long.block_table[:4].tolist() == short.block_table[:4].tolist()
    assert cache.num_tree_blocks == 7


def test_forks_share_full_blocks_and_copy_the_half_one() -> None:
    cache = RadixCache(16, 4)
    parent = compute(cache, range(5))
    child = parent.fork()
    full, half = parent.block_table.tolist()
    assert cache.pool.ref_count(half) == 2
    assert parent.node is not None
    assert parent.node.ref_count == 2
    child.append([50])
    child.reserve(6)
    assert child.block_table[0] == full
    assert cache.take_copies() == [(half, child.block_table[1])]
    parent.append([60])
    parent.reserve(6)
    assert parent.block_table.tolist() == [full, half]
    cache.check_integrity()


@pytest.mark.parametrize("count", [2, 3, 5])
def test_last_of_the_forks_that_write_at_once_copies_nothing(count: int) -> None:
    cache = RadixCache(16, 4)
    parent = compute(cache, range(6))
    forks = [parent, *(parent.fork() for _ in range(count - 1))]
    half = parent.block_table[1]
    for token, fork in enumerate(forks):
        fork.append((100 + token,))
        fork.reserve(len(fork))
        cache.check_integrity()
    copies = cache.take_copies()
    assert len(copies) == count - 1
    assert {source for source, _ in copies} == {half}
    assert [fork.block_table[1] for fork in forks].count(half) == 1
    for fork in forks:
        fork.commit(len(fork))
        fork.free()
    cache.check_integrity()


@pytest.mark.parametrize("length", [4, 8])
def test_fork_at_a_block_boundary_copies_nothing(length: int) -> None:
    cache = RadixCache(16, 4)
    parent = compute(cache, range(length))
    child = parent.fork()
    for sequence in (parent, child):
        sequence.append([70])
        sequence.reserve(length + 1)
    assert not cache.pending_copies
    cache.check_integrity()


def test_fork_without_memory_leaves_the_counts_alone() -> None:
    cache = RadixCache(2, 4)
    parent = compute(cache, range(5))
    before = snapshot(cache)
    child = parent.fork()
    child.append([9])
    with pytest.raises(OutOfBlocksError):
        child.reserve(6)
    child.free()
    assert snapshot(cache) == before


def test_free_keeps_the_tail_and_is_idempotent() -> None:
    cache = RadixCache(8, 4)
    sequence = compute(cache, range(6))
    sequence.free()
    before = snapshot(cache)
    sequence.free()
    assert snapshot(cache) == before
    assert hit(cache, range(6)) == 6
    assert not sequence.is_open


def test_free_without_tail_drops_the_half_block() -> None:
    cache = RadixCache(8, 4)
    sequence = compute(cache, range(6))
    sequence.free(keep_tail=False)
    cache.check_integrity()
    assert hit(cache, range(6)) == 4


def test_free_before_the_copy_is_made_keeps_no_tail() -> None:
    """A tail whose block was never written would be served as KV."""
    cache = RadixCache(8, 4)
    store(cache, range(8))
    sequence = cache.create_sequence([*range(6), 50])
    sequence.reuse()
    cache.evict(1)
    sequence.free()
    cache.check_integrity()
    assert hit(cache, range(8)) == 4
    assert not cache.pending_copies


def test_sequence_can_be_reopened_after_free() -> None:
    cache = RadixCache(8, 4)
    sequence = compute(cache, range(6))
    sequence.append([6, 7, 8])
    sequence.free()
    assert sequence.reuse() == 6
    cache.check_integrity()


def test_copy_that_gets_no_block_leaves_its_source_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source kept one holder too many, so that its block could never be freed again."""
    cache = RadixCache(8, 4)
    store(cache, range(6))

    def fail(*_: object) -> list[int]:
        raise OutOfBlocksError("injected")

    sequence = cache.create_sequence([*range(6), 9])
    with monkeypatch.context() as patch:
        patch.setattr(cache.pool, "allocate", fail)
        assert sequence.reuse() == 6  # the tail itself is taken over
    cache.check_integrity()
    sequence.free()
    assert cache.reset() == 2
    assert cache.num_free_blocks == 8


def test_copy_of_a_block_that_waits_for_its_own_reads_where_the_content_is() -> None:
    cache = RadixCache(8, 4)
    store(cache, range(6))
    sequence = cache.create_sequence([*range(6), 9])
    assert sequence.reuse() == 6
    child = sequence.fork()
    child.reserve(7)
    first, second = sequence.block_table.tolist()[1], child.block_table.tolist()[1]
    copies = cache.pending_copies
    assert copies[first] == copies[second] not in (first, second)
    assert cache.copies.cached_reads == {first, second}
    cache.check_integrity()
    cache.take_copies()
    sequence.free()
    child.free()
    assert cache.num_referenced_blocks == 0
