"""KV memory that parallel sampling and beam search save by sharing blocks, and how full blocks are.

    python -m loadtests.bench_sharing

Saved is the part of the blocks in all block tables that needn't be there, as several tables have
the same block: (blocks referenced - blocks stored) / blocks referenced, as each step sees it after
its copies, all steps together. That is figure 15 of the PagedAttention paper (Kwon et al.
2023, arXiv:2309.06180, section 6.3), whose figures for widths 2 and 6 stand next to ours. Prompts
and answers are as long as in its datasets: all of the mean length ("fixed"), or exponentially
distributed around it ("varied").

Filled is the part of the slots of all stored blocks that holds KV (the paper, section 6.1: 96.3 %),
wasted are the slots in a sequence's blocks that none of its tokens will take: both under load
without sharing, 32 requests with ShareGPT's lengths, varied, at a time.

The engine is RadixKV's. Parallel sampling and the load get random logits in place of a model: which
tokens are drawn makes no difference there. How beams branch depends on the probabilities, so they
run with the default model (or --model) on excerpts of this project's documentation; with
--random-beams they get random logits, too. The last line is everything as JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from loadtests.memory_use import BLOCK_SIZE, VOCAB, MemoryUse, measure, random_engine
from radixkv.config import ServeConfig
from radixkv.engine.engine import Engine
from radixkv.engine.factory import assemble_engine
from radixkv.model.loader import LoadedModel, load_model

__all__ = ["DATASETS", "Dataset", "lengths_of", "main"]

WIDTHS = (2, 4, 6)
DOCUMENTS = ("ARCHITECTURE.md", "README.md", "docs/*.md")


@dataclass(frozen=True, slots=True)
class Dataset:
    """Mean lengths in tokens, and what the paper saves at widths 2 and 6, in percent."""

    prompt: int
    output: int
    parallel: tuple[float, float]
    beam: tuple[float, float]


DATASETS = {
    "Alpaca": Dataset(19, 58, (6.1, 9.8), (37.6, 55.2)),
    "ShareGPT": Dataset(161, 338, (16.2, 30.5), (44.3, 66.3)),
}


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", help="for the beams, as for `radixkv serve`")
    parser.add_argument("--random-beams", action="store_true", help="beams without a model")
    parser.add_argument("--requests", type=int, default=16, help="of parallel sampling, at once")
    parser.add_argument("--beam-requests", type=int, default=4)
    parser.add_argument("--load", type=int, default=128, help="requests under load, 32 at once")
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths, to try it")
    args = parser.parse_args(arguments)
    console = Console(stderr=True)
    rows: list[dict[str, Any]] = []
    with Progress(console=console, disable=not console.is_terminal) as progress:
        cases = list(_cases(args.random_beams))
        task = progress.add_task("", total=len(cases) + 1)
        model = None if args.random_beams else _load(args.model, console)
        for case in cases:
            name = " ".join(map(str, case.values()))
            progress.update(task, description=name)
            use = _measure_case(case, args, model)
            paper = _paper(case["method"], case["dataset"])
            rows.append({**case, **_summary(use), "paper_percent": paper})
            progress.advance(task)
            if progress.disable:
                console.print(f"{name}: {100 * use.saved:.1f} % saved", highlight=False)
        progress.update(task, description="load")
        load = _summary(_measure_load(args.load, args.scale))
        progress.advance(task)
    _print_tables(rows, load)
    print(json.dumps({"block_size": BLOCK_SIZE, "sharing": rows, "load": load}))


def lengths_of(
    mean: int, count: int, kind: str, rng: np.random.Generator, scale: float = 1.0
) -> list[int]:
    """Return `count` lengths of at least 1 with a mean of about `scale * mean`.

    Args:
        mean: tokens.
        count: how many.
        kind: "fixed", or "varied" for the quantiles of an exponential distribution.
        rng: the order of the latter.
        scale: see above.
    """
    if kind == "fixed":
        lengths = np.full(count, scale * mean)
    else:
        at = (np.arange(count) + 0.5) / count
        lengths = rng.permutation(-scale * mean * np.log1p(-at))
    return [max(1, round(float(length))) for length in lengths]


def _cases(random_beams: bool) -> Iterator[dict[str, Any]]:
    for method in ("parallel", "beam"):
        logits = "random" if method == "parallel" or random_beams else "model"
        for dataset in DATASETS:
            for lengths in ("fixed", "varied"):
                for width in WIDTHS:
                    yield {
                        "method": method,
                        "dataset": dataset,
                        "lengths": lengths,
                        "width": width,
                        "logits": logits,
                    }


def _measure_case(
    case: dict[str, Any], args: argparse.Namespace, model: LoadedModel | None
) -> MemoryUse:
    beams, width = case["method"] == "beam", case["width"]
    count = args.beam_requests if beams else args.requests
    # The same requests at every width.
    rng = np.random.default_rng(0)
    prompts, outputs = _lengths(case["dataset"], case["lengths"], count, rng, args.scale)
    longest = max(map(sum, zip(prompts, outputs, strict=True)))
    if case["logits"] == "random":
        engine = random_engine(count * width, longest)
        ids = [rng.integers(0, VOCAB, length).astype(np.int32) for length in prompts]
    else:
        assert model is not None
        engine = _model_engine(model, count * width, longest)
        ids = _excerpts(rng, model, prompts)
    return measure(engine, ids, outputs, width=width, beams=beams)


def _measure_load(count: int, scale: float) -> MemoryUse:
    rng = np.random.default_rng(0)
    prompts, outputs = _lengths("ShareGPT", "varied", count, rng, scale)
    longest = max(map(sum, zip(prompts, outputs, strict=True)))
    ids = [rng.integers(0, VOCAB, length).astype(np.int32) for length in prompts]
    return measure(random_engine(32, longest), ids, outputs)


def _lengths(
    dataset: str, kind: str, count: int, rng: np.random.Generator, scale: float
) -> tuple[list[int], list[int]]:
    means = DATASETS[dataset].prompt, DATASETS[dataset].output
    prompts, outputs = (lengths_of(mean, count, kind, rng, scale) for mean in means)
    return prompts, outputs


def _load(name: str | None, console: Console) -> LoadedModel:
    return load_model(name, dtype="auto", device="cpu", load_format="auto", console=console)


def _model_engine(model: LoadedModel, max_num_seqs: int, max_model_len: int) -> Engine:
    shape = model.config
    per_block = 2 * BLOCK_SIZE * shape.num_layers * shape.num_kv_heads * shape.head_dim
    per_block *= model.decoder.dtype.itemsize
    config = ServeConfig(
        block_size=BLOCK_SIZE,
        kv_cache_memory=max_num_seqs * (max_model_len // BLOCK_SIZE + 2) * per_block,
        max_num_seqs=max_num_seqs,
        swap_space=0,
    )
    return assemble_engine(model, config).engine.engine


def _excerpts(
    rng: np.random.Generator, model: LoadedModel, lengths: Sequence[int]
) -> list[np.ndarray]:
    """Return pieces of the documentation, each of so many tokens."""
    root = Path(__file__).parents[1]
    files = sorted(path for pattern in DOCUMENTS for path in root.glob(pattern))
    ids = model.tokenizer.encode("\n".join(path.read_text(encoding="utf-8") for path in files))
    starts = [int(rng.integers(0, len(ids) - length)) for length in lengths]
    return [np.array(ids[s : s + n], dtype=np.int32) for s, n in zip(starts, lengths, strict=True)]


def _summary(use: MemoryUse) -> dict[str, Any]:
    return {
        "steps": use.steps,
        "saved_percent": round(100 * use.saved, 2),
        "filled_percent": round(100 * use.filled, 2),
        "max_wasted_slots": use.max_wasted,
    }


def _paper(method: str, dataset: str) -> tuple[float, float]:
    return DATASETS[dataset].beam if method == "beam" else DATASETS[dataset].parallel


def _print_tables(rows: list[dict[str, Any]], load: dict[str, Any]) -> None:
    console = Console()
    table = Table("", *(f"{width} wide" for width in WIDTHS), "paper", "filled")
    table.title = "KV blocks saved by sharing, percent"
    for at in range(0, len(rows), len(WIDTHS)):
        widths = rows[at : at + len(WIDTHS)]
        first = widths[0]
        name = "beams" if first["method"] == "beam" else "parallel"
        low, high = _paper(first["method"], first["dataset"])
        filled = [row["filled_percent"] for row in widths]
        table.add_row(
            f"{first['dataset']} {first['lengths']}, {name} ({first['logits']})",
            *(f"{row['saved_percent']:.1f}" for row in widths),
            f"{low:.1f} to {high:.1f}",
            f"{min(filled):.0f} to {max(filled):.0f}",
        )
    console.print(table)
    console.print(
        f"Under load {load['filled_percent']:.1f} % of the slots are filled (wanted: 96 or more), "
        f"and a sequence wastes {load['max_wasted_slots']} at most (wanted: under {BLOCK_SIZE}).",
        highlight=False,
    )


if __name__ == "__main__":
    main()
