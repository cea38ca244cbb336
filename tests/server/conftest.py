from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp.test_utils import TestClient
from server_fakes import FakeEngine

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
