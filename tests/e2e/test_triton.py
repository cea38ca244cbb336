"""The default model with the Triton kernels, on a GPU or interpreted, answers as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from radixkv.config import ServeConfig
from radixkv.engine import Engine, SamplingParams
from radixkv.engine.factory import BuiltEngine, assemble_engine
from radixkv.engine.runner import ModelRunner
from radixkv.model.loader import LoadedModel, load_model
from radixkv.model.triton_attention import TritonAttention

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

NUM_TOKENS = 3
PREFIX = "The largest cities of France are Paris, Marseille and Lyon. The capital of "
ENDINGS = ("France is", "Germany is")


@pytest.fixture(scope="module")
def model(default_model_dir: Path, default_model: LoadedModel) -> LoadedModel:
    """In float32, where the device is."""
    if not torch.cuda.is_available():
        return default_model
    return load_model(str(default_model_dir), dtype="float32", device="cuda")


@pytest.fixture(scope="module")
def engine(model: LoadedModel) -> Engine:
    config = ServeConfig(attention="triton", kv_cache_memory=256 * 1024**2, max_num_seqs=4)
    engine = assemble_engine(model, config).engine.engine
    assert isinstance(engine.runner, ModelRunner)
    assert isinstance(engine.runner.attention, TritonAttention)
    return engine


def answers(engine: Engine, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """Run prompts together; return their answers and how many of their tokens were cached."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    tokens: list[list[int]] = [[] for _ in prompts]
    cached = 0
    while engine.has_work:
        for item in engine.step():
            tokens[int(item.request_id)] += item.output.token_ids
            if item.output.finish_reason is not None:
                assert item.output.finish_reason == "length"
                cached += item.output.num_cached_tokens
    engine.cache.check_integrity()
    return tokens, cached


def test_answers_equal_those_of_the_cpu_cold_and_warm(
    build: Callable[..., BuiltEngine], engine: Engine, model: LoadedModel
) -> None:
    prompts = [model.tokenizer.encode(PREFIX + ending) for ending in ENDINGS]
    shared = len(model.tokenizer.encode(PREFIX)) // 16 * 16
    assert shared >= 16
    expected, _ = answers(build().engine.engine, prompts)
    cold, cached = answers(engine, prompts)
    # The second prompt waits for the first one's prefill and takes its blocks.
    assert cached >= shared
    assert cold == expected
    # It ends within a block, which is copied before it is written to.
    warm, cached = answers(engine, prompts[1:])
    assert cached == len(prompts[1]) - 1
    assert warm == expected[1:]
