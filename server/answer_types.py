"""The shapes of answers to chat, completions, tokens and models, and of errors.

Handlers build their answers as dicts; these types say what is in them, for the OpenAPI document,
and the tests hold every route to them. A field that is not always there has the default `UNSET`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

__all__ = [
    "ChatChunk",
    "ChatCompletion",
    "Completion",
    "CompletionChunk",
    "Detokenized",
    "ErrorAnswer",
    "Health",
    "Model",
    "ModelList",
    "SessionCompletion",
    "Tokenized",
    "Usage",
]

FinishReason = Literal["stop", "length", "tool_calls"]
Count = Annotated[int, Meta(ge=0)]


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong: in words, by kind, and the request field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, kw_only=True):
    """Any answer other than success, in OpenAI's form."""

    error: ErrorDetail


class CachedTokens(msgspec.Struct, kw_only=True):
    """How many tokens of the prompt were reused."""

    cached_tokens: Count


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of a request, of all its answers together."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens


class LogprobOf(msgspec.Struct, kw_only=True):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[Annotated[int, Meta(ge=0, le=255)]]


class ChosenLogprob(LogprobOf, kw_only=True):
    """A token of the answer, and those that were likeliest in its place."""

    top_logprobs: list[LogprobOf]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities of the tokens of an answer or a chunk."""

    content: list[ChosenLogprob]
    refusal: None


class AnswerFunction(msgspec.Struct, kw_only=True):
    """The function of a call, with its arguments as JSON text."""

    name: str
    arguments: str


class AnswerToolCall(msgspec.Struct, kw_only=True):
    """A call that the model made."""

    id: str
    type: Literal["function"]
    function: AnswerFunction


class AnswerMessage(msgspec.Struct, kw_only=True):
    """What the model said; `content` is null in an answer that is nothing but calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[AnswerToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer; `stop_reason` is the stop string or token that ended it."""

    index: Count
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class AnswerHead(msgspec.Struct, kw_only=True):
    """What every answer that was generated begins with."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None


class TurnOfSession(msgspec.Struct, kw_only=True):
    """Where a session stands after a turn: its id, its turns, and the tokens of its history.

    `saved` is there if sessions are kept on disk.
    """

    id: str
    turn: Count
    num_tokens: Count
    saved: bool | UnsetType = UNSET


class ChatCompletion(AnswerHead, kw_only=True):
    """A whole answer to a conversation; `session` is there if the request named one."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    session: TurnOfSession | UnsetType = UNSET


class SessionCompletion(ChatCompletion, kw_only=True):
    """A whole answer to a turn of a session."""

    session: TurnOfSession


class FunctionDelta(msgspec.Struct, kw_only=True):
    """A piece of a call: the name first, with empty arguments, then the arguments bit by bit."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """A piece of the call with this index; only the first one has its id."""

    index: Count
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(msgspec.Struct, kw_only=True):
    """What a chunk adds to the message; nothing in the one that ends it."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    """A piece of one answer; the last one has its finish reason."""

    index: Count
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET


class ChatChunk(AnswerHead, kw_only=True):
    """An event of a streamed chat; `usage` is there if the request asked for it.

    In a turn of a session, the one with the finish reason says where the session stands.
    """

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    session: TurnOfSession | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities of the tokens of a text, and where in it they begin."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[Count]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One text; choice `i` of prompt `p` has the index `p * n + i`."""

    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class Completion(AnswerHead, kw_only=True):
    """Whole continuations of the prompts."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(msgspec.Struct, kw_only=True):
    """A piece of one text; the last one has its finish reason."""

    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET


class CompletionChunk(AnswerHead, kw_only=True):
    """An event of a streamed completion; `usage` is there if the request asked for it."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class Model(msgspec.Struct, kw_only=True):
    """The model that is served, as OpenAI's and Anthropic's clients read it.

    `root` is its own name, whatever clients call it.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: Count
    type: Literal["model"]
    display_name: str
    created_at: str
    max_input_tokens: Count


class ModelList(msgspec.Struct, kw_only=True):
    """All models, which is one."""

    object: Literal["list"]
    data: list[Model]
    has_more: Literal[False]
    first_id: str
    last_id: str


class Tokenized(msgspec.Struct, kw_only=True):
    """The ids of a text or a conversation; `token_strs` if the request asked for them."""

    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct, kw_only=True):
    """The text of token ids."""

    prompt: str


class EngineState(msgspec.Struct, kw_only=True):
    """Whether the engine steps, and what it has to do."""

    state: Literal["dead", "stuck", "stepping", "idle"]
    accepting: bool
    seconds_in_step: float
    num_running: Count
    num_waiting: Count


class Health(msgspec.Struct, kw_only=True):
    """Whether the server should get traffic; status 503 if it is "dead" or "draining"."""

    status: Literal["ok", "stuck", "dead", "draining"]
    loop: Literal["alive"]
    engine: EngineState
