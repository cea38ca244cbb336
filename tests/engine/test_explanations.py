from __future__ import annotations

import asyncio

import pytest
from fakes import Harness, make_engine, prompt_of
from test_async_engine import collect

from radixkv.engine import AsyncEngine
from radixkv.errors import EngineClosedError, RequestRejectedError
from radixkv.request import SamplingParams

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


def reason_of(harness: Harness, request_id: str) -> str:
    entry = harness.engine.explanations.get(request_id)
    assert entry is not None
    return entry.explanation.reason


def test_a_request_is_explained_as_it_was_at_its_admission() -> None:
    harness = Harness()
    prompt = prompt_of(30)
    harness.add("cold", prompt, max_tokens=2)
    harness.run()
    harness.add("warm", prompt, max_tokens=2)
    harness.add("other", [*prompt[:10], 40, *prompt[11:]], max_tokens=2)
    harness.run()
    explanations = harness.engine.explanations
    cold, warm, other = (explanations.get(i) for i in ("cold", "warm", "other"))
    assert cold is not None
    assert warm is not None
    assert other is not None
    assert (cold.explanation.reason, cold.num_cached_tokens) == ("never_seen", 0)
    assert (warm.explanation.reason, warm.num_cached_tokens) == ("complete", 29)
    assert (warm.num_prompt_tokens, warm.num_computed_tokens) == (30, 1)
    assert (other.explanation.reason, other.explanation.position) == ("diverged", 10)
    assert other.explanation.cached_window == prompt + warm_answer(harness)
    assert [e.request_id for e in explanations.recent(2)] == ["other", "warm"]
    assert [e.request_id for e in explanations.recent(9, misses_only=True)] == ["other", "cold"]


def warm_answer(harness: Harness) -> list[int]:
    """The computed tokens of the first answer, which follow its prompt in the cache."""
    return harness.answers["cold"].token_ids[:-1]


def test_what_is_explained_is_what_is_counted() -> None:
    harness = Harness()
    for i in range(12):
        harness.ask(prompt_of(20 + i, seed=i % 3), max_tokens=3)
    entries = harness.engine.explanations.recent(100)
    assert len(entries) == 12
    for entry in entries:
        assert entry.explanation.num_hit_tokens == entry.num_cached_tokens
    assert sum(e.num_cached_tokens for e in entries) == harness.cache.stats.tokens_hit


def test_a_follower_is_explained_after_its_leader_has_computed() -> None:
    """The lookup that counts is the one at admission, not the one at arrival."""
    harness = Harness(max_num_batched_tokens=16)
    prompt = prompt_of(40)
    harness.add("leader", prompt, max_tokens=2)
    harness.add("follower", prompt, max_tokens=2)
    harness.run()
    assert reason_of(harness, "leader") == "never_seen"
    assert reason_of(harness, "follower") in {"complete", "never_seen"}
    entry = harness.engine.explanations.get("follower")
    assert entry is not None
    assert entry.num_cached_tokens > 0


def test_a_preempted_request_keeps_its_first_explanation() -> None:
    harness = Harness(num_blocks=14)
    for name, seed in (("a", 1), ("b", 2)):
        harness.add(name, prompt_of(16, seed), max_tokens=20, ignore_eos=True)
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    assert len(harness.engine.explanations) == 2
    assert {reason_of(harness, n) for n in "ab"} == {"never_seen"}


def test_an_eviction_is_named_as_the_cause() -> None:
    harness = Harness(num_blocks=12)
    prompt = prompt_of(30, seed=1)
    harness.ask(prompt, max_tokens=1)
    harness.ask(prompt_of(40, seed=2), max_tokens=1)
    harness.add("again", prompt, max_tokens=1)
    harness.run()
    entry = harness.engine.explanations.get("again")
    assert entry is not None
    assert (entry.explanation.reason, entry.explanation.evicted_by) == ("evicted", "lru")


def test_what_a_tier_brings_back_is_no_miss() -> None:
    harness = Harness(num_blocks=12, host_blocks=32)
    prompt = prompt_of(30, seed=1)
    harness.ask(prompt, max_tokens=1)
    harness.ask(prompt_of(40, seed=2), max_tokens=1)
    harness.add("again", prompt, max_tokens=1)
    harness.run()
    entry = harness.engine.explanations.get("again")
    assert entry is not None
    assert entry.cached_by_tier["host"] > 0
    assert sum(entry.cached_by_tier.values()) == entry.num_cached_tokens == 28
    assert (entry.explanation.reason, entry.explanation.position) == ("below_block", 28)


def test_the_log_is_bounded() -> None:
    harness = Harness()
    log = harness.engine.explanations
    log.capacity = 3
    for i in range(5):
        harness.add(str(i), prompt_of(8, i), max_tokens=1)
        harness.run()
    assert [e.request_id for e in log.recent(10)] == ["4", "3", "2"]
    assert log.get("1") is None


async def test_an_async_engine_explains_requests_and_prompts() -> None:
    served = AsyncEngine(make_engine(), None, model_name="fake")  # type: ignore[arg-type]
    await served.start()
    prompt = prompt_of(30)
    await collect(served.submit(prompt, PARAMS, request_id="mine"))
    entry = served.explain("mine")
    assert entry is not None
    assert entry.explanation.reason == "never_seen"
    assert served.explain("unknown") is None
    assert served.recent_explanations(5) == [entry]
    found = await served.explain_prompt(prompt)
    assert (found.reason, found.num_hit_tokens) == ("complete", 29)
    assert (await served.explain_prompt(prompt, ("other",))).reason == "other_namespace"
    with pytest.raises(RequestRejectedError):
        await served.explain_prompt([])
    report = await served.tree_report(4, 4, "default")
    assert [e["namespace"] for e in report["namespaces"]] == ["default"]
    with pytest.raises(RequestRejectedError, match="namespace"):
        await served.tree_report(4, 4, "nobody")
    await served.shutdown()
    with pytest.raises(EngineClosedError):
        await asyncio.wait_for(served.tree_report(4, 4), 5)
