"""The parameters of queries, for the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from radixkv.server import admin_requests
from radixkv.server.admin_cache import MAX_BREADTH, MAX_DEPTH, MAX_MISSES
from radixkv.server.answer_types_engine import RequestState
from radixkv.server.responses_stored import DEFAULT_LIMIT, MAX_LIMIT
from radixkv.server.session_routes import MAX_LIST

__all__ = [
    "AdminSessionsQuery",
    "ExplainQuery",
    "ItemsQuery",
    "MissesQuery",
    "RequestQuery",
    "RequestsQuery",
    "SessionsQuery",
    "TimelineQuery",
    "TreeQuery",
]

Reveal = Annotated[
    Literal["true", "false", "1", "0", "yes", "no"],
    Meta(description="Name the namespace that has what another one lacks."),
]


class ItemsQuery(msgspec.Struct, kw_only=True):
    """Of `GET /v1/responses/{id}/input_items`."""

    order: Annotated[
        Literal["asc", "desc"], Meta(description="By time; the latest first unless said.")
    ] = "desc"
    limit: Annotated[int, Meta(ge=1, le=MAX_LIMIT, description="Items at most.")] = DEFAULT_LIMIT
    after: Annotated[
        str | None, Meta(description="Only those after this one, by its id, in the list.")
    ] = None


class TimelineQuery(msgspec.Struct, kw_only=True):
    """Of `GET /admin/timeline`."""

    first: Annotated[
        int, Meta(ge=0, lt=10**15, description="The number of the first sample wanted.")
    ] = 0
    run: Annotated[
        str | None,
        Meta(description="The run of the server that `first` is from; of another, all are sent."),
    ] = None


class SessionsQuery(msgspec.Struct, kw_only=True):
    """Of `GET /v1/sessions`."""

    limit: Annotated[int, Meta(ge=1, le=MAX_LIST, description="Sessions at most.")] = 100
    after: Annotated[
        str | None, Meta(description="Only those after this one, by its id, in the list.")
    ] = None


class RequestsQuery(msgspec.Struct, kw_only=True):
    """Of `GET /admin/requests`."""

    limit: Annotated[
        int, Meta(ge=1, le=admin_requests.MAX_LIMIT, description="Requests of each kind at most.")
    ] = admin_requests.DEFAULT_LIMIT
    state: Annotated[RequestState | None, Meta(description="Only those in this state.")] = None


class RequestQuery(msgspec.Struct, kw_only=True):
    """Of `GET /admin/requests/{request}`."""

    index: Annotated[int, Meta(ge=0, description="Which prompt, of a completion with several.")] = 0


class ExplainQuery(RequestQuery, kw_only=True):
    """Of `GET /admin/cache/explain/{request}`."""

    reveal: Reveal = "false"


class MissesQuery(msgspec.Struct, kw_only=True):
    """Of `GET /admin/cache/misses`."""

    limit: Annotated[int, Meta(ge=1, le=MAX_MISSES, description="Requests at most.")] = 20
    reveal: Reveal = "false"


class TreeQuery(msgspec.Struct, kw_only=True):
    """Of `GET /admin/cache/tree`."""

    depth: Annotated[int, Meta(ge=1, le=MAX_DEPTH, description="Nodes on a path at most.")] = 4
    breadth: Annotated[
        int, Meta(ge=1, le=MAX_BREADTH, description="Children of a node at most.")
    ] = 10
    namespace: Annotated[
        str | None, Meta(description="Only this one, by its label in `/admin/cache`.")
    ] = None


class AdminSessionsQuery(msgspec.Struct, kw_only=True):
    """Of `GET /admin/sessions`."""

    limit: Annotated[int, Meta(ge=1, le=1000, description="Sessions at most.")] = 100
    order: Annotated[
        Literal["last_used", "tokens"], Meta(description="The latest used, or the largest, first.")
    ] = "last_used"
