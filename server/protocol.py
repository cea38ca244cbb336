"""The bodies of requests: OpenAI's fields, vLLM's additions, and the session routes.

Types are strict: "0.5" and true are no numbers. Integer fields also take a number with no fraction
(1e9), since JSON knows one number type and some clients write them so. `null` always means "left
out". A field nobody declares here is ignored, as in other servers with this API; fields whose
meaning would be lost by ignoring them are declared and refused.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from radixkv.server.field_limits import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_PARTS,
    BestOf,
    CachePriority,
    FrequencyPenalty,
    LengthPenalty,
    LogitBias,
    Logprobs,
    MaxTokens,
    Metadata,
    MinP,
    MinTokens,
    Name,
    Number,
    PinTtl,
    Priority,
    RepetitionPenalty,
    Seed,
    Stop,
    StopTokenIds,
    Strings,
    Temperature,
    Timeout,
    Tools,
    TopK,
    TopP,
)

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "ExplainRequest",
    "FunctionCall",
    "Message",
    "Messages",
    "Number",
    "Part",
    "SamplingFields",
    "SessionCreate",
    "SessionFork",
    "SessionRollback",
    "SessionTurn",
    "StreamOptions",
    "ToolCall",
    "known",
    "whole_number",
]


class StreamOptions(msgspec.Struct, kw_only=True):
    """`stream_options`: whether a stream reports usage at its end, or in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def known(*values: str) -> Meta:
    """Return what tells the schema which texts there are; others are refused by name, later."""
    return Meta(extra_json_schema={"enum": list(values)})


class Part(msgspec.Struct, kw_only=True):
    """One part of a message's content; only `type` "text" and "refusal" are understood."""

    type: Annotated[str, known("text", "refusal")]
    text: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """The function of a tool call; `arguments` is JSON text."""

    name: Name
    arguments: str | None = None


class ToolCall(msgspec.Struct, kw_only=True):
    """One call an assistant made in an earlier turn."""

    function: FunctionCall
    id: Name | None = None
    type: str = "function"


Calls = Annotated[list[ToolCall], Meta(max_length=MAX_CALLS)]
Parts = Annotated[list[Part], Meta(max_length=MAX_PARTS)]


class Message(msgspec.Struct, kw_only=True):
    """One message of a conversation, as the client sent it."""

    role: Annotated[str, known("system", "developer", "user", "assistant", "tool")]
    content: str | Parts | None = None
    name: Name | None = None
    tool_calls: Calls | None = None
    tool_call_id: Name | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    function_call: Any = None
    audio: Any = None


Messages = Annotated[
    list[Message], Meta(max_length=MAX_MESSAGES, extra_json_schema={"minItems": 1})
]


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields that say how to sample and how to answer; shared by every generating route."""

    model: str | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: FrequencyPenalty | None = None
    frequency_penalty: FrequencyPenalty | None = None
    stop: Stop | None = None
    stop_token_ids: StopTokenIds | None = None
    max_tokens: MaxTokens | None = None
    min_tokens: MinTokens | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: LogitBias | None = None
    n: BestOf | None = None
    best_of: BestOf | None = None
    use_beam_search: bool | None = None
    beam_width: BestOf | None = None
    length_penalty: LengthPenalty | None = None
    early_stopping: bool | str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority | None = None
    timeout: Timeout | None = None
    cache_priority: CachePriority | None = None
    cache_pin_ttl: PinTtl | None = None
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

    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Strings | None = None
    web_search_options: Any = None
    moderation: Any = None


class ChatRequest(ChatFields, kw_only=True):
    """The body of `POST /v1/chat/completions`.

    `store`, `service_tier`, `reasoning_effort`, `verbosity`, `prediction`, `safety_identifier` and
    the `prompt_cache_*` fields are hints that clients send; they change nothing here.
    """

    messages: Messages
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    metadata: Metadata | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    """The body of `POST /v1/completions`; `max_tokens` is 16 when left out, as in OpenAI's API."""

    prompt: str | list[int | str | list[int]]
    max_tokens: MaxTokens | None = 16
    logprobs: Logprobs | None = None
    echo: bool | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    metadata: Metadata | None = None


class SessionCreate(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/sessions`."""

    model: str | None = None
    system: str | Parts | None = None
    tools: Tools | None = None
    metadata: Metadata | None = None
    cache_salt: str | None = None


class SessionTurn(ChatFields, kw_only=True):
    """The body of `POST /v1/sessions/{id}/messages`: exactly one of the first three fields."""

    content: str | Parts | None = None
    message: Message | None = None
    messages: Messages | None = None
    role: Annotated[str, known("user", "tool")] | None = None
    tool_call_id: Name | None = None
    # Declared to be refused: both are fixed when the session is made.
    tools: Any = None
    cache_salt: Any = None


class SessionFork(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/sessions/{id}/fork`; None forks after the last turn."""

    at_turn: int | None = None
    metadata: Metadata | None = None


class SessionRollback(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/sessions/{id}/rollback`: how many turns stay."""

    to_turn: int


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
    messages: Messages | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    reveal: bool | None = None
