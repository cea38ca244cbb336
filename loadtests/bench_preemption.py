"""Swapping a preempted request's KV out and in, against computing it again, by block size.

Blocks of the default model are copied between the KV pool and host memory as the engine does it,
and the same number of tokens is computed in chunks. The figure follows figure 19 of the
PagedAttention paper (Kwon et al. 2023, arXiv:2309.06180).

    python -m loadtests.bench_preemption --plot preemption.svg

Times are CPU time of one thread, torch using no other, so that a busy machine disturbs little:
medians, and what is compared takes turns. The plot needs matplotlib (`pip install radixkv[bench]`).
The last line is everything as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from radixkv.config import ServeConfig
from radixkv.engine.batch import BatchBuilder
from radixkv.engine.branch import Branch
from radixkv.engine.factory import assemble_engine
from radixkv.engine.runner import ModelRunner
from radixkv.engine.scheduler import ScheduledChunk
from radixkv.engine.step_cost import StepCost, load_of
from radixkv.engine.swap import SwapSpace
from radixkv.model.loader import LoadedModel, load_model
from radixkv.request import SamplingParams

__all__ = ["main"]

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
WAYS = ("recompute", "swap out", "swap in", "swap out and in")
CHUNK = 128


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default=None, help="as for `radixkv serve`")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of the request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=list(BLOCK_SIZES))
    parser.add_argument("--plot", type=Path, help="a .png or .svg file to write")
    args = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load_model(args.model, dtype="auto", device="cpu", load_format="auto")
    results = {size: _measure(loaded, size, args.tokens, args.rounds) for size in args.block_sizes}
    table = Table("block size", *WAYS, "recompute / swap", title=f"ms for {args.tokens} tokens")
    for size, ms in results.items():
        ratio = ms["recompute"] / ms["swap out and in"]
        table.add_row(str(size), *(f"{ms[way]:.2f}" for way in WAYS), f"{ratio:.1f}")
    Console().print(table)
    _print_rule(loaded, results, args.tokens)
    if args.plot is not None:
        _plot(results, args)
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    print(json.dumps({"machine": machine, "tokens": args.tokens, "ms": results}))


def _measure(loaded: LoadedModel, block_size: int, tokens: int, rounds: int) -> dict[str, float]:
    """Return the milliseconds of each way, and the rates that the engine would have learned."""
    model = loaded.config
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * 2
    num_blocks = 2 * -(-tokens // block_size) + 8
    config = ServeConfig(
        block_size=block_size,
        kv_cache_memory=max(num_blocks, CHUNK // block_size + 8) * block_size * per_token * 2,
        swap_space=0,
    )
    built = assemble_engine(loaded, config)
    engine = built.engine.engine
    runner, cache = engine.runner, engine.cache
    assert isinstance(runner, ModelRunner)
    swap = SwapSpace(
        runner.pool,
        cache,
        built.bytes_per_block,
        2 * tokens * built.bytes_per_block,
        clock=time.thread_time,
    )
    builder, cost = BatchBuilder(cache), StepCost()
    ids = np.random.default_rng(0).integers(0, model.vocab_size, tokens + 1).astype(np.int32)

    def compute(branch: Branch) -> None:
        while branch.num_uncomputed_tokens > 1:
            start = branch.sequence.num_computed
            count = min(CHUNK, branch.num_uncomputed_tokens - 1)
            batch, _ = builder.build([ScheduledChunk(branch, start, count)], cache.take_copies())
            seconds = _seconds(lambda: runner.execute(batch))  # noqa: B023
            cost.record(load_of(batch.attention, len(batch.logits_rows)), seconds)
            branch.sequence.commit(start + count)

    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds + 1):
        request = engine.add_request("bench", ids, SamplingParams(max_tokens=1))
        branch = request.live[0]
        sequence = branch.sequence
        sequence.reuse()
        sequence.reserve(len(sequence))
        times["recompute"].append(_seconds(lambda: compute(branch)))  # noqa: B023
        plan = swap.plan([sequence])
        out = _seconds(lambda: swap.swap_out(0, plan))  # noqa: B023
        sequence.free()
        cache.reset()
        sequence.reuse(partial=False)
        sequence.reserve(len(sequence))
        back = _seconds(lambda: swap.restore(0, sequence))  # noqa: B023
        assert sequence.num_computed == tokens
        swap.drop(0)
        engine.abort("bench")
        cache.reset()
        for way, seconds in zip(WAYS[1:], (out, back, out + back), strict=True):
            times[way].append(seconds)
    # The first round warms up.
    ms = {way: 1e3 * statistics.median(seconds[1:]) for way, seconds in times.items()}
    known = cost.prefill_seconds(0, tokens)
    ms["estimated recompute"] = 1e3 * known if known is not None else float("nan")
    ms["estimated swap"] = 1e3 * swap.seconds(plan)
    return ms


def _seconds(function: Callable[[], object]) -> float:
    begin = time.thread_time()
    function()
    return time.thread_time() - begin


def _print_rule(loaded: LoadedModel, results: dict[int, dict[str, float]], tokens: int) -> None:
    best = min(results, key=lambda size: results[size]["swap out and in"])
    faster = [size for size, ms in results.items() if ms["swap out and in"] < ms["recompute"]]
    rate = tokens / statistics.median(ms["recompute"] for ms in results.values()) * 1e3
    both = statistics.median(ms["swap out and in"] for ms in results.values())
    kept = [
        size
        for size, ms in results.items()
        if (ms["estimated swap"] < ms["estimated recompute"])
        == (ms["swap out and in"] < ms["recompute"])
    ]
    print(
        f"{loaded.name}: {rate:.0f} tokens/s are computed and {tokens / both * 1e3:.0f} swapped "
        f"out and in. Swapping is faster at block sizes {faster or 'none'}, fastest at {best}.\n"
        "Rule: swap if tokens * bytes/token * (1 / rate out + 1 / rate in) is less than the time "
        "to compute them.\n"
        f"--preemption-mode auto, which estimates both, decides so at block sizes {kept}."
    )


def _plot(results: dict[int, dict[str, float]], args: argparse.Namespace) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed (pip install radixkv[bench])", file=sys.stderr)
        return
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for way, marker in zip(WAYS, "o^vs", strict=True):
        axes.plot(list(results), [ms[way] for ms in results.values()], marker=marker, label=way)
    axes.set(xscale="log", yscale="log", xlabel="block size", ylabel="ms")
    axes.set_xticks(list(results), [str(size) for size in results], minor=False)
    axes.minorticks_off()
    axes.set_title(f"A preempted request of {args.tokens} tokens")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(args.plot)


if __name__ == "__main__":
    main()
