"""Counters are facts: each request's own numbers sum to the totals."""

from __future__ import annotations

import dataclasses
import random

from fakes import Harness, prompt_of

from radixkv.engine import EngineStats


def counters(stats: EngineStats) -> dict[str, int]:
    names = (
        "tokens_looked_up",
        "tokens_hit",
        "tokens_rehit",
        "tokens_computed",
        "tokens_recomputed",
        "tokens_generated",
        "requests_admitted",
        "preemptions",
        "evicted_blocks",
        "copied_blocks",
        "steps",
    )
    return {name: getattr(stats, name) for name in names}


def test_preemption_does_not_inflate_the_hit_rate() -> None:
    """A recomputed request found its own blocks: 32 % hits on random prompts."""
    harness = Harness(8, 16)
    for i in range(2):
        harness.add(str(i), prompt_of(17, seed=i), max_tokens=80, temperature=0.0)
    harness.run()
    stats = harness.engine.stats()
    assert stats.preemptions > 0
    assert (stats.tokens_looked_up, stats.tokens_hit, stats.tokens_computed) == (34, 0, 34)
    assert stats.tokens_rehit > 0
    assert stats.requests_admitted == 2
    assert [a.last.num_cached_tokens for a in harness.answers.values()] == [0, 0]


def test_waiting_for_space_counts_a_lookup_once() -> None:
    """Each failed admission recorded the lookup again."""
    harness = Harness(14, 16)
    prompt = prompt_of(64)
    harness.ask([*prompt, 40], max_tokens=1, temperature=0.0)
    before = harness.engine.stats()
    harness.add("big", prompt_of(100, seed=1), max_tokens=40, temperature=0.0)
    harness.step()
    harness.add("b", prompt + prompt_of(60, seed=2), max_tokens=1, temperature=0.0)
    for _ in range(25):
        harness.step()
    assert harness.scheduler.waiting
    waiting = harness.engine.stats()
    assert waiting.tokens_looked_up == before.tokens_looked_up + 100
    assert waiting.num_waiting == 1
    harness.run()
    after = harness.engine.stats()
    assert after.tokens_looked_up - before.tokens_looked_up == 100 + 124
    hit = harness.answers["b"].last.num_cached_tokens
    assert after.tokens_hit - before.tokens_hit == hit >= 64


def test_aborted_in_the_queue_counts_nothing() -> None:
    harness = Harness(64, 4, max_num_seqs=1)
    harness.add("a", prompt_of(9), max_tokens=5, temperature=0.0)
    harness.add("b", prompt_of(9), max_tokens=5, temperature=0.0)
    harness.step()
    harness.abort("b")
    harness.run()
    stats = harness.engine.stats()
    assert (stats.tokens_looked_up, stats.requests_admitted) == (9, 1)
    assert stats.requests_finished == {"abort": 1, "length": 1}


def test_cached_tokens_are_fixed_at_the_first_admission() -> None:
    """After retraction a request reported more cached tokens than its prompt has."""
    harness = Harness(64, 4)
    request = harness.add("a", prompt_of(10), max_tokens=20, temperature=0.0)
    for _ in range(2):
        for _ in range(5):
            harness.step()
        harness.scheduler.preempt(request)
    harness.run()
    assert {o.num_cached_tokens for o in harness.answers["a"].outputs} == {0}
    assert harness.engine.stats().tokens_rehit > 10


def test_preempted_half_way_through_its_prompt_still_sums_up() -> None:
    """Prompt tokens first computed after a preemption were counted as recomputed."""
    harness = Harness(64, 4, max_num_batched_tokens=16)
    request = harness.add("a", prompt_of(40), max_tokens=2, temperature=0.0)
    harness.step()
    harness.scheduler.preempt(request)
    harness.cache.reset()
    harness.run()
    stats = harness.engine.stats()
    assert (stats.tokens_computed, stats.tokens_recomputed) == (40, 16)


def test_random_load_keeps_every_sum_and_no_counter_decreases() -> None:
    rng = random.Random(4)
    harness = Harness(24, 4, max_num_batched_tokens=24)
    before = counters(harness.engine.stats())
    added = 0
    while added < 60 or harness.engine.has_work:
        if added < 60 and rng.random() < 0.8:
            prompt = prompt_of(rng.randint(1, 12), seed=rng.randrange(3))
            prompt += prompt_of(rng.randint(1, 12), seed=added)
            harness.add(str(added), prompt, max_tokens=rng.randint(1, 40), seed=added)
            added += 1
        harness.step()
        stats = harness.engine.stats()
        now = counters(stats)
        assert all(now[name] >= before[name] for name in now)
        assert stats.blocks_free + stats.blocks_cached + stats.blocks_referenced == 24
        before = now
    lasts = [a.last for a in harness.answers.values()]
    assert stats.preemptions > 0 < stats.evicted_blocks
    assert stats.tokens_looked_up == sum(o.num_prompt_tokens for o in lasts)
    assert stats.tokens_hit == sum(o.num_cached_tokens for o in lasts) > 0
    assert stats.tokens_generated == sum(o.num_completion_tokens for o in lasts)
    assert stats.tokens_looked_up - stats.tokens_hit == stats.tokens_computed
    assert all(0 <= o.num_cached_tokens < o.num_prompt_tokens for o in lasts)
    assert stats.requests_finished == {"length": 60}
    assert stats.num_running == stats.num_waiting == stats.blocks_referenced == 0


def test_stats_are_plain_and_complete() -> None:
    harness = Harness()
    harness.ask(prompt_of(9), ("a",), max_tokens=2, temperature=0.0)
    harness.ask(prompt_of(9), ("a",), max_tokens=2, temperature=0.0)
    stats = harness.engine.stats()
    assert stats.to_dict() == dataclasses.asdict(stats)
    assert stats.namespaces["a"] == {
        "requests": 2,
        "looked_up": 18,
        "hit": 8,
        "hit_rate": 8 / 18,
        "blocks": 3,
        "pins": 0,
        "pinned_blocks": 0,
        "quota": None,
    }
    assert stats.windows["all"] == stats.windows["1m"]
    assert stats.leaves == 1
