"""Replays recorded traffic against the cache alone: real block hashes, no model.

A trace is a file of the Mooncake project's form: a JSON object a line with `timestamp` (ms) and
`hash_ids`, each of which stands for a block of 512 tokens and all before it. Ids are replayed as
the tokens of blocks of size 1. RADIXKV_DATA names the folder (default ../shared/data).
"""

from __future__ import annotations

import heapq
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from radixkv.cache import RadixCache

__all__ = [
    "TRACES",
    "Request",
    "expand",
    "hits_infinite",
    "hits_optimal",
    "load_trace",
    "num_distinct",
    "replay",
]

TRACES = ("conversation", "synthetic")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt: its arrival in seconds, and its `[n]` int32 block ids."""

    time: float
    blocks: npt.NDArray[np.int32]


def load_trace(name: str, limit: int | None = None) -> list[Request]:
    """Read a trace, or its first `limit` requests.

    Raises:
        FileNotFoundError: RADIXKV_DATA doesn't have it.
    """
    path = Path(os.environ.get("RADIXKV_DATA", "../shared/data")) / f"mooncake_{name}.jsonl"
    requests: list[Request] = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if limit is not None and len(requests) == limit:
                break
            row = json.loads(line)
            blocks = np.array(row["hash_ids"], dtype=np.int32)
            requests.append(Request(row["timestamp"] / 1000, blocks))
    return requests


def num_distinct(trace: list[Request]) -> int:
    """Return how many different blocks a trace asks for."""
    return len({block for request in trace for block in request.blocks.tolist()})


def replay(trace: list[Request], policy: str, num_blocks: int) -> int:
    """Return how many blocks hit in a cache of `num_blocks`."""
    now = 0.0
    cache = RadixCache(num_blocks, 1, policy=policy, clock=lambda: now)
    hits = 0
    for request in trace:
        now = request.time
        sequence = cache.create_sequence(request.blocks)
        hits += sequence.reuse(len(sequence))
        sequence.reserve(len(sequence))
        sequence.commit(len(sequence))
        sequence.free()
    return hits


def hits_infinite(trace: list[Request]) -> int:
    """Return how many blocks hit in a cache that never evicts."""
    seen: set[int] = set()
    hits = 0
    for request in trace:
        blocks = request.blocks.tolist()
        hits += next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
        seen.update(blocks)
    return hits


def hits_optimal(trace: list[Request], num_blocks: int) -> int:
    """Return how many blocks hit if the block needed latest always goes first.

    Belady's rule, which knows the future, under the rules of the cache: every block of a running
    request stays, and only leaves leave. A block is asked for whenever one below it is, so the one
    needed latest (of equals the deepest) is a leaf by itself.
    """
    upcoming: dict[int, list[int]] = {}
    for index in range(len(trace) - 1, -1, -1):
        for block in trace[index].blocks.tolist():
            upcoming.setdefault(block, []).append(index)
    never = len(trace)
    next_use: dict[int, int] = {}  # of the cached blocks
    heap: list[tuple[int, int, int]] = []  # (-next use, -depth, block); stale if next_use differs
    hits = 0
    for request in trace:
        blocks = request.blocks.tolist()
        length = next((i for i, block in enumerate(blocks) if block not in next_use), len(blocks))
        hits += length
        running = set(blocks)
        missing = sum(block not in next_use for block in blocks)
        held = []
        while len(next_use) + missing > num_blocks:
            entry = heapq.heappop(heap)
            block = entry[2]
            if next_use.get(block) != -entry[0]:
                continue
            if block in running:
                held.append(entry)
            else:
                del next_use[block]
        for entry in held:
            heapq.heappush(heap, entry)
        for depth, block in enumerate(blocks):
            uses = upcoming[block]
            uses.pop()
            next_use[block] = uses[-1] if uses else never
            heapq.heappush(heap, (-next_use[block], -depth, block))
    return hits


def expand(blocks: npt.NDArray[np.int32], tokens_per_block: int = 512) -> npt.NDArray[np.int32]:
    """Return `[n * tokens_per_block]` token ids that the block ids determine."""
    offsets = np.arange(tokens_per_block, dtype=np.int64)
    mixed = (blocks[:, None].astype(np.int64) * 1_000_003 + offsets * 7919) % 49_152
    # The first token tells the blocks apart whatever the mixture does.
    mixed[:, 0] = blocks
    return mixed.astype(np.int32).reshape(-1)
