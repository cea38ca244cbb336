"""What agents experienced: counters and distributions that can be merged, by kind of user."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loadtests.openai_client import Sample
from loadtests.slo import SPREADS

__all__ = ["WINDOW_S", "LoadStats", "Spread", "Totals", "inter_token"]

WINDOW_S = 10
RATIO = 1.02  # of neighbouring buckets: a percentile is off by 1 % at most
SMALLEST_S = 1e-6
COUNTS = ("requests", "errors", "prompt_tokens", "told_tokens", "cached_tokens", "output_tokens")


class Spread:
    """Owns a distribution of times in buckets of equal ratio: O(1) memory for a soak of days."""

    def __init__(self, buckets: Mapping[int, int] | None = None) -> None:
        self.buckets: dict[int, int] = dict(buckets or {})

    def __len__(self) -> int:
        return sum(self.buckets.values())

    def add(self, seconds: float) -> None:
        """Count a time."""
        index = round(math.log(max(seconds, SMALLEST_S)) / math.log(RATIO))
        self.buckets[index] = self.buckets.get(index, 0) + 1

    def merge(self, other: Spread) -> None:
        """Count what another one has counted."""
        for index, count in other.buckets.items():
            self.buckets[index] = self.buckets.get(index, 0) + count

    def percentile(self, percent: float) -> float | None:
        """Return the least time, to 1 %, that `percent` of all don't exceed; None of nothing."""
        rank = max(1, math.ceil(len(self) * percent / 100))
        seen = 0
        for index in sorted(self.buckets):
            seen += self.buckets[index]
            if seen >= rank:
                return float(RATIO**index)
        return None


@dataclass(slots=True)
class Totals:
    """Sums over requests.

    Attributes:
        requests: ended ones, failed ones too; all else is of those that didn't fail.
        told_tokens: prompt tokens of requests whose answer tells how many were cached.
        spreads: by the name of the time.
    """

    requests: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    told_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    spreads: dict[str, Spread] = field(default_factory=lambda: {name: Spread() for name in SPREADS})

    def add(self, sample: Sample, answers: int = 1) -> None:
        """Count a request that gave `answers` answers in parallel."""
        self.requests += 1
        if sample.error is not None:
            self.errors += 1
            return
        self.prompt_tokens += sample.prompt_tokens
        self.output_tokens += sample.completion_tokens
        if sample.tells_cached:
            self.told_tokens += sample.prompt_tokens
            self.cached_tokens += sample.cached_tokens
        self.spreads["e2e"].add(sample.latency)
        if sample.arrivals:
            self.spreads["ttft"].add(sample.ttft)
        itl = inter_token(sample, answers)
        if itl is not None:
            self.spreads["itl"].add(itl)
        if answers == 1:
            for gap in sample.gaps:
                self.spreads["gap"].add(gap)

    def merge(self, other: Totals) -> None:
        """Add another one's sums."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name, spread in other.spreads.items():
            self.spreads[name].merge(spread)

    def figure(self, name: str, seconds: float) -> float | None:
        """Return a figure by its name in an SLO; None if nothing tells.

        Args:
            name: of the figure; seconds, a share, or a rate a second.
            seconds: the time that rates are over.
        """
        if match := re.fullmatch(r"([a-z0-9]+)_p([\d.]+)", name):
            return self.spreads[match[1]].percentile(float(match[2]))
        if name == "error_rate":
            return self.errors / self.requests if self.requests else None
        if name == "cached_share":
            return self.cached_tokens / self.told_tokens if self.told_tokens else None
        if not seconds:
            return None
        done = self.requests - self.errors
        return {"output_rate": self.output_tokens, "request_rate": done}[name] / seconds

    def to_dict(self) -> dict[str, Any]:
        """Return plain types."""
        spreads = {name: list(s.buckets.items()) for name, s in self.spreads.items()}
        return {**{name: getattr(self, name) for name in COUNTS}, "spreads": spreads}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Totals:
        """Return what `to_dict` was made of."""
        spreads = {name: Spread(dict(pairs)) for name, pairs in data["spreads"].items()}
        return cls(**{name: data[name] for name in COUNTS}, spreads=spreads)


class LoadStats:
    """Owns the totals of a load test by kind of user, and by windows of ten seconds.

    Attributes:
        kinds: totals by kind.
        windows: totals of all kinds by the window that a request ended in.
        users: users that ran, by window.
        first, last: when the first request began and the last one ended, seconds since the epoch.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything: a new test begins."""
        self.kinds: dict[str, Totals] = {}
        self.windows: dict[int, Totals] = {}
        self.users: dict[int, int] = {}
        self.first = math.inf
        self.last = -math.inf

    @property
    def seconds(self) -> float:
        """From the first request's beginning to the last one's end."""
        return max(self.last - self.first, 0.0) if self.kinds else 0.0

    def record(
        self, kind: str, sample: Sample, end: float, *, answers: int = 1, users: int = 0
    ) -> None:
        """Count a request that ended at `end`, seconds since the epoch, while `users` ran."""
        window = int(end // WINDOW_S)
        self.kinds.setdefault(kind, Totals()).add(sample, answers)
        self.windows.setdefault(window, Totals()).add(sample, answers)
        self.users[window] = max(self.users.get(window, 0), users)
        self.first = min(self.first, end - sample.latency)
        self.last = max(self.last, end)

    def total(self, kind: str | None = None) -> Totals:
        """Return the totals of a kind, or of all."""
        if kind is not None:
            return self.kinds.get(kind, Totals())
        result = Totals()
        for totals in self.kinds.values():
            result.merge(totals)
        return result

    def figure(self, kind: str | None, name: str) -> float | None:
        """Return a figure as `check_slos` asks for it."""
        return self.total(kind).figure(name, self.seconds)

    def drain(self) -> dict[str, Any]:
        """Return everything as plain types, and forget it: what a worker sends to its master."""
        data = {
            "kinds": {kind: totals.to_dict() for kind, totals in self.kinds.items()},
            "windows": [(window, totals.to_dict()) for window, totals in self.windows.items()],
            "first": self.first if self.kinds else None,
            "last": self.last if self.kinds else None,
        }
        self.clear()
        return data

    def merge(self, data: Mapping[str, Any], users: int = 0) -> None:
        """Add what another process drained.

        Args:
            data: what it sent.
            users: users that run in all processes.
        """
        for kind, totals in data["kinds"].items():
            self.kinds.setdefault(kind, Totals()).merge(Totals.from_dict(totals))
        for window, totals in data["windows"]:
            self.windows.setdefault(window, Totals()).merge(Totals.from_dict(totals))
            self.users[window] = max(self.users.get(window, 0), users)
        if data["first"] is not None:
            self.first = min(self.first, data["first"])
            self.last = max(self.last, data["last"])


def inter_token(sample: Sample, answers: int = 1) -> float | None:
    """Return the mean time a token after the first of `answers` that came side by side."""
    length = sample.completion_tokens / answers
    if length <= 1 or len(sample.arrivals) < 2:
        return None
    return (sample.arrivals[-1] - sample.arrivals[0]) / (length - 1)
