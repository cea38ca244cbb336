"""What quantization costs: the perplexity of a fixed text, with and without it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table

from radixkv.engine.batch import ForwardBatch
from radixkv.engine.runner import ModelRunner
from radixkv.engine.runner_setup import prepare_runner
from radixkv.errors import ConfigError
from radixkv.model.attention import AttentionMetadata
from radixkv.model.backends import resolve_device
from radixkv.model.loader import LoadedModel, load_model
from radixkv.model.progress import progress
from radixkv.model.quantization import KV_CACHE_DTYPES
from radixkv.model.quantized_linear import check_quantization

__all__ = [
    "QualityReport",
    "QualitySettings",
    "compare",
    "perplexity",
    "quality_text",
    "render_report",
]


@dataclass(frozen=True, slots=True)
class QualitySettings:
    """What is measured.

    Attributes:
        model: as for `load_model`.
        device: auto, cpu or cuda.
        quantization, kv_cache_dtype: what is compared with neither.
        num_tokens: of the text; all of it if it has fewer.
        window: tokens that are one sequence, or as many as the model has positions.
        chunk: tokens computed in one step; they read what earlier steps stored in the pool.
        block_size: of the pool.
    """

    model: str | None = None
    device: str = "auto"
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    num_tokens: int = 8192
    window: int = 2048
    chunk: int = 128
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class QualityReport:
    """What was measured.

    Attributes:
        model: its name.
        dtype: of weights and KV of the baseline.
        num_tokens: whose probability was taken.
        baseline, quantized: perplexities.
        weight_bytes, baseline_weight_bytes: the weights in memory.
    """

    model: str
    dtype: str
    quantization: str
    kv_cache_dtype: str
    num_tokens: int
    baseline: float
    quantized: float
    weight_bytes: int
    baseline_weight_bytes: int

    @property
    def change(self) -> float:
        """The relative difference; 0.01 is one percent worse."""
        return self.quantized / self.baseline - 1

    def as_json(self) -> dict[str, object]:
        """Return all figures for one line of JSON."""
        return {**asdict(self), "change": self.change}


def quality_text() -> str:
    """Return the text: the first chapters of Alice's Adventures in Wonderland (Carroll, 1865)."""
    return (files("radixkv") / "data" / "alice.txt").read_text(encoding="utf-8")


def compare(settings: QualitySettings, *, console: Console | None = None) -> QualityReport:
    """Measure the model as it is, then quantized, one after the other.

    Raises:
        ConfigError: the model can't be had, or not be quantized like this.
    """
    known = ("auto", *KV_CACHE_DTYPES)
    if settings.kv_cache_dtype not in known:
        raise ConfigError(
            f"--kv-cache-dtype must be one of {', '.join(known)}, got {settings.kv_cache_dtype!r}"
        )
    check_quantization(settings.quantization, resolve_device(settings.device))
    plain = replace(settings, quantization="none", kv_cache_dtype="auto")
    loaded, baseline, count = _measure(plain, "baseline", console)
    weight_bytes, dtype = loaded.weight_bytes, loaded.decoder.dtype
    del loaded
    what = f"{settings.quantization} weights, {settings.kv_cache_dtype} KV"
    loaded, quantized, _ = _measure(settings, what, console)
    return QualityReport(
        model=loaded.name,
        dtype=str(dtype).removeprefix("torch."),
        quantization=settings.quantization,
        kv_cache_dtype=settings.kv_cache_dtype,
        num_tokens=count,
        baseline=baseline,
        quantized=quantized,
        weight_bytes=loaded.weight_bytes,
        baseline_weight_bytes=weight_bytes,
    )


def perplexity(
    runner: ModelRunner,
    token_ids: Sequence[int],
    *,
    window: int,
    chunk: int,
    console: Console | None = None,
    label: str = "perplexity",
) -> tuple[float, int]:
    """Return the perplexity of a text, and of how many tokens it is the mean.

    The text is cut into windows that know nothing of each other; of each the first token is not
    counted. A window is computed in chunks through the pool, as a long prompt is: what a chunk
    reads of those before it has been stored, in whatever form the pool has.

    Args:
        runner: its pool must hold a window, and its content is overwritten.
        token_ids: the text.
        window: tokens of one sequence.
        chunk: tokens of one step.
        console: where progress is shown; stderr if None.
        label: names the bar.

    Raises:
        ValueError: the text has fewer than two tokens.
    """
    total, count = 0.0, 0
    starts = range(0, len(token_ids), window)
    with progress(label, len(token_ids), console=console) as task:
        for start in starts:
            ids = np.array(token_ids[start : start + window], dtype=np.int64)
            for first in range(0, len(ids), chunk):
                last = min(first + chunk, len(ids))
                logits = runner.execute(_batch(runner, ids, first, last))
                # Row j predicts the token after it; the last row of the window predicts none.
                wanted = torch.from_numpy(ids[first + 1 : last + 1]).to(logits.device)
                losses = torch.nn.functional.cross_entropy(
                    logits[: len(wanted)], wanted, reduction="none"
                )
                total += float(losses.double().sum())
                count += len(wanted)
                task.advance(last - first)
    if not count:
        raise ValueError(f"a perplexity needs two tokens or more, got {len(token_ids)}")
    return math.exp(total / count), count


def render_report(report: QualityReport) -> Table:
    """Return the figures as a table."""
    table = Table(title=f"{report.model}, {report.num_tokens} tokens")
    table.add_column("")
    table.add_column("weights")
    table.add_column("KV")
    table.add_column("perplexity", justify="right")
    table.add_column("change", justify="right")
    table.add_row("baseline", report.dtype, report.dtype, f"{report.baseline:.4f}", "")
    kv = report.dtype if report.kv_cache_dtype == "auto" else report.kv_cache_dtype
    weights = report.dtype if report.quantization == "none" else report.quantization
    table.add_row(
        "quantized", weights, kv, f"{report.quantized:.4f}", f"{100 * report.change:+.2f} %"
    )
    return table


def _measure(
    settings: QualitySettings, label: str, console: Console | None
) -> tuple[LoadedModel, float, int]:
    loaded = load_model(
        settings.model,
        device=str(resolve_device(settings.device)),
        quantization=settings.quantization,
        console=console,
    )
    token_ids = loaded.tokenizer.encode(quality_text())[: settings.num_tokens]
    window = min(settings.window, loaded.decoder.max_positions, len(token_ids))
    setup = prepare_runner(
        loaded, block_size=settings.block_size, kv_cache_dtype=settings.kv_cache_dtype
    )
    runner = setup.build(-(-window // settings.block_size))
    value, count = perplexity(
        runner,
        token_ids,
        window=window,
        chunk=settings.chunk,
        console=console,
        label=label,
    )
    return loaded, value, count


def _batch(runner: ModelRunner, ids: npt.NDArray[np.int64], first: int, last: int) -> ForwardBatch:
    """Return the step that computes tokens `first` to `last` of the only sequence."""
    num_blocks = -(-last // runner.pool.block_size)
    positions = np.arange(first, last, dtype=np.int64)
    return ForwardBatch(
        token_ids=ids[first:last],
        positions=positions,
        logits_rows=positions - first,
        attention=AttentionMetadata(
            query_start_loc=np.array([0, last - first], dtype=np.int32),
            seq_lens=np.array([last], dtype=np.int32),
            block_tables=(np.arange(num_blocks, dtype=np.int32),),
            slot_mapping=positions,
        ),
    )
