"""Prometheus families under vLLM's names that repeat the engine's numbers as vLLM counts them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from radixkv.engine import EngineStats

__all__ = ["vllm_families"]


def vllm_families(stats: EngineStats, labels: list[str]) -> Iterator[Metric]:
    """Yield the families of one snapshot.

    Args:
        stats: the snapshot.
        labels: the value of `model_name`.
    """
    sources = CounterMetricFamily(
        "vllm:prompt_tokens_by_source",
        "Prompt tokens of admitted requests, by where their KV came from at admission",
        labels=["model_name", "source"],
    )
    by_tier = stats.tokens_hit_by_tier
    device = by_tier.get("device", stats.tokens_hit)
    for source, count in (
        ("local_compute", stats.tokens_looked_up - stats.tokens_hit),
        ("local_cache_hit", device),
        ("external_kv_transfer", stats.tokens_hit - device),
    ):
        sources.add_metric([*labels, source], count)
    yield sources
    cached = CounterMetricFamily(
        "vllm:prompt_tokens_cached",
        "Prompt tokens of admitted requests that were found cached, in any tier",
        labels=["model_name"],
    )
    cached.add_metric(labels, stats.tokens_hit)
    yield cached
    config = GaugeMetricFamily(
        "vllm:cache_config_info",
        "1; the labels describe the pool",
        labels=["model_name", "block_size", "num_gpu_blocks"],
    )
    config.add_metric([*labels, str(stats.block_size), str(stats.blocks_total)], 1)
    yield config
