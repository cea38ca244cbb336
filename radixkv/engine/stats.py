"""What the engine tells about itself."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote

from radixkv.engine.histogram import HistogramData
from radixkv.request import Namespace

__all__ = ["EngineHealth", "EngineStats", "hit_rate", "namespace_label", "namespace_of"]


def hit_rate(hit: int, looked_up: int) -> float | None:
    """Return the share of looked-up tokens that were hits; None before any lookup."""
    return hit / looked_up if looked_up else None


def namespace_label(namespace: Namespace) -> str:
    """Return a name that no other namespace has.

    >>> namespace_label(()), namespace_label(("a/b", "c"))
    ('default', 'a%2Fb/c')
    """
    return "/".join(quote(field, safe="") for field in namespace) if namespace else "default"


def namespace_of(label: str) -> Namespace:
    """Return the namespace that has a label.

    >>> namespace_of(namespace_label(("a/b", ""))), namespace_of("default")
    (('a/b', ''), ())
    """
    return () if label == "default" else tuple(unquote(part) for part in label.split("/"))


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Whether the engine is fit to answer.

    Attributes:
        alive: its thread runs and has not failed.
        accepting: it takes new requests (False while it drains).
        busy: it has requests.
        seconds_in_step: how long the current step has been running; 0 between steps.
    """

    alive: bool
    accepting: bool
    busy: bool
    seconds_in_step: float
    num_running: int
    num_waiting: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A consistent snapshot of all counters, which never decrease, and gauges.

    `tokens_looked_up` counts the prompt tokens of admitted requests, `tokens_hit` those reused at
    first admission, `tokens_computed` prompt tokens computed for the first time; what a resumed
    request finds or computes again is in `tokens_rehit` and `tokens_recomputed`. `tokens_hit` is
    the sum of `tokens_hit_by_tier`; `tiers` is empty without a host or disk tier. `namespaces` and
    `pins` are those of `radixkv.engine.usage`. The `kv_` gauges are those of `KVSharing`: what
    running sequences refer to, and what is stored and held for them.

    Prompt tokens add up: `tokens_looked_up` is the sum of `tokens_hit`, `tokens_computed`, and
    `prompt_tokens_` `found_late`, `pending` and `dropped`, see `Meter`; and unless a step failed,
    `step_tokens` "decode" and "prefill" together are `tokens_computed`, `tokens_recomputed` and
    `answer_tokens_computed`. `histograms`, `step_sizes` and `queue_by_namespace` are `Meter`'s;
    `swap_bytes` are those copied "out" and "in".
    """

    uptime_s: float
    num_running: int
    num_waiting: int
    oldest_wait_s: float
    tokens_looked_up: int
    tokens_hit: int
    tokens_rehit: int
    tokens_computed: int
    tokens_recomputed: int
    tokens_generated: int
    requests_admitted: int
    requests_rejected: int
    requests_finished: dict[str, int]
    preemptions: int
    block_size: int
    bytes_per_block: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_referenced: int
    evicted_blocks: int
    copied_blocks: int
    nodes: int
    leaves: int
    steps: int
    step_time_s: float
    last_step_age_s: float
    tokens_hit_by_tier: dict[str, int] = field(default_factory=dict)
    tiers: dict[str, Any] = field(default_factory=dict)
    scheduling: dict[str, Any] = field(default_factory=dict)
    windows: dict[str, dict[str, Any]] = field(default_factory=dict)
    namespaces: dict[str, dict[str, Any]] = field(default_factory=dict)
    kv_events: dict[str, int] = field(default_factory=dict)
    pins: dict[str, int] = field(default_factory=dict)
    kv_tokens_referenced: int = 0
    kv_tokens_stored: int = 0
    kv_slots_allocated: int = 0
    model_time_s: float = 0.0
    prompt_tokens_found_late: int = 0
    prompt_tokens_pending: int = 0
    prompt_tokens_dropped: int = 0
    answer_tokens_computed: int = 0
    step_tokens: dict[str, int] = field(default_factory=dict)
    tokens_drafted: int = 0
    tokens_accepted: int = 0
    preemptions_by_mode: dict[str, int] = field(default_factory=dict)
    swap_bytes: dict[str, int] = field(default_factory=dict)
    histograms: dict[str, HistogramData] = field(default_factory=dict)
    step_sizes: dict[str, HistogramData] = field(default_factory=dict)
    queue_by_namespace: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def kv_utilisation(self) -> float | None:
        """Tokens stored in a slot of the blocks that running sequences hold; None without any."""
        return self.kv_tokens_stored / self.kv_slots_allocated if self.kv_slots_allocated else None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain types."""
        return dataclasses.asdict(self)
