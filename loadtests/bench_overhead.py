"""What a decode step costs beside the model: scheduler, cache, batch building, sampling.

The engine runs with a model that returns the same logits at once. Every request shares a system
prompt and has a past of its own, and the steps measured are decodes only. "commit" is what the
cache does after a step; "text" is the rest: detokenizing (here by a dummy), stop strings, outputs.
The target is for the first four together. Greedy sampling reads every logit once: "limit" is what
that takes alone, by numpy's argmax.

    python -m loadtests.bench_overhead --running 32 256

Times are CPU time of the engine's thread, torch using that one only, which is what they take on an
idle machine and hardly depends on who else uses it; medians over the steps. The last line is
everything as JSON.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from radixkv.cache import RadixCache, Sequence
from radixkv.engine.batch import ForwardBatch
from radixkv.engine.engine import Engine, EngineLimits
from radixkv.request import SamplingParams

__all__ = ["main"]

VOCAB = 49_152  # of the default model
BLOCK_SIZE = 16
TARGET_MS = {32: 1.0, 256: 3.0}
PARTS = ("schedule", "batch", "sampling", "commit")


class DummyRunner:
    """Returns the same logits in every step."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.randn(max_num_seqs, vocab_size, generator=generator)

    def execute(self, batch: ForwardBatch) -> torch.Tensor:
        """Return as many rows as are wanted."""
        return self.logits[: len(batch.logits_rows)]

    def move_slots(self, moves: SequenceOf[tuple[int, int]]) -> None:
        """Keep no KV."""


class DummyTokenizer:
    """Every token is a letter: what a tokenizer costs is not measured here."""

    def decode(self, ids: SequenceOf[int], *, skip_special_tokens: bool = True) -> str:
        """Return a letter per id."""
        return "".join(chr(97 + i % 26) for i in ids)


class Stopwatch:
    """Seconds by name; wraps functions."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, its time added under `name`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            result = function(*args, **kwargs)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.thread_time() - begin
            return result

        return timed

    def take(self) -> dict[str, float]:
        """Return what was added since the last call."""
        seconds, self.seconds = self.seconds, {}
        return seconds


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--running", type=int, nargs="+", default=[32, 256], metavar="N")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--shared", type=int, default=1024, help="tokens of the system prompt")
    parser.add_argument("--private", type=int, default=512, help="tokens of each past")
    parser.add_argument("--vocab", type=int, default=VOCAB)
    parser.add_argument("--profile", action="store_true", help="show where the time goes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {running: _measure(running, args) for running in args.running}
    table = Table("running", *next(iter(results.values())), title="ms a step, medians")
    for running, parts in results.items():
        table.add_row(str(running), *(f"{ms:.3f}" for ms in parts.values()))
    Console().print(table)
    for running, parts in results.items():
        if (target := TARGET_MS.get(running)) is not None:
            met = "met" if parts["four"] <= target else "missed"
            print(f"{running} running: {parts['four']:.2f} ms, target {target:g} ms: {met}")
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    print(json.dumps({"machine": machine, "vocab": args.vocab, "ms": results}))


def _measure(running: int, args: argparse.Namespace) -> dict[str, float]:
    watch = Stopwatch()
    engine = _fill(running, args)
    runner = cast(DummyRunner, engine.runner)
    engine.scheduler.schedule = watch.around(  # type: ignore[method-assign]
        "schedule", engine.scheduler.schedule
    )
    engine.sampler.sample = watch.around(  # type: ignore[method-assign]
        "sampling", engine.sampler.sample
    )
    engine.batches.build = watch.around("batch", engine.batches.build)  # type: ignore[method-assign]
    engine.runner.execute = watch.around("model", engine.runner.execute)  # type: ignore[method-assign]
    rows: list[dict[str, float]] = []
    commit = Sequence.commit
    logits = runner.logits.numpy()
    Sequence.commit = watch.around("commit", commit)  # type: ignore[method-assign]
    with _profiled(args.profile):
        for _ in range(args.steps):
            begin = time.thread_time()
            outputs = engine.step()
            total = time.thread_time() - begin
            assert len(outputs) == running
            seconds = watch.take()
            parts = {name: seconds[name] for name in PARTS}
            text = total - sum(seconds.values())
            begin = time.thread_time()
            logits.argmax(axis=-1)
            limit = time.thread_time() - begin
            rows.append({"four": sum(parts.values()), **parts, "text": text, "limit": limit})
    Sequence.commit = commit  # type: ignore[method-assign]
    return {name: 1e3 * statistics.median(row[name] for row in rows) for name in rows[0]}


@contextmanager
def _profiled(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    profile = cProfile.Profile()
    profile.enable()
    yield
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(30)


def _fill(running: int, args: argparse.Namespace) -> Engine:
    """Return an engine in which so many requests decode."""
    rng = np.random.default_rng(0)
    # The first decode while the last are still being started.
    answer = args.steps + 2 * running + 64
    length = args.shared + args.private + answer
    num_blocks = args.shared // BLOCK_SIZE + running * (length // BLOCK_SIZE + 2)
    engine = Engine(
        DummyRunner(running, args.vocab),
        DummyTokenizer(),
        RadixCache(num_blocks, BLOCK_SIZE),
        EngineLimits(
            length + 64, max_num_seqs=running, max_num_batched_tokens=max(2048, 2 * running)
        ),
    )
    shared = rng.integers(0, args.vocab, args.shared)
    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    for i in range(running):
        own = rng.integers(0, args.vocab, args.private)
        engine.add_request(str(i), np.concatenate([shared, own]), params)
        # One by one, so that they don't reach the ends of their blocks in the same step.
        engine.step()
    while any(request.is_prefilling for request in engine.requests.values()):
        engine.step()
    for _ in range(3):
        engine.step()
    return engine


if __name__ == "__main__":
    main()
