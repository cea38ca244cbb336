"""Numbers and flags in the query of a request."""

from __future__ import annotations

from aiohttp import web

from radixkv.server.errors import ApiError

__all__ = ["query_flag", "query_number"]

FLAGS = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}


def query_number(request: web.Request, name: str, default: int, low: int, high: int) -> int:
    """Return a whole number from the query.

    Raises:
        ApiError: 400, it isn't one between `low` and `high`.
    """
    text = request.query.get(name)
    if text is None:
        return default
    # More digits than any bound has are cut off, since int() takes long for thousands of them.
    if not (text.isascii() and text.isdecimal() and low <= int(text[:9]) <= high):
        raise _refused(name, f"{name} must be between {low} and {high}")
    return int(text[:9])


def query_flag(request: web.Request, name: str) -> bool:
    """Return whether a flag of the query is set.

    Raises:
        ApiError: 400, it is neither set nor not.
    """
    value = FLAGS.get(request.query.get(name, "false").lower())
    if value is None:
        raise _refused(name, f"{name} must be one of {', '.join(FLAGS)}")
    return value


def _refused(name: str, message: str) -> ApiError:
    return ApiError(400, message, param=name, code="invalid_value")
