"""The figures of a run, and the comparison of two servers' runs."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from loadtests.openai_client import Sample
from loadtests.serving_workloads import Target, Workload

__all__ = ["compare", "comparison_table", "figures", "percentile"]

PERCENTS = (50, 95, 99)
ROWS = (
    "output_tokens_per_s",
    "requests_per_s",
    *(f"ttft_p{percent}_s" for percent in PERCENTS),
    *(f"itl_p{percent}_ms" for percent in PERCENTS),
    *(f"gap_p{percent}_ms" for percent in PERCENTS),
    "tokens_per_chunk",
    "hit_rate",
    "wall_s",
)


def figures(samples: Sequence[Sample], wall_s: float) -> dict[str, Any]:
    """Return the figures of a run of `wall_s` seconds; failed requests count in `errors` only.

    `itl` is the mean time a token after the first, one value per request (what vLLM's benchmark
    calls TPOT); `gap` is the time between two chunks that carried tokens. They are the same for a
    server that sends every token by itself. `hit_rate` is None if the server doesn't tell.
    """
    good = [s for s in samples if s.error is None]
    prompt, output = sum(s.prompt_tokens for s in good), sum(s.completion_tokens for s in good)
    cached = sum(s.cached_tokens for s in good) if any(s.tells_cached for s in good) else None
    chunks = sum(len(s.arrivals) for s in good)
    spreads = {
        "ttft_p{}_s": [s.ttft for s in good],
        "itl_p{}_ms": [1e3 * s.inter_token for s in good if s.inter_token is not None],
        "gap_p{}_ms": [1e3 * gap for s in good for gap in s.gaps],
    }
    return {
        "requests": len(samples),
        "errors": dict(Counter(s.error for s in samples if s.error).most_common(5)),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "output_tokens": output,
        "hit_rate": None if cached is None else round(cached / max(prompt, 1), 4),
        "output_tokens_per_s": round(output / wall_s, 2),
        "requests_per_s": round(len(good) / wall_s, 3),
        **{
            name.format(percent): percentile(values, percent)
            for name, values in spreads.items()
            for percent in PERCENTS
        },
        "tokens_per_chunk": round(output / chunks, 3) if chunks else None,
        "wall_s": round(wall_s, 2),
    }


def compare(runs: Mapping[str, Sequence[Mapping[str, Any]]], target: Target) -> dict[str, Any]:
    """Hold the first of two servers against a target that is relative to the second.

    Args:
        runs: by the server's name, one result of `figures` per round.
        target: what the ratio should be.

    Returns:
        The ratio of the medians, the least and the greatest ratio of a round, and whether the first
        meets the target; None where a figure is missing, or where a request failed.
    """
    first, second = runs.values()
    pairs = [(a[target.figure], b[target.figure]) for a, b in zip(first, second, strict=True)]
    result = {"figure": target.figure, "target": str(target)}
    if any(run["errors"] for run in (*first, *second)) or not all(a and b for a, b in pairs):
        return {**result, "ratio": None, "rounds": None, "met": None}
    ratio = statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs)
    rounds = [round(a / b, 3) for a, b in pairs]
    return {
        **result,
        "ratio": round(ratio, 3),
        "rounds": [min(rounds), max(rounds)],
        "met": target.is_met(ratio),
    }


def comparison_table(workload: Workload, runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """Show the medians of one or two servers; of two, their ratios and what they should be.

    Args:
        workload: what was played.
        runs: by the server's name, one result of `figures` per round.
    """
    rounds = max(map(len, runs.values()))
    title = f"{workload.name}: medians of {rounds} round{'s' if rounds != 1 else ''}"
    table = Table("", *runs, title=title)
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    if len(runs) == 2:
        for header in ("ratio", "of the rounds", "target", "met"):
            table.add_column(header)
    for name in ROWS:
        shown = [_shown([run[name] for run in results]) for results in runs.values()]
        if len(runs) == 1:
            table.add_row(name, *shown)
            continue
        targets = [t for t in workload.targets if t.figure == name] or [Target(name)]
        for i, target in enumerate(targets):
            start = (name, *shown) if i == 0 else ("",) * (1 + len(shown))
            table.add_row(*start, *_verdict(compare(runs, target)))
    errors = [str(sum(sum(run["errors"].values()) for run in r)) for r in runs.values()]
    table.add_row("errors", *errors)
    return table


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Return a percentile, between neighbours by linear interpolation; None of nothing."""
    if len(values) < 2:
        return round(values[0], 4) if values else None
    return round(statistics.quantiles(values, n=100, method="inclusive")[percent - 1], 4)


def _verdict(result: Mapping[str, Any]) -> tuple[str, str, str, str]:
    ratio, spread = "-", "-"
    if result["ratio"] is not None:
        ratio, spread = f"{result['ratio']:.2f}", "{:.2f} to {:.2f}".format(*result["rounds"])
    met = {True: "yes", False: "no", None: "?"}[result["met"]] if result["target"] else ""
    return ratio, spread, result["target"], met


def _shown(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.4g}" if known else "-"
