"""The route that shows what the engine does with its time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import web

from radixkv.server.body import json_response
from radixkv.server.metrics_engine import prompt_sources
from radixkv.server.state import STATE

if TYPE_CHECKING:
    from radixkv.engine import EngineStats, HistogramData

__all__ = ["engine_report", "engine_stats"]

QUANTILES = (0.5, 0.9, 0.99)


async def engine_stats(request: web.Request) -> web.Response:
    """`GET /admin/engine`: latencies, what steps consist of, and where tokens came from."""
    state = request.app[STATE]
    report = engine_report(state.engine.stats())
    return json_response({"model": state.model_name, **report})


def engine_report(stats: EngineStats) -> dict[str, Any]:
    """Return the body of `/admin/engine`; counters only ever grow."""
    return {
        "uptime_s": stats.uptime_s,
        "requests": {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "queue_by_namespace": stats.queue_by_namespace,
        },
        "steps": {
            "count": stats.steps,
            "time_s": stats.step_time_s,
            "model_time_s": stats.model_time_s,
            "host_time_s": stats.step_time_s - stats.model_time_s,
            "tokens": stats.step_tokens,
            "tokens_per_step": {kind: _summary(data) for kind, data in stats.step_sizes.items()},
        },
        "histograms": {name: _summary(data) for name, data in stats.histograms.items()},
        "prompt_tokens": {
            "looked_up": stats.tokens_looked_up,
            **prompt_sources(stats),
            "pending": stats.prompt_tokens_pending,
        },
        "tokens": {
            "generated": stats.tokens_generated,
            "recomputed": stats.tokens_recomputed,
            "rehit": stats.tokens_rehit,
            "drafted": stats.tokens_drafted,
            "accepted": stats.tokens_accepted,
        },
        "preemptions": stats.preemptions_by_mode,
        "swap_bytes": stats.swap_bytes,
        "kv": {
            "tokens_referenced": stats.kv_tokens_referenced,
            "tokens_stored": stats.kv_tokens_stored,
            "slots_allocated": stats.kv_slots_allocated,
            "utilisation": stats.kv_utilisation,
        },
    }


def _summary(data: HistogramData) -> dict[str, float | int | None]:
    """Return the count and the mean, and quantiles interpolated within their buckets."""
    count = data.count
    summary: dict[str, float | int | None] = {
        "count": count,
        "mean": data.total / count if count else None,
    }
    for quantile in QUANTILES:
        summary[f"p{quantile * 100:g}"] = _quantile(data, quantile * count) if count else None
    return summary


def _quantile(data: HistogramData, rank: float) -> float:
    low, seen = 0.0, 0
    for bound, count in zip(data.bounds, data.counts, strict=False):
        if count and seen + count >= rank:
            return low + (bound - low) * (rank - seen) / count
        seen += count
        low = bound
    return low  # beyond the last bound nothing more is known
