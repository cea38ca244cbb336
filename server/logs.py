"""The process's log, as text or JSON: its request's id in each line, no prompt's text in any."""

from __future__ import annotations

import datetime
import logging
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Protocol

import orjson
from rich.console import Console
from rich.logging import RichHandler

from radixkv.errors import ConfigError
from radixkv.server.scope import current_scope

__all__ = [
    "JsonFormatter",
    "TextFormatter",
    "configure_logging",
    "log_prompt",
    "utc_time",
]

logger = logging.getLogger(__name__)

MAX_PROMPT_TOKENS = 8192
# Exceptions whose message is the system's: about files, addresses and memory. Any other may quote
# what it failed on, and that may be text of a prompt.
PLAIN_ERRORS = (OSError, MemoryError, RecursionError, ConfigError)
PLAIN_PREFIX = "torch."

ExceptionInfo = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)


class Decoder(Protocol):
    """What makes text of token ids."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`."""
        ...


class SafeFormatter(logging.Formatter):
    """Formats records without what could be text of a prompt: messages of exceptions.

    A trace keeps its types and places. `show_text` keeps the messages, too.
    """

    def __init__(self, pattern: str | None = None, *, show_text: bool = False) -> None:
        super().__init__(pattern)
        self._show_text = show_text

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text."""
        # What another handler's formatter has left there shows everything.
        record.exc_text = None
        text = super().format(record)
        record.exc_text = None
        return text

    def formatException(self, ei: ExceptionInfo) -> str:  # noqa: N802
        """Return the trace of an exception."""
        if self._show_text or ei[1] is None:
            return super().formatException(ei)
        return "\n".join(_trace(ei[1], set()))

    def message(self, record: logging.LogRecord) -> str:
        """Return what the record says."""
        text = record.getMessage()
        if record.name == "asyncio" and not self._show_text:
            # Arguments of callbacks, exceptions and the futures that hold them would follow.
            text = re.split(r"[\n(<'\"]", text, maxsplit=1)[0].rstrip()
        # Half of a surrogate pair, say of a file's name, can't be written as it is.
        return text.encode("utf-8", "backslashreplace").decode()


class TextFormatter(SafeFormatter):
    """One line for people: the logger, the request's id if there is one, the message."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return the line without a trace."""
        request_id = _request_id(record)
        within = f" [{request_id}]" if request_id else ""
        return f"{record.name}{within}: {self.message(record)}"


class JsonFormatter(SafeFormatter):
    """One JSON object a line: `time`, `level`, `logger`, `message`, `request_id`, `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line."""
        line: dict[str, object] = {
            "time": utc_time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self.message(record),
        }
        if request_id := _request_id(record):
            line["request_id"] = request_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=repr).decode()


def configure_logging(
    level: str, kind: str = "text", *, show_text: bool = False, console: Console | None = None
) -> None:
    """Send the process's log to standard error, in place of where it went before.

    Args:
        level: the least that is logged, in lower case.
        kind: "text" or "json".
        show_text: keep messages of exceptions, which may quote prompts.
        console: where text goes.
    """
    handler: logging.Handler
    if kind == "json":
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonFormatter(show_text=show_text))
    else:
        handler = RichHandler(console=console or Console(stderr=True), show_path=False)
        handler.setFormatter(TextFormatter(show_text=show_text))
    # Python's warnings are lines for people otherwise.
    logging.captureWarnings(kind == "json")
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def log_prompt(tokenizer: Decoder, name: str, ids: Sequence[int]) -> None:
    """Log a request's prompt, for those who asked for it; what can't be decoded is passed over."""
    try:
        text = tokenizer.decode(list(ids[:MAX_PROMPT_TOKENS]), skip_special_tokens=False)
        logger.info("request %s: prompt of %d tokens: %r", name, len(ids), text)
    except Exception:
        logger.exception("the prompt of request %s can't be shown", name)


def utc_time(seconds: float) -> str:
    """Return a time, in seconds since 1970, as ISO 8601 has it."""
    time = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _request_id(record: logging.LogRecord) -> str | None:
    scope = current_scope()
    return scope.request_id if scope is not None else getattr(record, "request_id", None)


def _trace(error: BaseException, seen: set[int]) -> Iterator[str]:
    """Yield the trace of an exception, behind that of what led to it."""
    seen.add(id(error))
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None and id(before) not in seen:
        yield from _trace(before, seen)
        yield ""
    yield "Traceback (most recent call last):"
    yield from "".join(traceback.format_tb(error.__traceback__)).splitlines()
    yield _shown(error)
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from ("  " + line for line in _trace(inner, seen))


def _shown(error: BaseException) -> str:
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    if isinstance(error, PLAIN_ERRORS) or name.startswith(PLAIN_PREFIX):
        return f"{name}: {error}"
    return f"{name} (its message could quote a prompt: --log-prompts true shows it)"
