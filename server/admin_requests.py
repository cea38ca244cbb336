"""Routes that show what requests are doing, and what the latest ones did."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any
from urllib.parse import quote

from aiohttp import web

from radixkv.server.body import json_response
from radixkv.server.errors import ApiError
from radixkv.server.queries import query_number
from radixkv.server.request_log import STATES, RequestRecord
from radixkv.server.state import STATE, ServerState

__all__ = ["get_request", "list_requests"]

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000


async def list_requests(request: web.Request) -> web.Response:
    """`GET /admin/requests?limit=100&state=`: requests that live, and the latest that ended.

    Latest first, `limit` of each kind at most; `state` is one of `STATES`.
    """
    server = request.app[STATE]
    limit = query_number(request, "limit", DEFAULT_LIMIT, 1, MAX_LIMIT)
    wanted = request.query.get("state")
    if wanted is not None and wanted not in STATES:
        raise ApiError(
            400,
            f"state must be one of {', '.join(STATES)}",
            param="state",
            code="invalid_value",
        )
    now = time.monotonic()

    def views(records: Any) -> list[dict[str, Any]]:
        chosen = (r for r in records if wanted is None or r.state == wanted)
        return [record.view(now) for record in islice(chosen, limit)]

    return json_response(
        {
            "object": "requests",
            "live": views(server.requests.live(server.engine.progress())),
            "recent": views(server.requests.recent()),
        }
    )


async def get_request(request: web.Request) -> web.Response:
    """`GET /admin/requests/{id}`: one of them, by the names that explanations take, too."""
    server = request.app[STATE]
    name = request.match_info["request"]
    index = query_number(request, "index", 0, 0, server.config.max_prompts - 1)
    record = _find(server, server.request_ids.resolve(name, index))
    if record is None:
        raise ApiError(
            404,
            f"There is no request {name[:128]!r}: the engine never took it, or too many came "
            "after it",
            param="request",
            code="not_found",
        )
    return json_response(
        {
            "object": "request",
            **record.view(time.monotonic()),
            "request_id": record.request_id,
            "trace_id": record.trace_id,
            "explain": f"/admin/cache/explain/{quote(record.engine_id)}",
        }
    )


def _find(server: ServerState, engine_id: str) -> RequestRecord | None:
    for record in server.requests.live(server.engine.progress()):
        if record.engine_id == engine_id:
            return record
    return next((r for r in server.requests.recent() if r.engine_id == engine_id), None)
