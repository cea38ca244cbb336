"""Speed, memory and hit rate of the cache alone, each next to a limit or a peer.

Run as `python -m loadtests.bench_cache [--quick] [--only speed|traces]`. RADIXKV_DATA names the
folder with the recorded traffic (see `loadtests.trace_cache`). Times are medians; what is compared
takes turns in one process. The last line is everything as JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from xxhash import xxh3_128_digest

from loadtests.trace_cache import (
    TRACES,
    Request,
    expand,
    hits_infinite,
    hits_optimal,
    load_trace,
    num_distinct,
    replay,
)
from radixkv.cache import POLICIES, RadixCache
from radixkv.cache.hashing import hash_blocks

__all__ = ["main"]

BLOCK_SIZE = 16
PROMPT_TOKENS = 32_768
NEW_TOKENS = 100
SIZES = (1, 3, 10, 30, 100)  # percent of the distinct blocks


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, what it is held against, and the most it should be."""

    name: str
    value: float
    unit: str
    peer: str
    target: float | None

    @property
    def is_met(self) -> bool:
        """Whether the figure is within its target."""
        return self.target is None or self.value <= self.target


def main() -> None:
    """Measure, print tables, and print the figures as one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller sizes, a part of the traces")
    parser.add_argument("--only", choices=("speed", "traces"), help="one half of the benchmark")
    args = parser.parse_args()
    console = Console()
    result: dict[str, object] = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "quick": args.quick,
    }
    with Progress(console=Console(stderr=True), transient=True) as progress:
        if args.only != "traces":
            rows = _speed(progress, quick=args.quick)
            result["speed"] = [asdict(row) | {"met": row.is_met} for row in rows]
            console.print(_speed_table(rows))
        if args.only != "speed":
            rates = {name: _hit_rates(name, progress, quick=args.quick) for name in TRACES}
            result["hit_rates"] = rates
            for name, by_order in rates.items():
                console.print(_rates_table(name, by_order))
    print(json.dumps(result))


def _speed(progress: Progress, *, quick: bool) -> list[Row]:
    steps: list[Callable[[], list[Row]]] = [
        lambda: _cold_rows(11 if quick else 101),
        lambda: _turn_rows(101 if quick else 1001),
        lambda: _evict_rows(10_000 if quick else 100_000),
        lambda: [_memory_row(100_000 if quick else 1_000_000)],
    ]
    task = progress.add_task("speed and memory", total=len(steps))
    rows = []
    for step in steps:
        rows += step()
        gc.collect()
        progress.advance(task)
    return rows


def _cold_rows(rounds: int) -> list[Row]:
    """A prompt that nobody has sent before, in a cache that holds a hundred others.

    The peer is the shortest loop that computes the same hashes: cut a block, put its parent's hash
    in front, digest. "digests alone" has all its messages made beforehand, which a chain can't.
    """
    rng = np.random.default_rng(0)
    cache = RadixCache(8192, BLOCK_SIZE)
    for _ in range(100):
        _store(cache, rng.integers(0, 49_152, 640, dtype=np.int32))
    size = 4 * BLOCK_SIZE
    ours, bare, calls = [], [], []
    for _ in range(rounds):
        tokens = rng.integers(0, 49_152, PROMPT_TOKENS, dtype=np.int32)
        data = tokens.tobytes()
        start = time.perf_counter()
        parent = bytes(16)
        for at in range(0, len(data), size):
            parent = xxh3_128_digest(parent + data[at : at + size])
        bare.append(time.perf_counter() - start)
        messages = [bytes(16) + data[at : at + size] for at in range(0, len(data), size)]
        start = time.perf_counter()
        for message in messages:
            xxh3_128_digest(message)
        calls.append(time.perf_counter() - start)
        start = time.perf_counter()
        handle = cache.match_prefix(tokens)
        hash_blocks(bytes(16), tokens.tobytes(), size)
        ours.append(time.perf_counter() - start)
        assert handle.num_cached_tokens < BLOCK_SIZE
    ratio = statistics.median(ours) / statistics.median(bare)
    peer = f"2,048 digests of parent and block: {_micro(bare):.0f} µs"
    return [
        Row("cold 32,768 tokens: hash, look up", _micro(ours), "µs", peer, None),
        Row("  against that loop", ratio, "x", f"digests alone: {_micro(calls):.0f} µs", 1.5),
    ]


def _turn_rows(rounds: int) -> list[Row]:
    """A hundred new tokens behind a cached history."""
    rng = np.random.default_rng(1)
    cache = RadixCache(8192, BLOCK_SIZE)
    history = rng.integers(0, 49_152, PROMPT_TOKENS, dtype=np.int32)
    _store(cache, history)
    stored = history.tobytes()
    adds, whole, compare = [], [], []
    for _ in range(rounds):
        new = rng.integers(0, 49_152, NEW_TOKENS, dtype=np.int32)
        sequence = cache.create_sequence(np.concatenate((history, new)))
        data = sequence.token_ids.tobytes()
        start = time.perf_counter()
        data.startswith(stored)
        compare.append(time.perf_counter() - start)
        start = time.perf_counter()
        handle = cache.match_prefix(sequence.token_ids)
        node = cache.lock(handle)
        hash_blocks(node.last_hash, data[len(stored) :], 4 * BLOCK_SIZE)
        adds.append(time.perf_counter() - start)
        cache.unlock(node)
        start = time.perf_counter()
        sequence.reuse()
        whole.append(time.perf_counter() - start)
        sequence.free()
    limit = f"one memcmp: {_micro(compare):.1f} µs"
    return [
        Row("next turn, 100 on 32,768: hash, match, lock", _micro(adds), "µs", limit, 50.0),
        Row("  the same with the block table", _micro(whole), "µs", "", None),
    ]


def _evict_rows(num_leaves: int) -> list[Row]:
    rows = []
    first = 0.0
    for count in (num_leaves, 10 * num_leaves):
        cache = RadixCache(count, 1)
        for token in range(count):
            _store(cache, np.array([token], dtype=np.int32))
        gc.collect()
        times = []
        for _ in range(2000):
            start = time.perf_counter()
            cache.evict(1)
            times.append(time.perf_counter() - start)
        value = _micro(times)
        if not first:
            first = value
            rows.append(Row(f"evict a block, {count:,} leaves", value, "µs", "", 20.0))
        else:
            peer = f"with {num_leaves:,}: {first:.1f} µs"
            rows.append(Row(f"evict a block, {count:,} leaves", value, "µs", peer, 1.5 * first))
        del cache
    return rows


def _memory_row(num_blocks: int) -> Row:
    """Python memory per block of recorded conversations, ids and hashes included."""
    trace = load_trace("conversation")
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    cache = RadixCache(num_blocks, BLOCK_SIZE)
    for request in trace:
        _store(cache, expand(request.blocks))
        if cache.num_free_blocks < num_blocks // 100:
            break
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    blocks, nodes = cache.num_tree_blocks, cache.tree.num_nodes
    peer = f"ids, hash and number: 84 B; {nodes:,} nodes, {blocks:,} blocks"
    return Row("memory per cached block", used / blocks, "B", peer, 160.0)


def _hit_rates(name: str, progress: Progress, *, quick: bool) -> dict[str, list[float]]:
    """Return the hit rate by order and cache size, in blocks."""
    trace: list[Request] = load_trace(name, 1500 if quick else None)
    asked = sum(len(request.blocks) for request in trace)
    distinct = num_distinct(trace)
    longest = max(len(request.blocks) for request in trace)
    sizes = [max(longest, distinct * percent // 100) for percent in SIZES]
    task = progress.add_task(f"trace {name}", total=len(sizes) * (len(POLICIES) + 1))
    rates: dict[str, list[float]] = {}
    for policy in POLICIES:
        rates[policy] = []
        for size in sizes:
            rates[policy].append(replay(trace, policy, size) / asked)
            progress.advance(task)
    rates["optimum"] = []
    for size in sizes:
        rates["optimum"].append(hits_optimal(trace, size) / asked)
        progress.advance(task)
    rates["infinite"] = [hits_infinite(trace) / asked] * len(sizes)
    return rates


def _speed_table(rows: list[Row]) -> Table:
    table = Table(title="The cache alone")
    for column in ("", "measured", "at most", "", "next to"):
        table.add_column(column, justify="left" if column in ("", "next to") else "right")
    for row in rows:
        verdict = "" if row.target is None else "met" if row.is_met else "MISSED"
        target = "" if row.target is None else f"{row.target:.4g} {row.unit}"
        table.add_row(row.name, f"{row.value:.4g} {row.unit}", target, verdict, row.peer)
    return table


def _rates_table(name: str, rates: dict[str, list[float]]) -> Table:
    table = Table(title=f"Hit rate on the trace {name}, by cache size in % of distinct blocks")
    table.add_column("order")
    for percent in SIZES:
        table.add_column(f"{percent}%", justify="right")
    for order, values in rates.items():
        table.add_row(order, *(f"{value:.4f}" for value in values))
    return table


def _store(cache: RadixCache, tokens: np.typing.NDArray[np.int32]) -> None:
    sequence = cache.create_sequence(tokens)
    sequence.reuse(len(sequence), partial=False)
    sequence.reserve(len(sequence))
    sequence.commit(len(sequence))
    sequence.free()


def _micro(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e6


if __name__ == "__main__":
    main()
