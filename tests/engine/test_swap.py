from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fakes import FakeRunner, Harness, cold, prompt_of

from radixkv.cache import RadixCache, Sequence
from radixkv.engine.scheduler import SchedulingOptions
from radixkv.engine.swap import SwapSpace

BLOCK = 4
CONTENT = 8 * BLOCK
SWAP = SchedulingOptions(preemption_mode="swap")
GREEDY: dict[str, Any] = {"temperature": 0.0}


class Space:
    """A swap space over a cache whose blocks hold the ids of their tokens."""

    def __init__(self, num_blocks: int = 16, swap_blocks: int = 16, *, enabled: bool = True):
        self.runner = FakeRunner(num_blocks, BLOCK)
        self.cache = RadixCache(num_blocks, BLOCK, enabled=enabled)
        self.swap = SwapSpace(self.runner, self.cache, CONTENT, swap_blocks * CONTENT)

    def start(self, tokens: list[int]) -> Sequence:
        """Compute all but the last token of a new sequence."""
        sequence = self.cache.create_sequence(tokens)
        sequence.reuse()
        sequence.reserve(len(sequence))
        self.compute(sequence, len(tokens) - 1)
        return sequence

    def compute(self, sequence: Sequence, end: int) -> None:
        for source, destination in self.cache.take_copies():
            self.runner.slots[destination] = self.runner.slots[source]
        for position in range(sequence.num_computed, end):
            block = sequence.block_table[position // BLOCK]
            self.runner.slots[block, position % BLOCK] = sequence.token_ids[position]
        sequence.commit(end)

    def swap_out(self, *sequences: Sequence, owner: int = 0) -> bool:
        kept = self.swap.swap_out(owner, self.swap.plan(sequences))
        for sequence in sequences:
            sequence.free()
        self.check()
        return kept

    def bring_back(self, sequence: Sequence, owner: int = 0) -> int:
        sequence.reuse(partial=False)
        sequence.reserve(len(sequence))
        restored = self.swap.restore(owner, sequence)
        self.check()
        return restored

    def content(self, sequence: Sequence) -> list[int]:
        slots = self.runner.slots[sequence.block_table].reshape(-1)
        return [int(i) for i in slots[: sequence.num_computed]]

    def forget(self) -> None:
        """Evict everything and overwrite it."""
        self.cache.reset()
        self.runner.slots[:] = 7
        self.check()

    def check(self) -> None:
        self.cache.check_integrity()
        self.swap.check_integrity()


def test_everything_comes_back_when_the_tree_has_lost_all() -> None:
    space, tokens = Space(), prompt_of(15)
    sequence = space.start(tokens)
    assert space.swap_out(sequence)
    space.forget()
    assert space.bring_back(sequence) == 14
    assert space.content(sequence) == tokens[:14]


def test_blocks_left_in_the_tree_are_taken_from_there() -> None:
    space, tokens = Space(), prompt_of(15)
    sequence = space.start(tokens)
    space.swap_out(sequence)
    space.cache.evict(2)  # the tail, and the last whole block
    assert space.bring_back(sequence) == 6
    assert sequence.num_cached_tokens == 8
    assert space.content(sequence) == tokens[:14]
    assert space.swap.counters["blocks_in"] == 2


def test_only_what_nobody_else_holds_is_copied() -> None:
    space, tokens = Space(), prompt_of(12)
    other = space.start([*tokens[:8], 99])
    sequence = space.start([*tokens, 77, 78])
    assert other.num_tree_blocks == 2
    plan = space.swap.plan([sequence])
    assert plan.block_ids == sequence.block_table[2:].tolist()
    assert (plan.first_token, plan.num_tokens) == (8, 5)


def test_hole_left_by_others_is_not_skipped() -> None:
    """What others held was not copied; once it is evicted, what lies behind it can't be used."""
    space, tokens = Space(), prompt_of(12)
    other = space.start([*tokens[:8], 99])
    sequence = space.start([*tokens, 77, 78])
    space.swap_out(sequence)
    other.free()
    space.forget()
    assert not space.swap.can_restore(0, sequence, 0)
    assert space.bring_back(sequence) == 0
    assert sequence.num_computed == 0


def test_group_keeps_what_it_shares_once() -> None:
    space, tokens = Space(), prompt_of(10)
    first = space.start(tokens)
    second = first.fork()
    first.append([1, 2])
    second.append([3, 4])
    for sequence in (first, second):
        sequence.reserve(len(sequence))
        space.compute(sequence, len(sequence) - 1)
    plan = space.swap.plan([first, second])
    assert len(plan.block_ids) == len({*first.block_table.tolist(), *second.block_table.tolist()})
    assert plan.first_token == 0
    space.swap_out(first, second)
    space.forget()
    for sequence in (first, second):
        assert space.bring_back(sequence) == (11 if sequence is first else 3)
        assert space.content(sequence) == sequence.token_ids[:11].tolist()


def test_block_that_waits_for_its_copy_is_read_from_the_source() -> None:
    space, tokens = Space(), prompt_of(10)
    first = space.start(tokens)
    second = first.fork()
    second.append([5])
    second.reserve(len(second))
    assert space.cache.pending_copies
    space.swap_out(second)
    space.cache.take_copies()
    first.free()
    assert space.bring_back(second) == 1
    assert space.content(second) == tokens[:9]


def test_nothing_is_lost_without_prefix_caching() -> None:
    space, tokens = Space(enabled=False), prompt_of(11)
    sequence = space.start(tokens)
    assert space.swap_out(sequence)
    space.runner.slots[:] = 7
    assert space.bring_back(sequence) == 10
    assert space.content(sequence) == tokens[:10]


def test_full_space_refuses_and_takes_again_when_there_is_room() -> None:
    space = Space(swap_blocks=4)
    first, second = space.start(prompt_of(15)), space.start(prompt_of(15, seed=1))
    assert space.swap_out(first, owner=1)
    assert not space.swap_out(second, owner=2)
    assert space.swap.counters["refused"] == 1
    space.swap.drop(1)
    assert space.swap.num_used == 0
    space.bring_back(second, owner=2)
    space.compute(second, 14)
    assert space.swap_out(second, owner=2)


def test_failed_copy_keeps_nothing() -> None:
    space = Space()
    sequence = space.start(prompt_of(15))
    space.runner.failing_transfers = 1
    assert not space.swap_out(sequence)
    assert len(space.swap) == space.swap.num_used == 0
    assert space.swap.counters["errors"] == 1


def test_failed_return_leaves_the_sequence_to_be_computed() -> None:
    space = Space()
    sequence = space.start(prompt_of(15))
    space.swap_out(sequence)
    space.forget()
    space.runner.failing_transfers = 1
    assert space.bring_back(sequence) == 0
    assert sequence.num_computed == 0
    assert space.swap.counters["errors"] == 1


def test_rates_are_what_was_measured() -> None:
    runner, cache = FakeRunner(16, BLOCK), RadixCache(16, BLOCK)
    runner.slots[:] = 1
    ticks = iter(range(1000))
    swap = SwapSpace(runner, cache, CONTENT, CONTENT, clock=lambda: next(ticks))
    swap.measure()
    assert swap.rates == {"out": 8 * CONTENT, "in": 8 * CONTENT}
    assert (runner.slots == 1).all()


# --- in an engine -------------------------------------------------------------------------------


def overcommit(
    swap_blocks: int, num: int = 9, options: SchedulingOptions = SWAP, **params: Any
) -> Harness:
    """Run requests that want three times the pool together; all must equal their solo runs."""
    harness = Harness(24, BLOCK, swap_blocks=swap_blocks, scheduling=options)
    prompts = [prompt_of(7 + i, seed=i) for i in range(num)]
    params = GREEDY | {"max_tokens": 22, "ignore_eos": True} | params
    for i, prompt in enumerate(prompts):
        harness.add(str(i), prompt, **params)
    assert sum(-(-(len(p) + 22) // BLOCK) for p in prompts) >= 3 * 24
    harness.run()
    for i, prompt in enumerate(prompts):
        assert harness.answers[str(i)].token_ids == cold(prompt, **params).token_ids
    return harness


def test_overcommitted_pool_gives_the_answers_of_an_ample_one() -> None:
    harness = overcommit(64)
    swap = harness.scheduler.swap
    assert swap is not None
    assert harness.scheduler.num_preemptions > 3
    assert swap.counters["swapped_out"] == swap.counters["swapped_in"] > 3
    assert harness.engine.tokens_recomputed == 0


def test_exhausted_swap_space_falls_back_to_computing_again() -> None:
    harness = overcommit(4)
    swap = harness.scheduler.swap
    assert swap is not None
    assert swap.counters["refused"] > 0
    assert harness.engine.tokens_recomputed > 0


def test_mode_recompute_uses_no_swap_space() -> None:
    harness = overcommit(64, options=SchedulingOptions(preemption_mode="recompute"))
    assert harness.scheduler.swap is None
    assert harness.scheduler.num_preemptions > 3


@pytest.mark.parametrize("faster", ["swap", "recompute"])
def test_auto_takes_what_is_faster(faster: str) -> None:
    harness = Harness(12, BLOCK, swap_blocks=64, scheduling=SchedulingOptions())
    swap = harness.scheduler.swap
    assert swap is not None
    params = GREEDY | {"max_tokens": 20, "ignore_eos": True}
    for i in range(3):
        harness.add(str(i), prompt_of(9, seed=i), **params)
    while harness.engine.has_work:
        swap.rates = dict.fromkeys(("out", "in"), 1e12 if faster == "swap" else 1e-3)
        harness.step()
    assert harness.scheduler.num_preemptions > 0
    assert (swap.counters["swapped_out"] > 0) == (faster == "swap")


@pytest.mark.parametrize(
    "params", [{"n": 3, "seed": 5, "temperature": 1.0}, {"n": 2, "best_of": 3}]
)
def test_answers_of_one_request_are_swapped_together(params: dict[str, Any]) -> None:
    options: dict[str, Any] = {"max_tokens": 17, "ignore_eos": True, "seed": 3} | params
    ample = Harness(200, BLOCK)
    harness = Harness(20, BLOCK, swap_blocks=64, scheduling=SWAP)
    for h in (ample, harness):
        for i in range(4):
            h.add(str(i), prompt_of(9 + i, seed=i), **options)
        h.run()
    swap = harness.scheduler.swap
    assert swap is not None
    assert swap.counters["swapped_in"] > 0
    for i in range(4):
        got, want = harness.choices[str(i)], ample.choices[str(i)]
        assert [a.token_ids for a in got] == [a.token_ids for a in want]


@pytest.mark.parametrize("event", ["abort", "timeout"])
def test_request_that_ends_while_swapped_out_frees_the_space(event: str) -> None:
    now = [0.0]
    harness = Harness(12, BLOCK, swap_blocks=64, scheduling=SWAP, clock=lambda: now[0])
    for i in range(3):
        timeout = 5.0 if i == 2 and event == "timeout" else None
        harness.add(str(i), prompt_of(9, seed=i), max_tokens=20, timeout_s=timeout, **GREEDY)
    swap = harness.scheduler.swap
    assert swap is not None
    while 2 not in swap:
        harness.step()
    assert swap.num_used > 0
    if event == "abort":
        harness.abort("2")
    else:
        now[0] = 5.0
        harness.step()
    assert 2 not in swap
    assert harness.answers["2"].last.finish_reason == event
    harness.run()


def test_new_work_waits_until_the_preempted_are_back() -> None:
    harness = Harness(12, BLOCK, swap_blocks=64, scheduling=SWAP)
    for i in range(3):
        harness.add(str(i), prompt_of(9, seed=i), max_tokens=20, ignore_eos=True, **GREEDY)
    while not harness.scheduler.num_preemptions:
        harness.step()
    victim = next(iter(harness.scheduler.waiting))
    # Of a namespace that was served less.
    late = harness.add("late", prompt_of(2, seed=9), ("quiet",), max_tokens=2, **GREEDY)
    while victim in list(harness.scheduler.waiting):
        assert late.timings.first_scheduled is None
        harness.step()
    harness.run()


def test_stress_transfers_that_fail_lose_nothing() -> None:
    rng = np.random.default_rng(0)
    harness = Harness(20, BLOCK, swap_blocks=12, scheduling=SWAP)
    prompts = {str(i): prompt_of(int(rng.integers(1, 30)), seed=i) for i in range(20)}
    params = GREEDY | {"max_tokens": 15, "ignore_eos": True}
    for name, prompt in prompts.items():
        harness.add(name, prompt, **params)
    while harness.engine.has_work:
        harness.runner.failing_transfers = int(rng.random() < 0.3)
        harness.step()
    assert harness.scheduler.num_preemptions > 3
    for name, prompt in prompts.items():
        assert harness.answers[name].token_ids == cold(prompt, **params).token_ids
