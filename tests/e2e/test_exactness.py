"""Greedy answers of the default model are those of plain transformers, however they come about."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from radixkv.config import ServeConfig
from radixkv.engine import Engine, SamplingParams
from radixkv.engine.factory import BuiltEngine, assemble_engine
from radixkv.model.loader import LoadedModel, load_model

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

NUM_TOKENS = 16
# Logits of this model are up to 40, where bfloat16's spacing is 0.25.
BF16_TIE = 0.5
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

SYSTEM = (
    "You are a careful assistant of a small airline. You answer in one sentence, you never invent "
    "flight numbers, and you ask back when the date or the destination is missing."
)
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "1, 1, 2, 3, 5, 8, 13,",
    "SELECT name FROM users WHERE",
    "Q: What is 17 + 25?\nA:",
    "Le chat est assis sur",
    '{"name": "Ada", "born": 1815, "field": "',
    "# Shopping list\n- milk\n- bread\n-",
    "a",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "日本の首都は",
    "Dear Sir or Madam,\n\nI am writing to",
    "0 1 0 1 0 1 0 1 0 1 0 1 0 1 0",
    "<html>\n<head>\n<title>",
    "Water boils at 100 degrees Celsius because",
]
CHATS = [
    "I want to fly to Oslo.",
    "Can I bring my dog?",
    "Cancel my booking, please.",
    "Write a haiku about clouds.",
]


@pytest.fixture(scope="module")
def prompts(default_model: LoadedModel) -> list[list[int]]:
    tokenizer = default_model.tokenizer
    chats = [
        tokenizer.render_chat(
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
        )
        for text in CHATS
    ]
    return [tokenizer.encode(text) for text in [*PROMPTS, *chats]]


@pytest.fixture(scope="module")
def expected(default_model_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    """The answers of plain transformers, one prompt at a time, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        answers.append(output[0, len(prompt) :].tolist())
    del model
    gc.collect()
    return answers


def answers(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY
) -> tuple[list[list[int]], int]:
    """Run prompts together; return their answers and the cached tokens of all."""
    ids = [f"r{i}" for i in range(len(prompts))]
    for request_id, prompt in zip(ids, prompts, strict=True):
        engine.add_request(request_id, prompt, params)
    tokens: dict[str, list[int]] = {i: [] for i in ids}
    cached = 0
    while engine.has_work:
        for item in engine.step():
            tokens[item.request_id] += item.output.token_ids
            if item.output.finish_reason is not None:
                assert item.output.finish_reason == "length"
                cached += item.output.num_cached_tokens
    engine.cache.check_integrity()
    assert engine.cache.num_referenced_blocks == 0
    return [tokens[i] for i in ids], cached


def test_twenty_prompts_alone_equal_transformers_cold_and_warm(
    engine: Engine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    assert len(prompts) == 20
    for prompt, answer in zip(prompts, expected, strict=True):
        engine.cache.reset()
        cold, cached = answers(engine, [prompt])
        assert cached == 0
        assert cold == [answer]
        warm, cached = answers(engine, [prompt])
        assert cached == len(prompt) - 1
        assert warm == [answer]


def test_batched_prompts_equal_transformers_cold_and_warm(
    engine: Engine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    assert answers(engine, prompts)[0] == expected
    warm, cached = answers(engine, prompts)
    assert cached == sum(len(prompt) - 1 for prompt in prompts)
    assert warm == expected


def test_forks_in_mid_answer_equal_transformers(
    engine: Engine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Three continuations of one half-given answer share its blocks and its partial block."""
    half = NUM_TOKENS // 2
    for prompt, answer in zip(prompts[-4:], expected[-4:], strict=True):
        start = SamplingParams(temperature=0, max_tokens=half, ignore_eos=True)
        first, _ = answers(engine, [prompt], start)
        assert first == [answer[:half]]
        forks = [prompt + answer[:half]] * 3
        rest, cached = answers(engine, forks, start)
        assert cached == 3 * (len(prompt) + half - 1)
        assert rest == [answer[half:]] * 3


def test_preempted_and_resumed_answers_equal_transformers(
    build: Callable[..., BuiltEngine], prompts: list[list[int]], expected: list[list[int]]
) -> None:
    per_block = build().bytes_per_block
    # Room to admit three of the four chats, but not for all of their answers.
    engine = build(kv_cache_memory=10 * per_block).engine.engine
    assert answers(engine, prompts[-4:])[0] == expected[-4:]
    assert engine.scheduler.num_preemptions > 0


def test_small_chunks_equal_transformers(
    build: Callable[..., BuiltEngine], prompts: list[list[int]], expected: list[list[int]]
) -> None:
    engine = build(max_num_batched_tokens=7, max_num_seqs=4).engine.engine
    assert answers(engine, prompts[-6:])[0] == expected[-6:]


def test_bfloat16_flips_only_near_ties(default_model_dir: Path, prompts: list[list[int]]) -> None:
    """Sums are taken in another order warm than cold, so a near tie may flip, and nothing else."""
    model = load_model(str(default_model_dir), dtype="bfloat16")
    engine = assemble_engine(model, ServeConfig(kv_cache_memory=256 * 1024**2)).engine.engine
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
    cold = [scored(engine, [prompt], params)[0] for prompt in prompts]
    for answers_now in (
        [scored(engine, [prompt], params)[0] for prompt in prompts],  # warm
        scored(engine, prompts, params),  # warm and batched
    ):
        for before, now in zip(cold, answers_now, strict=True):
            for (token, gap), (other, _) in zip(before, now, strict=True):
                if token != other:
                    assert gap < BF16_TIE
                    break  # from here on the two are different texts


def scored(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[list[tuple[int, float]]]:
    """Return per prompt (token, log-probability by which it led the second) of each step."""
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    steps: list[list[tuple[int, float]]] = [[] for _ in prompts]
    while engine.has_work:
        for item in engine.step():
            for logprob in item.output.logprobs or ():
                (_, first), (_, second) = logprob.top
                steps[int(item.request_id)].append((logprob.token_id, first - second))
    return steps
