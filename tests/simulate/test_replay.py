"""Hit rates against those of the replays that the benchmarks use."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from loadtests import trace_cache
from radixkv.simulate.managers import MANAGERS, ManagerOptions
from radixkv.simulate.replay import replay_hits
from radixkv.simulate.traffic import Request

OPTIONS = ManagerOptions(max_len=10**6, block_size=512)


def random_trace(seed: int) -> list[Request]:
    """Return conversations whose prompts repeat what came before and add a few blocks."""
    rng = random.Random(seed)
    conversations: list[list[int]] = [[0, 1]]
    fresh = 2
    requests = []
    for time in range(400):
        keys = list(rng.choice(conversations[-30:]))
        for _ in range(rng.randint(1, 4)):
            keys.append(fresh)
            fresh += 1
        conversations.append(keys)
        requests.append(Request(float(time), 512 * len(keys), 1, np.array(keys, np.int32)))
    return requests


def their_hit_rate(requests: list[Request], policy: str, num_blocks: int) -> float:
    trace = [trace_cache.Request(r.arrival, r.keys) for r in requests]
    return trace_cache.replay(trace, policy, num_blocks) / sum(len(r.keys) for r in requests)


@pytest.mark.parametrize("policy", ["lru", "slru"])
@pytest.mark.parametrize("num_blocks", [90, 150, 10_000])
def test_the_radix_tree_hits_what_the_replay_of_the_cache_hits(
    policy: str, num_blocks: int
) -> None:
    requests = random_trace(0)
    hit_rate = replay_hits("radix", requests, num_blocks, replace(OPTIONS, policy=policy))
    assert hit_rate == pytest.approx(their_hit_rate(requests, policy, num_blocks), abs=1e-12)
    assert hit_rate > 0.1


@pytest.mark.parametrize("num_blocks", [1000, 10_000])
def test_the_radix_tree_hits_what_the_replay_hits_on_recorded_traffic(num_blocks: int) -> None:
    try:
        trace = trace_cache.load_trace("conversation", 1500)
    except FileNotFoundError:
        pytest.skip("RADIXKV_DATA has no mooncake_conversation.jsonl")
    requests = [Request(r.time, 512 * len(r.blocks), 1, r.blocks) for r in trace]
    hit_rate = replay_hits("radix", requests, num_blocks, OPTIONS)
    assert hit_rate == pytest.approx(their_hit_rate(requests, "lru", num_blocks), abs=1e-12)


def test_an_unlimited_table_of_hashes_hits_what_was_ever_seen() -> None:
    requests = random_trace(1)
    trace = [trace_cache.Request(r.arrival, r.keys) for r in requests]
    best = trace_cache.hits_infinite(trace) / sum(len(r.keys) for r in requests)
    assert replay_hits("hash-blocks", requests, 10_000, OPTIONS) == pytest.approx(best)


@pytest.mark.parametrize("name", ["hash-blocks", "radix"])
def test_more_memory_hits_more(name: str) -> None:
    rates = [replay_hits(name, random_trace(2), n, OPTIONS) for n in (40, 80, 160, 320)]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]


@pytest.mark.parametrize("name", [n for n in MANAGERS if n not in ("hash-blocks", "radix")])
def test_managers_without_reuse_hit_nothing(name: str) -> None:
    assert replay_hits(name, random_trace(3), 1000, OPTIONS) == 0
