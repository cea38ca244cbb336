"""OpenAI's Responses API: `/v1/responses`, whole or streamed, stored or not."""

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
from radixkv.server.messages import join_content, template_tools
from radixkv.server.protocol import Message
from radixkv.server.protocol_responses import (
    ResponsesRequest,
    chat_choice,
    chat_fields,
    chat_tools,
    input_messages,
)
from radixkv.server.response_shapes import ResponseBuilder
from radixkv.server.response_store import StoredResponse
from radixkv.server.sampling import chat_sampling
from radixkv.server.state import STATE, ServerState
from radixkv.server.streaming import StreamStyle, stream_chunks
from radixkv.server.tools import plan_tools

__all__ = ["create_response", "delete_response", "get_response", "list_input_items"]

# Fields that a response object, or its list of input items, repeats.
SHOWN = (
    "input", "instructions", "max_output_tokens", "metadata", "previous_response_id", "text",
    "tool_choice", "tools", "user",
)  # fmt: skip
# What chat completions call otherwise.
RENAMED = {
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "messages": "input",
}


async def create_response(request: web.Request) -> web.StreamResponse:
    """`POST /v1/responses`: answer an input, after the conversation of an earlier response."""
    state = request.app[STATE]
    config = state.config
    body = await read_json(
        request, ResponsesRequest, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s
    )
    state.check_model(body.model)
    try:
        return await _answer(request, state, body)
    except (ApiError, RequestRejectedError) as error:
        raise _renamed(error if isinstance(error, ApiError) else api_error_from(error)) from error


async def get_response(request: web.Request) -> web.Response:
    """`GET /v1/responses/{id}`: a stored response."""
    return json_response(_stored(request).body)


async def delete_response(request: web.Request) -> web.Response:
    """`DELETE /v1/responses/{id}`: forget a response; those that continue it keep its text."""
    response = _stored(request)
    request.app[STATE].responses.delete(response)
    return json_response({"id": response.id, "object": "response", "deleted": True})


async def list_input_items(request: web.Request) -> web.Response:
    """`GET /v1/responses/{id}/input_items`: what a response was given, latest first."""
    items = _stored(request).input_items[::-1]
    if request.query.get("order") == "asc":
        items.reverse()
    ids = [item["id"] for item in items]
    return json_response(
        {
            "object": "list",
            "data": items,
            "first_id": ids[0] if ids else None,
            "last_id": ids[-1] if ids else None,
            "has_more": False,
        }
    )


async def _answer(
    request: web.Request, state: ServerState, body: ResponsesRequest
) -> web.StreamResponse:
    _check_shown(body)
    params = chat_sampling(chat_fields(body), vocab_size=state.engine.vocab_size)
    namespace = make_namespace(tenant_of(request), body.cache_salt)
    tools = chat_tools(body.tools)
    plan = plan_tools(
        state.tools,
        template_tools(tools),
        chat_choice(body.tool_choice),
        body.parallel_tool_calls,
    )
    conversation = input_messages(body.input)
    if not conversation:
        raise ApiError(400, "input must not be empty", param="input", code="invalid_value")
    if body.previous_response_id is not None:
        previous = state.responses.get(
            body.previous_response_id, tenant_of(request), "previous_response_id"
        )
        conversation = [*previous.messages, *conversation]
    system = [Message(role="system", content=body.instructions)] if body.instructions else []
    dialogue = await Dialogue.begin(
        request, [*system, *conversation], plan, params, namespace, param="input"
    )
    builder = ResponseBuilder(dialogue, body, params, state.model_name)

    def finish() -> dict[str, Any]:
        response = builder.finish()
        if body.store is not False:
            answer = dialogue.readers[0].message()
            messages = [*conversation, answer]
            chars = sum(len(join_content(m.content, "input")) for m in messages)
            items = _input_items(body.input)
            state.responses.put(StoredResponse(namespace, response, items, messages, chars))
        return response

    try:
        if body.stream:
            style = StreamStyle(error=builder.error_event, named=True, done=b"")
            return await stream_chunks(
                request, state.config, _events(dialogue, builder, finish), style
            )
        await dialogue.run(request)
        builder.add_all(dialogue.readers[0])
        return json_response(finish())
    finally:
        dialogue.close()


async def _events(
    dialogue: Dialogue, builder: ResponseBuilder, finish: Callable[[], dict[str, Any]]
) -> AsyncGenerator[dict[str, Any], None]:
    for event in builder.begin():
        yield event
    async for _, _, parts in dialogue:
        for part in parts:
            for event in builder.add(part):
                yield event
    for event in builder.complete():
        yield event
    yield builder.end_event(finish())


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
    name = (error.param or "").partition("[")[0]
    if error.param is None or name not in RENAMED:
        return error
    return error.rename_param(error.param, error.param.replace(name, RENAMED[name], 1))


def _stored(request: web.Request) -> StoredResponse:
    return request.app[STATE].responses.get(
        request.match_info["response_id"], tenant_of(request), "response_id"
    )


def _input_items(given: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the items of `input`, each with a type and an id."""
    if isinstance(given, str):
        part = {"type": "input_text", "text": given}
        given = [{"type": "message", "role": "user", "content": [part]}]
    return [{"type": "message", "id": f"item_{uuid.uuid4().hex}", **i} for i in given or ()]
