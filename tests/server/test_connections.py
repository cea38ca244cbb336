"""What ends connections that do nothing, and what they are told."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import tracemalloc
from typing import Any

import pytest
from aiohttp import web
from live import LiveServer, live_server
from server_fakes import FakeEngine, FakeTokenizer, until

from loadtests.raw_http import head_of, read_answer
from radixkv.server.connections import SPARE_FILES, Connections, default_max_connections

JSON = (("Content-Type", "application/json"),)
BODY = b'{"prompt": [1], "max_tokens": 1}'


async def ended(reader: asyncio.StreamReader, timeout_s: float = 10.0) -> bytes:
    """Return what comes until the server ends the connection."""
    async with asyncio.timeout(timeout_s):
        with contextlib.suppress(ConnectionError):
            return await reader.read()
    return b""


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comple", b"POST / HTTP/1.1\r\nHost: x\r\nA: "])
async def test_a_head_that_does_not_come_ends_the_connection(sent: bytes) -> None:
    async with live_server(FakeEngine(), keepalive_timeout_s=0.3) as live:
        reader, writer = await live.connect()
        writer.write(sent)
        # A byte now and then doesn't help.
        for _ in range(20):
            await asyncio.sleep(0.05)
            with contextlib.suppress(ConnectionError):
                writer.write(b"x" if sent else b"")
            if reader.at_eof():
                break
        assert await ended(reader) == b""
        writer.close()


async def test_a_kept_connection_ends_after_its_time_and_not_before() -> None:
    async with live_server(FakeEngine(), keepalive_timeout_s=2.0) as live:
        reader, writer = await live.connect()
        for _ in range(3):
            head = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
            writer.write(head)
            assert (await read_answer(reader)).status == 200
            await asyncio.sleep(0.1)
        assert await ended(reader) == b""
        writer.close()


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_never_ends_is_a_408(chunked: bool) -> None:
    framing = ("Transfer-Encoding", "chunked") if chunked else ("Content-Length", "1000")
    async with live_server(FakeEngine(), body_timeout_s=0.3) as live:
        reader, writer = await live.connect()
        writer.write(head_of("POST", "/v1/completions", (*JSON, framing)))

        async def trickle() -> None:
            while True:
                writer.write(b"1\r\n \r\n" if chunked else b" ")
                await asyncio.sleep(0.05)

        feeding = asyncio.create_task(trickle())
        answer = await asyncio.wait_for(read_answer(reader), 10)
        feeding.cancel()
        assert answer.status == 408
        assert answer.json()["error"]["code"] == "body_timeout"
        writer.close()


async def test_a_chunked_body_over_the_limit_is_refused_as_it_comes() -> None:
    async with live_server(FakeEngine(), max_body_bytes=10_000, body_timeout_s=30) as live:
        reader, writer = await live.connect()
        writer.write(
            head_of("POST", "/v1/completions", (*JSON, ("Transfer-Encoding", "chunked")))
            + b"".join(b"400\r\n" + b" " * 1024 + b"\r\n" for _ in range(12))
        )
        # It has no end, but that is not waited for.
        assert (await asyncio.wait_for(read_answer(reader), 10)).status == 413
        writer.close()


async def test_one_connection_too_many_is_told_so_and_others_go_on() -> None:
    engine = FakeEngine()
    engine.gate.clear()
    async with live_server(engine, max_connections=3) as live:
        posts = [asyncio.create_task(live.post("/v1/completions", BODY)) for _ in range(3)]
        await until(lambda: len(engine.waiting) == 3)
        refused = await live.send(head_of("GET", "/health", ()))
        assert refused.status == 503
        assert refused.json()["error"]["code"] == "too_many_connections"
        assert refused.headers["retry-after"] == "5"
        assert refused.headers["connection"] == "close"
        engine.gate.set()
        assert [answer.status for answer in await asyncio.gather(*posts)] == [200] * 3
        assert (await live.send(head_of("GET", "/health", ()))).status == 200


def test_connections_are_bounded_by_the_files_that_may_be_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for soft, expected in ((1024, 1024 - SPARE_FILES), (100, 1), (10**6, 16_384), (-1, 16_384)):
        monkeypatch.setattr("resource.getrlimit", lambda _, soft=soft: (soft, -1))
        assert default_max_connections() == expected


class OneToken(FakeTokenizer):
    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [1]


async def stalled_post(live: LiveServer, body: dict[str, Any]) -> socket.socket:
    """Send a request and read nothing of the answer."""
    sock = socket.socket()
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", live.port))
    data = json.dumps(body).encode()
    await loop.sock_sendall(sock, head_of("POST", "/v1/completions", JSON, len(data)) + data)
    return sock


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_nobody_reads_is_given_up(stream: bool) -> None:
    """A whole answer has left its handler by then: nothing else would ever end it."""
    engine = FakeEngine(OneToken(), max_model_len=10**7)
    async with live_server(engine, max_stream_stall_s=0.3, keepalive_s=0) as live:
        before = len(asyncio.all_tasks())
        # More than any socket buffers.
        body = {"prompt": "x" * 12_000_000, "echo": True, "max_tokens": 1, "stream": stream}
        sock = await stalled_post(live, body)
        await until(lambda: engine.submitted)
        await until(lambda: len(asyncio.all_tasks()) <= before, 20)
        assert not live.state.lifecycle.handlers
        sock.close()


async def test_a_reader_has_stalled_only_if_nothing_of_what_waits_was_taken() -> None:
    """A slow reader that goes on reading is not given up, however much there is to send."""

    class Wire:
        size = 0

        def get_write_buffer_size(self) -> int:
            return self.size

    async def handler(request: web.BaseRequest) -> web.Response:
        raise AssertionError("nothing is asked")

    connections = Connections(web.Server(handler), limit=9, stall_s=30, keepalive_timeout_s=9)
    connection, wire = connections(), Wire()
    connection._wire = wire  # type: ignore[attr-defined]
    seen = []
    # At each second: nothing, then more and more, a little taken, and more again; at last nothing.
    for now, wire.size in enumerate((0, 0, 10, 10, 15, 20, 19, 25, 25, 0, 0, 5)):
        seen.append(connection.stalled_s(float(now)))  # type: ignore[attr-defined]
    assert seen == [0, 0, 0, 1, 2, 3, 0, 1, 2, 0, 0, 0]
    connections.close()


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00",
        b"GET / HTTP/1.1\r\nbad\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: \x00\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_answered_in_json_without_a_trace(
    raw: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with live_server(FakeEngine()) as live:
        answer = await live.send(raw)
    assert answer.status == 400
    assert answer.json()["error"]["code"] == "invalid_http"
    assert answer.headers["connection"] == "close"
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_an_expectation_that_cannot_be_met_is_refused_in_json(path: str) -> None:
    async with live_server(FakeEngine()) as live:
        answer = await live.send(head_of("POST", path, (("Expect", "miracles"),), 2) + b"{}")
    assert answer.status == 417
    assert ("param" in answer.json()["error"]) is (path == "/v1/completions")


async def test_compressed_bodies_are_read_up_to_the_limit_of_all_bodies() -> None:
    gzipped = {"Content_Encoding": "gzip"}
    limit = 200_000
    async with live_server(FakeEngine(), max_body_bytes=limit) as live:
        good = await live.post("/v1/completions", gzip.compress(BODY), **gzipped)
        assert good.status == 200
        broken = await live.post("/v1/completions", b"\x1f\x8b" + BODY, **gzipped)
        assert broken.status == 400
        assert broken.json()["error"]["code"] == "invalid_body"
        for encoding in ("br", "zstd", "rot13"):
            other = await live.post("/v1/completions", BODY, Content_Encoding=encoding)
            assert other.status == 415
        bomb = gzip.compress(b" " * 30_000_000)
        assert len(bomb) < limit
        tracemalloc.start()
        try:
            refused = await live.post("/v1/completions", bomb, **gzipped)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert refused.status == 413
        assert peak < 8_000_000
