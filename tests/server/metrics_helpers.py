"""A server over the fake model with everything that has metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fakes import make_engine
from server_fakes import END, STOP, FakeTokenizer
from tiering_helpers import open_disk

from radixkv.engine import AsyncEngine
from radixkv.engine.kv_events import KVEventStream
from radixkv.engine.scheduler import SchedulingOptions

BODY = {"max_tokens": 12, "ignore_eos": True, "temperature": 0}


class Publisher:
    """Publishes to nobody."""

    published = dropped = replayed = 0

    def publish(self, events: Any) -> None:
        self.published += 1

    def add(self, event: Any) -> None:
        self.published += 1

    def close(self) -> None:
        self.published = 0


def full_engine(directory: Path) -> AsyncEngine:
    """An engine with tiers, swap space, speculation and events."""
    engine = make_engine(
        16,
        16,
        max_num_batched_tokens=64,
        eos_token_ids=(END, STOP),
        host_blocks=2,
        disk=open_disk(directory, block_size=16),
        swap_blocks=32,
        scheduling=SchedulingOptions(speculative_tokens=4, preemption_mode="swap"),
    )
    tokenizer = FakeTokenizer()
    engine.tokenizer = tokenizer
    engine.kv_events = KVEventStream(engine.cache, Publisher(), engine.tiers)  # type: ignore[arg-type]
    return AsyncEngine(engine, tokenizer, model_name="real")  # type: ignore[arg-type]
