from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from fakes import VOCAB, FakeRunner, Harness, fake_logits

from radixkv.engine.branch import Branch
from radixkv.engine.prompt_lookup import Draft, find_occurrences
from radixkv.engine.scheduler import SchedulingOptions
from radixkv.engine.speculation import FIRST_PAUSE, TRIAL_STEPS, Speculator
from radixkv.engine.step_cost import StepCost, StepLoad


class RepeatingRunner(FakeRunner):
    """A model that mostly goes on as the text did where its last two tokens occurred before.

    Which of the places it follows depends on the whole history. Where it follows none, the next
    token is some earlier one.
    """

    num_moves = 0

    def logits_after(self, history: np.ndarray) -> np.ndarray:
        logits = fake_logits(history, self.vocab_size)
        choice = int(np.abs(logits[0]) * 1e6)
        pair = (history[:-2] == history[-2]) & (history[1:-1] == history[-1])
        places = np.flatnonzero(pair)
        if len(places) and choice % 8:
            logits[history[places[choice % len(places)] + 2]] += 20.0
        else:
            logits[history[choice % len(history)]] += 20.0
        return logits

    def move_slots(self, moves: Sequence[tuple[int, int]]) -> None:
        self.num_moves += len(moves)
        super().move_slots(moves)


def make(num_tokens: int = 8, num_blocks: int = 256, **options: Any) -> Harness:
    scheduling = SchedulingOptions(speculative_tokens=num_tokens)
    harness = Harness(num_blocks, scheduling=scheduling, **options)
    runner = harness.engine.runner = harness.runner = RepeatingRunner(num_blocks, 4)
    speculator = harness.scheduler.speculator
    if speculator is not None:
        # The clock of a test says nothing of what pays.
        speculator.record_step = lambda *args: None  # type: ignore[method-assign]
        speculator._least_chances = lambda bs: [0.05] * len(bs)  # type: ignore[method-assign]
    assert isinstance(runner, RepeatingRunner)
    return harness


def prompt(seed: int, length: int = 40) -> list[int]:
    rng = np.random.default_rng(seed)
    words = [rng.integers(32, VOCAB, 5).tolist() for _ in range(3)]
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += words[rng.integers(3)]
    return tokens[:length]


def answers(num_tokens: int, requests: int = 4, **params: Any) -> tuple[list[Any], Harness]:
    harness = make(num_tokens)
    params.setdefault("max_tokens", 30)
    for i in range(requests):
        harness.add(f"r{i}", prompt(i), seed=i, **params)
    harness.run()
    found = [
        [(a.token_ids, a.text, a.last.finish_reason, a.last.stop_reason) for a in choices]
        for choices in harness.choices.values()
    ]
    return found, harness


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 20},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"temperature": 0.7, "presence_penalty": 0.5, "min_tokens": 5},
        {"temperature": 0.0, "logit_bias": ((40, 30.0),)},
        {"temperature": 0.9, "n": 3},
        {"temperature": 0.9, "n": 2, "best_of": 3},
        {"temperature": 0.0, "stop_token_ids": tuple(range(32, 200))},
        {"temperature": 0.0, "max_tokens": 1},
        {"temperature": 0.0, "max_tokens": 2},
        {"temperature": 0.0, "use_beam_search": True, "n": 3},
    ],
    ids=str,
)
def test_answers_are_those_without_drafts(params: dict[str, Any]) -> None:
    expected, _ = answers(0, **params)
    found, harness = answers(8, **params)
    assert found == expected
    assert not harness.engine.has_work


def test_drafts_save_steps_and_are_counted() -> None:
    _, plain = answers(0, requests=1, temperature=0.0)
    _, drafted = answers(8, requests=1, temperature=0.0)
    speculator = drafted.scheduler.speculator
    assert speculator is not None
    assert drafted.engine.num_steps < 0.7 * plain.engine.num_steps
    made = sum(len(a.token_ids) for a in drafted.answers.values())
    assert made == 30 == drafted.engine.tokens_generated
    assert 0 < speculator.num_accepted < speculator.num_drafted
    assert drafted.engine.stats().scheduling["speculation"]["tokens_accepted"] == (
        speculator.num_accepted
    )


def test_logprobs_come_with_every_token_of_a_step() -> None:
    for temperature in (0.0, 0.8):
        logprobs = []
        for num_tokens in (0, 8):
            harness = make(num_tokens)
            harness.add("a", prompt(1), temperature=temperature, seed=1, logprobs=2, max_tokens=25)
            harness.run()
            outputs = harness.answers["a"].outputs
            logprobs.append([entry for o in outputs for entry in o.logprobs or ()])
        assert len(logprobs[0]) == 25
        assert logprobs[0] == logprobs[1]


def test_stop_string_in_the_middle_of_a_draft_ends_the_answer_there() -> None:
    plain = make(0)
    plain.add("a", prompt(2), temperature=0.0, max_tokens=30)
    plain.run()
    text = plain.answers["a"].text
    for at in range(4, 20, 3):
        harness = make(8)
        harness.add("a", prompt(2), temperature=0.0, max_tokens=30, stop=(text[at : at + 2],))
        harness.run()
        answer = harness.answers["a"]
        assert answer.text == text[: text.index(text[at : at + 2])]
        assert answer.last.finish_reason == "stop"
        assert harness.cache.num_referenced_blocks == 0


def test_what_was_drafted_serves_later_requests() -> None:
    harness = make(8)
    harness.add("a", prompt(3), temperature=0.0, max_tokens=41)
    harness.run()
    answer = harness.answers["a"].token_ids
    harness.add("b", prompt(3) + answer + [50], temperature=0.0, max_tokens=20)
    harness.run()
    cold = make(0)
    cold.add("b", prompt(3) + answer + [50], temperature=0.0, max_tokens=20)
    cold.run()
    assert harness.answers["b"].token_ids == cold.answers["b"].token_ids
    assert harness.answers["b"].last.num_cached_tokens == 40 + 41 - 1


@pytest.mark.parametrize("num_blocks", [24, 40])
def test_drafts_in_a_small_pool_change_nothing(num_blocks: int) -> None:
    expected, _ = answers(0, requests=6, temperature=0.8)
    harness = make(8, num_blocks=num_blocks)
    for i in range(6):
        harness.add(f"r{i}", prompt(i), seed=i, temperature=0.8, max_tokens=30)
    harness.run()
    found = [[a.token_ids for a in choices] for choices in harness.choices.values()]
    assert found == [[entry[0] for entry in choices] for choices in expected]
    assert harness.scheduler.num_preemptions > 0


def test_lines_beside_the_likeliest_are_accepted_and_moved_into_place() -> None:
    moves = 0
    for seed in range(12):
        harness = make(8)
        harness.add("a", prompt(seed, 60), temperature=0.0, max_tokens=60)
        harness.run()
        assert isinstance(harness.runner, RepeatingRunner)
        moves += harness.runner.num_moves
    assert moves > 0


def test_every_step_with_drafts_is_judged_by_the_decodes_it_had() -> None:
    """Counted after the answers had grown, there seemed to be none, and nothing was judged."""
    harness = make(8)
    speculator = harness.scheduler.speculator
    assert speculator is not None
    judged: list[int] = []
    speculator.record_step = lambda load, num, s: judged.append(num)  # type: ignore[method-assign]
    for i in range(3):
        harness.add(f"r{i}", prompt(i, 60), temperature=0.0, max_tokens=40)
    harness.run()
    assert judged
    assert set(judged) <= {1, 2, 3}


def test_branch_that_fails_in_the_middle_of_a_draft_takes_down_its_request_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sibling's walk went on over sequences that were freed, and ended everybody's step."""
    harness = make(8)
    harness.add("bad", prompt(1, 60), temperature=0.01, n=2, max_tokens=60)
    harness.add("good", prompt(2, 60), temperature=0.0, max_tokens=60)
    go_on = harness.engine._go_on

    def fail(branch: Branch, *args: Any) -> Any:
        if branch.request.request_id == "bad":
            raise RuntimeError("injected")
        return go_on(branch, *args)

    monkeypatch.setattr(harness.engine, "_go_on", fail)
    harness.run()
    assert {a.last.finish_reason for a in harness.choices["bad"]} == {"error"}
    assert harness.answers["good"].last.finish_reason == "length"
    assert harness.cache.num_referenced_blocks == 0


def repeating_branch() -> Branch:
    """Return a branch whose last tokens occurred before."""
    harness = make(8)
    harness.add("a", prompt(1, 80), temperature=0.0, max_tokens=50)
    while True:
        harness.step()
        branch = harness.engine.requests["a"].live[0]
        found = find_occurrences(branch.sequence.token_ids)
        if len(found) > 2 and found[0].overlap > 2:
            return branch


def speculator_of(step_s: float, token_s: float) -> tuple[Speculator, StepCost]:
    cost = StepCost()
    for tokens in (1, 2, 4, 8, 16, 32, 64) * 12:
        for samples in (1, 2, 3):
            cost.record(StepLoad(tokens, tokens * 100, samples), step_s + token_s * tokens)
    return Speculator(cost, max_tokens=8), cost


def test_dear_tokens_are_drafted_only_if_likely() -> None:
    branch = repeating_branch()
    lengths = []
    for token_s in (1e-5, 2e-3, 9e-3):
        speculator, _ = speculator_of(10e-3, token_s)
        speculator._num_tries = 0
        lengths.append(len(speculator.draft([branch], 64).get(branch, ())))
    assert lengths[0] > lengths[1] > lengths[2]


def test_drafting_pauses_while_it_does_not_pay() -> None:
    branch = repeating_branch()
    speculator, _ = speculator_of(10e-3, 1e-5)
    draft = Draft((1, 2), (-1, 0), ((0, 3), (0, 4)))
    load = StepLoad(1, 100, 1)

    def steps(count: int, seconds: float, right: bool) -> None:
        for _ in range(count):
            speculator.record_walk(draft, [1, 2, 9] if right else [7])
            speculator.record_step(load, 1, seconds)

    # Two more tokens for half as much time again pay.
    steps(3 * TRIAL_STEPS, 15e-3, right=True)
    assert speculator.num_pauses == 0
    # The same time for nothing doesn't.
    steps(TRIAL_STEPS, 15e-3, right=False)
    assert speculator.num_pauses == 1
    for _ in range(FIRST_PAUSE):
        assert speculator.draft([branch], 64) == {}
    steps(TRIAL_STEPS, 5e-3, right=True)
    assert speculator.draft([branch], 64)


def test_pauses_grow_while_drafting_keeps_failing() -> None:
    speculator, _ = speculator_of(10e-3, 1e-5)
    draft = Draft((1,), (-1,), ((0, 3),))
    lengths = []
    for _ in range(3):
        for _ in range(TRIAL_STEPS):
            speculator.record_walk(draft, [7])
            speculator.record_step(StepLoad(1, 100, 1), 1, 20e-3)
        count = 0
        while speculator._pause:
            speculator.draft([], 64)
            count += 1
        lengths.append(count)
    assert lengths == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
