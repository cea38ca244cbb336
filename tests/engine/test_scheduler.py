from __future__ import annotations

from typing import Any

import pytest
from fakes import Harness, prompt_of

from radixkv.cache import RadixCache
from radixkv.engine.scheduler import Scheduler, SchedulingOptions

GREEDY: dict[str, Any] = {"temperature": 0.0}


def counts(harness: Harness) -> dict[str, int]:
    """Tokens per request of the next step."""
    return {c.branch.request.request_id: c.count for c in harness.scheduler.schedule(0.0)}


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
    assert next(iter(harness.scheduler.waiting)).request_id == "c"


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
    assert [r.request_id for r in harness.scheduler.waiting] == ["b"]
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
    assert [r.request_id for r in harness.scheduler.waiting] == ["2"]
    assert next(iter(harness.scheduler.waiting)).num_preemptions == 1
    assert [r.request_id for r in harness.scheduler.running.values()] == ["0", "1"]


def test_preempted_request_keeps_its_place_in_the_queue() -> None:
    harness = Harness(64, 4, max_num_seqs=2)
    request = harness.add("a", prompt_of(4), max_tokens=6, **GREEDY)
    harness.step()
    harness.add("late", prompt_of(4, seed=1), max_tokens=6, **GREEDY)
    harness.add("later", prompt_of(4, seed=2), max_tokens=6, **GREEDY)
    harness.scheduler.preempt(request)
    assert [r.request_id for r in harness.scheduler.waiting] == ["a", "late", "later"]
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


# --- order --------------------------------------------------------------------------------------


def finish_order(harness: Harness) -> list[str]:
    """Run to the end; return the requests as they finish."""
    finished: list[str] = []
    while harness.engine.has_work:
        finished += [o.request_id for o in harness.step() if o.output.finish_reason]
    return finished


def running(harness: Harness) -> list[str]:
    return [r.request_id for r in harness.scheduler.running.values()]


def waiting(harness: Harness) -> list[str]:
    return [r.request_id for r in harness.scheduler.waiting]


def test_unknown_preemption_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="auto, recompute, swap"):
        Harness(scheduling=SchedulingOptions(preemption_mode="drop"))


def test_lower_priority_number_runs_first() -> None:
    harness = Harness(64, 4, max_num_seqs=1, scheduling=SchedulingOptions(policy="priority"))
    for name, priority in (("a", 2), ("b", 0), ("c", -1), ("d", 0)):
        prompt = prompt_of(5, seed=ord(name))
        harness.add(name, prompt, max_tokens=2, priority=priority, **GREEDY)
    assert finish_order(harness) == ["c", "b", "d", "a"]


def test_preemption_takes_the_latest_of_the_lowest_priority() -> None:
    harness = Harness(9, 4, scheduling=SchedulingOptions(policy="priority"))
    for name, priority in (("low", 5), ("lower", 7), ("lower2", 7), ("high", 0)):
        prompt = prompt_of(4, seed=len(name))
        harness.add(name, prompt, max_tokens=12, ignore_eos=True, priority=priority, **GREEDY)
    victims: list[str] = []
    while len(victims) < 2 and harness.engine.has_work:
        before = set(waiting(harness))
        harness.step()
        victims += [n for n in waiting(harness) if n not in before]
    assert victims == ["lower2", "lower"]
    harness.run()


def test_policy_fcfs_preempts_the_latest_whatever_its_priority() -> None:
    harness = Harness(6, 4)
    for i in range(3):
        harness.add(str(i), prompt_of(4, seed=i), max_tokens=12, priority=-i, **GREEDY)
    while not harness.scheduler.num_preemptions:
        harness.step()
    assert waiting(harness) == ["2"]
    harness.run()


def test_cached_prompts_run_first_but_nobody_waits_for_ever() -> None:
    now = [0.0]
    options = SchedulingOptions(policy="cache-aware", max_skip_s=5.0)
    harness = Harness(200, 4, max_num_seqs=1, scheduling=options, clock=lambda: now[0])
    base = prompt_of(32)
    harness.ask(base, max_tokens=1, **GREEDY)
    harness.add("busy", prompt_of(5, seed=9), max_tokens=3, **GREEDY)
    harness.step()
    harness.add("cold", prompt_of(8, seed=1), max_tokens=3, **GREEDY)
    for i in range(6):
        harness.add(f"warm{i}", [*base, 40 + i], max_tokens=3, **GREEDY)
    order: list[str] = []
    while harness.engine.has_work:
        order += [o.request_id for o in harness.step() if o.output.finish_reason]
        now[0] += 0.5
    assert order[:3] == ["busy", "warm0", "warm1"]
    # Nine half seconds a request: it would have been the last.
    assert 0 < order.index("cold") < len(order) - 1


def test_flood_of_one_namespace_delays_another_by_its_share_only() -> None:
    """First come, first served would let the newcomer wait for all sixty."""
    harness = Harness(400, 4, max_num_seqs=2)
    for i in range(60):
        harness.add(f"f{i}", prompt_of(12, seed=i), ("flood",), max_tokens=4, **GREEDY)
    for _ in range(10):
        harness.step()
    harness.add("single", prompt_of(12, seed=99), ("quiet",), max_tokens=4, **GREEDY)
    finished: list[str] = []
    while "single" not in finished:
        finished += [o.request_id for o in harness.step() if o.output.finish_reason]
    # Those that ran, and one more that may start before its turn.
    assert len(finished) - 1 <= 3
    harness.run()


def test_two_floods_share_what_is_served() -> None:
    harness = Harness(400, 4, max_num_seqs=2)
    for i in range(30):
        harness.add(f"a{i}", prompt_of(24, seed=i), ("a",), max_tokens=2, **GREEDY)
    for i in range(60):
        harness.add(f"b{i}", prompt_of(8, seed=100 + i), ("b",), max_tokens=2, **GREEDY)
    served = {"a": 0, "b": 0}
    while served["a"] < 15 * 28:
        for output in harness.step():
            if output.output.finish_reason:
                name = output.request_id[0]
                served[name] += (24 if name == "a" else 8) + 2 * 2
    assert 0.8 <= served["b"] / served["a"] <= 1.25


def test_computed_and_generated_tokens_are_charged_and_reused_ones_are_not() -> None:
    harness = Harness(64, 4)
    prompt = prompt_of(13)
    counters = harness.scheduler.waiting.counters
    for number in (1, 2):
        harness.add(str(number), prompt, ("a",), max_tokens=6, ignore_eos=True, **GREEDY)
        harness.run()
        # The last token is never fed back.
        assert counters.get(("a",)) == 13 + (number - 1) + number * 5 * counters.output_weight


# --- what a stuck request costs -----------------------------------------------------------------


def stuck() -> tuple[Harness, list[int]]:
    """A request at the head of the queue that finds half of itself, and no blocks for the rest."""
    harness = Harness(16, 4, max_num_batched_tokens=64)
    base = prompt_of(12)
    harness.ask(base, max_tokens=1, **GREEDY)
    harness.add("long", prompt_of(24, seed=1), max_tokens=12, ignore_eos=True, **GREEDY)
    harness.step()
    harness.add("stuck", [*base, *prompt_of(30, seed=2)], max_tokens=2, **GREEDY)
    return harness, base


def test_stuck_head_is_not_counted_as_a_hit_until_it_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness, base = stuck()
    node = harness.cache.match_prefix(base).match
    assert node is not None
    before = node.node.hits
    for _ in range(6):
        harness.step()
        assert waiting(harness) == ["stuck"]
    assert node.node.hits == before
    harness.run()
    assert harness.answers["stuck"].last.num_cached_tokens == 12


def test_stuck_head_is_looked_up_only_when_the_tree_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness, _ = stuck()
    calls: list[str] = []
    for name in ("explain", "match_bytes", "lock"):
        method = getattr(harness.cache, name)
        monkeypatch.setattr(
            harness.cache, name, lambda *a, n=name, m=method, **k: calls.append(n) or m(*a, **k)
        )
    for _ in range(8):
        harness.step()
    assert waiting(harness) == ["stuck"]
    # The one that runs takes two blocks meanwhile, and files two.
    assert "explain" not in calls
    assert "lock" not in calls
    assert calls.count("match_bytes") <= 5


def test_capacity_counts_what_the_lock_takes_from_the_evictable() -> None:
    """All blocks are evictable, but those that the request reuses can't be evicted for it."""
    harness = Harness(10, 4)
    base = prompt_of(21)
    harness.ask(base, max_tokens=1, **GREEDY)
    harness.add("run", prompt_of(4, seed=1), max_tokens=30, ignore_eos=True, **GREEDY)
    harness.step()
    cached = harness.cache.match_prefix(base).match
    assert cached is not None
    assert cached.num_blocks == 5
    hits = cached.node.hits
    harness.add("stuck", [*base[:20], *prompt_of(17, seed=2)], max_tokens=2, **GREEDY)
    harness.step()
    # Five blocks besides the cached ones are wanted; with the cached ones unlocked, eight are left.
    assert waiting(harness) == ["stuck"]
    assert cached.node.hits == hits
    harness.run()


# --- prompts in flight --------------------------------------------------------------------------


def test_followers_are_compared_once_and_looked_up_never_while_they_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = SchedulingOptions(itl_target_s=1e-9)  # leaves room for others in every step
    harness = Harness(400, 4, max_num_batched_tokens=64, scheduling=options)
    harness.add("busy", prompt_of(4, seed=1), max_tokens=60, ignore_eos=True, **GREEDY)
    harness.step()
    prompt = prompt_of(160)
    for i in range(12):
        harness.add(str(i), prompt, max_tokens=2, **GREEDY)
    harness.step()
    harness.step()
    calls: list[int] = []
    match = harness.cache.match_bytes
    monkeypatch.setattr(
        harness.cache, "match_bytes", lambda *a, **k: calls.append(1) or match(*a, **k)
    )
    for _ in range(8):
        harness.step()
    assert running(harness) == ["busy", "0"]
    assert harness.scheduler.admission.leaders.num_followers == 11
    assert calls == []
    harness.run()
    assert harness.engine.tokens_computed == 4 + 160 + 11
    assert harness.scheduler.admission.leaders.num_followers == 0
    assert len(harness.scheduler.admission.leaders) == 0


def test_follower_prefers_the_leader_that_shares_most() -> None:
    harness = Harness(400, 4, max_num_batched_tokens=16)
    prompt = prompt_of(60)
    harness.add("long", prompt, max_tokens=2, **GREEDY)
    harness.step()
    harness.add("other", [*prompt[:20], *prompt_of(40, seed=1)], max_tokens=2, **GREEDY)
    harness.add("same", [*prompt, 7], max_tokens=2, **GREEDY)
    harness.run()
    assert harness.answers["other"].last.num_cached_tokens == 20
    assert harness.answers["same"].last.num_cached_tokens == 60


def test_aborted_follower_leaves_no_trace() -> None:
    harness = Harness(64, 4, max_num_batched_tokens=40)
    prompt = prompt_of(60)
    for name in ("leader", "follower"):
        harness.add(name, prompt, max_tokens=2, **GREEDY)
    harness.step()
    harness.step()
    assert harness.scheduler.admission.leaders.num_followers == 1
    harness.abort("follower")
    assert harness.scheduler.admission.leaders.num_followers == 0
    harness.run()
