"""Every way out of the engine: each request ends once, holds nothing, and harms nobody."""

from __future__ import annotations

import random
from collections.abc import Sized
from typing import Any

import pytest
from fakes import Harness, cold, prompt_of

from radixkv.engine.scheduler import SchedulingOptions
from radixkv.errors import RequestRejectedError
from radixkv.request import SamplingParams

GREEDY: dict[str, Any] = {"temperature": 0.0}


def assert_aborted(harness: Harness, request_id: str) -> None:
    delivered = len(harness.answers[request_id].outputs)
    assert harness.abort(request_id) == 1
    assert harness.abort(request_id) == 0
    last = harness.answers[request_id].last
    assert (last.finish_reason, last.text, last.token_ids) == ("abort", "", ())
    for _ in range(2):
        harness.step()
    assert len(harness.answers[request_id].outputs) == delivered + 1


@pytest.mark.parametrize("steps", range(12))
def test_abort_at_every_point_of_a_request(steps: int) -> None:
    """Before admission, between chunks, after the last chunk, while decoding, at the end."""
    harness = Harness(32, 4, max_num_batched_tokens=8, max_num_seqs=4)
    prompt, other = prompt_of(30), prompt_of(7, seed=1)
    harness.add("a", prompt, max_tokens=8, **GREEDY)
    harness.add("b", other, max_tokens=12, **GREEDY)
    for _ in range(steps):
        harness.step()
    if harness.answers["a"].outputs and harness.answers["a"].last.finish_reason:
        assert harness.abort("a") == 0
    else:
        assert_aborted(harness, "a")
    harness.run()
    assert harness.answers["b"].token_ids == cold(other, max_tokens=12, **GREEDY).token_ids
    assert harness.ask(prompt, max_tokens=8, **GREEDY).token_ids == (
        cold(prompt, max_tokens=8, **GREEDY).token_ids
    )


def test_abort_of_a_preempted_request() -> None:
    harness = Harness(32, 4)
    request = harness.add("a", prompt_of(9), max_tokens=20, **GREEDY)
    for _ in range(4):
        harness.step()
    harness.scheduler.preempt(request)
    assert_aborted(harness, "a")
    harness.run()


def test_abort_of_an_unknown_or_finished_request_does_nothing() -> None:
    harness = Harness()
    assert harness.engine.abort("nobody") == []
    harness.add("a", prompt_of(5), max_tokens=1, **GREEDY)
    harness.run()
    assert harness.engine.abort("a") == []


def test_request_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    harness = Harness()
    harness.add("a", prompt_of(5), max_tokens=2, **GREEDY)
    with pytest.raises(RequestRejectedError, match="in use"):
        harness.engine.add_request("a", [40], SamplingParams())
    harness.run()
    harness.add("a", prompt_of(5), max_tokens=2, **GREEDY)
    harness.run()


@pytest.mark.parametrize("fail_at", range(1, 12))
def test_error_in_the_model_ends_only_the_requests_of_its_step(fail_at: int) -> None:
    harness = Harness(64, 4, max_num_batched_tokens=16, max_num_seqs=2)
    prompts = {str(i): prompt_of(8 + 5 * i, seed=i) for i in range(5)}
    for name, prompt in prompts.items():
        harness.add(name, prompt, max_tokens=4 + int(name), **GREEDY)
    harness.runner.fail_at = fail_at
    while len(harness.runner.steps) < fail_at - 1:
        harness.step()
    ended = harness.step()
    assert 1 <= len(ended) <= 2
    assert all(o.output.finish_reason == "error" for o in ended)
    assert all("injected" not in (o.output.error or "") for o in ended)
    failed = {o.request_id for o in ended}
    harness.run()
    for name, prompt in prompts.items():
        answer = harness.answers[name]
        assert (answer.last.finish_reason == "error") == (name in failed)
        if name not in failed:
            assert answer.token_ids == cold(prompt, max_tokens=4 + int(name), **GREEDY).token_ids
    for name in failed:
        again = harness.ask(prompts[name], max_tokens=5, **GREEDY)
        assert again.token_ids == cold(prompts[name], max_tokens=5, **GREEDY).token_ids


def test_copy_of_a_failed_step_is_never_served() -> None:
    """The block was filed as if the copy had been made, and the next prompt read garbage."""
    harness = Harness(6, 4)
    base = prompt_of(4)
    harness.ask(base, max_tokens=1, **GREEDY)
    harness.ask(prompt_of(4, seed=1), max_tokens=1, **GREEDY)
    harness.runner.fail_at = len(harness.runner.steps) + 1
    # It shares two tokens with the oldest block, which has to go to make room for it.
    request = harness.add("failed", base[:2] + prompt_of(16, seed=2), max_tokens=1, **GREEDY)
    harness.step()
    assert harness.answers["failed"].last.finish_reason == "error"
    assert request.num_cached_tokens == 2
    assert harness.cache.match_prefix(base).num_cached_tokens == 0
    prompt = [*base[:2], 50]
    answer = harness.ask(prompt, max_tokens=3, **GREEDY)
    assert answer.token_ids == cold(prompt, max_tokens=3, **GREEDY).token_ids


def test_partial_match_survives_the_failure_of_its_step() -> None:
    harness = Harness(64, 4)
    base = prompt_of(16)
    harness.ask(base, max_tokens=1, **GREEDY)
    request = harness.add("failed", [*base[:6], 50, 51, 52], max_tokens=1, **GREEDY)
    harness.runner.fail_at = len(harness.runner.steps) + 1
    harness.step()
    assert request.num_cached_tokens == 6
    # The copy went to a block that is free again, or it would hold what was never written.
    assert harness.cache.match_prefix(base).num_cached_tokens == 16
    assert harness.cache.num_tree_blocks == 4


def test_branch_that_owes_a_copy_to_a_failed_step_ends_with_it() -> None:
    """Opened at the step's beginning, it has no chunk in it: another prompt takes all the room."""
    priority = SchedulingOptions(policy="priority")
    harness = Harness(128, 4, max_num_batched_tokens=9, max_num_seqs=4, scheduling=priority)
    branched = harness.add(
        "b", prompt_of(14), n=2, priority=5, max_tokens=20, temperature=1.0, seed=3
    )
    while branched.timings.first_token is None or branched.live[0].num_output_tokens < 3:
        harness.step()
    harness.scheduler.preempt(branched)
    harness.cache.reset()
    harness.step()
    harness.add("c", prompt_of(40, seed=1), priority=0, max_tokens=4, **GREEDY)
    harness.step()
    assert [b.sequence.is_open for b in branched.live] == [True, False]
    harness.runner.fail_at = len(harness.runner.steps) + 1
    failed = {o.request_id for o in harness.step()}
    assert harness.runner.steps[-1].copies
    assert harness.runner.steps[-1].attention.num_tokens == 9  # of the prompt alone
    assert failed == {"b", "c"}
    harness.run()


class BrokenTokenizer:
    def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str:
        raise RuntimeError("broken")


def test_error_in_the_tokenizer_is_its_requests_alone() -> None:
    harness = Harness()
    request = harness.add("a", prompt_of(5), max_tokens=5, **GREEDY)
    request.branches[0].detokenizer._tokenizer = BrokenTokenizer()
    harness.add("b", prompt_of(6), max_tokens=5, **GREEDY)
    harness.run()
    assert harness.answers["a"].last.finish_reason == "error"
    assert harness.answers["b"].last.finish_reason == "length"


@pytest.mark.parametrize("chunk", [4, 16])
def test_short_prompt_and_long_answer_release_each_block_once(chunk: int) -> None:
    """Two code paths freed the slot of the last decode step."""
    harness = Harness(64, 4, max_num_batched_tokens=chunk, max_num_seqs=4)
    harness.ask(prompt_of(5), max_tokens=200, **GREEDY)
    assert harness.cache.reset() == 204 // 4
    assert harness.cache.num_free_blocks == 64


def test_thousand_requests_with_every_exit_leave_nothing_behind() -> None:
    rng = random.Random(0)
    harness = Harness(40, 4, max_num_batched_tokens=32, max_num_seqs=8, eos_token_ids=(7, 8, 9))
    live: set[str] = set()
    added = 0
    while added < 1000 or harness.engine.has_work:
        while added < 1000 and len(harness.engine.requests) < 12:
            name = str(added)
            prompt = prompt_of(rng.randint(1, 30), seed=rng.randrange(6))
            stop = (chr(rng.randrange(32, 200)),) if rng.random() < 0.3 else ()
            harness.add(
                name,
                prompt,
                ("t",) if rng.random() < 0.2 else (),
                max_tokens=rng.randint(1, 25),
                stop=stop,
                stop_token_ids=(rng.randrange(512),),
                seed=added % 7,
                temperature=rng.choice([0.0, 1.0]),
            )
            live.add(name)
            added += 1
        action = rng.random()
        if action < 0.15:
            harness.abort(rng.choice(sorted(live)))
        elif action < 0.2:
            harness.abort("unknown")
        elif action < 0.25 and harness.scheduler.running:
            harness.scheduler.preempt(rng.choice(list(harness.scheduler.running.values())))
        elif action < 0.27:
            harness.runner.fail_at = len(harness.runner.steps) + 1
        harness.step()
        live = set(harness.engine.requests) or {"nobody"}
        harness.runner.steps[:-1] = [harness.runner.steps[-1]] * (len(harness.runner.steps) - 1)
    harness.run()
    finished = harness.engine.stats().requests_finished
    assert sum(finished.values()) == 1000
    assert min(finished[reason] for reason in ("stop", "length", "abort", "error")) > 20
    harness.cache.reset()
    assert harness.cache.num_free_blocks == 40


def containers(owner: object) -> dict[str, int]:
    """Sizes of all containers that hang from an object's attributes."""
    sizes: dict[str, int] = {}
    seen: set[int] = set()

    def walk(value: object, name: str, depth: int) -> None:
        if id(value) in seen or depth > 6:
            return
        seen.add(id(value))
        if isinstance(value, Sized) and not isinstance(value, str | bytes):
            sizes[name] = len(value)
        attributes = list(getattr(value, "__dict__", {}).items())
        for cls in type(value).__mro__:
            slots = getattr(cls, "__slots__", ())
            attributes.extend((slot, getattr(value, slot, None)) for slot in slots)
        for key, item in attributes:
            if type(item).__module__.startswith(("radixkv", "collections", "sorted", "builtins")):
                walk(item, f"{name}.{key}", depth + 1)

    walk(owner, "engine", 0)
    return sizes


def test_no_container_grows_with_the_number_of_requests() -> None:
    """One entry per prefix that ever existed took a scheduler to 60 GB."""
    harness = Harness(64, 4, max_num_batched_tokens=64)
    engine = harness.engine
    engine.explanations.capacity = 50  # a bound that is reached before the sizes are compared
    largest: dict[str, int] = {}
    for i in range(3000):
        engine.add_request(
            str(i), prompt_of(10, seed=i), SamplingParams(max_tokens=1), namespace=(f"n{i % 50}",)
        )
        if i % 10 == 0:
            engine.abort(str(i))
        engine.step()
        harness.runner.steps.clear()
        if i % 50 == 0:
            with pytest.raises(RequestRejectedError):
                engine.add_request("bad", [], SamplingParams())
            sizes = containers(engine)
            if i < 1000:
                for name, size in sizes.items():
                    largest[name] = max(size, largest.get(name, 0))
            else:
                assert not [n for n, s in sizes.items() if s > max(largest.get(n, 0), 64)]
    assert len(largest) > 15
    assert engine.cache.tree.num_nodes <= 64
    assert len(engine.cache.tree.roots) <= 50
