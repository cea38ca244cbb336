"""The shapes of answers of the two other APIs that agents speak: Responses, and Messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from radixkv.server.answer_types import CachedTokens, ChosenLogprob

__all__ = [
    "AnthropicErrorAnswer",
    "InputItems",
    "InputTokens",
    "MessageAnswer",
    "MessageEvent",
    "Response",
    "ResponseDeleted",
    "ResponseEvent",
    "ResponseInputTokens",
]

Count = Annotated[int, Meta(ge=0)]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class OutputText(msgspec.Struct, kw_only=True):
    """A text of an output message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChosenLogprob]


class OutputMessage(msgspec.Struct, kw_only=True, tag="message"):
    """What the model said."""

    id: str
    role: Literal["assistant"]
    content: list[OutputText]
    status: ItemStatus


class OutputCall(msgspec.Struct, kw_only=True, tag="function_call"):
    """A call that the model made, with its arguments as JSON text."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


OutputItem = OutputMessage | OutputCall


class OutputTokens(msgspec.Struct, kw_only=True):
    """Of the tokens of an answer, those of thoughts, which are not told apart here."""

    reasoning_tokens: Count


class InputDetails(CachedTokens, kw_only=True):
    """How many tokens of the prompt were reused, and how many computed and pinned."""

    cache_write_tokens: Count


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Tokens of a response."""

    input_tokens: Count
    input_tokens_details: InputDetails
    output_tokens: Count
    output_tokens_details: OutputTokens
    total_tokens: Count


class IncompleteDetails(msgspec.Struct, kw_only=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class Response(msgspec.Struct, kw_only=True):
    """A response: the request's fields as they were understood, and its output."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete"]
    background: Literal[False]
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | float | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: Any
    reasoning: dict[str, None]
    safety_identifier: Any
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: Count
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: Any


class ResponseDeleted(msgspec.Struct, kw_only=True):
    """A response that is forgotten."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(msgspec.Struct, kw_only=True):
    """The items that a response was given, as they were sent, each with a type and an id."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseInputTokens(msgspec.Struct, kw_only=True):
    """The tokens of the prompt that a response would have."""

    object: Literal["response.input_tokens"]
    input_tokens: Count


class NumberedEvent(msgspec.Struct, kw_only=True):
    """What every event of a response has."""

    sequence_number: Count


class ItemEvent(NumberedEvent, kw_only=True):
    """What every event inside an item of the output has."""

    item_id: str
    output_index: Count


class ResponseCreated(NumberedEvent, kw_only=True, tag="response.created"):
    """The request is accepted."""

    response: Response


class ResponseInProgress(NumberedEvent, kw_only=True, tag="response.in_progress"):
    """It is being answered."""

    response: Response


class ItemAdded(NumberedEvent, kw_only=True, tag="response.output_item.added"):
    """An item begins."""

    output_index: Count
    item: OutputItem


class ItemDone(NumberedEvent, kw_only=True, tag="response.output_item.done"):
    """An item is complete."""

    output_index: Count
    item: OutputItem


class PartAdded(ItemEvent, kw_only=True, tag="response.content_part.added"):
    """A part of a message begins."""

    content_index: Count
    part: OutputText


class PartDone(ItemEvent, kw_only=True, tag="response.content_part.done"):
    """A part of a message is complete."""

    content_index: Count
    part: OutputText


class TextDelta(ItemEvent, kw_only=True, tag="response.output_text.delta"):
    """More text of a part."""

    content_index: Count
    delta: str
    logprobs: list[ChosenLogprob]


class TextDone(ItemEvent, kw_only=True, tag="response.output_text.done"):
    """The whole text of a part."""

    content_index: Count
    text: str
    logprobs: list[ChosenLogprob]


class ArgumentsDelta(ItemEvent, kw_only=True, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    delta: str


class ArgumentsDone(ItemEvent, kw_only=True, tag="response.function_call_arguments.done"):
    """All of a call's arguments."""

    name: str
    arguments: str


class ResponseCompleted(NumberedEvent, kw_only=True, tag="response.completed"):
    """The end."""

    response: Response


class ResponseIncomplete(NumberedEvent, kw_only=True, tag="response.incomplete"):
    """The end, forced by `max_output_tokens`."""

    response: Response


class ResponseFailed(NumberedEvent, kw_only=True, tag="error"):
    """The end of a stream that failed."""

    error: dict[str, str | None]
    code: str | None
    message: str
    param: str | None


ResponseEvent = (
    ResponseCreated
    | ResponseInProgress
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ArgumentsDelta
    | ArgumentsDone
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
)


class AnthropicErrorCode(msgspec.Struct, kw_only=True):
    """What went wrong, for programs."""

    error_code: str


class AnthropicErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong, by kind and in words."""

    type: str
    message: str
    details: AnthropicErrorCode | UnsetType = UNSET


class AnthropicErrorAnswer(msgspec.Struct, kw_only=True, tag="error"):
    """Any answer other than success, in Anthropic's form; also the event of a failure."""

    error: AnthropicErrorDetail
    request_id: str


class InputTokens(msgspec.Struct, kw_only=True):
    """The tokens of a prompt."""

    input_tokens: Count


class MessageUsage(msgspec.Struct, kw_only=True):
    """Tokens of a message; the three counts of input add up to the prompt."""

    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count


class CacheCreation(msgspec.Struct, kw_only=True):
    """The tokens computed and pinned, by how long they are."""

    ephemeral_5m_input_tokens: Count
    ephemeral_1h_input_tokens: Count


class WholeUsage(MessageUsage, kw_only=True):
    """The usage of a message; in a stream, of the one that begins it."""

    cache_creation: CacheCreation
    service_tier: Literal["standard"]


class TextBlock(msgspec.Struct, kw_only=True, tag="text"):
    """What the model said."""

    text: str


class ToolUseBlock(msgspec.Struct, kw_only=True, tag="tool_use"):
    """A call that the model made."""

    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ToolUseBlock


class MessageAnswer(msgspec.Struct, kw_only=True):
    """A whole message; the one that begins a stream is empty and has no stop reason."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: WholeUsage


class MessageStart(msgspec.Struct, kw_only=True, tag="message_start"):
    """A message begins; its prompt has been counted."""

    message: MessageAnswer


class BlockStart(msgspec.Struct, kw_only=True, tag="content_block_start"):
    """A block begins."""

    index: Count
    content_block: ContentBlock


class BlockText(msgspec.Struct, kw_only=True, tag="text_delta"):
    """More text."""

    text: str


class BlockJson(msgspec.Struct, kw_only=True, tag="input_json_delta"):
    """More of a call's input, as JSON text."""

    partial_json: str


class BlockDelta(msgspec.Struct, kw_only=True, tag="content_block_delta"):
    """More of a block."""

    index: Count
    delta: BlockText | BlockJson


class BlockStop(msgspec.Struct, kw_only=True, tag="content_block_stop"):
    """A block is complete."""

    index: Count


class MessageStop(msgspec.Struct, kw_only=True, tag="message_stop"):
    """The end."""


class MessageEnding(msgspec.Struct, kw_only=True):
    """Why a message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, kw_only=True, tag="message_delta"):
    """A message is complete, with its final usage."""

    delta: MessageEnding
    usage: MessageUsage


class Ping(msgspec.Struct, kw_only=True, tag="ping"):
    """Nothing; clients expect one."""


MessageEvent = (
    MessageStart
    | BlockStart
    | BlockDelta
    | BlockStop
    | MessageDelta
    | MessageStop
    | Ping
    | AnthropicErrorAnswer
)
