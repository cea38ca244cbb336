"""What a simulated run came to: counters while it runs, then the figures of a report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from radixkv.simulate.managers import Usage
from radixkv.simulate.traffic import Request

__all__ = ["Outcome", "Recorder"]

MAX_POINTS = 400
NOTHING = Usage(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of one run.

    Attributes:
        manager: its name.
        requests, finished, rejected: rejected are those that could never fit.
        seconds: from the first arrival to the last answer.
        hit_rate: share of the prompt tokens that were found, counted once per request.
        mean_batch: answers that run at once, mean over the time in which any does.
        usage: shares of the memory, mean over that time.
        full_usage: the same over the time in which a request waits for memory; None if none did.
        ttft_s: seconds to the first token, (median, 95th percentile).
        latency_s: seconds per answer token from arrival to end, (mean, 95th percentile).
        output_rate, request_rate: tokens and requests a second over `seconds`.
        preemptions: how often a request lost its memory.
        series: (second, usage in tokens, answers running, requests waiting) over time.
    """

    manager: str
    total: int
    requests: int
    finished: int
    rejected: int
    seconds: float
    hit_rate: float
    mean_batch: float
    usage: Usage
    full_usage: Usage | None
    ttft_s: tuple[float, float]
    latency_s: tuple[float, float]
    output_rate: float
    request_rate: float
    preemptions: int
    series: tuple[tuple[float, Usage, int, int], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain types for JSON; what isn't known is null."""
        values = asdict(self)
        values["usage"] = self.usage._asdict()
        values["full_usage"] = None if self.full_usage is None else self.full_usage._asdict()
        values["series"] = [
            {"time": time, **usage._asdict(), "running": running, "waiting": waiting}
            for time, usage, running, waiting in self.series
        ]
        for name in ("ttft_s", "latency_s"):
            values[name] = [None if math.isnan(value) else value for value in values[name]]
        return values


class Recorder:
    """Owns the counters of a run."""

    def __init__(self, requests: Sequence[Request], total: int) -> None:
        self.requests = requests
        self.total = total
        self.cached = np.full(len(requests), -1, dtype=np.int64)
        self.arrival = np.full(len(requests), np.nan)
        self.first_token = np.full(len(requests), np.nan)
        self.finish = np.full(len(requests), np.nan)
        self.num_rejected = 0
        self.num_preempted = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.now = 0.0
        self._busy = _Mean()
        self._full = _Mean()
        self._batch = 0.0
        self._series: list[tuple[float, Usage, int, int]] = []
        self._resolution = 0.0

    def on_arrived(self, index: int, arrival: float) -> None:
        """Note when a request came."""
        self.arrival[index] = arrival

    def on_time(
        self, now: float, seconds: float, usage: Usage, running: int, waiting: int, is_full: bool
    ) -> None:
        """Note that time passes from `now` on, with this mean usage."""
        self.now = now + seconds
        if running:
            self._busy.add(seconds, usage)
            self._batch += seconds * running
            if is_full:
                self._full.add(seconds, usage)
        if not self._series or now - self._series[-1][0] >= self._resolution:
            self._series.append((now, usage, running, waiting))
            if len(self._series) > MAX_POINTS:
                # Every second point goes, and from now on only half as many come.
                del self._series[1::2]
                self._resolution = 2 * (now - self._series[0][0]) / MAX_POINTS

    def on_computed(self, prompt_tokens: int, output_tokens: int) -> None:
        """Note what steps computed."""
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens

    def on_admitted(self, index: int, num_cached: int) -> None:
        """Note what a request found; only its first admission counts."""
        if self.cached[index] < 0:
            self.cached[index] = num_cached

    def on_first_token(self, index: int, now: float) -> None:
        """Note the end of a prompt's computation."""
        self.first_token[index] = now
        self.output_tokens += self.requests[index].num_samples

    def on_finished(self, index: int, now: float) -> None:
        """Note the end of an answer."""
        self.finish[index] = now

    def on_rejected(self, index: int) -> None:
        """Note a request that can't be served."""
        self.num_rejected += 1
        self.finish[index] = np.nan

    def on_preempted(self) -> None:
        """Note that a running request lost its memory."""
        self.num_preempted += 1

    def outcome(self, manager: str) -> Outcome:
        """Return the figures."""
        prompts = np.array([request.prompt_len for request in self.requests])
        outputs = np.array([request.output_len for request in self.requests])
        admitted = self.cached >= 0
        done = ~np.isnan(self.finish)
        seconds = max(self.now - float(np.nanmin(self.arrival)), 1e-9)
        asked = int(prompts[admitted].sum())
        found = int(np.minimum(self.cached, prompts)[admitted].sum())
        ttft = (self.first_token - self.arrival)[done]
        latency = ((self.finish - self.arrival) / outputs)[done]
        return Outcome(
            manager=manager,
            total=self.total,
            requests=len(self.requests),
            finished=int(done.sum()),
            rejected=self.num_rejected,
            seconds=seconds,
            hit_rate=found / asked if asked else 0.0,
            mean_batch=self._batch / self._busy.seconds if self._busy.seconds else 0.0,
            usage=self._busy.mean(self.total),
            full_usage=self._full.mean(self.total) if self._full.seconds else None,
            ttft_s=(_quantile(ttft, 0.5), _quantile(ttft, 0.95)),
            latency_s=(
                float(latency.mean()) if len(latency) else math.nan,
                _quantile(latency, 0.95),
            ),
            output_rate=self.output_tokens / seconds,
            request_rate=int(done.sum()) / seconds,
            preemptions=self.num_preempted,
            series=tuple(self._series),
        )


class _Mean:
    """Owns a mean usage, weighted by time."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._sums = [0.0] * len(NOTHING)

    def add(self, seconds: float, usage: Usage) -> None:
        self.seconds += seconds
        self._sums = [total + seconds * part for total, part in zip(self._sums, usage, strict=True)]

    def mean(self, total: int) -> Usage:
        """Return shares of `total`."""
        if not self.seconds:
            return NOTHING
        return Usage(*(part / self.seconds / total for part in self._sums))


def _quantile(values: np.ndarray, share: float) -> float:
    return float(np.quantile(values, share)) if len(values) else math.nan
