from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fakes import CharTokenizer

from radixkv.cache import RadixCache
from radixkv.engine.branch import Branch
from radixkv.engine.request import EngineRequest
from radixkv.engine.sampler import NUCLEUS_CANDIDATES, Sampler, uniform
from radixkv.request import SamplingParams

CACHE = RadixCache(4, 4)


def request_of(
    params: dict[str, Any], *, prompt: list[int] | None = None, output: list[int] | None = None
) -> Branch:
    made = SamplingParams(**params)
    request = EngineRequest(
        "r",
        CACHE.create_sequence(prompt or [0]),
        made,
        order=0,
        seed=made.seed or 0,
        max_total_tokens=100,
        arrival=0.0,
        tokenizer=CharTokenizer(),
    )
    (branch,) = request.branches
    for token_id in output or []:
        branch.append(token_id)
    return branch


def draw(logits: np.ndarray, *requests: Branch, eos: tuple[int, ...] = ()) -> list[int]:
    rows = torch.from_numpy(np.broadcast_to(logits, (len(requests), logits.shape[-1])).copy())
    return [t.token_id for t in Sampler(eos).sample(rows.float(), requests)]


def random_logits(vocab: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=vocab, scale=3.0).astype(np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    exps = np.exp(logits.astype(np.float64) - logits.max())
    return np.asarray(exps / exps.sum())


def test_uniform_is_uniform_and_depends_on_seed_and_position_only() -> None:
    values = np.array([[uniform(s, p) for p in range(100)] for s in range(100)])
    assert 0.0 <= values.min() < values.max() < 1.0
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert ((counts - 500) ** 2 / 500).sum() < 50  # chi-square, 19 degrees of freedom
    assert len(np.unique(values)) == 10_000
    assert abs(np.corrcoef(values[:, :-1].ravel(), values[:, 1:].ravel())[0, 1]) < 0.05
    assert uniform(-5, 3) == uniform(-5, 3)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 6])
def test_draws_follow_the_distribution(temperature: float, top_k: int) -> None:
    logits, n = random_logits(8, seed=2) / 3, 3000
    params = {"temperature": temperature, "top_k": top_k}
    requests = [request_of({**params, "seed": s}) for s in range(1, n + 1)]
    counts = np.bincount(draw(logits, *requests), minlength=8)
    expected = softmax(logits / temperature)
    if top_k:
        expected[np.argsort(expected)[: 8 - top_k]] = 0.0
        expected /= expected.sum()
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    chi_square = ((counts[kept] - n * expected[kept]) ** 2 / (n * expected[kept])).sum()
    assert chi_square < 30  # 7 degrees of freedom at most: p < 1e-4


@pytest.mark.parametrize("vocab", [5, 256, 257, 1000])
def test_draw_inverts_the_cumulative_distribution(vocab: int) -> None:
    logits = random_logits(vocab)
    ends = softmax(logits / 0.9).cumsum()
    requests = [request_of({"temperature": 0.9, "seed": s}) for s in range(1, 300)]
    drawn = draw(logits, *requests)
    for request, token_id in zip(requests, drawn, strict=True):
        u = uniform(request.seed, 0)
        low = ends[token_id - 1] if token_id else 0.0
        assert low - 1e-5 <= u <= ends[token_id] + 1e-5


def reference_set(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    probs = softmax(logits)
    order = np.argsort(-probs, kind="stable")
    if top_k > 0:
        order = order[:top_k]
    kept, mass, total = set(), 0.0, probs[order].sum()
    for i, token_id in enumerate(order):
        if i == 0 or (mass < top_p * total and probs[token_id] >= min_p * probs.max()):
            kept.add(int(token_id))
        mass += probs[token_id]
    return kept


@pytest.mark.parametrize("top_k", [-1, 1, 3, 50])
@pytest.mark.parametrize("top_p", [1e-9, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.2, 1.0])
def test_filters_keep_the_same_set_as_numpy(top_k: int, top_p: float, min_p: float) -> None:
    logits = random_logits(24, seed=4) / 2
    params = {"temperature": 1.0, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    drawn = draw(logits, *(request_of({**params, "seed": s}) for s in range(1, 300)))
    kept = reference_set(logits, top_k, top_p, min_p)
    probs = softmax(logits)
    assert set(drawn) <= kept
    likely = {t for t in kept if probs[t] / sum(probs[i] for i in kept) > 0.03}
    assert likely <= set(drawn)


def test_nucleus_wider_than_the_candidates_is_complete() -> None:
    vocab = 4 * NUCLEUS_CANDIDATES
    logits = random_logits(vocab) / 100
    requests = [request_of({"top_p": 0.9, "seed": s}) for s in range(1, 400)]
    drawn = draw(logits, *requests)
    ranks = np.argsort(np.argsort(-logits))[drawn]
    assert ranks.max() > 2 * NUCLEUS_CANDIDATES
    assert set(drawn) <= reference_set(logits, 0, 0.9, 0.0)


def test_penalties_equal_numpy() -> None:
    logits = random_logits(16)
    params = {
        "temperature": 0.0,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.3,
    }
    request = request_of(params, prompt=[1, 2, 3], output=[3, 4, 4, 4])
    expected = logits.copy()
    for token_id, count in {1: 0, 2: 0, 3: 1, 4: 3}.items():
        value = expected[token_id]
        value = value / 1.5 if value > 0 else value * 1.5
        expected[token_id] = value - 0.3 * count - 0.7 * (count > 0)
    row = torch.from_numpy(logits.copy())[None]
    Sampler(()).sample(row, [request])
    np.testing.assert_allclose(row[0].numpy(), expected, rtol=1e-6)


def test_logit_bias_moves_the_choice() -> None:
    logits = random_logits(16)
    worst, best = int(logits.argmin()), int(logits.argmax())
    assert draw(logits, request_of({"temperature": 0.0, "logit_bias": ((worst, 100.0),)})) == [
        worst
    ]
    assert draw(logits, request_of({"temperature": 0.0, "logit_bias": ((best, -100.0),)})) != [best]


def test_end_tokens_are_masked_until_min_tokens() -> None:
    logits = random_logits(16)
    best, second = np.argsort(-logits)[:2].tolist()
    params = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (second,)}
    early = draw(logits, request_of(params, output=[9]), eos=(best,))
    assert early[0] not in (best, second)
    assert draw(logits, request_of(params, output=[9, 9]), eos=(best,)) == [best]


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    logits = random_logits(32)
    params = {"temperature": 0.3, "logprobs": 3, "seed": 4, "logit_bias": ((5, 50.0),)}
    (token,) = Sampler(()).sample(torch.from_numpy(logits.copy())[None], [request_of(params)])
    expected = np.log(softmax(logits))
    assert token.token_id == 5
    assert token.logprob is not None
    assert token.logprob.logprob == pytest.approx(expected[5], abs=1e-5)
    order = np.argsort(-expected)[:3]
    assert [i for i, _ in token.logprob.top] == order.tolist()
    np.testing.assert_allclose([p for _, p in token.logprob.top], expected[order], atol=1e-5)


@pytest.mark.parametrize(("asked", "expected"), [(None, None), (0, ())])
def test_logprobs_only_as_asked(asked: int | None, expected: tuple[()] | None) -> None:
    request = request_of({"temperature": 0.0, "logprobs": asked})
    (token,) = Sampler(()).sample(torch.from_numpy(random_logits(32))[None], [request])
    assert (token.logprob.top if token.logprob else None) == expected


def test_each_row_is_independent_of_the_batch() -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.5, "seed": 1},
        {"temperature": 0.7, "top_p": 0.8, "seed": 2},
        {"temperature": 1.0, "top_k": 5, "seed": 3, "frequency_penalty": 1.0},
        {"temperature": 1e-40},
        {"temperature": 1.0, "min_p": 0.1, "seed": 5, "logprobs": 2},
    ]
    rows = np.stack([random_logits(64, seed=i) for i in range(len(kinds))])
    alone = [draw(rows[i], request_of(k))[0] for i, k in enumerate(kinds)]
    for order in (range(len(kinds)), reversed(range(len(kinds)))):
        index = list(order)
        batch = torch.from_numpy(rows[index].copy())
        tokens = Sampler(()).sample(batch, [request_of(kinds[i]) for i in index])
        assert [t.token_id for t in tokens] == [alone[i] for i in index]


def test_infinite_and_huge_logits_give_valid_tokens() -> None:
    logits = np.array([-np.inf, 1e30, -1e30, 1e30, -np.inf], dtype=np.float32)
    requests = [request_of({"temperature": t, "seed": 3}) for t in (1e-3, 0.5, 2.0)]
    assert set(draw(logits, *requests)) <= {1, 3}
