"""What the engine measures adds up, whatever happens to its requests."""

from __future__ import annotations

import doctest
import random
from typing import Any

import fakes
import numpy as np
import pytest
import torch
from fakes import FakeRunner, Harness, make_engine, prompt_of

from radixkv.engine import EngineStats, SamplingParams, histogram
from radixkv.engine.batch import ForwardBatch
from radixkv.engine.histogram import Histogram
from radixkv.engine.meter import Meter, StepTokens
from radixkv.engine.scheduler import SchedulingOptions

LATENCIES = (
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
)


class LoopingRunner(FakeRunner):
    """A model that repeats what followed its last token before, so that drafts are often right."""

    def logits_after(self, history: np.ndarray) -> np.ndarray:
        logits = super().logits_after(history)
        places = np.flatnonzero(history[:-1] == history[-1])
        if len(places) and history[0] % 4:
            logits[history[places[-1] + 1]] += 20.0
        return logits


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def check_sums(stats: EngineStats) -> None:
    """Check every identity of docs/metrics.md."""
    assert stats.tokens_looked_up == (
        stats.tokens_hit
        + stats.tokens_computed
        + stats.prompt_tokens_found_late
        + stats.prompt_tokens_pending
        + stats.prompt_tokens_dropped
    )
    assert stats.tokens_hit == sum(stats.tokens_hit_by_tier.values())
    assert stats.step_tokens["decode"] + stats.step_tokens["prefill"] == (
        stats.tokens_computed + stats.tokens_recomputed + stats.answer_tokens_computed
    )
    assert stats.step_tokens["speculated"] == stats.tokens_drafted >= stats.tokens_accepted
    assert sum(stats.preemptions_by_mode.values()) == stats.preemptions
    for kind, data in stats.step_sizes.items():
        assert (data.count, data.total) == (stats.steps, stats.step_tokens[kind])
    times = [stats.histograms[f"step_{part}_time_seconds"] for part in ("model", "host")]
    assert [data.count for data in times] == [stats.steps, stats.steps]
    assert sum(data.total for data in times) == pytest.approx(stats.step_time_s)


def make(num_blocks: int, **options: Any) -> Harness:
    # Tiers and swap space keep the runner that the engine is made with.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fakes, "FakeRunner", LoopingRunner)
        harness = Harness(num_blocks, 4, **options)
    speculator = harness.scheduler.speculator
    assert speculator is not None
    # The clock of a test says nothing of what pays.
    speculator.record_step = lambda *args: None  # type: ignore[method-assign]
    speculator._least_chances = lambda bs: [0.05] * len(bs)  # type: ignore[method-assign]
    return harness


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_tokens_add_up_through_preemption_branches_drafts_and_aborts(mode: str) -> None:
    rng = random.Random(11)
    harness = make(
        22,
        max_num_batched_tokens=20,
        host_blocks=6,
        swap_blocks=12,
        scheduling=SchedulingOptions(speculative_tokens=8, preemption_mode=mode),
    )
    added = 0
    while added < 50 or harness.engine.has_work:
        if added < 50 and rng.random() < 0.7:
            prompt = prompt_of(rng.randint(1, 20), seed=rng.randrange(3))
            prompt += prompt_of(rng.randint(1, 8), seed=added)
            count = rng.choice([1, 1, 1, 3])
            length = rng.randint(1, 30 // count)
            search = {"use_beam_search": True} if rng.random() < 0.1 else {"seed": added}
            harness.add(str(added), prompt, max_tokens=length, n=count, **search)
            added += 1
        if rng.random() < 0.03 and harness.engine.requests:
            harness.abort(rng.choice(sorted(harness.engine.requests)))
        harness.step()
        check_sums(harness.engine.stats())
    stats = harness.engine.stats()
    assert stats.prompt_tokens_pending == 0
    assert stats.tokens_accepted > 0 < stats.preemptions
    assert (stats.preemptions_by_mode["swap"] > 0) == (mode == "swap")
    assert stats.tokens_hit_by_tier["host"] > 0
    lasts = [a.outputs[-1] for choices in harness.choices.values() for a in choices]
    assert stats.tokens_generated >= sum(o.num_completion_tokens for o in lasts)
    scheduled = stats.requests_admitted
    assert stats.histograms["request_queue_time_seconds"].count == scheduled


def test_prompt_tokens_of_an_aborted_request_are_pending_then_dropped() -> None:
    harness = Harness(64, 4, max_num_batched_tokens=16)
    harness.add("a", prompt_of(40), max_tokens=4)
    harness.step()
    assert harness.engine.stats().prompt_tokens_pending == 24
    harness.abort("a")
    stats = harness.engine.stats()
    assert (stats.prompt_tokens_pending, stats.prompt_tokens_dropped) == (0, 24)
    check_sums(stats)


def test_prompt_tokens_that_another_request_computed_meanwhile_are_found_late() -> None:
    harness = Harness(64, 4, max_num_batched_tokens=16, max_num_seqs=2)
    prompt = prompt_of(40)
    first = harness.add("a", prompt, max_tokens=4, temperature=0.0)
    harness.step()
    harness.scheduler.preempt(first)
    harness.scheduler.admission.remove(first)
    harness.add("b", prompt, max_tokens=1, temperature=0.0)
    while not harness.answers["b"].outputs:
        harness.step()
    harness.scheduler.add(first)
    harness.run()
    stats = harness.engine.stats()
    assert stats.prompt_tokens_found_late == 40 - 16 - 1
    assert stats.tokens_recomputed == 0
    check_sums(stats)


class SlowRunner(FakeRunner):
    """A model that takes two seconds a step."""

    clock: Clock

    def execute(self, batch: ForwardBatch) -> torch.Tensor:
        self.clock.now += 2.0
        return super().execute(batch)


def test_latencies_are_those_of_the_clock() -> None:
    clock = Clock()
    engine = make_engine(max_num_batched_tokens=16, clock=clock)
    engine.runner = SlowRunner(64, 4)
    engine.runner.clock = clock
    engine.add_request("a", prompt_of(20), SamplingParams(max_tokens=4))
    clock.now += 5.0
    while engine.has_work:
        engine.step()
        clock.now += 0.5
    stats = engine.stats()
    totals = {name: data.total for name, data in stats.histograms.items()}
    assert [totals[name] for name in LATENCIES] == [5.0, 4.5, 7.5]
    assert totals["time_to_first_token_seconds"] == 9.5
    assert totals["inter_token_latency_seconds"] == 7.5
    assert stats.histograms["inter_token_latency_seconds"].count == 3
    assert totals["e2e_request_latency_seconds"] == 17.0
    assert (totals["step_model_time_seconds"], stats.model_time_s) == (10.0, 10.0)
    assert totals["step_host_time_seconds"] == 0.0


def test_requests_that_got_no_token_or_no_end_are_counted_as_far_as_they_came() -> None:
    harness = Harness(64, 4, max_num_seqs=2, max_num_batched_tokens=16)
    harness.add("running", prompt_of(9), max_tokens=50)
    harness.add("prefilling", prompt_of(60, seed=1), max_tokens=50)
    harness.add("waiting", prompt_of(9, seed=2), max_tokens=50)
    for _ in range(2):
        harness.step()
    for name in ("running", "prefilling", "waiting"):
        harness.abort(name)
    counts = {name: d.count for name, d in harness.engine.stats().histograms.items()}
    assert [counts[name] for name in LATENCIES] == [2, 1, 1]
    assert counts["time_to_first_token_seconds"] == 1
    assert counts["e2e_request_latency_seconds"] == 0


def test_only_named_namespaces_have_waiting_times_of_their_own() -> None:
    meter = Meter([("tenant",)])
    harness = Harness()
    harness.engine.meter = meter
    for namespace in ((), ("tenant",), ("tenant",), ("salt",)):
        harness.ask(prompt_of(9), namespace, max_tokens=1)
    queue = harness.engine.stats().queue_by_namespace
    assert {name: wait["requests"] for name, wait in queue.items()} == {"default": 1, "tenant": 2}


def test_utilisation_is_that_of_the_slots_held() -> None:
    harness = Harness(64, 4)
    harness.add("a", prompt_of(9), max_tokens=3)
    assert harness.engine.stats().kv_utilisation is None
    harness.step()
    assert harness.engine.stats().kv_utilisation == 9 / 12


def test_swapped_bytes_are_those_of_the_blocks() -> None:
    options = SchedulingOptions(preemption_mode="swap")
    harness = Harness(64, 4, swap_blocks=8, scheduling=options)
    request = harness.add("a", prompt_of(10), max_tokens=4)
    harness.step()
    harness.scheduler.preempt(request)
    harness.cache.reset()
    harness.run()
    stats = harness.engine.stats()
    assert stats.swap_bytes == {"out": 3 * 32, "in": 3 * 32}
    assert stats.preemptions_by_mode == {"swap": 1, "recompute": 0}


def test_doctests_of_the_histogram_pass() -> None:
    result = doctest.testmod(histogram)
    assert result.attempted > 0 == result.failed


def test_values_on_a_bound_are_below_it_one_by_one_and_together() -> None:
    values = [0.0, 1.0, 1.5, 2.0, 2.5, 99.0]
    one, all_ = Histogram((1, 2)), Histogram((1, 2))
    for value in values:
        one.add(value)
    all_.add_all(values)
    all_.add_all([])
    assert one.data() == all_.data()
    assert one.data().counts == (2, 2, 2)
    assert one.data().total == sum(values)


def test_a_step_is_recorded_as_model_and_host_time_and_by_kind() -> None:
    meter = Meter(())
    meter.record_step(1.0, 0.75, 3, StepTokens(decode=2, prefill=5000, speculated=0))
    assert meter.step_tokens == {"decode": 2, "prefill": 5000, "speculated": 0}
    assert meter.histograms()["step_host_time_seconds"].total == 0.25
