"""The access log: one JSON line per HTTP request, with counts and times, and never any text."""

from __future__ import annotations

import logging
import logging.handlers
import sys
import time
from typing import TYPE_CHECKING

import orjson

from radixkv.errors import ConfigError
from radixkv.server.logs import utc_time
from radixkv.server.scope import RequestScope

if TYPE_CHECKING:
    from os import PathLike

__all__ = ["ACCESS_LOG", "configure_access_log", "log_access"]

logger = logging.getLogger(__name__)

ACCESS_LOG = "radixkv.access"
access_logger = logging.getLogger(ACCESS_LOG)


def log_access(scope: RequestScope, status: int, body_bytes: int, trace_id: str | None) -> None:
    """Write the line of a request that has ended; what fails is logged, not raised.

    Args:
        scope: of the request.
        status: of its answer.
        body_bytes: of the answer's body.
        trace_id: of the trace that it is in, if there is one.
    """
    line: dict[str, object] = {
        "time": utc_time(time.time()),
        "request_id": scope.request_id,
        "method": scope.method,
        "route": scope.route,
        "status": status,
        "ms": round((time.monotonic() - scope.started) * 1000, 1),
        "bytes": body_bytes,
        "tenant": scope.tenant,
    }
    if scope.records:
        first = scope.records[0]
        ttft_s = first.ttft_s
        line |= {
            "id": scope.response_id,
            "prompt_tokens": sum(record.prompt_tokens for record in scope.records),
            "cached_tokens": sum(record.cached_tokens or 0 for record in scope.records),
            "output_tokens": sum(record.output_tokens for record in scope.records),
            "ttft_ms": None if ttft_s is None else round(ttft_s * 1000, 1),
            "finish_reason": first.finish_reason,
        }
    if trace_id is not None:
        line["trace_id"] = trace_id
    try:
        access_logger.info("%s", orjson.dumps(line).decode())
    except Exception:
        logger.exception("a line of the access log could not be written")


def configure_access_log(target: str | PathLike[str]) -> None:
    """Send the lines of the access log to a file, or to standard output for "-".

    A file that is renamed, as by logrotate, is made anew.

    Raises:
        ConfigError: the file can't be written.
    """
    handler: logging.Handler
    if target == "-":
        handler = logging.StreamHandler(sys.stdout)
    else:
        try:
            handler = logging.handlers.WatchedFileHandler(target, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--access-log {target} can't be written: {error.strerror or error}"
            ) from None
    handler.setFormatter(logging.Formatter("%(message)s"))
    for old in list(access_logger.handlers):
        access_logger.removeHandler(old)
        old.close()
    access_logger.addHandler(handler)
    access_logger.setLevel(logging.INFO)
    access_logger.propagate = False
