"""Errors as HTTP answers: OpenAI's JSON form and the map from exception to status."""

from __future__ import annotations

import math
from typing import Any

import orjson
from aiohttp import web

from radixkv.errors import EngineClosedError, QueueFullError, RequestRejectedError

__all__ = [
    "ApiError",
    "anthropic_error_body",
    "api_error_from",
    "error_body",
    "error_response",
    "is_anthropic",
]

ANTHROPIC_PATH = "/v1/messages"

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}

ANTHROPIC_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}

BUSY_CODE = "busy"


class ApiError(Exception):
    """An answer other than success, in the words the client will read.

    Attributes:
        status: HTTP status; also decides OpenAI's `type`.
        message: safe to show: no trace, no text of a prompt.
        param: the request field at fault, or None.
        code: machine-readable reason, or None.
        headers: extra response headers, such as Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        # Paths and headers may hold bytes that are no text, which JSON can't be written with.
        message = message.encode(errors="replace").decode()
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def rename_param(self, old: str, new: str) -> ApiError:
        """Return the same error naming the field as this route spells it."""
        if self.param != old or old == new:
            return self
        message = self.message.replace(old, new)
        return ApiError(self.status, message, param=new, code=self.code, headers=self.headers)


def is_anthropic(path: str) -> bool:
    """Return whether errors at a path have the form of Anthropic's API."""
    return path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/")


def error_body(error: ApiError) -> dict[str, Any]:
    """Return OpenAI's error object for a JSON answer or a stream event."""
    return {
        "error": {
            "message": error.message,
            "type": ERROR_TYPES.get(error.status, "invalid_request_error"),
            "param": error.param,
            "code": error.code,
        }
    }


def anthropic_error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Return Anthropic's error object for a JSON answer or a stream event."""
    kind = ANTHROPIC_ERROR_TYPES.get(error.status, "invalid_request_error")
    shown: dict[str, Any] = {"type": kind, "message": error.message}
    if error.code is not None:
        shown["details"] = {"error_code": error.code}
    return {"type": "error", "error": shown, "request_id": request_id}


def error_response(error: ApiError, body: dict[str, Any] | None = None) -> web.Response:
    """Return the JSON answer of an error, in OpenAI's form unless there is a `body`."""
    return web.Response(
        status=error.status,
        body=orjson.dumps(error_body(error) if body is None else body),
        content_type="application/json",
        headers=error.headers,
    )


def api_error_from(error: RequestRejectedError) -> ApiError:
    """Map a refusal of the engine to an HTTP answer."""
    message = str(error)
    if isinstance(error, QueueFullError):
        seconds = max(1, math.ceil(error.retry_after_s))
        return ApiError(429, message, code=error.code, headers={"Retry-After": str(seconds)})
    if isinstance(error, EngineClosedError):
        return ApiError(
            503, message, code=error.code or "engine_closed", headers={"Retry-After": "5"}
        )
    if error.code == BUSY_CODE:
        return ApiError(409, message, code=error.code)
    return ApiError(400, message, param=error.param, code=error.code)
