"""A server whose tokens are words, and which remembers every prompt."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

BOS, MESSAGE = 1, 5


@dataclass
class WordServer:
    """Counts words; a prompt has a token more, a chat five more per message.

    Attributes:
        seconds: an answer takes.
        doubles: a word that is two tokens.
        prompts: the words of each request, in the order they came.
        bodies: of the requests.
        times: when they came, on the event loop's clock.
        running, most_running: requests at once, now and at most.
    """

    seconds: float = 0.0
    doubles: str = ""
    has_tokenize: bool = True
    prompts: list[list[str]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    running: int = 0
    most_running: int = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/flush_cache", self._flush)
        if self.has_tokenize:
            app.router.add_post("/tokenize", self._tokenize)
        return app

    def words_of(self, body: dict[str, Any]) -> list[str]:
        if "messages" in body:
            return [w for m in body["messages"] for w in ["#"] * MESSAGE + m["content"].split()]
        return ["#"] * BOS + [w for w in body["prompt"].split() for _ in range(1 + self._two(w))]

    def _two(self, word: str) -> bool:
        return word == self.doubles

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "words"}]})

    async def _flush(self, request: web.Request) -> web.Response:
        self.prompts.clear()
        self.times.clear()
        self.bodies.clear()
        return web.json_response({})

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"count": len(self.words_of(await request.json()))})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        words = self.words_of(body)
        cached = max((num_common(words, old) for old in self.prompts), default=0)
        self.times.append(asyncio.get_running_loop().time())
        self.prompts.append(words)
        self.bodies.append(body)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        response = web.StreamResponse()
        await response.prepare(request)
        for number in range(body["max_tokens"]):
            await asyncio.sleep(self.seconds / body["max_tokens"])
            choice = {"text": "a "} if "prompt" in body else {"delta": {"content": "a "}}
            await self._send(
                response, {"choices": [choice], "usage": self._usage(words, number, 0)}
            )
        last = {"choices": [{"finish_reason": "length", "delta": {}}]}
        self.running -= 1
        await self._send(response, last)
        usage = self._usage(words, body["max_tokens"] - 1, min(cached, len(words) - 1))
        await self._send(response, {"choices": [], "usage": usage})
        await response.write_eof()
        return response

    async def _send(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b"data: %b\n\n" % json.dumps(event).encode())

    def _usage(self, words: list[str], number: int, cached: int) -> dict[str, Any]:
        return {
            "prompt_tokens": len(words),
            "completion_tokens": number + 1,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def num_common(first: list[str], second: list[str]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(first), len(second)))
