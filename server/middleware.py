"""What wraps every request: its id, its errors, its key, and its line in the access log."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid

from aiohttp import web
from aiohttp.typedefs import Handler

from radixkv.errors import RequestRejectedError
from radixkv.server import dashboard_routes
from radixkv.server.access_log import log_access
from radixkv.server.auth import authenticate, is_admin_route, tenant_of
from radixkv.server.errors import ApiError, anthropic_error_body, api_error_from, error_response
from radixkv.server.guards import check_browser, keep_limits
from radixkv.server.scope import RequestScope, current_scope, enter_scope, leave_scope
from radixkv.server.state import REQUEST_ID, STATE, ServerState
from radixkv.server.streaming import ClientGoneError

__all__ = ["MIDDLEWARES", "add_request_id"]

logger = logging.getLogger(__name__)

# No space, quote, bracket or backslash: what is shown in lines of a log can't pretend to be more.
REQUEST_ID_PATTERN = re.compile(r"[A-Za-z0-9._:/@+=,~#-]{1,128}")
OPEN_ROUTES = frozenset({"/health", "/metrics", *dashboard_routes.OPEN_ROUTES})
ANTHROPIC_PATH = "/v1/messages"
# What a proxy writes for a client that closed the connection before its answer.
CLIENT_CLOSED = 499


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request its id; count, trace and log its end."""
    state = request.app[STATE]
    scope = _open_scope(request, state)
    request[REQUEST_ID] = scope.request_id
    token = enter_scope(scope)
    status, response = CLIENT_CLOSED, None
    task = asyncio.current_task()
    if task is not None:
        state.lifecycle.handlers.add(task)
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        if task is not None:
            state.lifecycle.handlers.discard(task)
        state.metrics.observe_http(scope.route, status)
        trace_id = _trace(state, scope, status)
        if state.config.access_log:
            log_access(scope, status, _body_bytes(scope, response), trace_id)
        leave_scope(token)


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every exception into an answer in the form of the route's API, without a trace in it."""
    try:
        return await handler(request)
    except ApiError as error:
        return _error_response(request, error)
    except RequestRejectedError as error:
        return _error_response(request, api_error_from(error))
    except ClientGoneError:
        return web.Response(status=CLIENT_CLOSED)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _error_response(request, _from_http(request, error))
    except asyncio.CancelledError:
        raise
    except Exception:
        logger.exception("request %s failed", request[REQUEST_ID])
        return _error_response(
            request, ApiError(500, "The server failed to answer the request", code="internal_error")
        )


@web.middleware
async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let known callers in; unknown paths need no key to be told that they are unknown."""
    if request.match_info.http_exception is None and _route(request) not in OPEN_ROUTES:
        authenticate(request, request.app[STATE].keys, admin=is_admin_route(_route(request)))
        if (scope := current_scope()) is not None:
            scope.tenant = tenant_of(request)
        if request.method == "POST":
            # Before the body is read: a draining server has no time for uploads.
            request.app[STATE].lifecycle.check_accepting()
    return await handler(request)


MIDDLEWARES = (observe, answer_errors, check_browser, check_key, keep_limits)


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Put the id on every answer, streams included; a signal handler of `on_response_prepare`."""
    response.headers["X-Request-ID"] = request.get(REQUEST_ID, "")
    if request.path.startswith(ANTHROPIC_PATH):
        response.headers["request-id"] = request.get(REQUEST_ID, "")


def _request_id(given: str | None) -> str:
    """Return the client's id if it is short and plain, else a new one."""
    if given is not None and REQUEST_ID_PATTERN.fullmatch(given):
        return given
    return uuid.uuid4().hex


def _open_scope(request: web.Request, state: ServerState) -> RequestScope:
    return RequestScope(
        request_id=_request_id(request.headers.get("X-Request-ID")),
        method=request.method,
        route=_route(request),
        model=state.model_name,
        headers=request.headers,
        log=state.requests,
        log_prompts=state.config.log_prompts,
        session_id=request.match_info.get("session_id"),
    )


def _trace(state: ServerState, scope: RequestScope, status: int) -> str | None:
    """Make the spans of a request that has ended; return the id of their trace."""
    if state.tracer is None:
        return None
    try:
        return state.tracer.record(scope, status)
    except Exception:
        state.metrics.note_failure()
        return None


def _body_bytes(scope: RequestScope, response: web.StreamResponse | None) -> int:
    """Return the bytes of an answer's body, of a stream those sent so far."""
    if isinstance(response, web.Response) and not scope.body_bytes:
        return response.content_length or 0
    return scope.body_bytes


def _error_response(request: web.Request, error: ApiError) -> web.Response:
    if not request.path.startswith(ANTHROPIC_PATH):
        return error_response(error)
    return error_response(error, anthropic_error_body(error, request[REQUEST_ID]))


def _route(request: web.Request) -> str:
    """Return the pattern of the route, which bounds the number of metric labels."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unknown"


def _from_http(request: web.Request, error: web.HTTPException) -> ApiError:
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return ApiError(
            405,
            f"{request.method} is not allowed here; use {allowed}",
            code="method_not_allowed",
            headers={"Allow": allowed},
        )
    if error.status == 404:
        return ApiError(404, f"There is no {request.path[:256]}", code="not_found")
    return ApiError(error.status, error.reason or "The request was refused")
