"""The shapes of answers about the engine."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

__all__ = ["EngineReport", "RequestDetail", "RequestReport", "RequestState", "TimelineReport"]

RequestState = Literal["waiting", "prefill", "decode", "finished", "failed", "aborted"]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


class Summary(msgspec.Struct, kw_only=True):
    """A histogram in few numbers; null before the first value."""

    count: Count
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


class Queue(msgspec.Struct, kw_only=True):
    """Requests of a namespace that left the queue, and the seconds they spent there."""

    requests: Count
    seconds: Seconds


class QueueCounts(msgspec.Struct, kw_only=True):
    """Requests now, and those that left the queue, by namespace."""

    running: Count
    waiting: Count
    queue_by_namespace: dict[str, Queue]


class StepReport(msgspec.Struct, kw_only=True):
    """What steps took and computed."""

    count: Count
    time_s: Seconds
    model_time_s: Seconds
    host_time_s: float
    tokens: dict[str, Count]
    tokens_per_step: dict[str, Summary]


class AnswerTokens(msgspec.Struct, kw_only=True):
    """Tokens that were generated, computed or found again, and guessed."""

    generated: Count
    recomputed: Count
    rehit: Count
    drafted: Count
    accepted: Count


class KvUse(msgspec.Struct, kw_only=True):
    """How well running sequences share and fill what they hold."""

    tokens_referenced: Count
    tokens_stored: Count
    slots_allocated: Count
    utilisation: Share | None


class EngineReport(msgspec.Struct, kw_only=True):
    """Latencies, what steps consist of, and where tokens came from; counters only ever grow."""

    model: str
    uptime_s: Seconds
    requests: QueueCounts
    steps: StepReport
    histograms: dict[str, Summary]
    prompt_tokens: dict[str, Count]
    tokens: AnswerTokens
    preemptions: dict[str, Count]
    swap_bytes: dict[str, Count]
    kv: KvUse


class TimelineReport(msgspec.Struct, kw_only=True):
    """What was sampled over the last hour, by column; null where there is nothing to tell.

    Counted columns tell how much since the sample before. `next` is the number of the next sample,
    `run` the name of this run of the server.
    """

    object: Literal["timeline"]
    run: str
    started: float
    interval_s: Seconds
    next: Count
    samples: dict[str, list[float | None]]


class RequestView(msgspec.Struct, kw_only=True):
    """What a request is doing, or did; times are null until they are known."""

    id: str
    api: Literal["chat", "completions", "responses", "messages", "session", "warm", "other"]
    model: str
    namespace: str
    tenant: str
    session_id: str | None
    state: RequestState
    finish_reason: Literal["stop", "length", "abort", "timeout", "error"] | None
    arrived_at: float
    prompt_tokens: Count
    cached_tokens: Count | None
    output_tokens: Count
    queue_s: Seconds
    ttft_s: Seconds | None
    itl_s: Seconds | None
    total_s: Seconds
    preemptions: Count


class RequestDetail(RequestView, kw_only=True):
    """A request by its name, with its other names and the place of its explanation."""

    object: Literal["request"]
    request_id: str
    trace_id: str | None
    explain: str


class RequestReport(msgspec.Struct, kw_only=True):
    """Requests that live, and the latest that ended, latest first."""

    object: Literal["requests"]
    live: list[RequestView]
    recent: list[RequestView]
