"""Evicted blocks come back with the right content, or not at all."""

import os
import random
import threading
import time
from typing import Any

import pytest
from fakes import cold, prompt_of
from tiering_helpers import (
    OPTIONS,
    MakeHarness,
    ask,
    by_tier,
    fill,
    tiers_of,
    worker_of,
)

from radixkv.cache import tiers_disk


def test_evicted_blocks_come_back_from_host_memory(make: MakeHarness) -> None:
    harness = make(host_blocks=32)
    prompt = prompt_of(21)
    ask(harness, prompt)
    fill(harness, 1, 2)
    assert ask(harness, prompt) == 20
    assert by_tier(harness) == {"device": 0, "host": 20, "disk": 0}
    stats = harness.engine.stats()
    assert stats.tokens_computed == stats.tokens_looked_up - stats.tokens_hit


def test_blocks_brought_back_are_shared_at_once(make: MakeHarness) -> None:
    harness = make(num_blocks=16, host_blocks=32)
    prompt = prompt_of(21)
    ask(harness, prompt)
    fill(harness, 1, 2, length=40)
    request = harness.add("first", prompt, **OPTIONS)
    second = harness.add("second", prompt, **OPTIONS)
    harness.step()
    assert request.num_cached_by_tier == {"device": 0, "host": 20, "disk": 0}
    first, other = request.branches[0].sequence, second.branches[0].sequence
    assert first.num_cached_tokens == 20
    assert second.num_cached_by_tier == {"device": 20}
    assert (first.block_table[:5] == other.block_table[:5]).all()
    harness.run()


def test_last_token_is_computed_although_a_tier_has_it(make: MakeHarness) -> None:
    harness = make(host_blocks=32)
    prompt = prompt_of(20)
    ask(harness, prompt)
    fill(harness, 1, 2)
    assert ask(harness, prompt) == 16


def test_whole_blocks_of_a_tier_go_before_a_part_of_the_tree(make: MakeHarness) -> None:
    harness = make(num_blocks=12, host_blocks=32)
    prompt = prompt_of(25)
    ask(harness, prompt)
    fill(harness, 1, 2, length=40)
    # Agrees with two blocks and a half of the prompt.
    ask(harness, prompt[:10] + prompt_of(3, seed=5))
    before = by_tier(harness)["host"]
    assert ask(harness, prompt) == 24
    assert by_tier(harness)["host"] - before == 16


def test_full_host_memory_passes_its_oldest_blocks_to_disk(make: MakeHarness) -> None:
    harness = make(host_blocks=4, disk_blocks=64)
    prompt = prompt_of(21)
    ask(harness, prompt)
    fill(harness, 1, 2, 3)
    worker_of(harness).drain()
    assert ask(harness, prompt) == 20
    tiers = by_tier(harness)
    assert tiers["disk"] == 20
    assert harness.engine.stats().tiers["disk"]["blocks_read"] == 5


def test_end_of_a_prompt_makes_room_before_its_beginning(make: MakeHarness) -> None:
    harness = make(host_blocks=3)
    prompt = prompt_of(21)
    ask(harness, prompt)
    fill(harness, 1, length=28)
    assert ask(harness, prompt) == 12


def test_blocks_are_read_before_what_they_displace_takes_their_place(make: MakeHarness) -> None:
    """Host memory is full of the prompt, and its return evicts as much from the pool."""
    harness = make(host_blocks=5)
    prompt = prompt_of(21)
    for _ in range(3):
        ask(harness, prompt)
        fill(harness, 1)
    assert ask(harness, prompt) == 20
    assert harness.engine.stats().tiers["load_errors"] == 0


def test_blocks_that_are_in_the_pool_again_make_room_first(make: MakeHarness) -> None:
    harness = make(host_blocks=7)
    prompt, other = prompt_of(21), prompt_of(26, seed=1)
    for ids in (prompt, other, prompt, prompt_of(5, seed=2)):
        ask(harness, ids)
    assert ask(harness, other) == 24


def test_blocks_evicted_in_the_same_step_are_found(make: MakeHarness) -> None:
    harness = make(num_blocks=20, host_blocks=32)
    prompt, other = prompt_of(21), prompt_of(30, seed=2)
    ask(harness, prompt)
    fill(harness, 1, length=40)
    harness.add("other", other, **OPTIONS)
    harness.add("prompt", prompt, **OPTIONS)
    harness.step()
    assert len(harness.scheduler.running) == 2
    harness.run()
    for name, ids in (("other", other), ("prompt", prompt)):
        assert harness.answers[name].token_ids == cold(ids, **OPTIONS).token_ids
    assert harness.answers["prompt"].last.num_cached_tokens == 20
    assert by_tier(harness)["host"] > 0


def test_request_that_waits_for_the_disk_lets_others_go_ahead(
    make: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make(disk_blocks=64)
    prompt, other = prompt_of(9), prompt_of(9, seed=7)
    ask(harness, prompt)
    fill(harness, 1, 2)
    worker_of(harness).drain()
    gate, read = threading.Event(), os.pread

    def slow(*arguments: Any) -> bytes:
        assert gate.wait(30)
        return read(*arguments)

    monkeypatch.setattr(tiers_disk.os, "pread", slow)
    harness.add("slow", prompt, **OPTIONS)
    harness.add("fast", other, **OPTIONS)
    while not harness.answers["fast"].outputs:
        harness.step()
    assert not harness.answers["slow"].outputs
    gate.set()
    harness.run()
    assert harness.answers["slow"].last.num_cached_tokens == 8
    assert harness.answers["slow"].token_ids == cold(prompt, **OPTIONS).token_ids


def test_aborted_request_leaves_its_reading_behind(
    make: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make(disk_blocks=64)
    prompt, second = prompt_of(17), prompt_of(17, seed=3)
    ask(harness, prompt)
    ask(harness, second)
    fill(harness, 1, 2)
    worker_of(harness).drain()
    gate, read = threading.Event(), os.pread

    def slow(*arguments: Any) -> bytes:
        assert gate.wait(30)
        return read(*arguments)

    monkeypatch.setattr(tiers_disk.os, "pread", slow)
    harness.add("gone", prompt, **OPTIONS)
    harness.add("next", second, **OPTIONS)
    harness.step()
    assert harness.abort("gone") == 1
    gate.set()
    harness.run()
    assert harness.answers["next"].last.num_cached_tokens == 16
    assert harness.answers["next"].token_ids == cold(second, **OPTIONS).token_ids


def test_two_requests_for_the_same_blocks_load_them_once(make: MakeHarness) -> None:
    harness = make(num_blocks=16, disk_blocks=64)
    prompt = prompt_of(21)
    ask(harness, prompt)
    fill(harness, 1, 2, 3, length=40)
    worker_of(harness).drain()
    for name in ("a", "b"):
        harness.add(name, prompt, **OPTIONS)
    harness.run()
    assert [harness.answers[n].last.num_cached_tokens for n in "ab"] == [20, 20]
    assert by_tier(harness) == {"device": 20, "host": 0, "disk": 20}


@pytest.mark.parametrize("namespace", [("x",), ("", "x"), ("x", "")])
def test_other_namespace_finds_nothing_in_any_tier(
    make: MakeHarness, namespace: tuple[str, ...]
) -> None:
    harness = make(host_blocks=4, disk_blocks=64)
    prompt = prompt_of(21)
    ask(harness, prompt)
    fill(harness, 1, 2, 3)
    worker_of(harness).drain()
    assert ask(harness, prompt, namespace) == 0
    fill(harness, 4, 5, 6)
    worker_of(harness).drain()
    assert ask(harness, prompt, namespace) == 20
    assert ask(harness, prompt) == 20


def test_colliding_hashes_of_the_tree_serve_nothing_wrong(make: MakeHarness) -> None:
    harness = make(num_blocks=12, host_blocks=64, digest=lambda data: b"same" * 4)
    end = prompt_of(9, seed=9)
    prompts = [prompt_of(8, seed=s) + end for s in range(6)]
    for _ in range(3):
        for prompt in prompts:
            ask(harness, prompt)
    assert by_tier(harness)["host"] > 0


def test_flush_clears_every_tier(make: MakeHarness) -> None:
    harness = make(host_blocks=4, disk_blocks=64)
    prompt = prompt_of(21)
    ask(harness, prompt)
    fill(harness, 1, 2, 3)
    harness.cache.reset()
    worker_of(harness).drain()
    assert ask(harness, prompt) == 0
    stats = harness.engine.stats().tiers
    assert stats["host"]["blocks"] == 0


def test_flush_clears_what_is_about_to_be_written(
    make: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make(disk_blocks=64)
    gate, write = threading.Event(), os.pwrite

    def slow(*arguments: Any) -> int:
        assert threading.current_thread() is threading.main_thread() or gate.wait(30)
        return write(*arguments)

    monkeypatch.setattr(tiers_disk.os, "pwrite", slow)
    ask(harness, prompt_of(21))
    fill(harness, 1)
    harness.cache.reset()
    gate.set()
    worker_of(harness).drain()
    assert harness.engine.stats().tiers["disk"]["blocks"] == 0
    assert ask(harness, prompt_of(21)) == 0


def test_busy_disk_drops_writes_and_counts_them(
    make: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make(disk_blocks=64)
    worker = worker_of(harness)
    worker.max_queued = 2
    gate, write = threading.Event(), os.pwrite

    def slow(*arguments: Any) -> int:
        assert gate.wait(30)
        return write(*arguments)

    monkeypatch.setattr(tiers_disk.os, "pwrite", slow)
    for seed in range(4):
        ask(harness, prompt_of(26, seed=seed))
    assert harness.engine.stats().tiers["disk"]["writes_dropped"] > 0
    gate.set()
    worker.drain()
    for seed in range(4):
        ask(harness, prompt_of(26, seed=seed))


def test_preempted_request_finds_its_blocks_in_a_tier(make: MakeHarness) -> None:
    """Swapped out, its place taken by another, and back: both as if alone."""
    harness = make(num_blocks=9, host_blocks=32, max_num_seqs=2)
    prompts = {"a": prompt_of(12), "b": prompt_of(12, seed=1)}
    params = {**OPTIONS, "max_tokens": 14}
    for name, prompt in prompts.items():
        harness.add(name, prompt, **params)
    harness.run()
    assert harness.engine.stats().preemptions > 0
    for name, prompt in prompts.items():
        assert harness.answers[name].token_ids == cold(prompt, **params).token_ids


def test_slow_tier_is_not_used_under_the_cost_rule(make: MakeHarness) -> None:
    harness = make(host_blocks=32, tier_policy="auto")
    prompt = prompt_of(21)
    ask(harness, prompt)
    fill(harness, 1, 2)
    costs = tiers_of(harness).costs
    costs.prefill_rate = 1e6  # four tokens in 4 us
    costs.rates["host"] = 1e3  # 32 bytes in 32 ms
    assert ask(harness, prompt) == 0
    fill(harness, 3, 4)
    costs.prefill_rate = 1e2
    costs.rates["host"] = 1e9
    assert ask(harness, prompt) == 20


@pytest.mark.parametrize("seed", range(6))
def test_stress_random_requests_equal_cold(make: MakeHarness, seed: int) -> None:
    """Few prompts, small tiers, aborts and failing copies: every answer is the cold one."""
    rng = random.Random(seed)
    harness = make(
        num_blocks=14, host_blocks=rng.choice([0, 3, 16]), disk_blocks=rng.choice([5, 40]),
        max_num_seqs=3, max_num_batched_tokens=12,
    )  # fmt: skip
    base = [prompt_of(30, seed=s) for s in range(3)]
    asked: dict[str, list[int]] = {}
    aborted = set()
    for number in range(60):
        cut = rng.randrange(1, 30)
        prompt = rng.choice(base)[:cut] + prompt_of(rng.randrange(3), seed=rng.randrange(4))
        name = f"r{number}"
        asked[name] = prompt
        harness.add(name, prompt, **OPTIONS)
        if rng.random() < 0.1:
            harness.runner.failing_transfers = 1
        for _ in range(rng.randrange(6)):
            harness.step()
        if rng.random() < 0.15 and harness.engine.requests:
            victim = rng.choice(list(harness.engine.requests))
            harness.abort(victim)
            aborted.add(victim)
    harness.run()
    for name, prompt in asked.items():
        if name not in aborted:
            assert harness.answers[name].token_ids == cold(prompt, **OPTIONS).token_ids
    tiers = by_tier(harness)
    assert tiers["host"] + tiers["disk"] > 0


def test_waiting_for_the_disk_does_not_spin(
    make: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make(disk_blocks=64)
    ask(harness, prompt_of(9))
    fill(harness, 1, 2)
    worker_of(harness).drain()
    read = os.pread

    def slow(*arguments: Any) -> bytes:
        time.sleep(0.1)
        return read(*arguments)

    monkeypatch.setattr(tiers_disk.os, "pread", slow)
    harness.add("a", prompt_of(9), **OPTIONS)
    steps = 0
    while not harness.answers["a"].outputs:
        harness.step()
        steps += 1
    assert steps < 20
    harness.run()
