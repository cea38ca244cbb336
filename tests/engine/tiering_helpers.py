"""Engines with tiers of a few blocks, and short ways to use them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fakes import Harness, cold, prompt_of

from radixkv.cache.tiers_disk import DiskTier
from radixkv.engine.tiering import Tiering
from radixkv.engine.tiering_io import DiskWorker
from radixkv.engine.tiering_labels import LABEL_BYTES

BLOCK = 4
CONTENT = 8 * BLOCK
OPTIONS: dict[str, Any] = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}
MakeHarness = Callable[..., Harness]


def open_disk(path: Path, blocks: int = 64, block_size: int = BLOCK, seed: int = 0) -> DiskTier:
    return DiskTier(
        path,
        blocks * (8 * block_size + 4 * block_size + LABEL_BYTES + 72) + 72,
        fingerprint=bytes([seed]) * 32,
        content_bytes=8 * block_size,
        token_bytes=4 * block_size + LABEL_BYTES,
    )


def tiers_of(harness: Harness) -> Tiering:
    tiers = harness.engine.tiers
    assert tiers is not None
    return tiers


def worker_of(harness: Harness) -> DiskWorker:
    worker = tiers_of(harness).worker
    assert worker is not None
    return worker


def ask(harness: Harness, prompt: list[int], namespace: tuple[str, ...] = ()) -> int:
    """Run a request, compare it with a cold one, and return its cached tokens."""
    answer = harness.ask(prompt, namespace, **OPTIONS)
    assert answer.token_ids == cold(prompt, **OPTIONS).token_ids
    return answer.last.num_cached_tokens


def fill(harness: Harness, *seeds: int, length: int = 26) -> None:
    """Push other prompts through, so that what was cached is evicted."""
    for seed in seeds:
        ask(harness, prompt_of(length, seed=1000 + seed))


def by_tier(harness: Harness) -> dict[str, int]:
    stats = harness.engine.stats()
    assert sum(stats.tokens_hit_by_tier.values()) == stats.tokens_hit
    return stats.tokens_hit_by_tier
