from __future__ import annotations

import asyncio
import contextlib
import functools
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
import pytest
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
                assert refused.headers["Connection"] == "close"
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


SERVER = """
import asyncio, logging, sys
from pathlib import Path
from server_fakes import FakeEngine
from radixkv.server import ServerConfig, create_app, run_server
logging.basicConfig(level="INFO", stream=sys.stderr)
async def main():
    keys = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    app = create_app(FakeEngine(step_s=float(sys.argv[1])), ServerConfig(api_keys=keys))
    return await run_server(app, port=0, on_ready=lambda url: print(url, flush=True))
sys.exit(asyncio.run(main()))
"""


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Run a server as a process of its own."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    try:
        assert started.stdout is not None
        async with asyncio.timeout(60):
            url = (await started.stdout.readline()).decode().strip()
        assert url.startswith("http://127.0.0.1:")
        yield started, url
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


async def test_a_process_reads_its_keys_on_sighup_and_drains_on_sigterm(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    old, new = bearer("sk-old-0123456789"), bearer("sk-new-0123456789")
    write_keys(path, "sk-old-0123456789")

    async def status(headers: dict[str, str]) -> int:
        async with http.get(f"{url}/v1/models", headers=headers) as response:
            return response.status

    async with process("0.02", str(path)) as (server, url), aiohttp.ClientSession() as http:
        post = functools.partial(http.post, f"{url}/v1/completions", json=PROMPT)
        assert [await status(key) for key in (old, new)] == [200, 401]
        write_keys(path, "sk-new-0123456789")
        server.send_signal(signal.SIGHUP)
        async with asyncio.timeout(LONG_S):
            while [await status(key) for key in (old, new)] != [401, 200]:
                pass
        async with post(headers=new) as stream:
            await stream.content.readany()
            server.send_signal(signal.SIGTERM)
            while True:
                async with http.get(f"{url}/health") as health:
                    if health.status == 503:
                        assert (await health.json())["status"] == "draining"
                        break
            async with post(headers=new) as refused:
                assert refused.status == 503
                assert refused.headers["Retry-After"] == "5"
                assert refused.headers["Connection"] == "close"
            assert (await stream.text()).endswith("data: [DONE]\n\n")
        async with asyncio.timeout(LONG_S):
            assert await server.wait() == 0


async def test_a_second_signal_ends_a_process_at_once() -> None:
    async with (
        process("3600") as (server, url),
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/completions", json=PROMPT) as stream,
        asyncio.timeout(LONG_S),
    ):
        server.send_signal(signal.SIGTERM)
        while (await http.get(f"{url}/health")).status != 503:
            pass
        server.send_signal(signal.SIGTERM)
        assert await server.wait() == 0
        assert "[DONE]" not in await read_rest(stream)


@pytest.mark.parametrize(
    ("host", "options", "warned"),
    [
        ("127.0.0.1", {}, False),
        ("localhost", {}, False),
        ("0.0.0.0", {}, True),
        ("0.0.0.0", {"api_key": "sk"}, False),
        ("0.0.0.0", {"admin_api_key": "sk"}, True),
    ],
)
async def test_a_server_that_all_can_reach_without_a_key_is_warned_of(
    host: str, options: dict[str, str], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stop = asyncio.Event()
    app = create_app(FakeEngine(), ServerConfig(**options))  # type: ignore[arg-type]
    await run_server(app, host, 0, stop=stop, on_ready=lambda _: stop.set())
    assert ("WITHOUT an API key" in caplog.text) is warned


async def read_rest(stream: aiohttp.ClientResponse) -> str:
    with contextlib.suppress(aiohttp.ClientError):
        return await stream.text()
    return ""


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def write_keys(path: Path, key: str) -> None:
    path.write_text(f'[keys.a]\nkey = "{key}"\n')
    path.chmod(0o600)


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
