"""The connections of a server: how many there may be, and what ends those that do nothing.

aiohttp closes a connection that has no request in progress for `keepalive_timeout` seconds, whether
it is silent or sends the head of a request byte by byte, and a handler waits for a body only so
long. What it does not bound is done here: the number of connections, and readers that take nothing
of an answer, which would otherwise keep its bytes and their socket for ever.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any, cast

import orjson
from aiohttp import web

from radixkv.server.body import unknown_encoding
from radixkv.server.errors import (
    ApiError,
    anthropic_error_body,
    error_body,
    error_response,
    is_anthropic,
)

__all__ = ["Connections", "default_max_connections"]

logger = logging.getLogger(__name__)

# File descriptors for the model's files, logs, and whatever else isn't a connection.
SPARE_FILES = 128
MAX_CONNECTIONS = 16_384
FULL_RETRY_S = 5
FULL_LINGER_S = 1.0
MAX_REASON_CHARS = 200


class Connections:
    """Makes the protocol of each accepted connection and watches those that are open.

    Event loop only.
    """

    def __init__(
        self,
        server: web.Server,
        *,
        limit: int,
        stall_s: float,
        keepalive_timeout_s: float,
    ) -> None:
        """Watch the connections of a server; `close` ends it.

        Args:
            server: of aiohttp, whose handler answers the requests.
            limit: of connections open at once; more are told so and closed.
            stall_s: a reader that takes no byte of what is sent to it for so long is dropped.
            keepalive_timeout_s: a connection without a request for so long is closed.
        """
        self._server = server
        self._limit = limit
        self._stall_s = stall_s
        self._keepalive_timeout_s = keepalive_timeout_s
        self._open: set[Connection] = set()
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    def __len__(self) -> int:
        return len(self._open)

    def __call__(self) -> asyncio.Protocol:
        """Return the protocol of a connection that was just accepted."""
        if len(self._open) >= self._limit:
            return Refusal(self._limit)
        return Connection(self, self._server, self._keepalive_timeout_s)

    def close(self) -> None:
        """Stop watching."""
        self._watcher.cancel()

    async def _watch(self) -> None:
        period_s = min(1.0, self._stall_s / 4)
        while True:
            await asyncio.sleep(period_s)
            now = asyncio.get_running_loop().time()
            for connection in list(self._open):
                if connection.stalled_s(now) > self._stall_s:
                    connection.drop()


class Connection(web.RequestHandler):
    """One connection: aiohttp's own, counted and watched."""

    __slots__ = ("_connections", "_mark", "_mark_time", "_wire")

    def __init__(
        self, connections: Connections, server: web.Server, keepalive_timeout_s: float
    ) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]
            keepalive_timeout=keepalive_timeout_s,
        )
        self._connections = connections
        self._wire: asyncio.Transport | None = None
        self._mark, self._mark_time = 0, 0.0
        # From here on: accepted connections that are not made yet count, too.
        connections._open.add(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        # aiohttp forgets its own as soon as it wants to close, when there may be much to send yet.
        self._wire = cast("asyncio.Transport", transport)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """See `asyncio.Protocol`."""
        self._wire = None
        self._connections._open.discard(self)
        super().connection_lost(exc)

    def stalled_s(self, now: float) -> float:
        """Return the seconds for which the reader has taken nothing of what waits for it."""
        size = 0 if self._wire is None else self._wire.get_write_buffer_size()
        if size == 0 or size < self._mark or self._mark == 0:
            self._mark_time = now
        self._mark = size
        return now - self._mark_time

    def drop(self) -> None:
        """End the connection, and with it whatever request it has."""
        logger.info("dropped a connection whose reader took nothing for too long")
        if self._wire is not None:
            self._wire.abort()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer; aiohttp's own refusals, which no handler saw, as errors in JSON."""
        if isinstance(resp, web.HTTPException) and resp.status >= 400:
            error = ApiError(resp.status, resp.text or resp.reason, code="invalid_http")
            body = anthropic_error_body(error, "") if is_anthropic(request.path) else None
            resp = _closing(error_response(error, body))
        return await super().finish_response(request, resp, start_time)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log what went wrong outside of a handler, unless it was the client's doing."""
        if isinstance(kw.get("exc_info"), web.RequestPayloadError):
            logger.debug(*args, **kw)
        else:
            super().log_exception(*args, **kw)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is no HTTP in the form of all other errors."""
        logger.debug("malformed request: %s", message, exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer was begun already")
        if status >= 500:
            logger.error("a request failed outside of its handler", exc_info=exc)
            error = ApiError(500, "The server failed to answer the request", code="internal_error")
        else:
            reason = (message or "unknown").splitlines()[0][:MAX_REASON_CHARS]
            error = ApiError(
                status, f"This is no valid HTTP request: {reason}", code="invalid_http"
            )
            if "content-encoding" in reason.lower():
                error = unknown_encoding()
        return _closing(error_response(error))


class Refusal(asyncio.Protocol):
    """Tells a connection too many that it is one, without waiting for what it wants."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        error = ApiError(
            503, f"The server has its {self._limit} connections", code="too_many_connections"
        )
        body = orjson.dumps(error_body(error))
        wire = cast("asyncio.Transport", transport)
        wire.write(
            b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
            b"Retry-After: %d\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
            % (FULL_RETRY_S, len(body), body)
        )
        # Closed at once, with a request unread, the answer would be lost in a reset.
        wire.write_eof()
        asyncio.get_running_loop().call_later(FULL_LINGER_S, wire.close)


def default_max_connections() -> int:
    """Return how many connections the limit of open files leaves room for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, soft - SPARE_FILES))


def _closing(response: web.Response) -> web.Response:
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Connection"] = "close"
    response.force_close()
    return response
