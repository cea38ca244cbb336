"""Requests to every route that answers with text, whole or streamed, read into one form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

__all__ = ["Choice", "Reply", "Step", "Token", "perform"]

TIMEOUT_S = 600.0
# A client that hangs up closes its connection; waiting for the rest would be polite.
HUNG_UP = "hung up"


@dataclass(slots=True)
class Step:
    """One request of a scenario, as it is sent, and as it is repeated alone.

    Attributes:
        shape: how the answer is read: chat, completion, messages, responses or json.
        path: `{name}` stands for an id that an earlier step saved under that name.
        twin: path and body of a chat with the same prompt, for shapes without logprobs.
        hang_up_events, hang_up_s: hang up after so many events of a stream, or so many seconds.
        accepts: statuses that are right; the one that a stream's error event would have, too.
        saves: name for the `id` of the answer.
        is_compared: the answer must be that of the same prompt run alone.
        is_replayed: later steps need it, so it is repeated, too.
    """

    shape: str
    path: str
    body: dict[str, Any] | None = None
    method: str = "POST"
    twin: dict[str, Any] | None = None
    hang_up_events: int | None = None
    hang_up_s: float | None = None
    accepts: tuple[int, ...] = (200,)
    saves: str | None = None
    is_compared: bool = False
    is_replayed: bool = False

    @property
    def is_stream(self) -> bool:
        """Whether the answer comes as events."""
        return bool(self.body and self.body.get("stream"))

    @property
    def hangs_up(self) -> bool:
        """Whether the client won't read the answer to its end."""
        return self.hang_up_events is not None or self.hang_up_s is not None


@dataclass(frozen=True, slots=True)
class Token:
    """A token of an answer.

    Attributes:
        top: log-probabilities of the most likely tokens there, the chosen one among them.
    """

    data: bytes
    top: dict[bytes, float]


@dataclass(slots=True)
class Choice:
    """One answer of a reply.

    Attributes:
        calls: names and arguments of tool calls.
        tokens: empty unless logprobs were asked for.
    """

    text: str = ""
    calls: list[list[str]] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    finish: str | None = None


@dataclass(slots=True)
class Reply:
    """What came back.

    Attributes:
        status: of the answer, or that which its error event stands for.
        error: what was wrong with it; "hung up" if the client ended it.
        prompt_tokens, cached_tokens, completion_tokens: as the usage tells; None if it doesn't.
        seconds: from sending to the end.
    """

    status: int = 0
    choices: dict[int, Choice] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    seconds: float = 0.0

    def choice(self, index: int) -> Choice:
        """Return a choice, a new one if there is none of the number yet."""
        return self.choices.setdefault(index, Choice())

    @property
    def is_whole(self) -> bool:
        """Whether the answer came to its end."""
        return self.status == 200 and self.error is None


async def perform(http: aiohttp.ClientSession, url: str, step: Step, ids: dict[str, str]) -> Reply:
    """Send a step and read what comes back.

    Args:
        ids: what earlier steps saved; what this one saves is added.

    Raises:
        aiohttp.ClientError: the server could not be reached, or went away.
        TimeoutError: nothing came to an end within 600 s.
    """
    clock = asyncio.get_running_loop().time
    begin, reply = clock(), Reply()
    body = step.body
    if body is not None and "previous_response_id" in body:
        body = {**body, "previous_response_id": ids[body["previous_response_id"]]}
    try:
        async with asyncio.timeout(step.hang_up_s or TIMEOUT_S):
            await _exchange(http, url + step.path.format_map(ids), step, body, reply)
    except TimeoutError:
        if step.hang_up_s is None:
            raise
        reply.error = HUNG_UP
    reply.seconds = clock() - begin
    if step.saves and reply.is_whole:
        ids[step.saves] = reply.body["id"]
    return reply


async def _exchange(
    http: aiohttp.ClientSession, url: str, step: Step, body: dict[str, Any] | None, reply: Reply
) -> None:
    async with http.request(step.method, url, json=body) as response:
        reply.status = response.status
        if response.content_type != "text/event-stream":
            data = await response.read()
            reply.body = json.loads(data) if response.content_type == "application/json" else {}
            if response.status == 200:
                _read_whole(step.shape, reply)
            return
        events = ended = 0
        async for event in _events(response):
            if event is None:
                ended = 1
                continue
            events += 1
            ended = _read_event(step.shape, event, reply) or ended
            if step.hang_up_events is not None and events >= step.hang_up_events:
                reply.error = HUNG_UP
                response.close()
                return
        if reply.status == 200 and not ended:
            reply.error = "the stream ended early"


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any] | None]:
    """Yield the events of a stream; None is `[DONE]`."""
    async for line in response.content:
        if line.startswith(b"data: "):
            yield None if line.startswith(b"data: [DONE]") else json.loads(line[6:])


def _read_whole(shape: str, reply: Reply) -> None:
    body = reply.body
    if shape in ("chat", "completion"):
        for entry in body["choices"]:
            choice = reply.choice(entry["index"])
            choice.finish = entry["finish_reason"]
            message = entry.get("message", {})
            choice.text = message.get("content") or entry.get("text") or ""
            for call in message.get("tool_calls") or ():
                choice.calls.append([call["function"]["name"], call["function"]["arguments"]])
            choice.tokens += _tokens(entry.get("logprobs"))
        _read_usage(reply, body["usage"])
    elif shape == "messages":
        choice = reply.choice(0)
        choice.finish = body["stop_reason"]
        for block in body["content"]:
            if block["type"] == "text":
                choice.text += block["text"]
            else:
                choice.calls.append([block["name"], json.dumps(block["input"])])
        _read_anthropic_usage(reply, body["usage"])
    elif shape == "responses":
        _read_response(reply, body)


def _read_event(shape: str, event: dict[str, Any], reply: Reply) -> bool:
    """Read one event; whether it is the last of its stream."""
    if event.get("error"):
        error = event["error"]
        reply.error = f"{error.get('code') or error.get('type')}: {error['message']}"
        reply.status = 504 if "timeout" in reply.error else 500
        return True
    if shape in ("chat", "completion"):
        _read_chunk(event, reply)
    elif shape == "messages":
        return _read_message_event(event, reply)
    elif event["type"] == "response.output_text.delta":
        reply.choice(0).text += event["delta"]
    elif event["type"] in ("response.completed", "response.incomplete"):
        reply.choices.clear()
        reply.body = event["response"]
        _read_response(reply, event["response"])
        return True
    return False


def _read_chunk(event: dict[str, Any], reply: Reply) -> None:
    for entry in event["choices"]:
        choice = reply.choice(entry["index"])
        delta = entry.get("delta", {})
        choice.text += delta.get("content") or entry.get("text") or ""
        choice.finish = entry["finish_reason"] or choice.finish
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            if "name" in function:
                choice.calls.append([function["name"], ""])
            choice.calls[-1][1] += function.get("arguments", "")
        choice.tokens += _tokens(entry.get("logprobs"))
    if event.get("usage"):
        _read_usage(reply, event["usage"])
    if "session" in event:
        reply.body["session"] = event["session"]


def _read_message_event(event: dict[str, Any], reply: Reply) -> bool:
    choice = reply.choice(0)
    match event["type"]:
        case "message_start":
            reply.body["id"] = event["message"]["id"]
        case "content_block_start" if event["content_block"]["type"] == "tool_use":
            choice.calls.append([event["content_block"]["name"], ""])
        case "content_block_delta" if "text" in event["delta"]:
            choice.text += event["delta"]["text"]
        case "content_block_delta":
            choice.calls[-1][1] += event["delta"]["partial_json"]
        case "message_delta":
            choice.finish = event["delta"]["stop_reason"]
            _read_anthropic_usage(reply, event["usage"])
        case "message_stop":
            return True
    return False


def _read_response(reply: Reply, body: dict[str, Any]) -> None:
    choice = reply.choice(0)
    for item in body["output"]:
        if item["type"] == "message":
            choice.text += "".join(part["text"] for part in item["content"])
        else:
            choice.calls.append([item["name"], item["arguments"]])
    choice.finish = body["status"]
    usage = body["usage"]
    reply.prompt_tokens = usage["input_tokens"]
    reply.cached_tokens = usage["input_tokens_details"]["cached_tokens"]
    reply.completion_tokens = usage["output_tokens"]


def _read_usage(reply: Reply, usage: dict[str, Any]) -> None:
    reply.prompt_tokens = usage["prompt_tokens"]
    reply.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    reply.completion_tokens = usage["completion_tokens"]


def _read_anthropic_usage(reply: Reply, usage: dict[str, Any]) -> None:
    reply.completion_tokens = usage["output_tokens"]
    if "input_tokens" in usage:
        read = usage.get("cache_read_input_tokens") or 0
        created = usage.get("cache_creation_input_tokens") or 0
        reply.prompt_tokens = usage["input_tokens"] + read + created
        reply.cached_tokens = read


def _tokens(logprobs: dict[str, Any] | None) -> list[Token]:
    if not logprobs:
        return []
    if "content" in logprobs:
        return [
            Token(
                bytes(entry["bytes"]),
                {bytes(top["bytes"]): top["logprob"] for top in reversed(entry["top_logprobs"])}
                | {bytes(entry["bytes"]): entry["logprob"]},
            )
            for entry in logprobs["content"]
        ]
    return [
        Token(text.encode(), {key.encode(): value for key, value in top.items()})
        for text, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
    ]
