"""Giving back what only one conversation uses."""

from __future__ import annotations

import random

import numpy as np
import pytest

from radixkv.cache import RadixCache
from radixkv.cache.release import Release, path_locks

BLOCK = 4


def packed(ids: list[int]) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def make(num_blocks: int = 64, **options: float) -> RadixCache:
    return RadixCache(num_blocks, BLOCK, **options)  # type: ignore[arg-type]


def run(cache: RadixCache, ids: list[int], namespace: tuple[str, ...] = ()) -> int:
    """Compute a prompt; return how much of it was cached."""
    sequence = cache.create_sequence(ids, namespace)
    cached = sequence.reuse()
    sequence.reserve(len(ids))
    cache.take_copies()
    sequence.commit(len(ids))
    sequence.free()
    cache.check_integrity()
    return cached


def release(cache: RadixCache, ids: list[int], shared: int = 0, *, below: bool = False) -> int:
    plan = Release(cache)
    if below:
        plan.add_below(packed(ids), ())
    plan.add(packed(ids), (), shared)
    planned = plan.num_blocks
    freed = plan.run()
    cache.check_integrity()
    assert freed == planned
    return freed


def cached(cache: RadixCache, ids: list[int]) -> int:
    return cache.match_prefix(ids).num_cached_tokens


def test_release_frees_runs_and_tail_at_once() -> None:
    cache = make()
    run(cache, list(range(18)))
    assert cache.num_free_blocks == 64 - 5
    assert release(cache, list(range(18))) == 5
    assert cache.num_free_blocks == 64
    assert not cache.tree.roots


def test_release_stops_where_another_prompt_branches_off() -> None:
    cache = make()
    run(cache, [*range(8), *[50] * 8])
    run(cache, [*range(8), *[60] * 8])
    assert release(cache, [*range(8), *[50] * 8]) == 2
    assert cached(cache, [*range(8), *[60] * 8]) == 16


@pytest.mark.parametrize("split", [False, True])
def test_release_cuts_the_block_that_holds_the_last_shared_token(split: bool) -> None:
    cache = make()
    run(cache, list(range(20)))
    if split:
        run(cache, [*range(8), 99, 99, 99, 99])
    assert release(cache, list(range(20)), shared=9) == 2
    assert cached(cache, list(range(20))) == 9
    # What is left is what the other one alone would have left: it frees all of it, or goes on.
    assert run(cache, [*range(9), 50, 50, 50, 50]) == 9
    assert cache.num_tree_blocks == 5 if split else 4
    assert release(cache, [*range(9), 50, 50, 50, 50]) == (2 if split else 4)


def test_release_of_the_other_one_frees_the_cut_block() -> None:
    cache = make()
    run(cache, list(range(20)))
    release(cache, list(range(20)), shared=9)
    assert release(cache, list(range(9))) == 3
    assert not cache.tree.roots


def test_release_cuts_no_block_whose_beginning_is_elsewhere() -> None:
    cache = make()
    run(cache, [*range(8), 1, 1, 5, 5, 6, 6])
    run(cache, [*range(8), 1, 2, 5, 5, 6, 6])
    assert release(cache, [*range(8), 1, 1, 5, 5, 6, 6], shared=9) == 2
    assert cached(cache, [*range(8), 1, 2, 5, 5, 6, 6]) == 14


def test_release_keeps_a_tail_that_is_shared_as_a_whole_and_cuts_a_longer_one() -> None:
    cache = make()
    run(cache, list(range(11)))
    assert release(cache, list(range(12)), shared=11) == 0
    assert cached(cache, list(range(12))) == 11
    assert release(cache, list(range(12)), shared=10) == 0
    assert cached(cache, list(range(12))) == 10
    assert release(cache, list(range(12)), shared=8) == 1
    assert cached(cache, list(range(12))) == 8


def test_release_leaves_what_continues_the_conversation() -> None:
    cache = make()
    run(cache, list(range(18)))
    assert release(cache, list(range(14))) == 0
    assert cached(cache, list(range(18))) == 18


def test_release_below_frees_an_answer_of_unknown_length() -> None:
    cache = make()
    run(cache, list(range(18)))
    run(cache, [*range(8), 70, 70, 70, 70])
    assert release(cache, list(range(14)), below=True) == 3
    assert cached(cache, [*range(8), 70, 70, 70, 70]) == 12


def test_release_below_frees_no_other_continuation_within_the_block() -> None:
    cache = make()
    run(cache, [*range(8), 1, 1, 5, 5, 6, 6])
    run(cache, [*range(8), 1, 2, 5, 5, 6, 6])
    assert release(cache, [*range(8), 1, 1], below=True) == 2
    assert cached(cache, [*range(8), 1, 2, 5, 5, 6, 6]) == 14


def test_release_below_of_nothing_frees_nothing() -> None:
    cache = make()
    run(cache, list(range(9)))
    assert release(cache, [], below=True) == 0
    assert release(cache, [99], below=True) == 0


def test_release_spares_what_a_sequence_or_a_pin_holds() -> None:
    cache = make()
    run(cache, list(range(16)))
    sequence = cache.create_sequence(list(range(9)))
    sequence.reuse()
    assert release(cache, list(range(16))) == 2
    sequence.free()
    pin_id = cache.pin(list(range(4)))
    assert pin_id is not None
    assert release(cache, list(range(16))) >= 1
    assert cached(cache, list(range(16))) == 4
    pin = cache.pins.get(pin_id)
    assert pin is not None
    plan = Release(cache, path_locks(pin.node))
    plan.add(packed(list(range(16))), ())
    assert plan.num_blocks == 1
    cache.unpin(pin_id)
    assert plan.run() == 1


@pytest.mark.parametrize("seed", range(6))
def test_stress_release_frees_what_is_planned_and_others_lose_nothing(seed: int) -> None:
    rng = random.Random(seed)
    cache = make(400)
    conversations = {0: [rng.randrange(3) for _ in range(rng.randrange(1, 12))]}
    for number in range(1, 60):
        base = conversations[rng.choice(list(conversations))]
        kept = base[: rng.randrange(len(base) + 1)] if rng.random() < 0.5 else list(base)
        conversations[number] = kept + [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
        run(cache, conversations[number])
        if len(conversations) > 8:
            gone = conversations.pop(rng.choice(list(conversations)))
            shared = max(
                next(
                    (i for i, (a, b) in enumerate(zip(gone, other, strict=False)) if a != b),
                    min(len(gone), len(other)),
                )
                for other in conversations.values()
            )
            before = {n: cached(cache, ids) for n, ids in conversations.items()}
            free = cache.num_free_blocks
            freed = release(cache, gone, shared)
            assert cache.num_free_blocks == free + freed
            assert {n: cached(cache, ids) for n, ids in conversations.items()} == before
