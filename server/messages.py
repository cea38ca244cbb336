"""From the messages of a request to what a chat template takes.

Rules, the same on every route:

- Several text parts are joined by one line break (`PART_SEPARATOR`); one part equals the string.
- `developer` is rendered as `system`.
- A null, absent or empty content of an assistant is the empty string, or its `refusal`.
- A template that knows nothing of tools gets them flattened: the tools as JSON lines after the
  system prompt, a tool call as JSON in the assistant's content, a tool's answer as a user message.
- The client's order of keys and of tools is kept untouched.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import orjson

from radixkv.server.errors import ApiError
from radixkv.server.protocol import Message, Part, ToolCall

__all__ = [
    "PART_SEPARATOR",
    "join_content",
    "template_messages",
    "template_tools",
    "tools_chars",
    "with_tools",
]

PART_SEPARATOR = "\n"
TOOLS_HEADER = "You can call these tools; each line describes one of them in JSON:"
TOOLS_FOOTER = (
    "To call a tool, answer with nothing but a line of JSON for each call: "
    '{"name": the name of the tool, "arguments": an object with its arguments}'
)
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})

TemplateMessage = dict[str, Any]


def template_messages(
    messages: Sequence[Message], *, supports_tools: bool, field: str = "messages"
) -> list[TemplateMessage]:
    """Return `messages` as a chat template takes them.

    Args:
        messages: as the client sent them.
        supports_tools: whether the template renders tool calls and tool answers itself.
        field: the request field the messages came in, for error messages.

    Raises:
        ApiError: 400; `param` names the message and field.
    """
    if not messages:
        raise _refuse(field, f"{field} must have at least one message")
    return [
        _template_message(message, f"{field}[{i}]", supports_tools)
        for i, message in enumerate(messages)
    ]


def _template_message(message: Message, where: str, supports_tools: bool) -> TemplateMessage:
    if message.role not in ROLES:
        raise _refuse(
            f"{where}.role",
            f"{where}.role must be one of {', '.join(sorted(ROLES))}, got {message.role[:64]!r}",
        )
    if message.function_call is not None:
        raise _refuse(
            f"{where}.function_call", f"{where}.function_call is not supported; use tool_calls"
        )
    if message.tool_calls and message.role != "assistant":
        raise _refuse(f"{where}.tool_calls", f"{where}.tool_calls: only an assistant calls tools")
    if message.content is None and message.role != "assistant":
        raise _refuse(
            f"{where}.content", f"{where}.content must be set in a message of role {message.role}"
        )
    if message.audio is not None:
        raise _refuse(f"{where}.audio", f"{where}.audio is not supported")
    content = join_content(message.content, f"{where}.content")
    if not content and message.role == "assistant":
        content = message.refusal or ""
    result: TemplateMessage = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content,
    }
    if message.name is not None:
        result["name"] = message.name
    if message.role == "assistant":
        if message.reasoning_content:
            result["reasoning_content"] = message.reasoning_content
        if message.tool_calls and supports_tools:
            result["tool_calls"] = [_template_call(call) for call in message.tool_calls]
        elif message.tool_calls:
            # Spaced as models that learned to call tools write them, and as a forced call is.
            calls = [_spaced(_template_call(c)["function"]) for c in message.tool_calls]
            result["content"] = "\n".join([content, *calls] if content else calls)
    if message.role == "tool":
        if supports_tools:
            if message.tool_call_id is not None:
                result["tool_call_id"] = message.tool_call_id
        else:
            result["role"] = "user"
    return result


def join_content(content: str | list[Part] | None, where: str) -> str:
    """Return the text of a message's content.

    Raises:
        ApiError: 400, for a part that is not text; the message names its type.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        if part.type not in ("text", "refusal"):
            raise _refuse(
                f"{where}[{i}].type",
                f"{where}[{i}] has type {part.type[:64]!r}; only 'text' parts are supported",
            )
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            field = f"{where}[{i}].{part.type}"
            raise _refuse(field, f"{field} must be set in a {part.type} part")
        texts.append(text)
    return PART_SEPARATOR.join(texts)


def template_tools(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return `tools` after checking their shape; None when there are none.

    Raises:
        ApiError: 400; `param` names the tool.
    """
    if not tools:
        return None
    for i, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise _refuse(
                f"tools[{i}]", f"tools[{i}] must have type 'function' and a function object"
            )
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise _refuse(f"tools[{i}].function.name", f"tools[{i}].function.name must be a name")
    return list(tools)


def tools_chars(tools: list[dict[str, Any]] | None) -> int:
    """Return about how many characters the tools take in a prompt.

    Raises:
        ApiError: 400, when they are nested too deeply to be written.
    """
    return sum(len(_dump(tool)) for tool in tools or ())


def with_tools(
    messages: list[TemplateMessage], tools: list[dict[str, Any]] | None
) -> list[TemplateMessage]:
    """Return `messages` with `tools` described in the system prompt, for templates without tools.

    Does not modify `messages`.
    """
    if not tools:
        return messages
    block = "\n".join([TOOLS_HEADER, *(_dump(tool) for tool in tools), TOOLS_FOOTER])
    if messages and messages[0]["role"] == "system":
        first = dict(messages[0])
        first["content"] = f"{first['content']}\n\n{block}" if first["content"] else block
        return [first, *messages[1:]]
    return [{"role": "system", "content": block}, *messages]


def _template_call(call: ToolCall) -> dict[str, Any]:
    """Return a call with its arguments parsed: templates render an object, not JSON in a string."""
    arguments: Any = call.function.arguments or "{}"
    try:
        parsed = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        # What a model wrote need not be JSON; the template then shows the text as it is.
        parsed = arguments
    result: dict[str, Any] = {
        "type": "function",
        "function": {"name": call.function.name, "arguments": parsed},
    }
    if call.id is not None:
        result["id"] = call.id
    return result


def _spaced(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise _refuse("messages", "the arguments of a call are nested too deeply") from error


def _dump(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except (orjson.JSONEncodeError, RecursionError) as error:
        raise _refuse("tools", f"tools cannot be written as JSON: {error}") from error


def _refuse(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
