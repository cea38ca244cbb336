"""An OpenAI-compatible server whose answers and chunks a test prescribes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

REUSED = 3

Serve = Callable[["FakeServer"], Awaitable[str]]
"""Starts a server; gives its URL."""


@dataclass
class FakeServer:
    """Answers with single letters, `burst` of them in a chunk.

    Attributes:
        bodies: of all requests for an answer, in order.
        resets: how often the cache was emptied.
        reset_route: the route that does it; None is a server without.
        counts: whether chunks carry usage, when they are asked to.
        knows_ignore_eos: else the field is refused, as transformers does.
        stops_after: tokens after which an answer ends too early.
        loses: tokens that it computes but forgets to send.
        cuts: whether streams end before their last chunk.
        running, most_running: requests at once, now and at most.
    """

    burst: int = 1
    reset_route: str | None = "/flush_cache"
    counts: bool = True
    knows_ignore_eos: bool = True
    stops_after: int | None = None
    loses: int = 0
    cuts: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    resets: int = 0
    running: int = 0
    most_running: int = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        if self.reset_route:
            app.router.add_post(self.reset_route, self._reset)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "letters"}]})

    async def _reset(self, request: web.Request) -> web.Response:
        self.resets += 1
        return web.json_response({})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "ignore_eos" in body and not self.knows_ignore_eos:
            return web.json_response({"detail": "Unexpected fields"}, status=422)
        self.bodies.append(body)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._stream(request, body)
        finally:
            self.running -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        length = body.get("max_tokens") or json.loads(body["generation_config"])["max_new_tokens"]
        length = min(length, self.stops_after or length)
        options = body["stream_options"] if self.counts else {}
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(choices: list[dict[str, Any]], count: int | None) -> None:
            event: dict[str, Any] = {"choices": choices}
            if count is not None:
                event["usage"] = {
                    "prompt_tokens": 10,
                    "completion_tokens": count,
                    "prompt_tokens_details": {"cached_tokens": REUSED},
                }
            await response.write(b"data: %b\n\n" % json.dumps(event).encode())

        def counted(sent: int) -> int | None:
            return sent if options.get("continuous_usage_stats") else None

        await send([{"delta": {"role": "assistant", "content": ""}}], counted(0))
        sent = 0
        while sent < length - self.loses:
            await asyncio.sleep(0.001)
            text = "abcdefgh"[: min(self.burst, length - self.loses - sent)]
            sent += len(text)
            await send([{"delta": {"content": text}}], counted(sent))
        if not self.cuts:
            await send([{"delta": {}, "finish_reason": "length"}], counted(sent))
            await send([], length)
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response
