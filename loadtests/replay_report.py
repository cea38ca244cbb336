"""Results of a replay under the names that public benchmarks use, so that they can be compared.

Records have the form of aiperf's `profile_export.jsonl`; the summary has the names of vLLM's
`bench serve --save-result`, and `total_cached_tokens` and `cached_share` beside them.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table

from loadtests.replay_run import Answer
from loadtests.serving_report import percentile

__all__ = ["record", "summarize", "summary_table"]

NS = 10**9
PERCENTILES = (50, 90, 95, 99)
TIMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "e2e"}


def record(answer: Answer) -> dict[str, Any]:
    """Return one request's line; a metric that doesn't apply is left out, as aiperf does."""
    sample = answer.sample
    metrics: dict[str, dict[str, Any]] = {"request_latency": _ms(sample.latency)}
    if sample.error is None:
        metrics["time_to_first_token"] = _ms(sample.ttft)
        if sample.inter_token is not None:
            metrics["inter_token_latency"] = _ms(sample.inter_token)
        metrics["input_sequence_length"] = _tokens(sample.prompt_tokens)
        metrics["output_sequence_length"] = _tokens(sample.completion_tokens)
        if sample.tells_cached:
            metrics["usage_prompt_cache_read_tokens"] = _tokens(sample.cached_tokens)
    return {
        "metadata": {
            "session_num": answer.turn.index,
            "conversation_id": answer.session,
            "turn_index": answer.turn_index,
            "request_start_ns": int(answer.start * NS),
            "request_end_ns": int(answer.end * NS),
            "schedule_lag_ms": round(1e3 * answer.lag, 3),
        },
        "metrics": metrics,
        "error": None if sample.error is None else {"message": sample.error},
    }


def summarize(answers: Sequence[Answer], duration: float) -> dict[str, Any]:
    """Return the figures of a replay of `duration` seconds; of failed requests only the number."""
    samples = [answer.sample for answer in answers if answer.sample.error is None]
    inputs = sum(sample.prompt_tokens for sample in samples)
    outputs = sum(sample.completion_tokens for sample in samples)
    told = [sample for sample in samples if sample.tells_cached]
    cached = sum(sample.cached_tokens for sample in told) if told else None
    asked = sum(sample.prompt_tokens for sample in told)
    spreads = {
        "ttft": [sample.ttft for sample in samples],
        "tpot": [s.inter_token for s in samples if s.inter_token is not None],
        "itl": [gap for sample in samples for gap in sample.gaps],
        "e2el": [sample.latency for sample in samples],
    }
    result: dict[str, Any] = {
        "duration": round(duration, 3),
        "completed": len(samples),
        "failed": len(answers) - len(samples),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "total_cached_tokens": cached,
        "cached_share": round(cached / asked, 5) if cached is not None and asked else None,
        "request_throughput": round(len(samples) / duration, 4),
        "output_throughput": round(outputs / duration, 3),
        "total_token_throughput": round((inputs + outputs) / duration, 3),
    }
    for name, values in spreads.items():
        in_ms = [1e3 * value for value in values]
        result[f"mean_{name}_ms"] = round(statistics.fmean(in_ms), 3) if in_ms else None
        result[f"median_{name}_ms"] = percentile(in_ms, 50)
        for percent in PERCENTILES[1:]:
            result[f"p{percent}_{name}_ms"] = percentile(in_ms, percent)
    lags = [answer.lag for answer in answers]
    result["p99_lag_ms"] = percentile([1e3 * lag for lag in lags], 99)
    errors = Counter(answer.sample.error for answer in answers if answer.sample.error)
    result["errors"] = dict(errors.most_common(5))
    return result


def summary_table(summary: dict[str, Any], title: str) -> Group:
    """Show a summary."""
    table = Table("", "mean", "p50", "p90", "p95", "p99", title=title)
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for name, label in TIMES.items():
        keys = ("mean", "median", "p90", "p95", "p99")
        values = [summary[f"{key}_{name}_ms"] for key in keys]
        table.add_row(f"{label}, ms", *("-" if v is None else f"{v:,.1f}" for v in values))
    facts = Table.grid(padding=(0, 2))
    share = summary["cached_share"]
    rows = {
        "requests": f"{summary['completed']} completed, {summary['failed']} failed",
        "throughput": f"{summary['output_throughput']:.1f} output tokens/s",
        "in all": f"{summary['total_token_throughput']:.1f} tokens/s",
        "requests/s": f"{summary['request_throughput']:.3f}",
        "duration": f"{summary['duration']:.1f} s",
        "cached": "not told" if share is None else f"{100 * share:.2f} % of the prompt tokens",
    }
    for name, value in rows.items():
        facts.add_row(name, value)
    for error, times in summary["errors"].items():
        facts.add_row("error", f"{times} x {error[:70]}")
    return Group(table, facts)


def _ms(seconds: float) -> dict[str, Any]:
    return {"value": round(1e3 * seconds, 3), "unit": "ms"}


def _tokens(count: int) -> dict[str, Any]:
    return {"value": count, "unit": "tokens"}
