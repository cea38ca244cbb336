"""The body of `POST /v1/messages`, and its parts as chat completions have them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import orjson
from msgspec import Meta

from radixkv.server.errors import ApiError
from radixkv.server.field_limits import (
    MAX_MESSAGES,
    CachePriority,
    LogitBias,
    MaxTokens,
    MinP,
    MinTokens,
    Objects,
    Priority,
    RepetitionPenalty,
    Seed,
    StopTexts,
    Temperature,
    Timeout,
    Tools,
    TopK,
    TopP,
)
from radixkv.server.protocol import ChatFields, FunctionCall, Message, Part, ToolCall, known

__all__ = [
    "SHORT_TTL",
    "CountTokensRequest",
    "MessagesRequest",
    "chat_choice",
    "chat_fields",
    "chat_messages",
    "chat_tools",
    "pin_ttl",
]

SHORT_TTL = 300.0
TTLS = {"5m": SHORT_TTL, "1h": 3600.0}
MAX_MARKERS = 4
ROLES = ("user", "assistant", "system")
# Thoughts of an earlier turn, which no template here shows.
IGNORED_BLOCKS = ("thinking", "redacted_thinking")
UNSUPPORTED = ("container", "mcp_servers")
# Edits that are done anyway: no thought of an earlier turn is ever in a prompt.
DONE_EDITS = "clear_thinking_"


class AnthropicMessage(msgspec.Struct, kw_only=True):
    """One message; its content is text or a list of blocks."""

    role: Annotated[str, known("user", "assistant", "system")]
    content: str | Objects


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/messages/count_tokens`."""

    messages: Annotated[list[AnthropicMessage], Meta(max_length=MAX_MESSAGES)]
    model: str | None = None
    system: str | Objects | None = None
    tools: Tools | None = None
    tool_choice: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    cache_salt: str | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The body of `POST /v1/messages`: Anthropic's fields, and a few of the other routes'.

    `thinking`, `metadata`, `service_tier` and the effort of `output_config` change nothing here.
    """

    max_tokens: MaxTokens
    stop_sequences: StopTexts | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    container: Any = None
    context_management: Any = None
    mcp_servers: Any = None
    thread: Any = None
    seed: Seed | None = None
    min_p: MinP | None = None
    min_tokens: MinTokens | None = None
    repetition_penalty: RepetitionPenalty | None = None
    ignore_eos: bool | None = None
    logit_bias: LogitBias | None = None
    timeout: Timeout | None = None
    priority: Priority | None = None
    cache_priority: CachePriority | None = None


def chat_fields(body: MessagesRequest) -> ChatFields:
    """Return what chat completions would have of a request's sampling.

    Raises:
        ApiError: 400; `param` names the field.
    """
    for name in UNSUPPORTED:
        if getattr(body, name):
            raise _refuse(name, f"{name} is not supported")
    if body.thread:
        # The code tells Anthropic's tool runner to send whole conversations.
        raise ApiError(
            400,
            "thread is not supported; send the whole conversation",
            param="thread",
            code="thread_unsupported_request",
        )
    _check_edits(body.context_management)
    return ChatFields(
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        min_p=body.min_p,
        min_tokens=body.min_tokens,
        repetition_penalty=body.repetition_penalty,
        ignore_eos=body.ignore_eos,
        logit_bias=body.logit_bias,
        timeout=body.timeout,
        priority=body.priority,
        cache_priority=body.cache_priority,
        cache_pin_ttl=pin_ttl(body),
        response_format=_response_format(body),
    )


def chat_messages(body: CountTokensRequest) -> list[Message]:
    """Return the messages of a request, the system prompt first.

    Each tool result becomes a message of its own, in the order in which they stand.

    Raises:
        ApiError: 400; `param` names the block.
    """
    messages = []
    if body.system:
        messages.append(Message(role="system", content=_texts(body.system, "system")))
    for i, message in enumerate(body.messages):
        where = f"messages[{i}]"
        if message.role not in ROLES:
            raise _refuse(
                f"{where}.role",
                f"{where}.role must be 'user' or 'assistant', got {message.role[:64]!r}",
            )
        if isinstance(message.content, str):
            messages.append(Message(role=message.role, content=message.content))
        elif message.role == "assistant":
            messages.append(_assistant(message.content, f"{where}.content"))
        else:
            messages.extend(_user(message.role, message.content, f"{where}.content"))
    return messages


def chat_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return `tools` as chat completions have them.

    Raises:
        ApiError: 400; `param` names the tool.
    """
    if not tools:
        return None
    result = []
    for i, tool in enumerate(tools):
        if tool.get("type") not in (None, "custom"):
            raise _refuse(
                f"tools[{i}].type",
                f"tools[{i}].type {str(tool['type'])[:64]!r} is not supported: only tools of the "
                "client's own are",
            )
        function = {"name": tool.get("name")}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        function["parameters"] = tool.get("input_schema")
        result.append({"type": "function", "function": function})
    return result


def chat_choice(
    choice: dict[str, Any] | None,
) -> tuple[str | dict[str, Any] | None, bool | None]:
    """Return `tool_choice` and `parallel_tool_calls` as chat completions have them.

    Raises:
        ApiError: 400; `param` names the field.
    """
    if choice is None:
        return None, None
    parallel = (
        None
        if choice.get("disable_parallel_tool_use") is None
        else not choice["disable_parallel_tool_use"]
    )
    match choice.get("type"):
        case "auto" | "none" as kind:
            return kind, parallel
        case "any":
            return "required", parallel
        case "tool" if isinstance(choice.get("name"), str):
            return {"type": "function", "function": {"name": choice["name"]}}, parallel
    raise _refuse(
        "tool_choice", "tool_choice.type must be 'auto', 'any', 'none', or 'tool' with a name"
    )


def pin_ttl(body: CountTokensRequest) -> float | None:
    """Return the seconds for which the markers want the prompt kept, the longest of them.

    Raises:
        ApiError: 400, a marker is malformed, or there are too many.
    """
    markers = list(_markers(body))
    if len(markers) > MAX_MARKERS:
        raise _refuse(
            "cache_control",
            f"at most {MAX_MARKERS} blocks may have cache_control, got {len(markers)}",
        )
    ttls = []
    for where, marker in markers:
        ttl = marker.get("ttl", "5m") if isinstance(marker, dict) else None
        if ttl not in tuple(TTLS) or marker.get("type") != "ephemeral":
            raise _refuse(
                where, f"{where} must have type 'ephemeral' and, if any, a ttl of '5m' or '1h'"
            )
        ttls.append(TTLS[ttl])
    return max(ttls, default=None)


def _markers(body: CountTokensRequest) -> Iterator[tuple[str, Any]]:
    """Yield (where, marker) of every `cache_control`."""
    places: list[tuple[str, Any]] = [("", {"cache_control": body.cache_control})]
    places += [(f"tools[{i}].", tool) for i, tool in enumerate(body.tools or ())]
    if isinstance(body.system, list):
        places += [(f"system[{i}].", block) for i, block in enumerate(body.system)]
    for i, message in enumerate(body.messages):
        if isinstance(message.content, list):
            places += [(f"messages[{i}].content[{j}].", b) for j, b in enumerate(message.content)]
    for where, place in places:
        if place.get("cache_control") is not None:
            yield f"{where}cache_control", place["cache_control"]


def _check_edits(given: Any) -> None:
    """Refuse `context_management` that would change a prompt."""
    edits = given.get("edits") if isinstance(given, dict) else given
    for edit in edits if isinstance(edits, list) else [edits]:
        kind = edit.get("type") if isinstance(edit, dict) else edit
        if kind is not None and not str(kind).startswith(DONE_EDITS):
            raise _refuse(
                "context_management",
                f"context_management: {str(kind)[:64]!r} is not supported; nothing is ever "
                "dropped from a prompt",
            )


def _user(role: str, blocks: list[dict[str, Any]], where: str) -> Iterator[Message]:
    texts: list[Part] = []
    for j, block in enumerate(blocks):
        if block.get("type") != "tool_result":
            texts.append(_text_part(block, f"{where}[{j}]"))
            continue
        if texts:
            yield Message(role=role, content=texts)
            texts = []
        if not isinstance(block.get("tool_use_id"), str):
            raise _refuse(f"{where}[{j}].tool_use_id", f"{where}[{j}].tool_use_id must be a text")
        content = _texts(block.get("content") or "", f"{where}[{j}].content")
        yield Message(role="tool", tool_call_id=block["tool_use_id"], content=content)
    if texts or not blocks:
        yield Message(role=role, content=texts)


def _assistant(blocks: list[dict[str, Any]], where: str) -> Message:
    texts: list[Part] = []
    calls: list[ToolCall] = []
    for j, block in enumerate(blocks):
        kind = block.get("type")
        if kind in IGNORED_BLOCKS:
            continue
        if kind != "tool_use":
            texts.append(_text_part(block, f"{where}[{j}]"))
            continue
        for name in ("id", "name"):
            if not isinstance(block.get(name), str):
                raise _refuse(f"{where}[{j}].{name}", f"{where}[{j}].{name} must be a text")
        if not isinstance(block.get("input", {}), dict):
            raise _refuse(f"{where}[{j}].input", f"{where}[{j}].input must be an object")
        try:
            arguments = orjson.dumps(block.get("input", {})).decode()
        except (TypeError, RecursionError):
            raise _refuse(
                f"{where}[{j}].input", f"{where}[{j}].input can't be written as JSON"
            ) from None
        function = FunctionCall(name=block["name"], arguments=arguments)
        calls.append(ToolCall(id=block["id"], function=function))
    return Message(role="assistant", content=texts, tool_calls=calls or None)


def _texts(content: str | list[Any], where: str) -> str | list[Part]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _refuse(where, f"{where} must be a text or a list of blocks")
    return [_text_part(block, f"{where}[{i}]") for i, block in enumerate(content)]


def _text_part(block: Any, where: str) -> Part:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text":
        raise _refuse(
            f"{where}.type", f"{where} has type {str(kind)[:64]!r}, which is not supported here"
        )
    if not isinstance(block.get("text"), str):
        raise _refuse(f"{where}.text", f"{where}.text must be a text")
    return Part(type="text", text=block["text"])


def _response_format(body: MessagesRequest) -> dict[str, Any] | None:
    """Return the `response_format` that `output_config.format` or `output_format` stands for."""
    given = (body.output_config or {}).get("format") or body.output_format
    if given is None:
        return None
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        raise _refuse("output_config.format", "output_config.format.type must be 'json_schema'")
    return {"type": "json_schema", "json_schema": {"schema": given.get("schema")}}


def _refuse(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
