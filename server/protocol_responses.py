"""The body of `POST /v1/responses`, and its input items as messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from radixkv.server.errors import ApiError
from radixkv.server.field_limits import (
    CachePriority,
    FrequencyPenalty,
    LogitBias,
    Logprobs,
    MaxTokens,
    Metadata,
    MinP,
    MinTokens,
    Objects,
    PinTtl,
    Priority,
    RepetitionPenalty,
    Seed,
    Stop,
    StopTokenIds,
    Temperature,
    Timeout,
    Tools,
    TopK,
    TopP,
)
from radixkv.server.protocol import ChatFields, FunctionCall, Message, Part, ToolCall

__all__ = [
    "ResponsesRequest",
    "chat_choice",
    "chat_fields",
    "chat_tools",
    "input_messages",
    "is_reference",
]

TEXT_PARTS = ("input_text", "output_text", "text")
SHARED_FIELDS = (
    "temperature", "top_p", "stream", "parallel_tool_calls", "top_logprobs", "top_k", "min_p",
    "seed", "stop", "stop_token_ids", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "min_tokens", "ignore_eos", "priority", "timeout",
    "cache_priority", "cache_pin_ttl",
)  # fmt: skip
# Fields whose meaning would be lost by ignoring them.
UNSUPPORTED = ("background", "conversation", "prompt", "context_management", "moderation")
LOGPROBS = "message.output_text.logprobs"


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/responses`: OpenAI's fields, and those of chat that other servers add.

    `reasoning`, `service_tier`, `safety_identifier` and `prompt_cache_key` are hints that change
    nothing here, and so is `include` but for log-probabilities. `max_tool_calls` limits tools that
    run on a server, which there are none of.
    """

    input: str | Objects | None = None
    model: str | None = None
    instructions: str | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    text: dict[str, Any] | None = None
    metadata: Metadata | None = None
    truncation: str | None = None
    reasoning: Any = None
    include: Any = None
    user: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    stream_options: Any = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    top_logprobs: Logprobs | None = None
    max_tool_calls: MaxTokens | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    stop_token_ids: StopTokenIds | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: FrequencyPenalty | None = None
    frequency_penalty: FrequencyPenalty | None = None
    logit_bias: LogitBias | None = None
    min_tokens: MinTokens | None = None
    ignore_eos: bool | None = None
    priority: Priority | None = None
    timeout: Timeout | None = None
    cache_priority: CachePriority | None = None
    cache_pin_ttl: PinTtl | None = None
    cache_salt: str | None = None


def chat_fields(body: ResponsesRequest) -> ChatFields:
    """Return what chat completions would have of a request's sampling.

    Raises:
        ApiError: 400; `param` names the field.
    """
    for name in UNSUPPORTED:
        if getattr(body, name):
            raise _refuse(name, f"{name} is not supported")
    if body.truncation not in (None, "disabled"):
        raise _refuse("truncation", "truncation must be 'disabled': nothing is ever dropped")
    fields = {name: getattr(body, name) for name in SHARED_FIELDS}
    included = isinstance(body.include, list) and LOGPROBS in body.include
    return ChatFields(
        max_tokens=body.max_output_tokens,
        response_format=_response_format(body.text),
        logprobs=included or bool(body.top_logprobs),
        **fields,
    )


def chat_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return `tools` as chat completions have them.

    Raises:
        ApiError: 400, for a tool that is no function.
    """
    if tools is None:
        return None
    result = []
    for i, tool in enumerate(tools):
        if tool.get("type") != "function":
            shown = repr(tool.get("type"))[:64]
            raise _refuse(f"tools[{i}].type", f"tools[{i}].type must be 'function', got {shown}")
        function = {k: v for k, v in tool.items() if k != "type" and v is not None}
        result.append({"type": "function", "function": function})
    return result


def chat_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """Return `tool_choice` as chat completions have it.

    Raises:
        ApiError: 400, an object that names no function.
    """
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        if isinstance(tools, list):
            tools = [_chat_function(tool) for tool in tools]
        allowed = {"mode": choice.get("mode"), "tools": tools}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise _refuse(
            "tool_choice", 'tool_choice, as an object, must be {"type": "function", "name": …}'
        )
    return {"type": "function", "function": {"name": choice["name"]}}


def is_reference(item: dict[str, Any]) -> bool:
    """Return whether an input item stands for one of a stored response."""
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "id" in item and "role" not in item)


def input_messages(given: str | list[dict[str, Any]] | None) -> list[Message]:
    """Return the messages that `input` stands for.

    Calls that follow each other, or an assistant's message, become one message, as the model wrote
    them.

    Raises:
        ApiError: 400; `param` names the item.
    """
    if given is None:
        return []
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    messages: list[Message] = []
    for i, item in enumerate(given):
        where = f"input[{i}]"
        kind = item.get("type") or "message"
        if kind == "message":
            role = item.get("role")
            if not isinstance(role, str):
                raise _refuse(f"{where}.role", f"{where}.role must be a text")
            messages.append(Message(role=role, content=_content(item.get("content"), where)))
        elif kind == "function_call":
            call = _call(item, where)
            if not (messages and messages[-1].role == "assistant"):
                messages.append(Message(role="assistant", content=""))
            last = messages[-1]
            last.tool_calls = [*(last.tool_calls or ()), call]
        elif kind == "function_call_output":
            output = item.get("output")
            call_id = item.get("call_id")
            if not isinstance(call_id, str):
                raise _refuse(f"{where}.call_id", f"{where}.call_id must be a text")
            content = _content(output, where, field="output")
            messages.append(Message(role="tool", tool_call_id=call_id, content=content))
        elif kind != "reasoning":
            raise _refuse(f"{where}.type", f"{where}.type {str(kind)[:64]!r} is not supported")
    return messages


def _content(content: Any, where: str, field: str = "content") -> str | list[Part]:
    where = f"{where}.{field}"
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise _refuse(where, f"{where} must be a text or a list of parts")
    parts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal" and isinstance(part.get("refusal"), str):
            parts.append(Part(type="text", text=part["refusal"]))
            continue
        if kind not in TEXT_PARTS:
            raise _refuse(
                f"{where}[{i}].type",
                f"{where}[{i}] has type {str(kind)[:64]!r}; only text parts are supported",
            )
        if not isinstance(part.get("text"), str):
            raise _refuse(f"{where}[{i}].text", f"{where}[{i}].text must be a text")
        parts.append(Part(type="text", text=part["text"]))
    return parts


def _chat_function(tool: Any) -> Any:
    """Return a tool of `tool_choice` as chat completions have it; what is malformed as it is."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {"name": tool.get("name")}}


def _call(item: dict[str, Any], where: str) -> ToolCall:
    for name in ("call_id", "name", "arguments"):
        if not isinstance(item.get(name), str):
            raise _refuse(f"{where}.{name}", f"{where}.{name} must be a text")
    function = FunctionCall(name=item["name"], arguments=item["arguments"])
    return ToolCall(id=item["call_id"], function=function)


def _response_format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return `text.format` as the `response_format` of chat completions."""
    given = (text or {}).get("format")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise _refuse("text.format", "text.format must be an object")
    if given.get("type") != "json_schema":
        return given
    wrapped = {k: v for k, v in given.items() if k != "type"}
    return {"type": "json_schema", "json_schema": wrapped}


def _refuse(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
