"""A server on a socket of its own, as `radixkv serve` runs it, in the loop of a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from fakes import make_engine
from server_fakes import END, STOP, FakeTokenizer, until

from loadtests.raw_http import RawAnswer, exchange, head_of
from radixkv.engine import AsyncEngine
from radixkv.server import ServerConfig, create_app, run_server
from radixkv.server.state import STATE, ServerState

__all__ = ["LiveServer", "live_server", "tiny_engine"]


@dataclass(slots=True)
class LiveServer:
    """What a test needs to know of it."""

    url: str
    port: int
    state: ServerState
    stop: asyncio.Event
    server: asyncio.Task[int]

    async def send(self, request: bytes, timeout_s: float = 20.0) -> RawAnswer:
        """Send bytes on a connection of their own."""
        return await exchange("127.0.0.1", self.port, request, timeout_s)

    async def post(self, path: str, body: bytes, **headers: str) -> RawAnswer:
        """Post JSON; underscores in the names of headers stand for hyphens."""
        given = {"Content-Type": "application/json"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.send(head_of("POST", path, given.items(), len(body)) + body)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection."""
        return await asyncio.open_connection("127.0.0.1", self.port)


@asynccontextmanager
async def live_server(engine: Any, **options: Any) -> AsyncIterator[LiveServer]:
    """Serve an engine; keyword arguments are options of `ServerConfig`."""
    app = create_app(engine, ServerConfig(**options))
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    server = asyncio.create_task(run_server(app, port=0, on_ready=ready.set_result, stop=stop))
    try:
        await until(lambda: ready.done() or server.done())
        url = ready.result() if ready.done() else ""
        yield LiveServer(url, int(urlsplit(url).port or 0), app[STATE], stop, server)
    finally:
        stop.set()
        await server


def tiny_engine(**limits: Any) -> AsyncEngine:
    """Return a real engine over the fake model."""
    limits = {"num_blocks": 1024, "block_size": 16, "max_num_batched_tokens": 256, **limits}
    engine = make_engine(eos_token_ids=(END, STOP), **limits)
    engine.tokenizer = tokenizer = FakeTokenizer()
    return AsyncEngine(engine, tokenizer, model_name="tiny", max_num_waiting=1024)
