from __future__ import annotations

from typing import Any

import pytest
from fakes import Harness, prompt_of

from radixkv.cache import RadixCache
from radixkv.engine.scheduler import Scheduler

GREEDY: dict[str, Any] = {"temperature": 0.0}


def counts(harness: Harness) -> dict[str, int]:
    """Tokens per request of the next step."""
    return {c.request.request_id: c.count for c in harness.scheduler.schedule(0.0)}


def test_budget_below_the_number_of_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        Scheduler(RadixCache(4), max_num_seqs=8, max_num_batched_tokens=7)


def test_budget_is_shared_decodes_first() -> None:
    harness = Harness(64, 4, max_num_batched_tokens=20, max_num_seqs=4)
    harness.add("a", prompt_of(5), max_tokens=9, **GREEDY)
    harness.step()
    harness.add("b", prompt_of(30, seed=1), max_tokens=9, **GREEDY)
    harness.add("c", prompt_of(30, seed=2), max_tokens=9, **GREEDY)
    assert counts(harness) == {"a": 1, "b": 19}
    assert harness.scheduler.waiting.peekitem(0)[1].request_id == "c"


def test_step_never_exceeds_budget_or_sequences() -> None:
    harness = Harness(200, 4, max_num_batched_tokens=10, max_num_seqs=5)
    for i in range(12):
        harness.add(str(i), prompt_of(3 + 7 * (i % 4), seed=i), max_tokens=6, **GREEDY)
    while harness.engine.has_work:
        harness.step()
        meta = harness.runner.steps[-1].attention
        assert meta.num_tokens <= 10
        assert meta.num_seqs <= 5
    assert max(s.attention.num_seqs for s in harness.runner.steps) == 5


def test_first_come_first_served() -> None:
    harness = Harness(64, 4, max_num_seqs=1)
    for name in "abc":
        harness.add(name, prompt_of(5, seed=ord(name)), max_tokens=2, **GREEDY)
    finished = []
    while harness.engine.has_work:
        finished += [o.request_id for o in harness.step() if o.output.finish_reason]
    assert finished == ["a", "b", "c"]


def test_admission_takes_room_for_the_whole_prompt_or_nothing() -> None:
    harness = Harness(8, 4, max_num_batched_tokens=16)
    harness.add("a", prompt_of(20), max_tokens=2, **GREEDY)
    harness.step()
    free = harness.cache.num_available_blocks
    harness.add("b", prompt_of(18, seed=1), max_tokens=1, **GREEDY)
    counts(harness)
    assert [r.request_id for r in harness.scheduler.waiting.values()] == ["b"]
    assert harness.cache.num_available_blocks == free
    assert harness.cache.stats.requests == 1


def test_admission_leaves_a_block_for_everyone_who_runs() -> None:
    harness = Harness(6, 4)
    harness.add("a", prompt_of(4), max_tokens=12, **GREEDY)
    harness.step()
    harness.add("b", prompt_of(16, seed=1), max_tokens=1, **GREEDY)
    harness.step()
    # The running one has two blocks now; the other four would all go to the prompt.
    assert harness.cache.num_available_blocks == 4
    assert len(harness.scheduler.waiting) == 1


def test_preemption_takes_the_latest() -> None:
    harness = Harness(6, 4)
    for i in range(3):
        harness.add(str(i), prompt_of(4, seed=i), max_tokens=12, **GREEDY)
    while not harness.scheduler.num_preemptions:
        harness.step()
    assert [r.request_id for r in harness.scheduler.waiting.values()] == ["2"]
    assert harness.scheduler.waiting.peekitem(0)[1].num_preemptions == 1
    assert [r.request_id for r in harness.scheduler.running.values()] == ["0", "1"]


def test_preempted_request_keeps_its_place_in_the_queue() -> None:
    harness = Harness(64, 4, max_num_seqs=2)
    request = harness.add("a", prompt_of(4), max_tokens=6, **GREEDY)
    harness.step()
    harness.add("late", prompt_of(4, seed=1), max_tokens=6, **GREEDY)
    harness.add("later", prompt_of(4, seed=2), max_tokens=6, **GREEDY)
    harness.scheduler.preempt(request)
    assert [r.request_id for r in harness.scheduler.waiting.values()] == ["a", "late", "later"]
    harness.step()
    assert [r.request_id for r in harness.scheduler.running.values()] == ["a", "late"]


def test_follower_waits_for_the_leader_and_strangers_pass() -> None:
    harness = Harness(64, 4, max_num_batched_tokens=16)
    prompt = prompt_of(40)
    harness.add("leader", prompt, max_tokens=2, **GREEDY)
    harness.add("follower", prompt[:30] + prompt_of(5, seed=1), max_tokens=2, **GREEDY)
    harness.step()
    harness.add("stranger", prompt_of(6, seed=2), max_tokens=2, **GREEDY)
    harness.step()
    harness.step()
    running = [r.request_id for r in harness.scheduler.running.values()]
    assert "stranger" in running
    harness.run()
    assert harness.answers["follower"].last.num_cached_tokens == 30
    assert harness.engine.tokens_computed == 40 + 5 + 6


def test_follower_of_another_beginning_does_not_wait() -> None:
    harness = Harness(64, 4, max_num_batched_tokens=64)
    prompt = prompt_of(40)
    harness.add("leader", prompt, max_tokens=2, **GREEDY)
    harness.add("other", [prompt[0] ^ 1, *prompt[1:]], max_tokens=2, **GREEDY)
    assert counts(harness) == {"leader": 40, "other": 24}


def test_disabled_cache_lets_nobody_wait() -> None:
    harness = Harness(64, 4, max_num_batched_tokens=64, enabled=False)
    for name in "ab":
        harness.add(name, prompt_of(40), max_tokens=2, **GREEDY)
    assert counts(harness) == {"a": 40, "b": 24}


def test_half_a_block_is_left_out_when_no_block_can_be_had_for_it() -> None:
    """All but the copy fits: the request is admitted with the whole blocks alone."""
    harness = Harness(3, 4)
    base = prompt_of(11)
    harness.ask(base, max_tokens=1, **GREEDY)
    answer = harness.ask([*base[:6], 50, 51, 52, 53], max_tokens=1, **GREEDY)
    assert answer.last.num_cached_tokens == 4
    assert len(answer.token_ids) == 1
