"""The bodies of requests: OpenAI's fields, vLLM's additions, and the session routes.

Types are strict: "0.5" and true are no numbers. Integer fields also take a number with no fraction
(1e9), since JSON knows one number type and some clients write them so. `null` always means "left
out". A field nobody declares here is ignored, as in other servers with this API; fields whose
meaning would be lost by ignoring them are declared and refused.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "ExplainRequest",
    "FunctionCall",
    "Message",
    "Part",
    "SamplingFields",
    "SessionCreate",
    "SessionFork",
    "SessionTurn",
    "StreamOptions",
    "ToolCall",
    "whole_number",
]

Number = int | float


class StreamOptions(msgspec.Struct, kw_only=True):
    """`stream_options`: whether a stream reports usage at its end, or in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Part(msgspec.Struct, kw_only=True):
    """One part of a message's content; only `type` "text" is understood."""

    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """The function of a tool call; `arguments` is JSON text."""

    name: str
    arguments: str | None = None


class ToolCall(msgspec.Struct, kw_only=True):
    """One call an assistant made in an earlier turn."""

    function: FunctionCall
    id: str | None = None
    type: str = "function"


class Message(msgspec.Struct, kw_only=True):
    """One message of a conversation, as the client sent it."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    function_call: Any = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields that say how to sample and how to answer; shared by every generating route."""

    model: str | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Number | None = None
    min_p: Number | None = None
    seed: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: Number | None = None
    min_tokens: Number | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    n: Number | None = None
    best_of: Number | None = None
    use_beam_search: bool | None = None
    beam_width: Number | None = None
    length_penalty: Number | None = None
    early_stopping: bool | str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Number | None = None
    timeout: Number | None = None
    cache_priority: Number | None = None
    cache_pin_ttl: Number | None = None
    user: Any = None
    # What the answer must look like, see `structured`.
    response_format: dict[str, Any] | None = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    # Refused when set: ignoring it would give an answer of another meaning.
    prompt_logprobs: Any = None


class ChatFields(SamplingFields, kw_only=True):
    """What chat and session turns add to `SamplingFields`."""

    max_completion_tokens: Number | None = None
    logprobs: bool | None = None
    top_logprobs: Number | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: list[str] | None = None


class ChatRequest(ChatFields, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    cache_salt: str | None = None
    metadata: Any = None


class CompletionRequest(SamplingFields, kw_only=True):
    """The body of `POST /v1/completions`; `max_tokens` is 16 when left out, as in OpenAI's API."""

    prompt: str | list[int | str | list[int]]
    max_tokens: Number | None = 16
    logprobs: Number | None = None
    echo: bool | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    metadata: Any = None


class SessionCreate(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/sessions`."""

    model: str | None = None
    system: str | list[Part] | None = None
    tools: list[dict[str, Any]] | None = None
    metadata: dict[str, str] | None = None
    cache_salt: str | None = None


class SessionTurn(ChatFields, kw_only=True):
    """The body of `POST /v1/sessions/{id}/messages`: exactly one of the first three fields."""

    content: str | list[Part] | None = None
    message: Message | None = None
    messages: list[Message] | None = None
    role: str | None = None
    tool_call_id: str | None = None
    # Declared to be refused: both are fixed when the session is made.
    tools: Any = None
    cache_salt: Any = None


class SessionFork(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/sessions/{id}/fork`; None forks after the last turn."""

    at_turn: int | None = None
    metadata: dict[str, str] | None = None


def whole_number(value: Number) -> int | None:
    """Return `value` as an int, or None if it has a fraction.

    >>> whole_number(1e9), whole_number(3), whole_number(1.5)
    (1000000000, 3, None)
    """
    if isinstance(value, int):
        return value
    return int(value) if value.is_integer() else None


class ExplainRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /admin/cache/explain`: `prompt` or `messages`, as the routes take them."""

    prompt: str | list[int] | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    reveal: bool | None = None
