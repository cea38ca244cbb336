"""Delivering an answer: server-sent events, and waiting for a whole one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from radixkv.server.config import ServerConfig
from radixkv.server.errors import ApiError, error_body
from radixkv.server.scope import current_scope

__all__ = [
    "OPENAI_STREAM",
    "ClientGoneError",
    "EventStream",
    "StreamStyle",
    "run_to_end",
    "stream_chunks",
]

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keep-alive\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class ClientGoneError(Exception):
    """The reader hung up, or took no bytes for too long."""


@dataclass(frozen=True, slots=True)
class StreamStyle:
    """How an API writes its events.

    Attributes:
        error: makes the event that ends a stream that failed.
        named: each event has its `type` as its name too.
        done: what is written at the end of a stream that did not fail.
    """

    error: Callable[[ApiError], dict[str, Any]] = error_body
    named: bool = False
    done: bytes = DONE


OPENAI_STREAM = StreamStyle()


class EventStream:
    """An open event stream. Writes wait for the reader, but only for `max_stream_stall_s`."""

    def __init__(
        self,
        request: web.Request,
        response: web.StreamResponse,
        config: ServerConfig,
        style: StreamStyle,
    ) -> None:
        self.response = response
        self._style = style
        self._request = request
        self._stall_s = config.max_stream_stall_s
        self._last_write = asyncio.get_running_loop().time()
        self._scope = current_scope()
        self._keepalive: asyncio.Task[None] | None = None
        if config.keepalive_s:
            self._keepalive = asyncio.create_task(self._keep_alive(config.keepalive_s))

    @classmethod
    async def open(
        cls, request: web.Request, config: ServerConfig, style: StreamStyle = OPENAI_STREAM
    ) -> EventStream:
        """Send the headers; from here on an error can only be an event.

        Raises:
            ClientGoneError: the reader hung up already.
        """
        response = web.StreamResponse(headers=HEADERS)
        # Announced in the headers, because an error event ends the connection: a client that kept
        # it would send its next request into a closing socket.
        response.force_close()
        try:
            await response.prepare(request)
        except ConnectionError as error:
            raise ClientGoneError from error
        return cls(request, response, config, style)

    async def send(self, payload: dict[str, Any]) -> None:
        """Write one event.

        Raises:
            ClientGoneError: the reader hung up or stalled; the connection is dropped.
        """
        name = b"event: %b\n" % payload["type"].encode() if self._style.named else b""
        await self._write(b"%bdata: %b\n\n" % (name, orjson.dumps(payload)))

    async def finish(self) -> None:
        """Write what ends a stream, `[DONE]` for most, and end the body."""
        if self._style.done:
            await self._write(self._style.done)
        await self._end()

    async def fail(self, error: ApiError) -> None:
        """Write one error event and end the body, with no `[DONE]` after it."""
        await self.send(self._style.error(error))
        await self._end()

    def close(self) -> None:
        """Stop the keep-alive comments. Idempotent."""
        if self._keepalive is not None:
            self._keepalive.cancel()

    async def _write(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await self.response.write(data)
        except TimeoutError as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientGoneError("the reader stalled") from error
        except ConnectionError as error:
            raise ClientGoneError("the reader hung up") from error
        if self._scope is not None:
            self._scope.body_bytes += len(data)
        self._last_write = asyncio.get_running_loop().time()

    async def _end(self) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await self.response.write_eof()
        except (TimeoutError, ConnectionError) as error:
            raise ClientGoneError from error

    async def _keep_alive(self, period_s: float) -> None:
        clock = asyncio.get_running_loop().time
        with contextlib.suppress(ClientGoneError):
            while True:
                await asyncio.sleep(max(0.0, self._last_write + period_s - clock()))
                if clock() - self._last_write >= period_s:
                    await self._write(KEEPALIVE)


async def stream_chunks(
    request: web.Request,
    config: ServerConfig,
    chunks: AsyncGenerator[dict[str, Any], None],
    style: StreamStyle = OPENAI_STREAM,
) -> web.StreamResponse:
    """Send `chunks` as events, then `[DONE]`; or one error event and no `[DONE]`.

    A client that goes away ends it quietly; whoever called aborts the generation in any case.
    """
    try:
        events = await EventStream.open(request, config, style)
    except ClientGoneError:
        await chunks.aclose()
        return web.Response(status=499)
    try:
        error = await _send_all(events, config, chunks)
        if error is not None:
            await events.fail(error)
    except ClientGoneError as gone:
        logger.info("stream dropped: %s", gone)
    finally:
        events.close()
        await chunks.aclose()
    return events.response


async def _send_all(
    events: EventStream, config: ServerConfig, chunks: AsyncGenerator[dict[str, Any], None]
) -> ApiError | None:
    """Send the whole answer; return the error that the client must be told, if any."""
    try:
        async with asyncio.timeout(config.request_timeout_s):
            async for chunk in chunks:
                await events.send(chunk)
            await events.finish()
    except TimeoutError:
        return _timeout_error(config)
    except ApiError as error:
        return error
    except ClientGoneError:
        raise
    except Exception:
        logger.exception("stream failed")
        return ApiError(500, "The server failed while answering", code="internal_error")
    return None


async def run_to_end(
    request: web.Request, config: ServerConfig, generation: AsyncIterable[object]
) -> None:
    """Read a generation, or what reads one, to its end, as long as the client is there.

    Raises:
        ApiError: the generation failed, or took longer than `request_timeout_s`.
        ClientGoneError: the client hung up and the server did not cancel the handler for it.
    """
    try:
        async with asyncio.timeout(config.request_timeout_s):
            async for _ in generation:
                # A server that does not cancel handlers still must not compute for nobody.
                if request.transport is None:
                    raise ClientGoneError("the client hung up")
    except TimeoutError as error:
        raise _timeout_error(config) from error


def _timeout_error(config: ServerConfig) -> ApiError:
    """Return the error of an answer that took longer than `request_timeout_s`."""
    return ApiError(
        504,
        f"The answer was not complete within {config.request_timeout_s:g} s",
        code="request_timeout",
    )
