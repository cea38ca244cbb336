"""Prometheus metrics: the engine's counters read at scrape time, and what requests took.

Names under `vllm:` mean what they mean there, so that existing dashboards and load generators work;
`radixkv:` names have no counterpart. Labels are bounded: model name, finish reason, route, status.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from radixkv.request import RequestTimings
from radixkv.server.metrics_cache import cache_families
from radixkv.server.metrics_engine import engine_families
from radixkv.server.metrics_requests import RequestHistograms
from radixkv.server.metrics_vllm import vllm_families

if TYPE_CHECKING:
    from radixkv.engine import AsyncEngine, EngineStats
    from radixkv.server.generation import Answer

__all__ = ["Metrics"]

logger = logging.getLogger(__name__)

Reader = Callable[["EngineStats"], float]

GAUGES: tuple[tuple[str, str, Reader], ...] = (
    ("vllm:num_requests_running", "Requests in the running batch", lambda s: s.num_running),
    ("vllm:num_requests_waiting", "Requests waiting to be admitted", lambda s: s.num_waiting),
    (
        "vllm:kv_cache_usage_perc",
        "Blocks held by running requests, as a fraction of all (1 is full)",
        lambda s: s.blocks_referenced / s.blocks_total if s.blocks_total else 0.0,
    ),
    ("radixkv:oldest_wait_seconds", "Age of the oldest waiting request", lambda s: s.oldest_wait_s),
    ("radixkv:uptime_seconds", "Time since the engine started", lambda s: s.uptime_s),
    ("radixkv:last_step_age_seconds", "Time since the last step", lambda s: s.last_step_age_s),
    ("radixkv:tree_nodes", "Nodes of the radix tree", lambda s: s.nodes),
    ("radixkv:tree_leaves", "Leaves of the radix tree", lambda s: s.leaves),
    (
        "radixkv:prompt_tokens_pending",
        "Prompt tokens that admitted requests have still to compute",
        lambda s: s.prompt_tokens_pending,
    ),
    (
        "radixkv:kv_utilisation",
        "Tokens stored in a slot of the blocks that running sequences hold (NaN without any)",
        lambda s: float("nan") if s.kv_utilisation is None else s.kv_utilisation,
    ),
    ("radixkv:bytes_per_block", "Size of one block of KV", lambda s: s.bytes_per_block),
)

COUNTERS: tuple[tuple[str, str, Reader], ...] = (
    (
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache",
        lambda s: s.tokens_looked_up,
    ),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", lambda s: s.tokens_hit),
    (
        # Tokens of admitted prompts, cached or not, as in vLLM.
        "vllm:prompt_tokens",
        "Prompt tokens of admitted requests",
        lambda s: s.tokens_looked_up,
    ),
    ("vllm:generation_tokens", "Tokens generated", lambda s: s.tokens_generated),
    ("vllm:num_preemptions", "Requests preempted", lambda s: s.preemptions),
    ("radixkv:prefill_tokens", "Prompt tokens computed", lambda s: s.tokens_computed),
    (
        "radixkv:recomputed_tokens",
        "Tokens computed again after a preemption",
        lambda s: s.tokens_recomputed,
    ),
    ("radixkv:requests_admitted", "Requests admitted", lambda s: s.requests_admitted),
    ("radixkv:requests_rejected", "Requests refused", lambda s: s.requests_rejected),
    ("radixkv:evicted_blocks", "Cached blocks evicted", lambda s: s.evicted_blocks),
    ("radixkv:copied_blocks", "Blocks copied before a write", lambda s: s.copied_blocks),
    ("radixkv:steps", "Engine steps", lambda s: s.steps),
    ("radixkv:step_seconds", "Time spent in engine steps", lambda s: s.step_time_s),
    (
        "radixkv:rehit_tokens",
        "Tokens that resumed requests found cached",
        lambda s: s.tokens_rehit,
    ),
    (
        "radixkv:answer_tokens_computed",
        "Answer tokens computed for the first time, but accepted drafts",
        lambda s: s.answer_tokens_computed,
    ),
    ("radixkv:speculated_tokens", "Tokens drafted", lambda s: s.tokens_drafted),
    ("radixkv:accepted_tokens", "Drafted tokens that were right", lambda s: s.tokens_accepted),
)


class Metrics:
    """The registry of one server, and the only place that records into it.

    A failure here is logged and counted; it never reaches a request.
    """

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(EngineCollector(engine, model_name))
        self._model_name = model_name
        self._failures = Counter(
            "radixkv:metrics_failures", "Recordings that failed", registry=self._registry
        )
        self._http = Counter(
            "radixkv:http_requests",
            "HTTP requests answered",
            ("route", "status"),
            registry=self._registry,
        )
        self._requests = RequestHistograms(self._registry, model_name, engine.max_model_len)

    def observe_request(self, timings: RequestTimings, answers: Sequence[Answer]) -> None:
        """Record what one request took, as far as it got.

        Args:
            timings: the engine's.
            answers: all of its choices.
        """
        try:
            self._requests.observe(timings, answers)
        except Exception:
            self.note_failure()

    def observe_http(self, route: str, status: int) -> None:
        """Count one HTTP answer; `route` is the route's pattern, never the client's path."""
        try:
            self._http.labels(route, str(status)).inc()
        except Exception:
            self.note_failure()

    def register(self, collector: Collector) -> None:
        """Have more metrics on the page."""
        self._registry.register(collector)

    def render(self) -> bytes:
        """Return the Prometheus text page."""
        return generate_latest(self._registry)

    def note_failure(self) -> None:
        """Log and count the exception being handled: something could not be recorded."""
        logger.exception("recording a metric failed")
        self._failures.inc()


class EngineCollector(Collector):
    """Turns one `stats()` snapshot into metric families at each scrape."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._engine = engine
        self._labels = [model_name]

    def collect(self) -> Iterator[Metric]:
        """Yield every engine metric from one snapshot, so that they agree with each other."""
        stats = self._engine.stats()
        for name, text, read in GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric(self._labels, float(read(stats)))
            yield gauge
        for name, text, read in COUNTERS:
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric(self._labels, float(read(stats)))
            yield counter
        finished = CounterMetricFamily(
            "vllm:request_success",
            "Requests ended, by reason",
            labels=["model_name", "finished_reason"],
        )
        for reason, count in sorted(stats.requests_finished.items()):
            finished.add_metric([*self._labels, reason], count)
        yield finished
        hits = CounterMetricFamily(
            "radixkv:hit_tokens", "Prompt tokens reused, by tier", labels=["model_name", "tier"]
        )
        for tier, count in stats.tokens_hit_by_tier.items():
            hits.add_metric([*self._labels, tier], count)
        yield hits
        blocks = GaugeMetricFamily(
            "radixkv:blocks", "Blocks of the KV pool by state", labels=["model_name", "state"]
        )
        for state, count in (
            ("free", stats.blocks_free),
            ("cached", stats.blocks_cached),
            ("referenced", stats.blocks_referenced),
        ):
            blocks.add_metric([*self._labels, state], count)
        yield blocks
        rate = GaugeMetricFamily(
            "radixkv:hit_rate", "Tokens hit / looked up", labels=["model_name", "window"]
        )
        for window, values in sorted(stats.windows.items()):
            if values["hit_rate"] is not None:
                rate.add_metric([*self._labels, window], values["hit_rate"])
        yield rate
        yield from engine_families(stats, self._labels)
        yield from cache_families(stats, self._labels)
        yield from vllm_families(stats, self._labels)
