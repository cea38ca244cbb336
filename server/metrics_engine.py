"""Prometheus families of what the engine does: latencies, steps, and where tokens came from."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

if TYPE_CHECKING:
    from radixkv.engine import EngineStats, HistogramData

__all__ = ["engine_families", "prompt_sources"]

# Of `EngineStats.histograms`; names are vLLM's where vLLM measures the same.
HISTOGRAMS = {
    "time_to_first_token_seconds": "Arrival to first token",
    "inter_token_latency_seconds": "Time between two tokens of an answer",
    "request_queue_time_seconds": "Arrival to the first step",
    "request_prefill_time_seconds": "First step to first token",
    "request_decode_time_seconds": "First token to last token",
    "e2e_request_latency_seconds": "Arrival to the end of a complete answer",
    "step_model_time_seconds": "Time of the model in a step",
    "step_host_time_seconds": "Time of a step without the model",
    "step_sequences": "Sequences that a step computes tokens of",
}


def engine_families(stats: EngineStats, labels: list[str]) -> Iterator[Metric]:
    """Yield the families of one snapshot.

    Args:
        stats: the snapshot.
        labels: the value of `model_name`.
    """
    for name, text in HISTOGRAMS.items():
        histogram = HistogramMetricFamily(f"radixkv:{name}", text, labels=["model_name"])
        if name in stats.histograms:
            _add(histogram, labels, stats.histograms[name])
        yield histogram
    sizes = HistogramMetricFamily(
        "radixkv:step_tokens", "Tokens that a step computes, by kind", labels=["model_name", "kind"]
    )
    for kind, data in stats.step_sizes.items():
        _add(sizes, [*labels, kind], data)
    yield sizes
    yield _labelled(
        CounterMetricFamily,
        "radixkv:prompt_tokens_by_source",
        "Prompt tokens of admitted requests by what became of them, but those still pending",
        "source",
        prompt_sources(stats),
        labels,
    )
    yield _labelled(
        CounterMetricFamily,
        "radixkv:preemptions",
        "Preemptions, by what became of the KV",
        "mode",
        stats.preemptions_by_mode,
        labels,
    )
    yield _labelled(
        CounterMetricFamily,
        "radixkv:swap_bytes",
        "KV of preempted requests copied out of the pool and in",
        "direction",
        stats.swap_bytes,
        labels,
    )
    for field, name, text in (
        ("requests", "namespace_requests", "Ended requests that had been admitted, by namespace"),
        ("seconds", "namespace_queue_seconds", "Time that these requests were in the queue"),
    ):
        yield _labelled(
            CounterMetricFamily,
            f"radixkv:{name}",
            text,
            "namespace",
            {label: wait[field] for label, wait in stats.queue_by_namespace.items()},
            labels,
        )
    yield _labelled(
        GaugeMetricFamily,
        "radixkv:kv_tokens",
        "Of running sequences: tokens they refer to, tokens stored, slots of their blocks",
        "state",
        {
            "referenced": stats.kv_tokens_referenced,
            "stored": stats.kv_tokens_stored,
            "allocated": stats.kv_slots_allocated,
        },
        labels,
    )


def prompt_sources(stats: EngineStats) -> dict[str, int]:
    """Return the prompt tokens of admitted requests by what became of them.

    Together with `prompt_tokens_pending` they are `tokens_looked_up`.
    """
    return {
        **stats.tokens_hit_by_tier,
        "computed": stats.tokens_computed,
        "found_late": stats.prompt_tokens_found_late,
        "dropped": stats.prompt_tokens_dropped,
    }


def _add(family: HistogramMetricFamily, labels: list[str], data: HistogramData) -> None:
    ends = [*map(str, map(float, data.bounds)), "+Inf"]
    counts = accumulate(data.counts)
    family.add_metric(labels, list(zip(ends, counts, strict=True)), data.total)


def _labelled(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    text: str,
    label: str,
    values: dict[str, int] | dict[str, float],
    labels: list[str],
) -> Metric:
    family = kind(name, text, labels=["model_name", label])
    for value, count in values.items():
        family.add_metric([*labels, value], count)
    return family
