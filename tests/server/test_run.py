from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from server_fakes import FakeEngine, until

from radixkv.server import ServerConfig, create_app, run_server

# Generous for a loaded machine, and far below the drain limits that must not be waited for.
LONG_S = 20
PROMPT = {"prompt": "x", "max_tokens": 100, "ignore_eos": True, "stream": True}


class Running:
    """A server in this event loop, and the texts of the streams opened on it."""

    def __init__(self, engine: FakeEngine, drain_timeout_s: float) -> None:
        self.engine = engine
        self.url = ""
        self.stop = asyncio.Event()
        config = ServerConfig(drain_timeout_s=drain_timeout_s)
        self.server = asyncio.create_task(
            run_server(
                create_app(engine, config),
                port=0,
                on_ready=self._ready,
                stop=self.stop,  # type: ignore[arg-type]
            )
        )
        self.streams: list[asyncio.Task[str]] = []

    def _ready(self, url: str) -> None:
        self.url = url

    async def open_streams(self, http: aiohttp.ClientSession, count: int) -> None:
        async def read() -> str:
            async with http.post(f"{self.url}/v1/completions", json=PROMPT) as response:
                return await response.text()

        self.streams = [asyncio.create_task(read()) for _ in range(count)]
        await until(lambda: len(self.engine.submitted) == count)


@asynccontextmanager
async def running(engine: FakeEngine, drain_timeout_s: float = 10.0) -> AsyncIterator[Any]:
    server = Running(engine, drain_timeout_s)
    try:
        await until(lambda: server.url)
        async with aiohttp.ClientSession() as http:
            yield server, http
    finally:
        server.stop.set()
        await server.server


async def test_drain_finishes_accepted_streams_and_refuses_new_work() -> None:
    engine = FakeEngine(step_s=0.005, max_running=4)
    async with running(engine) as (server, http):
        await server.open_streams(http, 6)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(server.stop.is_set)
        await asyncio.sleep(0.02)
        async with http.get(f"{server.url}/health") as health:
            assert health.status == 503
            assert (await health.json())["status"] == "draining"
        for route in ("completions", "chat/completions", "sessions"):
            async with http.post(f"{server.url}/v1/{route}", json=PROMPT) as refused:
                assert refused.status == 503
                assert "Retry-After" in refused.headers
                assert (await refused.json())["error"]["code"] == "shutting_down"
        texts = await asyncio.gather(*server.streams)
        assert all(text.endswith("data: [DONE]\n\n") for text in texts)
        assert engine.finished == {"length": 6}
        assert await server.server == 0


async def test_drain_limit_ends_the_rest_with_an_error_event() -> None:
    engine = FakeEngine(step_s=0.05)
    async with running(engine, drain_timeout_s=0.3) as (server, http):
        await server.open_streams(http, 4)
        server.stop.set()
        async with asyncio.timeout(LONG_S):
            texts = await asyncio.gather(*server.streams)
            assert await server.server == 0
    for text in texts:
        assert '"code":"request_aborted"' in text.rstrip().rsplit("\n\n", 1)[-1]
        assert "[DONE]" not in text


async def test_second_signal_stops_at_once() -> None:
    engine = FakeEngine()
    engine.gate.clear()
    async with running(engine, drain_timeout_s=60) as (server, http):
        await server.open_streams(http, 3)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(server.stop.is_set)
        await asyncio.sleep(0.05)
        assert not server.server.done()
        os.kill(os.getpid(), signal.SIGINT)
        async with asyncio.timeout(LONG_S):
            assert await server.server == 0
        texts = await asyncio.gather(*server.streams)
    assert all("[DONE]" not in text for text in texts)


async def test_idle_server_stops_without_draining_and_frees_its_port() -> None:
    async with running(FakeEngine(), drain_timeout_s=60) as (server, http):
        async with http.get(f"{server.url}/health") as health:
            assert health.status == 200
        server.stop.set()
        async with asyncio.timeout(LONG_S):
            assert await server.server == 0
        url = server.url
    async with running(FakeEngine()) as (server, _):
        assert server.url.startswith("http://127.0.0.1:")
        assert server.url != "" != url


def test_process_exits_with_0_after_sigterm() -> None:
    code = (
        "import asyncio, sys\n"
        "from server_fakes import FakeEngine\n"
        "from radixkv.server import create_app, run_server\n"
        "async def main():\n"
        "    ready = lambda url: print(url, flush=True)\n"
        "    return await run_server(create_app(FakeEngine()), port=0, on_ready=ready)\n"
        "sys.exit(asyncio.run(main()))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parent, text=True
    )
    assert process.stdout is not None
    with process.stdout as out:
        assert out.readline().startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


async def test_unsupported_body_is_json_while_draining() -> None:
    """The refusal comes before the body is read, whatever the body is."""
    engine = FakeEngine()
    engine.gate.clear()
    async with running(engine, drain_timeout_s=5) as (server, http):
        await server.open_streams(http, 1)
        server.stop.set()
        await asyncio.sleep(0.05)
        async with http.post(f"{server.url}/v1/completions", data=b"x" * 100_000) as refused:
            assert refused.status == 503
            assert json.loads(await refused.text())["error"]["code"] == "shutting_down"
        engine.gate.set()
        await asyncio.gather(*server.streams)
