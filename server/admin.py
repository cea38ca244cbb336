"""Routes for the one who runs the server: cache numbers, flush, integrity check, metrics."""

from __future__ import annotations

import logging
from itertools import islice
from typing import TYPE_CHECKING, Any

from aiohttp import web

from radixkv.engine import namespace_label
from radixkv.errors import CacheCorruptionError
from radixkv.server.auth import tenant_of
from radixkv.server.body import json_response, read_json
from radixkv.server.errors import ApiError, error_body
from radixkv.server.protocol_cache import FlushRequest
from radixkv.server.state import STATE

if TYPE_CHECKING:
    from radixkv.engine import EngineStats

__all__ = ["cache_report", "cache_stats", "check", "flush", "flush_all", "metrics"]

logger = logging.getLogger(__name__)

# The sessions used latest are shown.
MAX_SESSIONS = 100


async def cache_stats(request: web.Request) -> web.Response:
    """`GET /admin/cache`: what was reused, by whom, and where the blocks are."""
    state = request.app[STATE]
    stats = state.engine.stats()
    report = cache_report(stats)
    report["model"] = state.model_name
    report["models"] = {
        state.model_name: _usage(
            stats.requests_admitted,
            stats.tokens_looked_up,
            stats.tokens_hit,
            stats.tokens_generated,
        )
    }
    report["sessions"] = len(state.sessions)
    latest = islice(reversed(state.requests.sessions.items()), MAX_SESSIONS)
    report["session_usage"] = {
        session_id: _usage(
            usage.turns, usage.tokens_looked_up, usage.tokens_hit, usage.tokens_generated
        )
        for session_id, usage in latest
    }
    return json_response(report)


async def flush(request: web.Request) -> web.Response:
    """`POST /admin/cache/flush`: drop what is cached, or say why not.

    All of it, or that of one namespace.
    """
    state = request.app[STATE]
    body = await read_json(
        request,
        FlushRequest,
        max_bytes=state.config.max_body_bytes,
        timeout_s=state.config.body_timeout_s,
        allow_empty=True,
    )
    if body.namespace is None and body.cache_salt is None:
        return await flush_all(request)
    namespace = body.place(tenant_of(request))
    freed = await state.engine.control.flush_namespace(namespace)
    label = namespace_label(namespace)
    return json_response({"success": True, "namespace": label, "freed_blocks": freed})


async def flush_all(request: web.Request) -> web.Response:
    """`POST` and `GET /flush_cache`: drop every cached block, as SGLang's scripts ask for it."""
    freed = await request.app[STATE].engine.flush_cache()
    return json_response({"success": True, "freed_blocks": freed})


async def check(request: web.Request) -> web.Response:
    """`GET /admin/check`: recount the cache from scratch."""
    try:
        await request.app[STATE].engine.check_integrity()
    except CacheCorruptionError as error:
        logger.error("cache integrity check failed: %s", error)
        refusal = ApiError(500, str(error), code="cache_corrupt")
        return json_response({"ok": False, **error_body(refusal)}, status=500)
    return json_response({"ok": True})


async def metrics(request: web.Request) -> web.Response:
    """`GET /metrics`: the Prometheus text page."""
    return web.Response(
        body=request.app[STATE].metrics.render(),
        headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
    )


def cache_report(stats: EngineStats) -> dict[str, Any]:
    """Return the body of `/admin/cache`.

    The counters under `tokens` only ever grow, so the difference of two reads is exact for the time
    between them; the rates are named by their window.
    """
    block_bytes = stats.bytes_per_block

    def blocks(count: int) -> dict[str, int]:
        return {"blocks": count, "bytes": count * block_bytes}

    return {
        "uptime_s": stats.uptime_s,
        "hit_rate": {name: window["hit_rate"] for name, window in stats.windows.items()},
        "windows": stats.windows,
        "tokens": {
            "looked_up": stats.tokens_looked_up,
            "hit": stats.tokens_hit,
            "hit_by_tier": stats.tokens_hit_by_tier,
            "computed": stats.tokens_computed,
            "recomputed": stats.tokens_recomputed,
            "generated": stats.tokens_generated,
        },
        "blocks": {
            "total": blocks(stats.blocks_total),
            "free": blocks(stats.blocks_free),
            "cached": blocks(stats.blocks_cached),
            "referenced": blocks(stats.blocks_referenced),
        },
        "block_size": stats.block_size,
        "bytes_per_block": block_bytes,
        "kv": _kv_report(stats),
        "tiers": stats.tiers,
        "evicted_blocks": stats.evicted_blocks,
        "copied_blocks": stats.copied_blocks,
        "preemptions": stats.preemptions,
        "scheduling": stats.scheduling,
        "tree": {"nodes": stats.nodes, "leaves": stats.leaves},
        "requests": {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "oldest_wait_s": stats.oldest_wait_s,
            "admitted": stats.requests_admitted,
            "rejected": stats.requests_rejected,
            "finished": stats.requests_finished,
        },
        "pins": stats.pins,
        "namespaces": stats.namespaces,
        "steps": {
            "count": stats.steps,
            "time_s": stats.step_time_s,
            "last_age_s": stats.last_step_age_s,
        },
        "kv_events": stats.kv_events,
    }


def _usage(requests: int, looked_up: int, hit: int, generated: int) -> dict[str, Any]:
    return {
        "requests": requests,
        "looked_up": looked_up,
        "hit": hit,
        "hit_rate": hit / looked_up if looked_up else None,
        "generated": generated,
    }


def _kv_report(stats: EngineStats) -> dict[str, Any]:
    """Return how well the blocks are used: all of them, and those of running sequences.

    Their waste is slots without a token, in blocks that are not full. `shared_tokens` is what
    copies of the shared blocks would take beside them.
    """
    total = stats.blocks_total
    used = total - stats.blocks_free
    wasted = stats.kv_slots_allocated - stats.kv_tokens_stored
    return {
        "pool_usage": used / total if total else 0.0,
        "referenced_usage": stats.blocks_referenced / total if total else 0.0,
        "tokens_stored": stats.kv_tokens_stored,
        "slots_allocated": stats.kv_slots_allocated,
        "utilisation": stats.kv_utilisation,
        "wasted_slots": wasted,
        "wasted_bytes": wasted * stats.bytes_per_block // stats.block_size,
        "shared_tokens": stats.kv_tokens_referenced - stats.kv_tokens_stored,
    }
