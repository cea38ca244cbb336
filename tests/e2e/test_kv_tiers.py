"""KV that went to host memory or disk and back is the same KV."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from radixkv.engine import Engine, SamplingParams
from radixkv.engine.factory import BuiltEngine

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TEXT = "The radix cache keeps the keys and values of each prompt in a tree of token blocks. " * 20


def answer(engine: Engine, prompt: list[int]) -> tuple[list[int], int]:
    """Return the answer's ids and the number of cached tokens."""
    engine.add_request("r", prompt, GREEDY)
    ids, cached = [], 0
    while engine.has_work:
        for item in engine.step():
            ids += item.output.token_ids
            cached = item.output.num_cached_tokens
    engine.cache.check_integrity()
    return ids, cached


def test_answers_are_the_same_after_host_memory_disk_and_restart(
    build: Callable[..., BuiltEngine], tmp_path: Path
) -> None:
    # Blocks of 16 tokens in float32 take 720 KiB: the pool holds 28, the host 10.
    options = {
        "kv_cache_memory": 20 * 1024**2,
        "host_cache_memory": 7 * 1024**2,
        "disk_cache": str(tmp_path),
        "max_model_len": 400,
    }
    built = build(**options)
    tokenizer, engine = built.engine.tokenizer, built.engine.engine
    first = tokenizer.encode(TEXT)[:300]
    second = tokenizer.encode("Something else. " + TEXT)[:300]
    expected, cached = answer(engine, first)
    assert cached == 0
    other, _ = answer(engine, second)
    assert engine.tiers is not None
    assert engine.tiers.worker is not None
    engine.tiers.worker.drain()
    again, cached = answer(engine, first)
    assert (again, cached) == (expected, 288)
    hits = engine.stats().tokens_hit_by_tier
    assert hits["host"] > 0
    assert hits["disk"] > 0
    engine.close()
    restarted = build(**options).engine.engine
    assert answer(restarted, second) == (other, 288)
    assert answer(restarted, first) == (expected, 288)
    restarted.close()
