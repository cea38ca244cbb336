"""Beam search against a plain implementation over whole lists of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from fakes import CharTokenizer, Harness, cold_all, fake_logits, prompt_of

from radixkv.request import SamplingParams

ENDS = tuple(range(32, 72))
TOLERANCE = 1e-4


@dataclass
class Beam:
    tokens: list[int]
    total: float = 0.0
    score: float = 0.0


def plain_search(
    prompt: list[int],
    params: SamplingParams,
    ends: tuple[int, ...],
    stops: Callable[[list[int]], bool] = lambda _: False,
) -> list[Beam]:
    """The rules of transformers' beam search, written down without any KV."""
    width, penalty = params.num_branches, params.length_penalty
    assert params.max_tokens is not None
    running, finished = [Beam([])], []
    for length in range(1, params.max_tokens + 1):
        candidates = []
        for beam in running:
            logits = fake_logits(np.array(prompt + beam.tokens)).astype(np.float64)
            logprobs = logits - np.log(np.exp(logits).sum())
            if length <= params.min_tokens:
                logprobs[list(ends)] = -np.inf
            best = np.argsort(-logprobs)[: (1 + len(ends)) * width]
            candidates += [
                Beam([*beam.tokens, int(t)], beam.total + float(logprobs[t])) for t in best
            ]
        candidates.sort(key=lambda b: -b.total)
        done = [
            b.tokens[-1] in ends or length == params.max_tokens or stops(b.tokens)
            for b in candidates
        ]
        for beam, is_done in list(zip(candidates, done, strict=True))[:width]:
            if is_done:
                beam.score = beam.total / length**penalty
                finished.append(beam)
        finished = sorted(finished, key=lambda b: -b.score)[:width]
        running = [b for b, is_done in zip(candidates, done, strict=True) if not is_done][:width]
        if not running:
            break
        if len(finished) == width:
            if params.early_stopping is True:
                break
            reach = length
            if params.early_stopping == "never" and penalty > 0:
                reach = params.max_tokens
            if running[0].total / reach**penalty <= finished[-1].score:
                break
    return finished[: params.n]


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -2.0, 3.0])
@pytest.mark.parametrize(("width", "n"), [(1, 1), (2, 1), (4, 3), (5, 5)])
def test_beams_equal_the_plain_search(
    width: int, n: int, length_penalty: float, early_stopping: Any
) -> None:
    fields: dict[str, Any] = {
        "n": n,
        "best_of": width,
        "use_beam_search": True,
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
        "max_tokens": 12,
    }
    harness = Harness(128, 4, eos_token_ids=ENDS)
    for seed in range(2):
        prompt = prompt_of(10 + seed, seed=seed)
        wanted = plain_search(prompt, SamplingParams(**fields), ENDS)
        answers = harness.ask_all(prompt, **fields)
        assert [a.token_ids for a in answers] == [b.tokens for b in wanted]
        scores = [a.last.score for a in answers]
        assert scores == pytest.approx([b.score for b in wanted], rel=1e-6)
        for answer in answers:
            ended = answer.token_ids[-1] in ENDS
            assert answer.last.finish_reason == ("stop" if ended else "length")
            assert answer.text == text_of(answer.token_ids[:-1] if ended else answer.token_ids)


def text_of(ids: list[int]) -> str:
    return CharTokenizer().decode(ids)


def steps_of(early_stopping: Any, length_penalty: float) -> int:
    harness = Harness(256, 4, eos_token_ids=tuple(range(32, 232)))
    harness.ask_all(
        prompt_of(10), n=3, use_beam_search=True, max_tokens=40,
        length_penalty=length_penalty, early_stopping=early_stopping,
    )  # fmt: skip
    return len(harness.runner.steps)


def test_search_ends_as_early_as_it_is_told() -> None:
    early, middle, late = (steps_of(e, 1.0) for e in (True, False, "never"))
    assert early <= middle < late == 40


def test_beam_ends_at_a_stop_string() -> None:
    fields: dict[str, Any] = {"n": 3, "best_of": 4, "use_beam_search": True, "max_tokens": 10}
    stop = tuple(chr(i) for i in range(72, 136))
    prompt = prompt_of(10)

    def stops(tokens: list[int]) -> bool:
        return chr(tokens[-1]) in stop

    harness = Harness(128, 4, eos_token_ids=ENDS[:1])
    answers = harness.ask_all(prompt, **fields, stop=stop)
    wide = SamplingParams(**fields)
    # Candidates are cut off behind (1 + end tokens) * beams, which stop strings don't widen.
    wanted = plain_search(prompt, wide, ENDS[:1], stops)
    assert [a.token_ids for a in answers] == [b.tokens for b in wanted]
    assert any(a.last.stop_reason in stop for a in answers)
    for answer in answers:
        if answer.last.stop_reason in stop:
            assert answer.text == text_of(answer.token_ids[:-1])


def test_min_tokens_hold_for_beams() -> None:
    fields: dict[str, Any] = {"n": 3, "use_beam_search": True, "max_tokens": 10, "min_tokens": 6}
    prompt = prompt_of(10, seed=3)
    harness = Harness(128, 4, eos_token_ids=ENDS)
    answers = harness.ask_all(prompt, **fields)
    wanted = plain_search(prompt, SamplingParams(**fields), ENDS)
    assert [a.token_ids for a in answers] == [b.tokens for b in wanted]
    assert any(a.token_ids[-1] in ENDS for a in answers)
    assert all(len(a.token_ids) > 6 for a in answers)


def test_logprobs_of_a_beam_sum_up_to_its_score() -> None:
    harness = Harness(128, 4, eos_token_ids=ENDS)
    fields: dict[str, Any] = {"n": 3, "use_beam_search": True, "max_tokens": 10, "logprobs": 2}
    for answer in harness.ask_all(prompt_of(10), **fields, length_penalty=0.0):
        entries = answer.last.logprobs
        assert entries is not None
        assert [e.token_id for e in entries] == answer.token_ids
        assert sum(e.logprob for e in entries) == pytest.approx(answer.last.score, abs=TOLERANCE)
        assert all(len(e.top) == 2 for e in entries)


def test_penalties_count_the_tokens_of_their_own_beam() -> None:
    """With counts shared by the beams of one parent, the winner would differ from its replay."""
    fields: dict[str, Any] = {
        "n": 4, "use_beam_search": True, "max_tokens": 12, "frequency_penalty": 2.0,
        "logit_bias": tuple((i, 8.0) for i in range(80, 84)),
    }  # fmt: skip
    prompt = prompt_of(10)
    answers = Harness(128, 4).ask_all(prompt, **fields, length_penalty=0.0)
    for answer in answers:
        total = 0.0
        for i, token in enumerate(answer.token_ids):
            logits = fake_logits(np.array(prompt + answer.token_ids[:i])).astype(np.float64)
            logprobs = logits - np.log(np.exp(logits).sum())
            count = answer.token_ids[:i].count(token)
            total += logprobs[token] - 2.0 * count + (8.0 if 80 <= token < 84 else 0.0)
        assert answer.last.score == pytest.approx(total, abs=TOLERANCE)
    assert any(len(set(a.token_ids)) < len(a.token_ids) for a in answers)


def test_step_copies_at_most_one_block_per_beam() -> None:
    harness = Harness(128, 16)
    harness.add("a", prompt_of(40), n=4, use_beam_search=True, max_tokens=30)
    while harness.engine.has_work:
        harness.step()
        assert len(harness.runner.steps[-1].copies) <= 4
    assert harness.engine.tokens_computed == 40
    # Every beam that goes on computes one token a step, and nothing a second time.
    assert sum(len(s.token_ids) for s in harness.runner.steps) == 40 + 29 * 4


@pytest.mark.parametrize("num_blocks", [18, 24, 30])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_preempted_beams_equal_those_of_an_ample_pool(
    num_blocks: int, length_penalty: float
) -> None:
    fields: dict[str, Any] = {
        "n": 2, "best_of": 3, "use_beam_search": True, "max_tokens": 14,
        "length_penalty": length_penalty, "early_stopping": "never",
    }  # fmt: skip
    prompts = [prompt_of(10, seed=i) for i in range(3)]
    wanted = [[a.token_ids for a in cold_all(p, **fields)] for p in prompts]
    harness = Harness(num_blocks, 4, max_num_batched_tokens=16)
    harness.add("first", prompt_of(20, seed=9), temperature=0.9, seed=1, max_tokens=36)
    for i, prompt in enumerate(prompts):
        harness.add(str(i), prompt, **fields)
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    for i in range(3):
        assert [a.token_ids for a in harness.choices[str(i)]] == wanted[i]
