"""What wraps every request: its id, its errors, its key, and its line in the access log."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from radixkv.errors import RequestRejectedError
from radixkv.server.auth import authenticate
from radixkv.server.errors import ApiError, anthropic_error_body, api_error_from, error_response
from radixkv.server.state import REQUEST_ID, STATE
from radixkv.server.streaming import ClientGoneError

__all__ = ["MIDDLEWARES", "add_request_id"]

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("radixkv.access")

MAX_ID_CHARS = 128
OPEN_ROUTES = frozenset({"/health", "/metrics"})
ANTHROPIC_PATH = "/v1/messages"
# What a proxy writes for a client that closed the connection before its answer.
CLIENT_CLOSED = 499


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request its id; count and log its end."""
    request[REQUEST_ID] = _request_id(request.headers.get("X-Request-ID"))
    state = request.app[STATE]
    started = time.monotonic()
    status = CLIENT_CLOSED
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
        route = _route(request)
        state.metrics.observe_http(route, status)
        if state.config.access_log:
            line = {
                "request_id": request[REQUEST_ID],
                "method": request.method,
                "route": route,
                "status": status,
                "ms": round((time.monotonic() - started) * 1000, 1),
            }
            access_logger.info("%s", orjson.dumps(line).decode())


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
        authenticate(request, request.app[STATE].config.api_key)
        if request.method == "POST":
            # Before the body is read: a draining server has no time for uploads.
            request.app[STATE].lifecycle.check_accepting()
    return await handler(request)


MIDDLEWARES = (observe, answer_errors, check_key)


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Put the id on every answer, streams included; a signal handler of `on_response_prepare`."""
    response.headers["X-Request-ID"] = request.get(REQUEST_ID, "")


def _request_id(given: str | None) -> str:
    """Return the client's id if it is short and printable, else a new one."""
    if given and len(given) <= MAX_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


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
