"""Check and time the Triton kernels on a GPU.

Run as `python -m loadtests.bench_kernels --check --bench`; it stops after less than four minutes.
`--check` compares every kernel with float64 on random data. `--bench` times them, alone against
what the device's memory and tensor cores do in the same run, and beside other attention on the same
sequences; and whole decode steps of a dummy Llama-3-8B. `--tiny` runs the same code on tiny shapes
without a GPU, in Triton's interpreter: its times mean nothing. The heads are those of Llama-3-8B:
32 of queries, 8 of K and V, of 128. The last line is everything as JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from loadtests.kernel_bench import BLOCK_SIZE, Bench, Heads, Timing, first_line
from loadtests.kernel_checks import Check, check_configs, run_checks
from loadtests.kernel_engine import EngineStep, llama_8b, measure_steps, tiny_llama
from loadtests.kernel_timing import Clock, measure_limits

__all__ = ["main"]

# What the run may take. What isn't reached is named in the report.
BUDGET_S = 225.0


def main() -> int:
    """Run what is asked for, print tables, and print everything as one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with float64")
    parser.add_argument("--bench", action="store_true", help="measure times")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes; works without a GPU")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contender")
    args = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    if not has_gpu and not args.tiny:
        print("There is no GPU here; --tiny runs the same code on tiny shapes without one.")
        print(json.dumps({"bench": "kernels", "device": None}))
        return 0
    if not has_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        # Triton decides when it is imported.
        environment = os.environ | {"TRITON_INTERPRET": "1"}
        os.execve(sys.executable, [sys.executable, "-m", __spec__.name, *sys.argv[1:]], environment)
    start = time.perf_counter()
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    report: dict[str, Any] = {
        "bench": "kernels",
        "device": torch.cuda.get_device_name(device) if has_gpu else "cpu, interpreted",
        "torch": torch.__version__,
        "tiny": args.tiny,
    }
    console = Console()
    passed = True
    with torch.inference_mode():
        if args.check:
            checks = _run_all_checks(device, tiny=args.tiny)
            passed = all(check.passed for check in checks)
            console.print(_check_table(checks))
            report["checks"] = [asdict(check) | {"passed": check.passed} for check in checks]
        if args.bench:
            report |= _run_bench(device, args.tiny, args.rounds, start, console)
    report["seconds"] = round(time.perf_counter() - start, 1)
    print(json.dumps(_without_nan(report)))
    return 0 if passed and not report.get("failures") else 1


def _run_all_checks(device: torch.device, *, tiny: bool) -> list[Check]:
    configs = check_configs(tiny=tiny)
    checks: list[Check] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for config in progress.track(configs, description="checking"):
            checks += run_checks(config, device)
    return checks


def _run_bench(
    device: torch.device, tiny: bool, rounds: int, start: float, console: Console
) -> dict[str, Any]:
    if tiny:
        rounds = 1
    clock = Clock(device, rounds)
    size = {"num_bytes": 2**20, "matmul_size": 64} if tiny else {
        "num_bytes": 2**30, "matmul_size": 8192,
    }  # fmt: skip
    limits = measure_limits(clock, **size)
    heads = Heads(2, 1, 64, torch.float32) if tiny else Heads()
    bench = Bench(device, heads, clock, limits)
    timings: list[Timing] = []
    skipped: list[str] = []
    failures: list[str] = []
    steps: list[EngineStep] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        # The engine comes early: it is what the kernels are for.
        config, shapes = (tiny_llama(), [(1, 20), (3, 20)]) if tiny else (
            llama_8b(), [(1, 1024), (64, 1024)],
        )  # fmt: skip
        task = progress.add_task("engine", total=1)
        try:
            steps = measure_steps(config, shapes, device, limits, rounds)
        except Exception as error:
            # A GPU is rarely at hand: what fails on it mustn't take the other figures with it.
            failures.append(f"engine: {first_line(error)}")
        progress.update(task, advance=1)
        jobs = list(_jobs(bench, tiny=tiny))
        task = progress.add_task("timing", total=len(jobs))
        for name, num_tokens, job in jobs:
            progress.update(task, advance=1, description=name)
            if time.perf_counter() - start > BUDGET_S:
                skipped.append(f"{name}: out of time")
            elif not bench.fits(num_tokens):
                skipped.append(f"{name}: out of memory")
            else:
                try:
                    timings.append(job())
                except Exception as error:
                    failures.append(f"{name}: {first_line(error)}")
    console.print(
        f"A copy moves {limits.copy_bytes_per_s / 1e9:,.1f} GB/s, a product does "
        f"{limits.matmul_flops_per_s / 1e12:,.2f} TFLOP/s."
    )
    console.print(_timing_table(timings))
    console.print(_engine_table(steps))
    if skipped:
        console.print(f"Left out: {'; '.join(skipped)}")
    for failure in failures:
        console.print(f"[red]Failed:[/red] {failure}")
    return {
        "limits": asdict(limits),
        "timings": [asdict(timing) for timing in timings],
        "engine": [asdict(step) for step in steps],
        "skipped": skipped,
        "failures": failures,
    }


def _jobs(bench: Bench, *, tiny: bool) -> Iterable[tuple[str, int, Callable[[], Timing]]]:
    """Yield (name, tokens of K and V, function), the most important first."""
    shared = (4, 64, 48) if tiny else (32, 9216, 8192)
    yield "decode, shared", shared[0] * shared[1], functools.partial(bench.decode_shared, *shared)
    batches = (1, 2) if tiny else (1, 8, 32, 128, 256)
    contexts = (128,) if tiny else (8192, 1024, 32_768, 131_072)
    for context in contexts:
        for num_seqs in batches:
            for share in (0, 50, 90) if num_seqs > 1 else (0,):
                with_flex = share == 0 and (num_seqs, context) == ((2, 128) if tiny else (32, 8192))
                yield (
                    f"decode {num_seqs} x {context}, {share} % shared",
                    num_seqs * context,
                    functools.partial(bench.decode, num_seqs, context, share, with_flex=with_flex),
                )
    prefills = [(1, 16, 0), (2, 16, 16)] if tiny else [
        (1, 2048, 0), (1, 8192, 0), (1, 2048, 8192), (1, 2048, 32_768), (8, 512, 4096),
        (32, 64, 8192),
    ]  # fmt: skip
    for shape in prefills:
        # The peers' copies of K and V are repeated for every query head.
        tokens = shape[0] * (shape[1] + shape[2]) * bench.heads.group_size
        yield f"prefill {shape}", tokens, functools.partial(bench.prefill, *shape)
    for shape in [(2, 4, 16)] if tiny else [(1, 64, 8192), (8, 64, 8192), (8, 256, 8192)]:
        yield (
            f"verify {shape}",
            shape[0] * (shape[1] + shape[2]),
            functools.partial(bench.verify, *shape),
        )
    for num_tokens in (8,) if tiny else (1, 64, 2048, 16_384):
        yield f"write_kv {num_tokens}", num_tokens, functools.partial(bench.write, num_tokens)
    for num_pairs in (1,) if tiny else (1, 16, 256):
        layers = 2 if tiny else 32
        yield (
            f"copy_blocks {num_pairs}",
            num_pairs * layers * BLOCK_SIZE,
            functools.partial(bench.copy, num_pairs, layers),
        )


def _check_table(checks: list[Check]) -> Table:
    table = Table(title="Largest difference from float64 (bytes that differ, for copies)")
    for name in ("kernel", "configuration", "error", "tolerance", ""):
        table.add_column(name)
    for check in checks:
        verdict = "ok" if check.passed else "[red]FAILED[/red]"
        table.add_row(
            check.kernel, check.config, f"{check.error:.2g}", f"{check.tolerance:.2g}", verdict
        )
    return table


def _timing_table(timings: list[Timing]) -> Table:
    table = Table(title="Times in milliseconds; ratios are times of others over ours")
    for name in ("kernel", "shape", "plain", "grouped", "GB/s", "TFLOP/s", "of limit", "others"):
        table.add_column(name, justify="left" if name in ("kernel", "shape", "others") else "right")
    for timing in timings:
        own = timing.ms.get("plain", timing.ms.get("ours", 0.0))
        grouped = timing.ms.get("grouped")
        others = [
            f"{name} {ms / timing.ours_ms:.2f}x"
            for name, ms in timing.ms.items()
            if name not in ("plain", "grouped", "ours")
        ]
        if grouped is not None:
            others.insert(0, f"plain {own / grouped:.2f}x")
        table.add_row(
            timing.kernel,
            timing.shape,
            f"{own:.4f}",
            "" if grouped is None else f"{grouped:.4f}",
            f"{timing.gb_per_s:,.0f}",
            f"{timing.tflop_per_s:,.0f}" if timing.tflop_per_s else "",
            f"{timing.of_limit:.0%}",
            "\n".join([", ".join(others), *timing.notes]),
        )
    return table


def _engine_table(steps: list[EngineStep]) -> Table:
    table = Table(title="Decode steps of a dummy Llama-3-8B; the floor reads weights, K and V once")
    for name in ("sequences", "context", "step ms", "floor ms", "step / floor", "graphs"):
        table.add_column(name, justify="right")
    for step in steps:
        table.add_row(
            str(step.num_seqs),
            str(step.context),
            f"{step.step_ms:.3f}",
            f"{step.floor_ms:.3f}",
            f"{step.step_ms / step.floor_ms:.2f}",
            "yes" if step.graphs else "no",
        )
    return table


def _without_nan(value: Any) -> Any:
    """Return the report with None for NaN, which JSON doesn't have."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if value != value else value


if __name__ == "__main__":
    sys.exit(main())
