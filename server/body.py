"""The bodies of requests, read and decoded, and those of JSON answers."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any, TypeVar

import msgspec
import orjson
from aiohttp import web

from radixkv.server.errors import ApiError

__all__ = ["decode_body", "json_response", "read_body", "read_json"]

T = TypeVar("T", bound=msgspec.Struct)

logger = logging.getLogger(__name__)

_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_FIELD = re.compile(r"required field `([^`]+)`")
MAX_LOGGED_NAMES = 10


async def read_json(
    request: web.Request,
    kind: type[T],
    *,
    max_bytes: int,
    timeout_s: float,
    allow_empty: bool = False,
) -> T:
    """Return the request's body as a `kind`; with `allow_empty`, no body counts as `{}`.

    Raises:
        ApiError: 400, 408, 413 or 415; `param` names the field when one is at fault.
    """
    body = await read_body(request, max_bytes, timeout_s)
    return decode_body(b"{}" if allow_empty and not body else body, kind)


async def read_body(request: web.Request, max_bytes: int, timeout_s: float) -> bytes:
    """Return the whole body, at most `max_bytes` of it, within `timeout_s` seconds.

    Raises:
        ApiError: 408, 413 or 415.
    """
    # A missing content type is taken for JSON; a wrong one is refused, which also keeps HTML forms
    # of foreign web pages from reaching a server on the same machine. Clients that send no body
    # often name a type for it all the same.
    typed = request.can_read_body and "Content-Type" in request.headers
    if typed and request.content_type != "application/json":
        raise ApiError(
            415,
            f"Content-Type must be application/json, got {request.content_type!r}",
            code="unsupported_media_type",
        )
    too_large = ApiError(
        413,
        f"The request body is larger than the limit of {max_bytes} bytes",
        code="request_too_large",
    )
    if request.content_length is not None and request.content_length > max_bytes:
        raise too_large
    try:
        async with asyncio.timeout(timeout_s):
            return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise too_large from error
    except TimeoutError as error:
        raise ApiError(
            408, f"The request body did not arrive within {timeout_s:g} s", code="body_timeout"
        ) from error


def decode_body(body: bytes, kind: type[T]) -> T:
    """Decode JSON into `kind`.

    Raises:
        ApiError: 400; `param` names the field when one is at fault.
    """
    try:
        value = msgspec.json.decode(body, type=kind)
        if logger.isEnabledFor(logging.INFO):
            _log_unknown_fields(body, kind)
    except msgspec.ValidationError as error:
        message, param = _split_path(str(error))
        raise ApiError(400, message, param=param, code="invalid_type") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(
            400, f"The request body is not valid JSON: {error}", code="invalid_json"
        ) from error
    except RecursionError as error:
        raise ApiError(400, "The request body is nested too deeply", code="invalid_json") from error
    return value


def json_response(body: Any, *, status: int = 200) -> web.Response:
    """Return `body` as a JSON answer."""
    return web.Response(status=status, body=orjson.dumps(body), content_type="application/json")


def _split_path(text: str) -> tuple[str, str | None]:
    """Split msgspec's message into what is wrong and where."""
    path = _PATH.search(text)
    message = text[: path.start()] if path else text
    param = path.group(1) if path else ""
    missing = _FIELD.search(message)
    if missing:
        param = f"{param}.{missing.group(1)}" if param else missing.group(1)
    if not param:
        return message, None
    return f"{param}: {message}", param


def _log_unknown_fields(body: bytes, kind: type[msgspec.Struct]) -> None:
    names = msgspec.json.decode(body, type=dict[str, msgspec.Raw]).keys()
    unknown = sorted(names - set(kind.__struct_fields__))
    if unknown:
        # Names come from the client: their number and length are bounded before they are logged.
        shown = ", ".join(repr(name[:64]) for name in unknown[:MAX_LOGGED_NAMES])
        logger.info("ignored %d unknown request fields: %s", len(unknown), shown)
