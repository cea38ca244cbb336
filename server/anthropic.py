"""Anthropic's Messages API: `/v1/messages`, whole or streamed, and the count of its tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from radixkv.server.auth import make_namespace, tenant_of
from radixkv.server.body import json_response, read_json
from radixkv.server.dialogue import AnswerReader, Dialogue
from radixkv.server.errors import ApiError, anthropic_error_body
from radixkv.server.generation import Answer
from radixkv.server.history import encode_chat
from radixkv.server.messages import template_messages, template_tools
from radixkv.server.protocol import Message
from radixkv.server.protocol_anthropic import (
    SHORT_TTL,
    CountTokensRequest,
    MessagesRequest,
    chat_choice,
    chat_fields,
    chat_messages,
    chat_tools,
    pin_ttl,
)
from radixkv.server.sampling import chat_sampling
from radixkv.server.state import REQUEST_ID, STATE
from radixkv.server.streaming import StreamStyle, stream_chunks
from radixkv.server.tool_parsers import CallArguments, CallStart, TextPart, ToolEvent
from radixkv.server.tools import plan_tools

__all__ = ["count_tokens", "create_message"]

# What chat completions call otherwise.
RENAMED = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "cache_pin_ttl": "cache_control",
}


async def create_message(request: web.Request) -> web.StreamResponse:
    """`POST /v1/messages`: answer a conversation."""
    state = request.app[STATE]
    config = state.config
    body = await read_json(
        request, MessagesRequest, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s
    )
    state.check_model(body.model)
    try:
        params = chat_sampling(chat_fields(body), vocab_size=state.engine.vocab_size)
    except ApiError as error:
        for old, new in RENAMED.items():
            error = error.rename_param(old, new)
        raise error from None
    choice, parallel = chat_choice(body.tool_choice)
    plan = plan_tools(state.tools, template_tools(chat_tools(body.tools)), choice, parallel)
    namespace = make_namespace(tenant_of(request), body.cache_salt)
    messages = chat_messages(body)
    dialogue = await Dialogue.begin(
        request, messages, plan, params, namespace, continue_final=_is_prefilled(messages)
    )
    shape = MessageShape(
        id=f"msg_{dialogue.generation.id}",
        model=state.model_name,
        block_size=state.engine.block_size if params.cache_pin_ttl is not None else None,
        ttl=params.cache_pin_ttl,
    )
    try:
        if body.stream:
            request_id = request[REQUEST_ID]
            style = StreamStyle(
                error=lambda error: anthropic_error_body(error, request_id), named=True, done=b""
            )
            return await stream_chunks(request, config, _events(dialogue, shape), style)
        await dialogue.run(request)
        return json_response(shape.whole(dialogue.readers[0]))
    finally:
        dialogue.close()


async def count_tokens(request: web.Request) -> web.Response:
    """`POST /v1/messages/count_tokens`: the tokens of the prompt that a request would have."""
    state = request.app[STATE]
    config = state.config
    body = await read_json(
        request,
        CountTokensRequest,
        max_bytes=config.max_body_bytes,
        timeout_s=config.body_timeout_s,
    )
    state.check_model(body.model)
    pin_ttl(body)
    choice, parallel = chat_choice(body.tool_choice)
    plan = plan_tools(state.tools, template_tools(chat_tools(body.tools)), choice, parallel)
    messages = chat_messages(body)
    prompt = await encode_chat(
        state.prompts,
        state.history,
        make_namespace(tenant_of(request), body.cache_salt),
        template_messages(messages, supports_tools=state.prompts.supports_tools),
        plan.tools,
        continue_final=_is_prefilled(messages),
    )
    return json_response({"input_tokens": len(prompt.ids)})


@dataclass(slots=True, kw_only=True)
class MessageShape:
    """The message of one answer, whole or as the events that build it.

    Attributes:
        block_size: of the cache, when the prompt is to be pinned; None when it is not.
        ttl: seconds for which it is to be pinned.
    """

    id: str
    model: str
    block_size: int | None
    ttl: float | None = None
    _kind: str | None = None  # of the open block
    _index: int = field(default=-1)

    def whole(self, reader: AnswerReader) -> dict[str, Any]:
        """Return a complete answer."""
        content: list[dict[str, Any]] = []
        text = reader.content()
        if text or not reader.calls:
            content.append({"type": "text", "text": text})
        content += [
            {
                "type": "tool_use",
                "id": call.id,
                "name": call.name,
                "input": _parsed("".join(call.arguments)),
            }
            for call in reader.calls
        ]
        return {
            **self._message(content),
            **_stop(reader),
            "usage": self.whole_usage(reader.answer),
        }

    def start(self, answer: Answer) -> dict[str, Any]:
        """Return the event that begins a message, whose prompt has been counted."""
        message = {
            **self._message([]),
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self.whole_usage(answer),
        }
        return {"type": "message_start", "message": message}

    def add(self, part: ToolEvent) -> Iterator[dict[str, Any]]:
        """Yield the events of a piece of content or of a call."""
        if isinstance(part, TextPart):
            if self._kind != "text":
                yield from self._begin({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": part.text})
        elif isinstance(part, CallStart):
            yield from self._begin(
                {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
            )
        elif isinstance(part, CallArguments):
            yield self._delta({"type": "input_json_delta", "partial_json": part.text})

    def end(self, reader: AnswerReader) -> Iterator[dict[str, Any]]:
        """Yield the events that end a message."""
        if self._kind is None:
            yield from self._begin({"type": "text", "text": ""})
        yield from self._close()
        yield {
            "type": "message_delta",
            "delta": _stop(reader),
            "usage": self.usage(reader.answer),
        }
        yield {"type": "message_stop"}

    def usage(self, answer: Answer) -> dict[str, Any]:
        """Return the tokens of an answer; the three counts of input add up to the prompt's.

        What was computed and pinned, whole blocks, counts as written to the cache.
        """
        prompt, cached = answer.num_prompt_tokens, answer.num_cached_tokens
        written = answer.num_pinned_tokens(self.block_size)
        return {
            "input_tokens": prompt - cached - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": cached,
            "output_tokens": answer.num_completion_tokens,
        }

    def whole_usage(self, answer: Answer) -> dict[str, Any]:
        """Return the usage that a message has: what was written to the cache by its time, too."""
        usage = self.usage(answer)
        written = usage["cache_creation_input_tokens"]
        is_long = self.ttl is not None and self.ttl > SHORT_TTL
        return {
            **usage,
            "cache_creation": {
                "ephemeral_5m_input_tokens": 0 if is_long else written,
                "ephemeral_1h_input_tokens": written if is_long else 0,
            },
            "service_tier": "standard",
        }

    def _begin(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self._index += 1
        self._kind = block["type"]
        yield {"type": "content_block_start", "index": self._index, "content_block": block}
        if self._index == 0:
            yield {"type": "ping"}

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._kind is not None:
            yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
        }


async def _events(dialogue: Dialogue, shape: MessageShape) -> AsyncGenerator[dict[str, Any], None]:
    (reader,) = dialogue.readers
    started = False
    async for _, _, parts in dialogue:
        if not started:
            # Not before: what was read from the cache is known once the request is admitted.
            yield shape.start(reader.answer)
            started = True
        for part in parts:
            for event in shape.add(part):
                yield event
    for event in shape.end(reader):
        yield event


def _is_prefilled(messages: Sequence[Message]) -> bool:
    """Return whether the answer goes on in the last message: an assistant's that calls nothing."""
    return bool(messages) and messages[-1].role == "assistant" and not messages[-1].tool_calls


def _stop(reader: AnswerReader) -> dict[str, Any]:
    sequence = reader.answer.stop_reason
    if isinstance(sequence, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
    reasons = {"tool_calls": "tool_use", "length": "max_tokens"}
    reason = reasons.get(reader.finish_reason or "", "end_turn")
    return {"stop_reason": reason, "stop_sequence": None}


def _parsed(arguments: str) -> dict[str, Any]:
    """Return a call's arguments; what is no object, such as one cut off, under a key of its own."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"raw_arguments": arguments}
