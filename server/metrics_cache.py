"""Prometheus families of what the cache holds for whom: pins, quotas, tiers and events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from radixkv.engine import EngineStats

__all__ = ["cache_families"]

PIN_GAUGES = (
    ("radixkv:pins", "Pins", "count"),
    ("radixkv:pinned_blocks", "Blocks that pins hold", "blocks"),
    ("radixkv:pin_budget_blocks", "Blocks that pins may hold", "max_blocks"),
)
PIN_COUNTERS = (
    ("radixkv:pins_expired", "Pins that ran out of time", "expired"),
    ("radixkv:pins_lapsed", "Pins that gave way to others", "lapsed"),
)
EVENT_COUNTERS = (
    ("radixkv:kv_event_batches_published", "Batches of KV events published", "published"),
    ("radixkv:kv_event_batches_dropped", "Batches of KV events never sent", "dropped"),
    ("radixkv:kv_event_batches_replayed", "Batches of KV events sent again", "replayed"),
)
TIER_COUNTERS = (
    ("radixkv:tier_blocks_offloaded", "Evicted blocks kept in a tier", "blocks_offloaded"),
    ("radixkv:tier_offload_errors", "Evicted blocks lost by a failed copy", "offload_errors"),
    ("radixkv:tier_load_errors", "Failed copies back into the pool", "load_errors"),
)
NAMESPACE_GAUGES: tuple[tuple[str, str, Callable[[dict[str, Any]], int | None]], ...] = (
    ("radixkv:namespace_blocks", "Cached blocks", lambda n: n.get("blocks")),
    ("radixkv:namespace_pinned_blocks", "Pinned blocks", lambda n: n.get("pinned_blocks")),
    ("radixkv:quota_limit_blocks", "Blocks of the share", lambda n: _quota(n, "limit_blocks")),
    ("radixkv:quota_used_blocks", "Blocks counted", lambda n: _quota(n, "used_blocks")),
    ("radixkv:quota_excess_blocks", "Blocks over the share", lambda n: _quota(n, "excess_blocks")),
)
DEFAULT = "default"


def cache_families(stats: EngineStats, labels: list[str]) -> Iterator[Metric]:
    """Yield the families of one snapshot.

    Namespaces are labelled only where whoever runs the server named them: those of
    `--tenant-quota`, and the default one. This page is open to all, and a salt may be a secret.

    Args:
        stats: the snapshot.
        labels: the value of `model_name`.
    """
    for name, text, key in PIN_GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=["model_name"])
        gauge.add_metric(labels, stats.pins.get(key, 0))
        yield gauge
    yield from _counters(PIN_COUNTERS, stats.pins, labels)
    if stats.kv_events:
        yield from _counters(EVENT_COUNTERS, stats.kv_events, labels)
    if stats.tiers:
        yield from _counters(TIER_COUNTERS, stats.tiers, labels)
        yield from _tier_gauges(stats.tiers, labels)
    for name, text, read in NAMESPACE_GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=["model_name", "namespace"])
        for namespace, usage in stats.namespaces.items():
            quota = usage.get("quota") or {}
            shown = namespace == DEFAULT or quota.get("own")
            if shown and (value := read(usage)) is not None:
                gauge.add_metric([*labels, namespace], value)
        yield gauge


def _counters(
    families: tuple[tuple[str, str, str], ...], values: dict[str, Any], labels: list[str]
) -> Iterator[Metric]:
    for name, text, key in families:
        counter = CounterMetricFamily(name, text, labels=["model_name"])
        counter.add_metric(labels, values.get(key, 0))
        yield counter


def _tier_gauges(tiers: dict[str, Any], labels: list[str]) -> Iterator[Metric]:
    blocks = GaugeMetricFamily(
        "radixkv:tier_blocks", "Blocks in a tier", labels=["model_name", "tier"]
    )
    capacity = GaugeMetricFamily(
        "radixkv:tier_capacity_blocks", "Blocks that fit", labels=["model_name", "tier"]
    )
    for tier in ("host", "disk"):
        if tier in tiers:
            blocks.add_metric([*labels, tier], tiers[tier]["blocks"])
            capacity.add_metric([*labels, tier], tiers[tier]["capacity_blocks"])
    yield blocks
    yield capacity
    loaded = CounterMetricFamily(
        "radixkv:tier_blocks_loaded", "Blocks brought back", labels=["model_name", "tier"]
    )
    for tier in ("host", "disk"):
        loaded.add_metric([*labels, tier], tiers[f"blocks_loaded_{tier}"])
    yield loaded
    if "disk" in tiers:
        queue = GaugeMetricFamily(
            "radixkv:disk_queue_blocks", "Blocks that wait to be written", labels=["model_name"]
        )
        queue.add_metric(labels, tiers["disk"]["queued_blocks"])
        yield queue
        dropped = CounterMetricFamily(
            "radixkv:disk_writes_dropped", "Blocks not written: full queue", labels=["model_name"]
        )
        dropped.add_metric(labels, tiers["disk"]["writes_dropped"])
        yield dropped


def _quota(usage: dict[str, Any], key: str) -> int | None:
    quota = usage.get("quota")
    return None if quota is None else quota[key]
