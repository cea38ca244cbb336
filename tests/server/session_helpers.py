"""Servers that keep sessions in a file, one after another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aiohttp.test_utils import TestClient, TestServer
from fakes import make_engine
from server_fakes import END, STOP, FakeTokenizer, Template, chatml

from radixkv.engine import AsyncEngine
from radixkv.server import ServerConfig, create_app
from radixkv.server.session_db import SessionDb
from radixkv.server.session_saver import SessionSaver
from radixkv.server.session_upkeep import SAVER
from radixkv.server.sessions import SessionStore
from radixkv.server.state import STATE

FIELDS = {"max_tokens": 8, "ignore_eos": True, "temperature": 0}
CHAT = "/v1/chat/completions"
SESSIONS = "/v1/sessions"


def real_engine(template: Template = chatml, **limits: Any) -> AsyncEngine:
    """The real engine with a fake model, in blocks of 16."""
    limits = {"num_blocks": 256, "max_num_batched_tokens": 256, **limits}
    engine = make_engine(block_size=16, eos_token_ids=(END, STOP), **limits)
    engine.tokenizer = tokenizer = FakeTokenizer(template)
    return AsyncEngine(engine, tokenizer, model_name="real")  # type: ignore[arg-type]


class Served:
    """A server until it is stopped."""

    def __init__(self, client: TestClient[Any, Any], engine: Any, db: SessionDb | None) -> None:
        self.client = client
        self.engine = engine
        self.db = db

    @classmethod
    async def start(
        cls,
        path: Path | None = None,
        engine: Any = None,
        *,
        key: str | None = None,
        **options: Any,
    ) -> Served:
        engine = engine or real_engine()
        db = None if path is None else SessionDb(path)
        app = create_app(engine, ServerConfig(api_key=key, **options), session_db=db)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        client = TestClient(TestServer(app), headers=headers)
        await client.start_server()
        return cls(client, engine, db)

    @property
    def store(self) -> SessionStore:
        assert self.client.app is not None
        return self.client.app[STATE].sessions

    @property
    def saver(self) -> SessionSaver:
        assert self.client.app is not None
        return self.client.app[SAVER]

    async def stop(self) -> None:
        await self.client.close()

    async def get(self, url: str, status: int = 200) -> Any:
        async with self.client.get(url) as response:
            assert response.status == status, await response.text()
            return await response.json()

    async def post(self, url: str, body: Any = None, status: int = 200) -> Any:
        async with self.client.post(url, json=body) as response:
            assert response.status == status, await response.text()
            return await response.json()

    async def delete(self, url: str, status: int = 200) -> Any:
        async with self.client.delete(url) as response:
            assert response.status == status, await response.text()
            return await response.json()

    async def open(self, *turns: str, **fields: Any) -> str:
        """Open a session and answer turns; return its URL."""
        url = f"{SESSIONS}/{(await self.post(SESSIONS, fields))['id']}"
        for content in turns:
            await self.say(url, content)
        return url

    async def say(self, url: str, content: str, **fields: Any) -> Any:
        return await self.post(f"{url}/messages", {**FIELDS, "content": content, **fields})

    async def chat(self, name: str, *messages: Any, status: int = 200, **fields: Any) -> Any:
        """Send a chat completion with a `session_id`; a text is a user's message."""
        shown = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
        body = {**FIELDS, "messages": shown, "session_id": name, **fields}
        return await self.post(CHAT, body, status)

    async def blocks(self) -> tuple[int, int]:
        """Return the (free, cached) blocks of a sound cache."""
        assert await self.get("/admin/check") == {"ok": True}
        blocks = (await self.get("/admin/cache"))["blocks"]
        assert blocks["referenced"]["blocks"] == 0
        return blocks["free"]["blocks"], blocks["cached"]["blocks"]

    async def row(self, url: str) -> Any:
        """Return the row of a session in the admin's list."""
        rows = (await self.get("/admin/sessions"))["data"]
        return next(row for row in rows if row["id"] == url.rpartition("/")[2])


def text_of(answer: Any) -> str:
    """Return the content of a chat completion."""
    return str(answer["choices"][0]["message"]["content"])


def cached_of(answer: Any) -> int:
    """Return the cached tokens of a chat completion."""
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
