from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp.test_utils import TestClient
from fakes import make_engine
from server_fakes import END, STOP, FakeEngine, FakeTokenizer

from radixkv.engine import AsyncEngine
from radixkv.server import ServerConfig, create_app

MakeClient = Callable[..., Awaitable[TestClient[Any, Any]]]


@pytest.fixture
def make_client(aiohttp_client: Any) -> MakeClient:
    """Serve an engine; keyword arguments are options of `ServerConfig`."""

    async def make(engine: Any = None, **options: Any) -> TestClient[Any, Any]:
        app = create_app(engine or FakeEngine(), ServerConfig(**options))
        return await aiohttp_client(app)

    return make


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def client(make_client: MakeClient, engine: FakeEngine) -> TestClient[Any, Any]:
    return await make_client(engine)


@pytest.fixture
def serve(make_client: Any) -> Any:
    """Serve a real engine; keyword arguments are those of `make_engine`."""

    async def start(
        max_num_waiting: int = 64, tool_parser: str | None = None, **limits: Any
    ) -> tuple[Any, AsyncEngine]:
        limits = {"num_blocks": 256, "block_size": 16, "max_num_batched_tokens": 256, **limits}
        engine = make_engine(eos_token_ids=(END, STOP), **limits)
        engine.tokenizer = tokenizer = FakeTokenizer()
        served = AsyncEngine(engine, tokenizer, model_name="real", max_num_waiting=max_num_waiting)
        return await make_client(served, tool_parser=tool_parser), served

    return start
