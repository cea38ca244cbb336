from __future__ import annotations

from typing import Any

import numpy as np
import torch
from fakes import Harness, prompt_of

from radixkv.engine.batch import ForwardBatch
from radixkv.engine.scheduler import SchedulingOptions
from radixkv.engine.step_cost import StepLoad, load_of
from radixkv.request import SamplingParams


class TimedHarness(Harness):
    """A harness whose model takes a known time, on a simulated clock."""

    def __init__(self, target_s: float | None, **options: Any) -> None:
        self.now = 0.0
        scheduling = SchedulingOptions(itl_target_s=target_s)
        super().__init__(2000, 16, scheduling=scheduling, clock=lambda: self.now, **options)
        self.loads: list[StepLoad] = []
        rng = np.random.default_rng(0)
        execute = self.runner.execute

        def timed(batch: ForwardBatch) -> torch.Tensor:
            load = load_of(batch.attention, len(batch.logits_rows))
            self.loads.append(load)
            seconds = 2e-3 + 1e-4 * load.tokens + 1e-8 * load.attended + 5e-5 * load.samples
            self.now += seconds * float(np.exp(0.03 * rng.normal()))
            return execute(batch)

        self.runner.execute = timed  # type: ignore[method-assign]

    def step_times(self, steps: int) -> list[tuple[float, StepLoad]]:
        """Run steps; return how long each took and what it did."""
        taken = []
        for _ in range(steps):
            before = self.now
            self.engine.step()
            taken.append((self.now - before, self.loads[-1]))
        return taken

    def decode(self, count: int) -> None:
        for i in range(count):
            self.engine.add_request(
                f"d{i}", prompt_of(20, seed=i), SamplingParams(max_tokens=3000, ignore_eos=True)
            )
        self.engine.step()


TARGET_S = 0.012


def test_steps_with_decodes_keep_the_target_and_use_it() -> None:
    harness = TimedHarness(TARGET_S, max_num_batched_tokens=512)
    harness.decode(8)
    for i in range(12):
        harness.engine.add_request(
            f"p{i}", prompt_of(1200, seed=50 + i), SamplingParams(max_tokens=1)
        )
    harness.step_times(40)  # learning
    taken = harness.step_times(100)
    assert all(load.tokens > 8 for _, load in taken), "a step without prefill"
    assert float(np.quantile([s for s, _ in taken], 0.95)) <= TARGET_S
    prefilled = sum(load.tokens - 8 for _, load in taken)
    # What fits at the mean cost, less the margin for noise.
    best = sum((TARGET_S - 2e-3 - 8 * 1.5e-4 - 1e-8 * load.attended) / 1e-4 for _, load in taken)
    assert prefilled >= 0.85 * best


def test_target_out_of_reach_leaves_a_block_a_step() -> None:
    harness = TimedHarness(1e-6, max_num_batched_tokens=512)
    harness.decode(4)
    harness.engine.add_request("p", prompt_of(400, seed=50), SamplingParams(max_tokens=1))
    taken = harness.step_times(20)
    assert {load.tokens for _, load in taken} == {4 + 16}


def test_whole_budget_goes_to_prefill_when_nothing_decodes() -> None:
    harness = TimedHarness(1e-6, max_num_batched_tokens=128)
    for i in range(2):
        harness.engine.add_request(f"p{i}", prompt_of(300, seed=i), SamplingParams(max_tokens=1))
    assert [load.tokens for _, load in harness.step_times(2)] == [128, 128]


def test_no_target_gives_the_whole_budget() -> None:
    harness = TimedHarness(None, max_num_batched_tokens=128)
    harness.decode(4)
    harness.engine.add_request("p", prompt_of(400, seed=50), SamplingParams(max_tokens=1))
    assert [load.tokens for _, load in harness.step_times(2)] == [128, 128]
