"""OpenAI's Responses API: `POST /v1/responses`, whole or streamed, and the count of its tokens."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Any

import orjson
from aiohttp import web

from radixkv.errors import RequestRejectedError
from radixkv.server.auth import make_namespace, tenant_of
from radixkv.server.body import json_response, read_json
from radixkv.server.dialogue import Dialogue
from radixkv.server.errors import ApiError, api_error_from
from radixkv.server.history import encode_chat
from radixkv.server.messages import join_content, template_messages, template_tools
from radixkv.server.protocol import Message
from radixkv.server.protocol_responses import (
    ResponsesRequest,
    chat_choice,
    chat_fields,
    chat_tools,
    input_messages,
    is_reference,
)
from radixkv.server.response_shapes import ResponseBuilder
from radixkv.server.response_store import StoredResponse
from radixkv.server.sampling import chat_sampling
from radixkv.server.state import STATE, ServerState
from radixkv.server.streaming import StreamStyle, run_to_end, stream_chunks
from radixkv.server.tools import ToolPlan, plan_tools

__all__ = ["count_input_tokens", "create_response"]

# Fields that a response object, or its list of input items, repeats.
SHOWN = (
    "input", "instructions", "max_output_tokens", "max_tool_calls", "metadata",
    "previous_response_id", "prompt_cache_key", "safety_identifier", "text", "tool_choice",
    "tools", "top_logprobs", "user",
)  # fmt: skip
# What chat completions call otherwise.
RENAMED = {
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "messages": "input",
    "tool_choice.allowed_tools": "tool_choice",
}


async def create_response(request: web.Request) -> web.StreamResponse:
    """`POST /v1/responses`: answer an input, after the conversation of an earlier response."""
    state, body = await _read(request)
    try:
        return await _answer(request, state, body)
    except (ApiError, RequestRejectedError) as error:
        raise _renamed(error if isinstance(error, ApiError) else api_error_from(error)) from error


async def count_input_tokens(request: web.Request) -> web.Response:
    """`POST /v1/responses/input_tokens`: the tokens of the prompt such a request would have."""
    state, body = await _read(request)
    try:
        chat_fields(body)  # refuses what would make another prompt
        plan = _plan(state, body)
        given = _resolved(request, state, body.input)
        messages = _with_instructions(body, _conversation(request, state, body, given))
        prompt = await encode_chat(
            state.prompts,
            state.history,
            make_namespace(tenant_of(request), body.cache_salt),
            template_messages(messages, supports_tools=state.prompts.supports_tools, field="input"),
            plan.tools,
        )
    except (ApiError, RequestRejectedError) as error:
        raise _renamed(error if isinstance(error, ApiError) else api_error_from(error)) from error
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.ids)})


async def _read(request: web.Request) -> tuple[ServerState, ResponsesRequest]:
    state = request.app[STATE]
    config = state.config
    body = await read_json(
        request, ResponsesRequest, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s
    )
    state.check_model(body.model)
    return state, body


async def _answer(
    request: web.Request, state: ServerState, body: ResponsesRequest
) -> web.StreamResponse:
    _check_shown(body)
    params = chat_sampling(chat_fields(body), vocab_size=state.engine.vocab_size)
    namespace = make_namespace(tenant_of(request), body.cache_salt)
    plan = _plan(state, body)
    given = _resolved(request, state, body.input)
    conversation = _conversation(request, state, body, given)
    dialogue = await Dialogue.begin(
        request, _with_instructions(body, conversation), plan, params, namespace, param="input"
    )
    builder = ResponseBuilder(dialogue, body, params, state)

    def finish() -> dict[str, Any]:
        response = builder.finish()
        if body.store is not False:
            answer = dialogue.readers[0].message()
            messages = [*conversation, answer]
            chars = sum(len(join_content(m.content, "input")) for m in messages)
            items = _input_items(given)
            state.responses.put(StoredResponse(namespace, response, items, messages, chars))
        return response

    events = _events(dialogue, builder, finish)
    try:
        if body.stream:
            style = StreamStyle(error=builder.error_event, named=True, done=b"")
            return await stream_chunks(request, state.config, events, style)
        await run_to_end(request, state.config, events)
        return json_response(builder.response)
    finally:
        await events.aclose()
        dialogue.close()


async def _events(
    dialogue: Dialogue, builder: ResponseBuilder, finish: Callable[[], dict[str, Any]]
) -> AsyncGenerator[dict[str, Any], None]:
    for event in builder.begin():
        yield event
    async for _, output, parts in dialogue:
        builder.note_logprobs(output.logprobs or ())
        for part in parts:
            for event in builder.add(part):
                yield event
    for event in builder.complete():
        yield event
    yield builder.end_event(finish())


def _plan(state: ServerState, body: ResponsesRequest) -> ToolPlan:
    return plan_tools(
        state.tools,
        template_tools(chat_tools(body.tools)),
        chat_choice(body.tool_choice),
        body.parallel_tool_calls,
    )


def _resolved(
    request: web.Request, state: ServerState, given: str | list[dict[str, Any]] | None
) -> str | list[dict[str, Any]] | None:
    """Return an input with the items that its references stand for."""
    if not isinstance(given, list):
        return given
    tenant = tenant_of(request)
    return [
        state.responses.item(str(item.get("id")), tenant, f"input[{i}].id")
        if is_reference(item)
        else item
        for i, item in enumerate(given)
    ]


def _conversation(
    request: web.Request,
    state: ServerState,
    body: ResponsesRequest,
    given: str | list[dict[str, Any]] | None,
) -> list[Message]:
    """Return the conversation up to this request's answer, without instructions."""
    conversation = input_messages(given)
    if not conversation:
        raise ApiError(400, "input must not be empty", param="input", code="invalid_value")
    if body.previous_response_id is not None:
        previous = state.responses.get(
            body.previous_response_id, tenant_of(request), "previous_response_id"
        )
        conversation = [*previous.messages, *conversation]
    return conversation


def _with_instructions(body: ResponsesRequest, conversation: list[Message]) -> list[Message]:
    if not body.instructions:
        return conversation
    return [Message(role="system", content=body.instructions), *conversation]


def _check_shown(body: ResponsesRequest) -> None:
    """Refuse what the response object, which repeats it, could not be written with.

    Raises:
        ApiError: 400; `param` names the field.
    """
    for name in SHOWN:
        try:
            orjson.dumps(getattr(body, name))
        except (TypeError, RecursionError):
            raise ApiError(
                400,
                f"{name} has a number over 64 bits, half of a surrogate pair, or too many levels",
                param=name,
                code="invalid_value",
            ) from None


def _renamed(error: ApiError) -> ApiError:
    """Return the error with the field as this API calls it."""
    param = error.param or ""
    name = next((n for n in RENAMED if param == n or param.startswith((f"{n}[", f"{n}."))), None)
    return error if name is None else error.rename_param(param, RENAMED[name] + param[len(name) :])


def _input_items(given: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the items of `input`, each with a type and an id."""
    if isinstance(given, str):
        part = {"type": "input_text", "text": given}
        given = [{"type": "message", "role": "user", "content": [part]}]
    items = []
    for item in given or ():
        item = {**item, "type": item.get("type") or "message"}
        if not isinstance(item.get("id"), str):
            item["id"] = f"item_{uuid.uuid4().hex}"
        items.append(item)
    return items
