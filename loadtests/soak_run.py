"""Drives a server, looks at what it still holds, and repeats what was asked alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from rich.console import Group

from loadtests.soak_replay import Replay
from loadtests.soak_report import Findings, live_view
from loadtests.soak_server import SoakServer
from loadtests.soak_traffic import Endpoint, Traffic, make_documents
from loadtests.soak_watch import Reading, Watch, settle

__all__ = ["Show", "SoakSettings", "replay", "soak"]

READINGS = 200
LONGEST_LINE = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakSettings:
    """How a server is driven.

    Attributes:
        seconds: of traffic.
        scenarios: of each client; those who have run them end before the time is up.
        working_set: tokens that are asked about, as a multiple of the pool's.
        is_exact: drawn answers are compared, too; needs float32.
        restarts: how often the server is killed and started again.
        max_growth: MiB a minute by which memory may grow.
    """

    seconds: float
    scenarios: int | None = None
    seed: int = 0
    clients: int = 8
    working_set: float = 20.0
    is_exact: bool = True
    restarts: int = 0
    max_growth: float = 2.0


Show = Callable[[Group], None]


async def soak(
    variant: str,
    endpoint: Endpoint,
    settings: SoakSettings,
    *,
    pid: int | None,
    show: Show = lambda view: None,
) -> tuple[Traffic, Findings]:
    """Drive a server, let it come to rest, and look at what it still holds.

    Raises:
        TimeoutError: it does not come to rest.
        aiohttp.ClientError: it does not answer.
    """
    async with open_http() as http:
        watch = Watch(http, endpoint, pid)
        first = await watch.read()
        report = await get(http, f"{endpoint.url}/admin/cache")
        documents = await make_documents(
            http,
            endpoint.url,
            pool_tokens=first.blocks["total"] * report["block_size"],
            ratio=settings.working_set,
            seed=settings.seed,
        )
        traffic = Traffic(http, documents, seed=settings.seed, is_exact=settings.is_exact)
        # Threads, connections and memory that the first requests need are there before the start.
        await traffic.run_each(endpoint)
    async with open_http() as http:
        watch = Watch(http, endpoint, pid)
        start = await settle(watch)
        traffic.http = http
        deadline = time.monotonic() + settings.seconds
        beside = [
            asyncio.create_task(watch.run(max(0.2, settings.seconds / READINGS))),
            asyncio.create_task(_show(show, variant, deadline, traffic, watch)),
        ]
        killer = asyncio.create_task(_kill(endpoint, settings, watch))
        try:
            await traffic.run(endpoint, settings.clients, settings.seconds, settings.scenarios)
            await killer
        finally:
            for task in (*beside, killer):
                task.cancel()
            await asyncio.gather(*beside, killer, return_exceptions=True)
    async with open_http() as http:
        watch_at_rest = Watch(http, endpoint, watch.pid)
        await settle(watch_at_rest)
        report = await get(http, f"{endpoint.url}/admin/cache")
        engine = await get(http, f"{endpoint.url}/admin/engine")
        check = await get(http, f"{endpoint.url}/admin/check", any_status=True)
        end = await _empty(http, endpoint, watch_at_rest)
    findings = Findings(
        start, end, watch, check, report, engine, log_errors=[], restarts=settings.restarts
    )
    return traffic, findings


async def replay(
    traffic: Traffic,
    url: str,
    *,
    tie: float,
    flush: bool,
    show: Callable[[str], None],
    share: float = 1.0,
) -> Replay:
    """Repeat what was asked, one request at a time.

    Args:
        share: part of the scenarios that are repeated, chosen by their names.
    """
    records = [r for r in traffic.records if random.Random(r.name).random() < share]
    async with open_http() as http:
        repeated = Replay(http, url, tie=tie, flush=flush)
        for count, record in enumerate(records, 1):
            await repeated.judge(record)
            show(f"repeated {count} of {len(records)} scenarios")
    return repeated


async def _kill(endpoint: Endpoint, settings: SoakSettings, watch: Watch) -> None:
    """Kill the server now and then, at moments that the seed decides."""
    rng = random.Random(f"{settings.seed} kill")
    for _ in range(settings.restarts):
        if not isinstance(endpoint, SoakServer):
            raise RuntimeError("only a server that the soak has started can be killed")
        await asyncio.sleep(settings.seconds / (settings.restarts + 1) * rng.uniform(0.7, 1.0))
        await endpoint.kill_and_restart()
        watch.pid = endpoint.pid


async def _empty(http: aiohttp.ClientSession, endpoint: Endpoint, watch: Watch) -> Reading:
    """Give up all pins and drop everything cached; return what is still held."""
    pins = await get(http, f"{endpoint.url}/admin/cache/pins")
    for pin in pins["data"]:
        await http.delete(f"{endpoint.url}/admin/cache/pin/{pin['id']}")
    async with http.post(f"{endpoint.url}/admin/cache/flush") as response:
        response.raise_for_status()
    return await settle(watch)


async def _show(show: Show, variant: str, deadline: float, traffic: Traffic, watch: Watch) -> None:
    while True:
        left = deadline - time.monotonic()
        phase = "traffic" if left > 0 else "the last scenarios"
        show(live_view(variant, left, phase, traffic, watch))
        await asyncio.sleep(0.5)


@contextlib.asynccontextmanager
async def open_http() -> AsyncIterator[aiohttp.ClientSession]:
    """Open a client without limits, and close its connections at the end."""
    connector = aiohttp.TCPConnector(limit=0)
    key = os.environ.get("RADIXKV_API_KEY")
    async with aiohttp.ClientSession(
        connector=connector,
        headers={"Authorization": f"Bearer {key}"} if key else None,
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=LONGEST_LINE,
    ) as http:
        yield http


async def get(http: aiohttp.ClientSession, url: str, *, any_status: bool = False) -> dict[str, Any]:
    """Return the JSON at a URL."""
    async with http.get(url) as response:
        if not any_status:
            response.raise_for_status()
        body: dict[str, Any] = await response.json()
        return body
