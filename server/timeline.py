"""What a server did lately: a sample every few seconds, the latest hour in memory."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import statistics
import time
from array import array
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radixkv.engine import EngineStats
    from radixkv.server.request_log import RequestRecord

__all__ = ["COLUMNS", "Timeline"]

logger = logging.getLogger(__name__)

INTERVAL_S = 5.0
SPAN_S = 3600.0
# What is counted from one sample to the next, by its counter in `EngineStats`.
COUNTED: tuple[tuple[str, Callable[[EngineStats], int]], ...] = (
    ("looked_up", lambda s: s.tokens_looked_up),
    ("hit", lambda s: s.tokens_hit),
    ("computed", lambda s: s.tokens_computed),
    ("generated", lambda s: s.tokens_generated),
    ("finished", lambda s: sum(s.requests_finished.values())),
    ("failed", lambda s: sum(s.requests_finished.get(r, 0) for r in ("error", "timeout"))),
    ("rejected", lambda s: s.requests_rejected),
    ("preempted", lambda s: s.preemptions),
    ("evicted", lambda s: s.evicted_blocks),
)
# What is so at the moment of the sample; blocks add up to the pool.
GAUGES: tuple[tuple[str, Callable[[EngineStats], float | None]], ...] = (
    ("running", lambda s: s.num_running),
    ("waiting", lambda s: s.num_waiting),
    ("free_blocks", lambda s: s.blocks_free),
    ("evictable_blocks", lambda s: s.blocks_cached),
    ("held_blocks", lambda s: max(0, s.blocks_referenced - s.pins.get("blocks", 0))),
    ("pinned_blocks", lambda s: min(s.blocks_referenced, s.pins.get("blocks", 0))),
    ("kv_utilisation", lambda s: s.kv_utilisation),
)
LATENCIES = ("cold", "warm", "ttft_cold_s", "ttft_warm_s")
COLUMNS = ("time", *(name for name, _ in COUNTED), *(name for name, _ in GAUGES), *LATENCIES)


class Timeline:
    """Owns the samples: one ring of numbers per column, overwritten from the oldest on.

    `time` is in seconds since 1970; counted columns tell how much since the sample before. A
    request is *warm* if at least half of its prompt was cached; `cold` and `warm` count those that
    ended since the sample before and had a first token, and `ttft_…_s` is the median from arrival
    to first token, NaN without any. Prompts that were only warmed don't count. Not thread-safe:
    event loop only.

    Attributes:
        interval_s: seconds from one sample to the next.
        capacity: samples kept.
        run_id: a name that no other run of a server has.
        started: seconds since 1970.
        num_samples: samples taken so far; the latest has the number before.
    """

    def __init__(
        self,
        read: Callable[[], EngineStats],
        *,
        interval_s: float = INTERVAL_S,
        span_s: float = SPAN_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Make a timeline without samples; memory is that of all it may ever hold.

        Args:
            read: returns the engine's counters.
            interval_s: seconds between samples.
            span_s: seconds that the samples kept are to cover.
            clock: seconds since 1970.
        """
        self.interval_s = interval_s
        self.capacity = max(1, math.ceil(span_s / interval_s))
        self.run_id = secrets.token_hex(8)
        self.started = clock()
        self.num_samples = 0
        self._read = read
        self._clock = clock
        self._rings = [array("d", [math.nan]) * self.capacity for _ in COLUMNS]
        self._previous: list[int] | None = None
        self._seen_until = -math.inf  # the latest end of a request, of the monotonic clock

    def sample(self, ended: Iterable[RequestRecord] = ()) -> None:
        """Take a sample now. Cost: that of reading the counters, and O(requests that ended).

        Args:
            ended: requests that have ended, the latest first; no more are looked at than are new.
        """
        stats = self._read()
        counts = [read(stats) for _, read in COUNTED]
        previous = counts if self._previous is None else self._previous
        self._previous = counts
        cold, warm = self._first_tokens(ended)
        row = [
            self._clock(),
            *(new - old for new, old in zip(counts, previous, strict=True)),
            *(_number(read(stats)) for _, read in GAUGES),
            len(cold),
            len(warm),
            _median(cold),
            _median(warm),
        ]
        index = self.num_samples % self.capacity
        for ring, value in zip(self._rings, row, strict=True):
            ring[index] = value
        self.num_samples += 1

    def columns(self, first: int = 0) -> dict[str, list[float]]:
        """Return the samples from number `first` on, as far as they are kept, oldest first.

        Cost: O(samples returned).
        """
        first = max(first, self.num_samples - self.capacity, 0)
        places = [number % self.capacity for number in range(first, self.num_samples)]
        return {
            name: [ring[place] for place in places]
            for name, ring in zip(COLUMNS, self._rings, strict=True)
        }

    def report(self, first: int = 0, run_id: str | None = None) -> dict[str, Any]:
        """Return the body of `GET /admin/timeline`.

        Args:
            first: number of the first sample wanted.
            run_id: the run of the server that `first` is from; of another run all are wanted.
        """
        if run_id is not None and run_id != self.run_id:
            first = 0
        return {
            "object": "timeline",
            "run": self.run_id,
            "started": self.started,
            "interval_s": self.interval_s,
            "next": self.num_samples,
            "samples": self.columns(first),
        }

    async def run(self, ended: Callable[[], Iterable[RequestRecord]]) -> None:
        """Take samples until cancelled. One that fails is logged, once in a row, and left out."""
        failing = False
        while True:
            try:
                self.sample(ended())
                failing = False
            except Exception:
                if not failing:
                    logger.exception("a sample of the timeline failed")
                failing = True
            await asyncio.sleep(self.interval_s)

    def _first_tokens(self, ended: Iterable[RequestRecord]) -> tuple[list[float], list[float]]:
        """Return the seconds to the first token of cold and of warm requests that are new here."""
        cold: list[float] = []
        warm: list[float] = []
        seen_until = self._seen_until
        for record in ended:
            finished = record.finished
            if finished is None:
                continue  # its end could not be recorded
            if finished <= seen_until:
                break
            self._seen_until = max(self._seen_until, finished)
            seconds = record.ttft_s
            if seconds is not None and record.api != "warm":
                is_warm = 2 * (record.cached_tokens or 0) >= record.prompt_tokens
                (warm if is_warm else cold).append(seconds)
        return cold, warm


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else math.nan
