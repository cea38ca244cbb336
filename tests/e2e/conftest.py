"""The default model in float32, loaded once, and engines around it."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
from dashboard_tools import busy as busy
from dashboard_tools import driver as driver
from dashboard_tools import page as page

from radixkv.config import ServeConfig
from radixkv.engine import Engine
from radixkv.engine.factory import BuiltEngine, assemble_engine
from radixkv.model.loader import LoadedModel, load_model
from radixkv.server import ServerConfig, create_app, run_server


@pytest.fixture(scope="session")
def default_model(default_model_dir: Path) -> LoadedModel:
    # float32, so that cold and warm, alone and batched can be compared token by token: their
    # sums are taken in different orders, and in bfloat16 a near tie would flip.
    return load_model(str(default_model_dir), dtype="float32")


@pytest.fixture(scope="session")
def build(default_model: LoadedModel) -> Callable[..., BuiltEngine]:
    def build(**options: object) -> BuiltEngine:
        options = {
            "kv_cache_memory": 512 * 1024**2,
            "served_model_name": "SmolLM2-135M-Instruct",
            **options,
        }
        return assemble_engine(default_model, ServeConfig(**options))  # type: ignore[arg-type]

    return build


@pytest.fixture
def engine(build: Callable[..., BuiltEngine]) -> Engine:
    return build().engine.engine


@pytest.fixture(scope="session")
def live_url(build: Callable[..., BuiltEngine]) -> Iterator[str]:
    """The base URL of a server with a thread of its own, for clients that have theirs."""
    started = threading.Event()
    urls: list[str] = []
    loops: list[asyncio.AbstractEventLoop] = []
    stop = asyncio.Event()

    def ready(url: str) -> None:
        urls.append(url)
        started.set()

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        app = create_app(build().engine, ServerConfig())
        await run_server(app, port=0, on_ready=ready, stop=stop)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="live-server")
    thread.start()
    try:
        assert started.wait(60)
        yield urls[0]
        with urllib.request.urlopen(f"{urls[0]}/admin/check", timeout=30) as answer:
            assert json.load(answer) == {"ok": True}
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(30)


@pytest.fixture
def api(live_url: str) -> Iterator[openai.OpenAI]:
    """OpenAI's client of the server at `live_url`."""
    with openai.OpenAI(base_url=f"{live_url}/v1", api_key="none", max_retries=0) as api:
        yield api
