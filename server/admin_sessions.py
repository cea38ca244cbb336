"""`GET /admin/sessions`: all sessions, and what each holds in the cache."""

from __future__ import annotations

import heapq
import time
from typing import Any

from aiohttp import web

from radixkv.engine import SessionUsage, namespace_label
from radixkv.server.body import json_response
from radixkv.server.errors import ApiError
from radixkv.server.queries import query_number
from radixkv.server.session_cache import usage_of
from radixkv.server.sessions import Session
from radixkv.server.state import STATE, ServerState

__all__ = ["admin_sessions"]

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000
ORDERS = ("last_used", "tokens")


async def admin_sessions(request: web.Request) -> web.Response:
    """`GET /admin/sessions?limit=100&order=last_used`: sessions of all tenants, without a text."""
    state = request.app[STATE]
    limit = query_number(request, "limit", DEFAULT_LIMIT, 1, MAX_LIMIT)
    order = request.query.get("order", ORDERS[0])
    if order not in ORDERS:
        raise ApiError(
            400,
            f"order must be one of {', '.join(ORDERS)}, got {order[:64]!r}",
            param="order",
            code="invalid_value",
        )
    everyone = list(state.sessions)
    if order == "tokens":
        shown = heapq.nlargest(limit, everyone, key=lambda session: session.num_tokens)
    else:
        shown = everyone[:limit]
    usage = await usage_of(state, shown)
    block_bytes = state.engine.stats().bytes_per_block
    data = [
        _row(state, s, u or SessionUsage(), block_bytes) for s, u in zip(shown, usage, strict=True)
    ]
    return json_response({"object": "list", "data": data, "total": len(everyone)})


def _row(
    state: ServerState, session: Session, usage: SessionUsage, block_bytes: int
) -> dict[str, Any]:
    expires_in_s = usage.pin_expires_in_s
    return {
        "id": session.id,
        "tenant": session.tenant,
        "namespace": namespace_label(session.namespace),
        "created_at": session.created,
        "last_used_at": session.last_used,
        "expires_at": state.sessions.expires_at(session),
        "pinned_until": None if expires_in_s is None else time.time() + expires_in_s,
        "turns": len(session.turns),
        "tokens": session.num_tokens,
        "cached_tokens": usage.cached_tokens,
        "cached_blocks": usage.cached_blocks,
        "private_blocks": usage.private_blocks,
        "bytes": usage.cached_blocks * block_bytes,
        "busy": session.busy,
    }
