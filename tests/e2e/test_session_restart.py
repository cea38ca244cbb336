"""The default model goes on with its sessions after a restart, from the same ids and KV."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from radixkv.engine.factory import BuiltEngine
from radixkv.server import ServerConfig, create_app
from radixkv.server.session_db import SessionDb

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

SYSTEM = "You are a helpful librarian. " + "Answer briefly and name one book per question. " * 3


async def start(built: BuiltEngine, path: Path) -> TestClient[Any, Any]:
    app = create_app(built.engine, ServerConfig(save_timeout_s=60), session_db=SessionDb(path))
    client = TestClient(TestServer(app))
    await client.start_server()
    return client


async def say(client: Any, url: str, content: str) -> Any:
    body = {"content": content, "temperature": 0, "max_tokens": 12}
    async with client.post(f"{url}/messages", json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def test_next_turn_after_a_restart_has_the_same_tokens_and_finds_their_kv(
    build: Callable[..., BuiltEngine], tmp_path: Path
) -> None:
    path = tmp_path / "sessions.db"
    options = {"kv_cache_memory": 64 * 1024**2, "disk_cache": str(tmp_path / "kv")}
    client = await start(build(**options), path)
    created = await (await client.post("/v1/sessions", json={"system": SYSTEM})).json()
    url = f"/v1/sessions/{created['id']}"
    await say(client, url, "Which book should I read about whales?")
    second = await say(client, url, "And about the sea?")
    fork = await (await client.post(f"{url}/fork")).json()
    control = await say(client, f"/v1/sessions/{fork['id']}", "And about ships?")
    tokens = second["session"]["num_tokens"]
    await client.close()

    client = await start(build(**options), path)
    session = await (await client.get(url)).json()
    assert (session["num_turns"], session["num_tokens"]) == (2, tokens)
    third = await say(client, url, "And about ships?")
    assert third["choices"][0]["message"] == control["choices"][0]["message"]
    assert third["usage"]["prompt_tokens"] == control["usage"]["prompt_tokens"]
    cached = third["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= (tokens - 1) // 16 * 16
    hits = (await (await client.get("/admin/cache")).json())["tokens"]["hit_by_tier"]
    assert hits["disk"] >= cached - 16
    assert (await (await client.get("/admin/check")).json()) == {"ok": True}
    await client.close()
