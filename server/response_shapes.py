"""The response object of the Responses API, and the events that build it before a client's eyes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from radixkv.request import SamplingParams, TokenLogprob
from radixkv.server.dialogue import Dialogue
from radixkv.server.errors import ApiError, error_body
from radixkv.server.protocol_responses import ResponsesRequest
from radixkv.server.responses import token_logprobs, usage_of
from radixkv.server.state import ServerState
from radixkv.server.tool_parsers import CallArguments, CallStart, TextPart, ToolEvent

__all__ = ["ResponseBuilder"]


class ResponseBuilder:
    """Builds one response out of what its answer tells, item by item.

    Every method that returns events has changed the response already: whoever wants no stream
    ignores them. Events are numbered in the order in which they are made.

    Attributes:
        response: as it is now; complete after `finish`.
    """

    def __init__(
        self,
        dialogue: Dialogue,
        body: ResponsesRequest,
        params: SamplingParams,
        state: ServerState,
    ) -> None:
        self._dialogue = dialogue
        self._tokens = state.engine.tokenizer
        self._block_size = state.engine.block_size if params.cache_pin_ttl is not None else None
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._texts: list[str] = []  # of the open item
        self._logprobs: list[dict[str, Any]] = []  # of the open item
        self._noted: list[dict[str, Any]] = []  # of tokens whose text is still to come
        self._number = 0
        self.response: dict[str, Any] = {
            "id": f"resp_{dialogue.generation.id}",
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": params.max_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": state.model_name,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **(body.text or {})},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": params.logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }

    def begin(self) -> list[dict[str, Any]]:
        """Return the events that tell that the request is accepted."""
        shown = dict(self.response)
        return [
            self._event("response.created", response=shown),
            self._event("response.in_progress", response=shown),
        ]

    def note_logprobs(self, entries: Sequence[TokenLogprob]) -> None:
        """Keep the log-probabilities of new tokens for the text that they are part of."""
        if entries:
            self._noted += token_logprobs(entries, self._tokens)

    def add(self, part: ToolEvent) -> Iterator[dict[str, Any]]:
        """Add a piece of content or of a call; iterate to the end for it to count."""
        if isinstance(part, TextPart):
            logprobs, self._noted = self._noted, []
            if self._open is None or self._open["type"] != "message":
                yield from self.close()
                yield from self._open_message()
            self._texts.append(part.text)
            self._logprobs += logprobs
            yield self._item_event(
                "response.output_text.delta", content_index=0, delta=part.text, logprobs=logprobs
            )
        elif isinstance(part, CallStart):
            self._noted = []  # a call has no place for them
            yield from self.close()
            item = {
                "type": "function_call",
                "id": f"fc_{part.id}",
                "call_id": part.id,
                "name": part.name,
                "arguments": "",
                "status": "in_progress",
            }
            yield self._open_item(item)
        elif isinstance(part, CallArguments):
            self._noted = []
            self._texts.append(part.text)
            yield self._item_event("response.function_call_arguments.delta", delta=part.text)

    def complete(self) -> Iterator[dict[str, Any]]:
        """End the answer; one without any content has an empty message."""
        if not self._output:
            yield from self._open_message()
        # What is open now was cut off, if the answer was.
        yield from self.close(is_cut=self._dialogue.answers[0].finish_reason == "length")

    def close(self, *, is_cut: bool = False) -> Iterator[dict[str, Any]]:
        """End the open item, if there is one; iterate to the end for it to count."""
        item, text = self._open, "".join(self._texts)
        if item is None:
            return
        item["status"] = "incomplete" if is_cut else "completed"
        if item["type"] == "message":
            # An end token has no text, so nothing came after its log-probability.
            logprobs = [*self._logprobs, *self._noted]
            part = {**_text_part(text), "logprobs": logprobs}
            item["content"] = [part]
            yield self._item_event(
                "response.output_text.done", content_index=0, text=text, logprobs=logprobs
            )
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        else:
            item["arguments"] = text
            yield self._item_event(
                "response.function_call_arguments.done", name=item["name"], arguments=text
            )
        yield self._event(
            "response.output_item.done", output_index=len(self._output) - 1, item=dict(item)
        )
        self._open = None
        self._texts, self._logprobs, self._noted = [], [], []

    def finish(self) -> dict[str, Any]:
        """Return the complete response, after `complete`."""
        (answer,) = self._dialogue.answers
        usage = usage_of([answer])
        response = self.response
        response["output"] = self._output
        response["status"] = "completed"
        response["completed_at"] = int(time.time())
        if answer.finish_reason == "length":
            response["status"] = "incomplete"
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                **usage["prompt_tokens_details"],
                "cache_write_tokens": answer.num_pinned_tokens(self._block_size),
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        return response

    def end_event(self, response: dict[str, Any]) -> dict[str, Any]:
        """Return the last event of a stream that did not fail."""
        return self._event(f"response.{response['status']}", response=response)

    def error_event(self, error: ApiError) -> dict[str, Any]:
        """Return the event of a failure; clients look for it at either place."""
        shown = error_body(error)["error"]
        fields = {key: shown[key] for key in ("code", "message", "param")}
        return self._event("error", error=shown, **fields)

    def _open_message(self) -> Iterator[dict[str, Any]]:
        number = len(self._output)
        suffix = f"_{number}" if number else ""
        item = {
            "type": "message",
            "id": f"msg_{self._dialogue.generation.id}{suffix}",
            "role": "assistant",
            "content": [],
            "status": "in_progress",
        }
        yield self._open_item(item)
        yield self._item_event("response.content_part.added", content_index=0, part=_text_part(""))

    def _open_item(self, item: dict[str, Any]) -> dict[str, Any]:
        self._open = item
        self._output.append(item)
        return self._event(
            "response.output_item.added", output_index=len(self._output) - 1, item=dict(item)
        )

    def _item_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        item_id = self._output[-1]["id"]
        return self._event(kind, item_id=item_id, output_index=len(self._output) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        number = self._number
        self._number += 1
        return {"type": kind, "sequence_number": number, **fields}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
