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
from radixkv.cache.int_vector import Int32Array

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
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=list(SIZES),
        metavar="PERCENT",
        help="sizes of the cache for the traces, in percent of the distinct blocks",
    )
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
            rates = {n: _hit_rates(n, args.sizes, progress, quick=args.quick) for n in TRACES}
            result["sizes"], result["hit_rates"] = args.sizes, rates
            for name, by_order in rates.items():
                console.print(_rates_table(name, args.sizes, by_order))
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

    The peers are loops over its 2,048 blocks of 64 bytes, from the plainest to the one that
    computes the same hashes: digest each slice of the ids' bytes; of the array; put the hash of the
    block before in front. "digests alone" has its messages made beforehand, which a chain can't.
    """
    rng = np.random.default_rng(0)
    cache = RadixCache(8192, BLOCK_SIZE)
    for _ in range(100):
        _store(cache, rng.integers(0, 49_152, 640, dtype=np.int32))
    size = 4 * BLOCK_SIZE
    peers = {
        "slices of the ids' bytes": _digest_slices,
        "slices of the array": _digest_array,
        "the same, chained": _digest_chain,
    }
    times: dict[str, list[float]] = {name: [] for name in [*peers, "alone", "ours"]}
    for _ in range(rounds):
        tokens = rng.integers(0, 49_152, PROMPT_TOKENS, dtype=np.int32)
        for name, loop in peers.items():
            start = time.perf_counter()
            loop(tokens, size)
            times[name].append(time.perf_counter() - start)
        data = tokens.tobytes()
        messages = [bytes(16) + data[at : at + size] for at in range(0, len(data), size)]
        start = time.perf_counter()
        for message in messages:
            xxh3_128_digest(message)
        times["alone"].append(time.perf_counter() - start)
        start = time.perf_counter()
        handle = cache.match_prefix(tokens)
        hash_blocks(bytes(16), tokens.tobytes(), size)
        times["ours"].append(time.perf_counter() - start)
        assert handle.num_cached_tokens < BLOCK_SIZE
    ours = _micro(times["ours"])
    alone = f"2,048 digests alone: {_micro(times['alone']):.0f} µs"
    rows = [Row("cold 32,768 tokens: hash, look up", ours, "µs", alone, None)]
    for name in peers:
        peer = f"that loop: {_micro(times[name]):.0f} µs"
        ratio = ours / _micro(times[name])
        rows.append(Row(f"  against 2,048 digests of {name}", ratio, "x", peer, 1.5))
    return rows


def _digest_slices(tokens: Int32Array, size: int) -> None:
    data = tokens.tobytes()
    for at in range(0, len(data), size):
        xxh3_128_digest(data[at : at + size])


def _digest_array(tokens: Int32Array, size: int) -> None:
    for at in range(0, len(tokens), size // 4):
        xxh3_128_digest(tokens[at : at + size // 4].tobytes())


def _digest_chain(tokens: Int32Array, size: int) -> None:
    data = tokens.tobytes()
    parent = bytes(16)
    for at in range(0, len(data), size):
        parent = xxh3_128_digest(parent + data[at : at + size])


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
    """One block at a time, a leaf each; every policy has evicted a quarter of its leaves before."""
    rows = []
    first = 0.0
    for policy in POLICIES:
        value, mean = _evict_times(policy, num_leaves)
        first = first or value
        name = f"evict a block, {num_leaves:,} leaves, {policy}"
        rows.append(Row(name, value, "µs", f"mean {mean:.1f} µs", 20.0))
    value, _ = _evict_times("lru", 10 * num_leaves)
    peer = f"with {num_leaves:,}: {first:.1f} µs"
    rows.insert(1, Row(f"  with {10 * num_leaves:,} leaves", value, "µs", peer, 1.5 * first))
    return rows


def _evict_times(policy: str, num_leaves: int) -> tuple[float, float]:
    """Return the median and the mean, in µs."""
    cache = RadixCache(num_leaves, 1, policy=policy)
    for token in range(num_leaves):
        _store(cache, np.array([token], dtype=np.int32))
    cache.evict(num_leaves // 4)
    gc.collect()
    times = []
    for _ in range(2000):
        start = time.perf_counter()
        cache.evict(1)
        times.append(time.perf_counter() - start)
    return _micro(times), statistics.fmean(times) * 1e6


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


def _hit_rates(
    name: str, percents: list[int], progress: Progress, *, quick: bool
) -> dict[str, list[float]]:
    """Return the hit rate by order and cache size, in blocks."""
    trace: list[Request] = load_trace(name, 1500 if quick else None)
    asked = sum(len(request.blocks) for request in trace)
    distinct = num_distinct(trace)
    longest = max(len(request.blocks) for request in trace)
    sizes = [max(longest, distinct * percent // 100) for percent in percents]
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


def _rates_table(name: str, percents: list[int], rates: dict[str, list[float]]) -> Table:
    table = Table(title=f"Hit rate on the trace {name}, by cache size in % of distinct blocks")
    table.add_column("order")
    for percent in percents:
        table.add_column(f"{percent}%", justify="right")
    for order, values in rates.items():
        table.add_row(order, *(f"{value:.4f}" for value in values))
    return table


def _store(cache: RadixCache, tokens: Int32Array) -> None:
    sequence = cache.create_sequence(tokens)
    sequence.reuse(len(sequence), partial=False)
    sequence.reserve(len(sequence))
    sequence.commit(len(sequence))
    sequence.free()


def _micro(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e6


if __name__ == "__main__":
    main()
