"""The bodies of requests, read and decoded, and those of JSON answers."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import Counter
from itertools import accumulate
from typing import Any, TypeVar

import msgspec
import orjson
from aiohttp import web

from radixkv.server.errors import ApiError

__all__ = ["decode_body", "json_response", "read_body", "read_json", "unknown_encoding"]

T = TypeVar("T", bound=msgspec.Struct)

logger = logging.getLogger(__name__)

_PATH = re.compile(r" - at (`key` in )?`\$\.?([^`]*)`$")
_FIELD = re.compile(r"required field `([^`]+)`")
_LENGTH = re.compile(r"Expected `(array|object|str)` of length (<=|>=) (\d+)$")
_RANGE = re.compile(r"Expected `(?:int|float)` (<=|>=|<|>) (\S+)$")
_SIZES = {"array": "items", "object": "entries", "str": "characters"}
_BOUNDS = {"<=": "at most", ">=": "at least", "<": "less than", ">": "greater than"}
# The end is optional, so that an unfinished string takes one pass and not one from each quote.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
MAX_LOGGED_NAMES = 10
# Far more than any schema needs, and far less than what exhausts the stack of those who read it.
MAX_DEPTH = 128
# Arrays and objects in one body; each costs the event loop more time than many characters.
MAX_CONTAINERS = 500_000
ENCODINGS = frozenset({"gzip", "deflate", "identity"})
CHARSETS = frozenset({"utf-8", "utf8"})


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
    if typed and (request.charset or "utf-8").lower() not in CHARSETS:
        raise ApiError(
            415,
            f"JSON must be in UTF-8, got charset {str(request.charset)[:64]!r}",
            code="unsupported_media_type",
        )
    too_large = ApiError(
        413,
        f"The request body is larger than the limit of {max_bytes} bytes",
        code="request_too_large",
    )
    if request.content_length is not None and request.content_length > max_bytes:
        raise too_large
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ENCODINGS:
        raise unknown_encoding()
    try:
        async with asyncio.timeout(timeout_s):
            # Of a compressed body as many bytes as it would have without; aiohttp inflates no more.
            return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise too_large from error
    except web.RequestPayloadError as error:
        raise ApiError(
            400, f"The request body can't be read: {str(error)[:200]}", code="invalid_body"
        ) from error
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
        _check_nesting(body)
        _check_names(body)
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


def unknown_encoding() -> ApiError:
    """Return the refusal of a body that is compressed in a way that can't be read."""
    return ApiError(
        415, "Content-Encoding must be gzip or deflate, if any", code="unsupported_media_type"
    )


def _check_nesting(body: bytes) -> None:
    """Refuse a JSON object with too many arrays and objects, or too many in each other.

    Raises:
        ApiError: 400, naming the field if there is one.
    """
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:  # also those in strings
        return
    brackets = _brackets(body)
    if len(brackets) > 2 * MAX_CONTAINERS:
        raise ApiError(
            400,
            f"The request body has more than {MAX_CONTAINERS} arrays and objects",
            code="too_many_values",
        )
    if _depth(brackets) <= MAX_DEPTH:
        return
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    deep = (name for name, raw in fields.items() if _depth(_brackets(raw)) >= MAX_DEPTH)
    param = next(deep, None)
    raise ApiError(
        400,
        f"{param or 'The request body'} has more than {MAX_DEPTH} arrays and objects in each other",
        param=param,
        code="nested_too_deeply",
    )


def _brackets(body: bytes | msgspec.Raw) -> bytes:
    """Return the brackets and braces of JSON that are not in strings."""
    return _STRING.sub(b"", bytes(body)).translate(None, _NOT_BRACKETS)


def _depth(brackets: bytes) -> int:
    return max(accumulate(1 if bracket in b"[{" else -1 for bracket in brackets), default=0)


def _check_names(body: bytes) -> None:
    """Refuse an object that has a name twice: which of the two counts is anybody's guess.

    Raises:
        ApiError: 400, naming it; or what isn't declared is no JSON.
    """
    try:
        json.loads(body.decode(), object_pairs_hook=_unique)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        # Fields that nobody declares are skipped, and looked at less closely.
        raise ApiError(
            400, f"The request body is not valid JSON: {error}", code="invalid_json"
        ) from error
    except ValueError:  # thousands of digits, which no field takes
        return


def _unique(pairs: list[tuple[str, Any]]) -> None:
    if len({name for name, _ in pairs}) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ApiError(
            400,
            f"{name[:64]!r} occurs twice in one object",
            param=name[:64],
            code="duplicate_field",
        )


def _split_path(text: str) -> tuple[str, str | None]:
    """Split msgspec's message into what is wrong and where."""
    path = _PATH.search(text)
    message = text[: path.start()] if path else text
    param = path.group(2) if path else ""
    where = f"a name in {param}" if path and path.group(1) else param
    missing = _FIELD.search(message)
    if missing:
        param = where = f"{param}.{missing.group(1)}" if param else missing.group(1)
    if not param:
        return message, None
    if found := _LENGTH.match(message):
        kind, sign, count = found.groups()
        return f"{where} must have {_BOUNDS[sign]} {count} {_SIZES[kind]}", param
    if found := _RANGE.match(message):
        sign, bound = found.groups()
        return f"{where} must be {_BOUNDS[sign]} {bound.removesuffix('.0')}", param
    return f"{where}: {message}", param


def _log_unknown_fields(body: bytes, kind: type[msgspec.Struct]) -> None:
    names = msgspec.json.decode(body, type=dict[str, msgspec.Raw]).keys()
    unknown = sorted(names - set(kind.__struct_fields__))
    if unknown:
        # They come from the client: few are logged, and none that looks like text.
        plain = [name for name in unknown if _NAME.fullmatch(name)]
        shown = ", ".join(plain[:MAX_LOGGED_NAMES]) or "(none of them a name)"
        logger.info("ignored %d unknown request fields: %s", len(unknown), shown)
