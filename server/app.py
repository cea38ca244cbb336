"""The aiohttp application."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from aiohttp import web

from radixkv.server import (
    admin,
    admin_cache,
    admin_engine,
    admin_requests,
    admin_sessions,
    anthropic,
    dashboard_routes,
    models,
    openapi,
    pins,
    responses_api,
    responses_stored,
    session_routes,
    session_upkeep,
    tokenize_routes,
)
from radixkv.server.api_keys import KeyRing
from radixkv.server.chat import chat_completions
from radixkv.server.completions import completions
from radixkv.server.config import ServerConfig
from radixkv.server.cors import BrowserRules
from radixkv.server.guards import add_guard_headers
from radixkv.server.health import health
from radixkv.server.metrics import Metrics
from radixkv.server.middleware import MIDDLEWARES, add_request_id
from radixkv.server.prompts import PromptBuilder
from radixkv.server.state import STATE, Lifecycle, ServerState
from radixkv.server.timeline import Timeline
from radixkv.server.tool_parsers import FAMILIES, ToolFamily, family_of_template
from radixkv.server.tracing import RequestTracer
from radixkv.server.turns import post_message

if TYPE_CHECKING:
    from radixkv.engine import AsyncEngine
    from radixkv.server.session_db import SessionDb

__all__ = ["create_app"]

logger = logging.getLogger(__name__)

# A step that hangs must not keep the process from ending.
ENGINE_STOP_S = 10.0


def create_app(
    engine: AsyncEngine,
    config: ServerConfig | None = None,
    *,
    tracer: RequestTracer | None = None,
    keys: KeyRing | None = None,
    session_db: SessionDb | None = None,
) -> web.Application:
    """Return an application that serves `engine`; it starts and stops the engine itself.

    Run it with `run_server`, or with any aiohttp runner that has `handler_cancellation=True`:
    without it, a client that hangs up while its whole (not streamed) answer is made is noticed
    only at the next token.

    Args:
        engine: not started yet.
        config: its options.
        tracer: makes a trace of every request that generates; closed at the end.
        keys: those of `config` if they were read before, such as to refuse a bad file early.
        session_db: keeps sessions across restarts; just opened, and closed at the end.

    Raises:
        ConfigError: the file of keys or that of sessions can't be used.
    """
    config = config or ServerConfig()
    # The limit of aiohttp counts too: its own default of 1 MiB refuses ordinary histories.
    app = web.Application(middlewares=MIDDLEWARES, client_max_size=config.max_body_bytes)
    model_name = config.served_model_name or engine.model_name
    app[STATE] = ServerState(
        engine=engine,
        config=config,
        model_name=model_name,
        created=int(time.time()),
        metrics=Metrics(engine, model_name),
        prompts=PromptBuilder(engine),
        sessions=session_upkeep.make_store(app, engine, config, model_name, session_db),
        lifecycle=Lifecycle(),
        timeline=Timeline(engine.stats),
        tools=_tool_family(engine, config),
        tracer=tracer,
        keys=keys or KeyRing(config.api_key, config.admin_api_key, config.api_keys),
        browsers=BrowserRules(config.cors_origins, config.allowed_hosts),
    )
    # The first is left last.
    app.cleanup_ctx.append(_close_tracer)
    app.cleanup_ctx.append(session_upkeep.keep_sessions)
    app.cleanup_ctx.append(_run_engine)
    app.cleanup_ctx.append(dashboard_routes.keep_timeline)
    app.on_response_prepare.extend((add_request_id, add_guard_headers))
    app[openapi.DOCUMENT] = openapi.ApiDocument(app)
    app.add_routes(
        [
            web.post("/v1/chat/completions", chat_completions),
            web.post("/v1/completions", completions),
            web.post("/v1/responses", responses_api.create_response),
            web.post("/v1/responses/input_tokens", responses_api.count_input_tokens),
            web.get("/v1/responses/{response_id}", responses_stored.get_response),
            web.delete("/v1/responses/{response_id}", responses_stored.delete_response),
            web.get("/v1/responses/{response_id}/input_items", responses_stored.list_input_items),
            web.post("/v1/responses/{response_id}/cancel", responses_stored.cancel_response),
            web.post("/v1/messages", anthropic.create_message),
            web.post("/v1/messages/count_tokens", anthropic.count_tokens),
            web.post("/tokenize", tokenize_routes.tokenize),
            web.post("/detokenize", tokenize_routes.detokenize),
            web.get("/v1/models", models.list_models),
            web.get("/v1/models/{model:.+}", models.get_model),
            web.post("/v1/sessions", session_routes.create_session),
            web.get("/v1/sessions", session_routes.list_sessions),
            web.get("/v1/sessions/{session_id}", session_routes.get_session),
            web.delete("/v1/sessions/{session_id}", session_routes.delete_session),
            web.get("/v1/sessions/{session_id}/messages", session_routes.list_messages),
            web.post("/v1/sessions/{session_id}/messages", post_message),
            web.post("/v1/sessions/{session_id}/fork", session_routes.fork_session),
            web.post("/v1/sessions/{session_id}/rollback", session_routes.roll_back_session),
            web.post("/v1/sessions/{session_id}/pin", pins.pin_session),
            web.post("/v1/sessions/{session_id}/unpin", pins.unpin_session),
            web.get("/health", health),
            web.get("/metrics", admin.metrics),
            web.get("/openapi.json", openapi.openapi),
            web.get("/admin", dashboard_routes.to_page),
            web.get("/admin/", dashboard_routes.page),
            web.get("/admin/assets/{name}", dashboard_routes.asset),
            web.get("/admin/timeline", dashboard_routes.timeline),
            web.get("/admin/cache", admin.cache_stats),
            web.get("/admin/engine", admin_engine.engine_stats),
            web.get("/admin/requests", admin_requests.list_requests),
            web.get("/admin/requests/{request:.+}", admin_requests.get_request),
            web.get("/admin/sessions", admin_sessions.admin_sessions),
            web.get("/admin/cache/explain/{request:.+}", admin_cache.explain_request),
            web.post("/admin/cache/explain", admin_cache.explain_prompt),
            web.get("/admin/cache/misses", admin_cache.latest_misses),
            web.get("/admin/cache/tree", admin_cache.cache_tree),
            web.get("/admin/check", admin.check),
            web.get("/admin/cache/pins", pins.list_pins),
            web.post("/admin/cache/pin", pins.pin_prompt),
            web.delete("/admin/cache/pin/{pin}", pins.unpin),
            web.post("/admin/cache/warm", pins.warm),
            web.post("/admin/cache/flush", admin.flush),
            web.post("/flush_cache", admin.flush_all),
            web.get("/flush_cache", admin.flush_all),
        ]
    )
    return app


def _tool_family(engine: AsyncEngine, config: ServerConfig) -> ToolFamily:
    """Return the family that the options name, or else the one that the chat template teaches."""
    if config.tool_parser is not None:
        return FAMILIES[config.tool_parser]
    tokenizer = engine.tokenizer
    # A template that shows no tools teaches nothing, whatever its name.
    return family_of_template(
        tokenizer.chat_template if tokenizer.template_supports_tools else None
    )


async def _close_tracer(app: web.Application) -> AsyncIterator[None]:
    yield
    if (tracer := app[STATE].tracer) is not None:
        await tracer.close()


async def _run_engine(app: web.Application) -> AsyncIterator[None]:
    state = app[STATE]
    await state.engine.start()
    yield
    state.lifecycle.draining = True
    state.prompts.close()
    stopping = asyncio.ensure_future(state.engine.shutdown(0.0))
    hurry = asyncio.ensure_future(state.lifecycle.hurry.wait())
    await asyncio.wait(
        {stopping, hurry},
        timeout=state.config.save_timeout_s + ENGINE_STOP_S,
        return_when=asyncio.FIRST_COMPLETED,
    )
    hurried = hurry.done()
    hurry.cancel()
    if hurried:
        state.engine.stop_saving()
    try:
        await asyncio.wait_for(stopping, ENGINE_STOP_S if hurried else 0.0)
    except TimeoutError:
        logger.error("the engine did not stop in time; leaving it behind")
