"""HTTP by hand, for requests that no client library would send."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["RawAnswer", "exchange", "head_of", "read_answer"]

# The largest head or line of a body that is read.
LINE_LIMIT = 2**20


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """What came back: names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the body parsed, None if it is no JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


def head_of(
    method: str, path: str, headers: Iterable[tuple[str, str]], length: int | None = None
) -> bytes:
    """Return the head of a request; its connection ends with the answer."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape")


async def exchange(host: str, port: int, request: bytes, timeout_s: float = 60.0) -> RawAnswer:
    """Send bytes on a connection of their own and return what is answered.

    Raises:
        ConnectionError, asyncio.IncompleteReadError: there was no whole answer.
        TimeoutError: nor within `timeout_s`.
    """
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(host, port, limit=LINE_LIMIT)
        try:
            writer.write(request)
            # A server that refuses a long body need not read it to its end.
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            return await read_answer(reader)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def read_answer(reader: asyncio.StreamReader) -> RawAnswer:
    """Return the next answer of a connection.

    Raises:
        ConnectionError, asyncio.IncompleteReadError: it isn't whole.
        ValueError: it is no HTTP.
    """
    while True:
        status_line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(status_line.split(" ", 2)[1])
        if status != 100:
            break
    pairs = (line.partition(":") for line in lines if line)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    if "chunked" in headers.get("transfer-encoding", ""):
        body = await _read_chunks(reader)
    elif "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    else:
        body = b"" if status == 204 else await reader.read()
    return RawAnswer(status, headers, body)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return body
