"""Stored responses: read again, listed by their input, and forgotten."""

from __future__ import annotations

from aiohttp import web

from radixkv.server.auth import tenant_of
from radixkv.server.body import json_response
from radixkv.server.errors import ApiError
from radixkv.server.queries import query_number
from radixkv.server.response_store import StoredResponse
from radixkv.server.state import STATE

__all__ = ["cancel_response", "delete_response", "get_response", "list_input_items"]

DEFAULT_LIMIT = 20
MAX_LIMIT = 100


async def get_response(request: web.Request) -> web.Response:
    """`GET /v1/responses/{id}`: a stored response."""
    if request.query.get("stream") in ("true", "True", "1"):
        raise _refuse("stream", "stream is not supported here: a stored response is complete")
    return json_response(_stored(request).body)


async def delete_response(request: web.Request) -> web.Response:
    """`DELETE /v1/responses/{id}`: forget a response; those that continue it keep its text."""
    response = _stored(request)
    request.app[STATE].responses.delete(response)
    return json_response({"id": response.id, "object": "response", "deleted": True})


async def cancel_response(request: web.Request) -> web.Response:
    """`POST /v1/responses/{id}/cancel`: refused, since no response runs in the background."""
    _stored(request)
    raise _refuse(
        "response_id", "Only a response in the background can be cancelled; this one is complete"
    )


async def list_input_items(request: web.Request) -> web.Response:
    """`GET /v1/responses/{id}/input_items`: what a response was given, latest first."""
    items = _stored(request).input_items
    query = request.query
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise _refuse("order", "order must be 'asc' or 'desc'")
    if order == "desc":
        items = items[::-1]
    limit = query_number(request, "limit", DEFAULT_LIMIT, 1, MAX_LIMIT)
    if "after" in query:
        ids = [item["id"] for item in items]
        if query["after"] not in ids:
            raise _refuse("after", "after must be the id of an item in the list")
        items = items[ids.index(query["after"]) + 1 :]
    page = items[:limit]
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(page) < len(items),
        }
    )


def _stored(request: web.Request) -> StoredResponse:
    return request.app[STATE].responses.get(
        request.match_info["response_id"], tenant_of(request), "response_id"
    )


def _refuse(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
