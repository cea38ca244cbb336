"""Watches what a server's process holds while it is driven."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import aiohttp

from loadtests.soak_traffic import Endpoint

__all__ = ["Reading", "Watch", "growth", "settle"]

MIB = 1024 * 1024
SETTLING_S = 120.0
# Pairs grow with the square of the readings.
MAX_READINGS = 240
MIN_READINGS = 8
MIN_MINUTES = 2.0


@dataclass(frozen=True, slots=True)
class Reading:
    """What a server held at a moment. None: can't be told from here.

    Attributes:
        seconds: since the watch began.
        life: of the server, which it was.
        tasks: asyncio's, of a server that was started by the soak.
        blocks: by state, from `/admin/cache`.
    """

    seconds: float
    life: int
    rss_mib: float | None
    threads: int | None
    files: int | None
    tasks: int | None
    blocks: dict[str, int] = field(default_factory=dict)
    running: int = 0
    waiting: int = 0


class Watch:
    """Takes readings of a server, on demand and at intervals.

    Attributes:
        readings: in order; every other one is dropped when there are too many.
    """

    def __init__(self, http: aiohttp.ClientSession, endpoint: Endpoint, pid: int | None) -> None:
        self.readings: list[Reading] = []
        self.pid = pid
        self._http, self._endpoint = http, endpoint
        self._begin = time.monotonic()

    async def read(self) -> Reading:
        """Take a reading.

        Raises:
            aiohttp.ClientError: the server does not answer.
        """
        report = await _get(self._http, f"{self._endpoint.url}/admin/cache")
        process = await _get(self._http, f"{self._endpoint.url}/soak/process", missing={})
        pid = self.pid
        return Reading(
            seconds=time.monotonic() - self._begin,
            life=self._endpoint.life,
            rss_mib=None if pid is None else _rss_mib(pid),
            threads=None if pid is None else _count(pid, "task"),
            files=None if pid is None else _count(pid, "fd"),
            tasks=process.get("tasks"),
            blocks={state: count["blocks"] for state, count in report["blocks"].items()},
            running=report["requests"]["running"],
            waiting=report["requests"]["waiting"],
        )

    async def run(self, interval_s: float) -> None:
        """Take readings until it is cancelled; a server that is down is not read."""
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                self.readings.append(await self.read())
            if len(self.readings) > MAX_READINGS:
                del self.readings[::2]
                interval_s *= 2
            await asyncio.sleep(interval_s)

    def as_json(self) -> list[dict[str, Any]]:
        """Return all readings."""
        return [asdict(reading) for reading in self.readings]


def growth(readings: Sequence[Reading]) -> float | None:
    """Return by how many MiB a minute memory grew in the second half of the server's last life.

    The median of the slopes of all pairs of readings (Theil, Sen), which a few odd ones don't move.
    None if that half has few readings, or is shorter than two minutes: a server that has just begun
    grows.
    """
    life = [reading for reading in readings if reading.life == readings[-1].life]
    points = [
        (reading.seconds / 60, reading.rss_mib)
        for reading in life
        if reading.seconds >= (life[0].seconds + life[-1].seconds) / 2
        and reading.rss_mib is not None
    ]
    if len(points) < MIN_READINGS or points[-1][0] - points[0][0] < MIN_MINUTES:
        return None
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if b[0] > a[0]]
    return statistics.median(slopes)


async def settle(watch: Watch) -> Reading:
    """Wait until nothing runs and nobody's handler is left, and return the reading.

    Raises:
        TimeoutError: it does not come to rest.
    """
    async with asyncio.timeout(SETTLING_S):
        last = await watch.read()
        while True:
            await asyncio.sleep(0.3)
            reading = await watch.read()
            still = (reading.threads, reading.files, reading.tasks)
            idle = not reading.running and not reading.waiting
            if idle and still == (last.threads, last.files, last.tasks):
                return reading
            last = reading


async def _get(
    http: aiohttp.ClientSession, url: str, missing: dict[str, Any] | None = None
) -> dict[str, Any]:
    async with http.get(url) as response:
        if response.status == 404 and missing is not None:
            return missing
        response.raise_for_status()
        body: dict[str, Any] = await response.json()
        return body


def _rss_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / MIB


def _count(pid: int, what: str) -> int:
    return len(list(Path(f"/proc/{pid}/{what}").iterdir()))
