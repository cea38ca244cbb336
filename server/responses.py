"""The JSON shapes of answers: whole ones, stream chunks, usage and logprobs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from radixkv.request import TokenLogprob
from radixkv.server.dialogue import AnswerReader
from radixkv.server.generation import Answer
from radixkv.server.protocol import StreamOptions
from radixkv.server.tool_parsers import CallStart, TextPart, ToolEvent

__all__ = ["ChatShape", "CompletionShape", "UsageMode", "token_logprobs", "usage_of"]

# JSON has no minus infinity; this is what other servers of this API send in its place.
LOWEST_LOGPROB = -9999.0


class TokenTexts(Protocol):
    """The part of a tokenizer that logprobs need."""

    def token_str(self, token_id: int, /) -> str:
        """Return the token as text."""

    def token_bytes(self, token_id: int, /) -> bytes:
        """Return the bytes the token stands for."""


@dataclass(frozen=True, slots=True)
class UsageMode:
    """When a stream reports usage: at its end, in every chunk, or never."""

    at_end: bool = False
    in_chunks: bool = False

    @classmethod
    def from_options(cls, options: StreamOptions | None) -> UsageMode:
        """Read `stream_options`."""
        if options is None or not options.include_usage:
            return cls()
        return cls(at_end=True, in_chunks=bool(options.continuous_usage_stats))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The constant fields of one answer, the same in all its chunks."""

    id: str
    model: str
    usage: UsageMode = field(default_factory=UsageMode)
    created: int = field(default_factory=lambda: int(time.time()))

    def _body(self, kind: str, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": choices,
            **extra,
        }

    def _chunk(
        self,
        kind: str,
        choices: list[dict[str, Any]],
        answers: Sequence[Answer],
        **extra: Any,
    ) -> dict[str, Any]:
        if self.usage.in_chunks:
            extra["usage"] = usage_of(answers)
        elif self.usage.at_end:
            extra["usage"] = None
        return self._body(kind, choices, **extra)

    def _usage_chunk(self, kind: str, answers: Sequence[Answer]) -> dict[str, Any]:
        return self._body(kind, [], usage=usage_of(answers))


class ChatShape(Shape):
    """`chat.completion` and `chat.completion.chunk`."""

    def whole(
        self, readers: Sequence[AnswerReader], tokens: TokenTexts, *, logprobs: bool
    ) -> dict[str, Any]:
        """Return a complete answer; one choice each."""
        choices = [
            {
                "index": i,
                "message": _chat_message(reader),
                "logprobs": _chat_logprobs(reader.answer.logprobs, tokens) if logprobs else None,
                "finish_reason": reader.finish_reason,
                "stop_reason": reader.answer.stop_reason,
            }
            for i, reader in enumerate(readers)
        ]
        answers = [reader.answer for reader in readers]
        return self._body("chat.completion", choices, usage=usage_of(answers))

    def role_chunk(self, index: int, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the first chunk of a choice, sent as soon as the request is accepted."""
        return self._delta(index, {"role": "assistant", "content": ""}, answers)

    def delta_chunk(
        self,
        index: int,
        event: ToolEvent,
        answers: Sequence[Answer],
        tokens: TokenTexts,
        logprobs: Sequence[TokenLogprob] | None = None,
    ) -> dict[str, Any]:
        """Return the chunk of a piece of content or of a call.

        Args:
            index: of the choice.
            event: the piece; an empty text only carries log-probabilities.
            answers: all choices.
            tokens: for the log-probabilities.
            logprobs: of the tokens that came with the piece.
        """
        shown = _chat_logprobs(logprobs, tokens) if logprobs else None
        return self._delta(index, _delta_of(event), answers, logprobs=shown)

    def finish_chunk(
        self, index: int, readers: Sequence[AnswerReader], **extra: Any
    ) -> dict[str, Any]:
        """Return the one chunk that carries the finish reason of a choice."""
        choice = {
            "index": index,
            "delta": {},
            "logprobs": None,
            "finish_reason": readers[index].finish_reason,
            "stop_reason": readers[index].answer.stop_reason,
        }
        answers = [reader.answer for reader in readers]
        return self._chunk("chat.completion.chunk", [choice], answers, **extra)

    def usage_chunk(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the last chunk of a stream that was asked for usage."""
        return self._usage_chunk("chat.completion.chunk", answers)

    def _delta(
        self,
        index: int,
        delta: dict[str, Any],
        answers: Sequence[Answer],
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        return self._chunk("chat.completion.chunk", [choice], answers)


class CompletionShape(Shape):
    """`text_completion`, whole and in chunks; `n` choices per prompt."""

    def whole(
        self,
        answers: Sequence[Answer],
        echoes: Sequence[str],
        tokens: TokenTexts,
        *,
        logprobs: bool,
    ) -> dict[str, Any]:
        """Return a complete answer; `echoes` are put before the texts."""
        choices = [
            {
                "index": i,
                "text": echo + answer.full_text(),
                "logprobs": _completion_logprobs(answer.logprobs, tokens, 0) if logprobs else None,
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
            }
            for i, (answer, echo) in enumerate(zip(answers, echoes, strict=True))
        ]
        return self._body("text_completion", choices, usage=usage_of(answers))

    def text_chunk(
        self,
        index: int,
        text: str,
        answers: Sequence[Answer],
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return a chunk with new text of one choice."""
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
        return self._chunk("text_completion", [choice], answers)

    def finish_chunk(self, index: int, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the one chunk that carries the finish reason of a choice."""
        choice = {
            "index": index,
            "text": "",
            "logprobs": None,
            "finish_reason": answers[index].finish_reason,
            "stop_reason": answers[index].stop_reason,
        }
        return self._chunk("text_completion", [choice], answers)

    def usage_chunk(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the last chunk of a stream that was asked for usage."""
        return self._usage_chunk("text_completion", answers)

    def logprobs(
        self, entries: Sequence[TokenLogprob], tokens: TokenTexts, offset: int
    ) -> dict[str, Any]:
        """Return the logprobs of a chunk whose first token starts at character `offset`."""
        return _completion_logprobs(entries, tokens, offset)


def usage_of(answers: Iterable[Answer]) -> dict[str, Any]:
    """Return the sum of the answers' token counts; on a miss `cached_tokens` is 0, never absent."""
    prompt = cached = completion = 0
    for answer in answers:
        prompt += answer.num_prompt_tokens
        cached += answer.num_cached_tokens
        completion += answer.num_completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _chat_message(reader: AnswerReader) -> dict[str, Any]:
    content = reader.content()
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reader.calls:
        message["content"] = content or None
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": "".join(call.arguments)},
            }
            for call in reader.calls
        ]
    return message


def _delta_of(event: ToolEvent) -> dict[str, Any]:
    if isinstance(event, TextPart):
        return {"content": event.text}
    call: dict[str, Any] = {"index": event.index}
    if isinstance(event, CallStart):
        call |= {"id": event.id, "type": "function"}
        call["function"] = {"name": event.name, "arguments": ""}
    else:
        call["function"] = {"arguments": event.text}
    return {"tool_calls": [call]}


def token_logprobs(entries: Iterable[TokenLogprob], tokens: TokenTexts) -> list[dict[str, Any]]:
    """Return the log-probabilities of tokens as chat completions and responses show them."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokens.token_str(token_id),
            "logprob": _finite(logprob),
            "bytes": list(tokens.token_bytes(token_id)),
        }

    return [
        {
            **one(entry.token_id, entry.logprob),
            "top_logprobs": [one(i, logprob) for i, logprob in entry.top],
        }
        for entry in entries
    ]


def _chat_logprobs(entries: Iterable[TokenLogprob], tokens: TokenTexts) -> dict[str, Any]:
    return {"content": token_logprobs(entries, tokens), "refusal": None}


def _completion_logprobs(
    entries: Iterable[TokenLogprob], tokens: TokenTexts, offset: int
) -> dict[str, Any]:
    result: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for entry in entries:
        text = tokens.token_str(entry.token_id)
        # The chosen token is always listed, so there may be one more than was asked for. Of several
        # tokens with one text (broken UTF-8, say) the likeliest counts: it comes first.
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(tokens.token_str(token_id), _finite(logprob))
        result["tokens"].append(text)
        result["token_logprobs"].append(_finite(entry.logprob))
        result["top_logprobs"].append(top)
        result["text_offset"].append(offset)
        offset += len(text)
    return result


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
