from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from server_fakes import FakeEngine, FakeTokenizer, read_events, until

from radixkv.server.state import STATE

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "x"}]
ROUTES = [(CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "x"})]


@pytest.mark.parametrize(("url", "body"), ROUTES)
async def test_engine_error_is_one_event_and_no_finish(
    client: Any, engine: FakeEngine, url: str, body: Any
) -> None:
    engine.fail_at = 5
    response = await client.post(url, json={**body, "stream": True})
    events = await read_events(response)
    assert response.status == 200
    assert "[DONE]" not in events
    assert [e for e in events if "error" in e] == [events[-1]]
    assert events[-1]["error"]["message"] == "injected"
    assert all(e["choices"][0]["finish_reason"] is None for e in events[:-1])
    whole = await client.post(url, json=body)
    assert whole.status == 500
    assert (await whole.json())["error"]["type"] == "server_error"


async def test_socket_is_closed_after_an_error_event(make_client: Any) -> None:
    engine = FakeEngine()
    engine.fail_at = 2
    client = await make_client(engine)
    reader, writer = await _raw_post(client, {"prompt": "x", "stream": True})
    data = await asyncio.wait_for(reader.read(), 5)
    assert b'data: {"error"' in data
    writer.close()
    await writer.wait_closed()


async def test_unexpected_failure_is_a_500_without_a_trace(
    make_client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine()
    engine.submit = lambda *args, **kwargs: 1 / 0  # type: ignore[method-assign,assignment]
    client = await make_client(engine)
    for stream in (False, True):
        response = await client.post(COMPLETIONS, json={"prompt": "secret", "stream": stream})
        assert response.status == 500
        text = await response.text()
        assert "division" not in text
        assert "Traceback" not in text
        assert json.loads(text)["error"]["code"] == "internal_error"
    assert "division" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(("url", "body"), ROUTES)
async def test_slow_answer_times_out_and_is_aborted(make_client: Any, url: str, body: Any) -> None:
    engine = FakeEngine()
    engine.gate.clear()
    client = await make_client(engine, request_timeout_s=0.05)
    whole = await client.post(url, json=body)
    assert whole.status == 504
    assert (await whole.json())["error"]["code"] == "request_timeout"
    events = await read_events(await client.post(url, json={**body, "stream": True}))
    assert events[-1]["error"]["code"] == "request_timeout"
    assert engine.finished["abort"] == 2
    assert not engine.waiting


async def test_silent_stream_gets_comments_until_the_first_token(make_client: Any) -> None:
    engine = FakeEngine()
    engine.gate.clear()
    client = await make_client(engine, keepalive_s=0.02)
    response = await client.post(CHAT, json={"messages": MESSAGES, "stream": True, "max_tokens": 1})
    await asyncio.sleep(0.1)
    engine.gate.set()
    text = await response.text()
    assert text.count(": keep-alive\n\n") >= 2
    assert text.rindex(": keep-alive") < text.index('"finish_reason":"length"')
    assert text.endswith("data: [DONE]\n\n")


async def test_stalled_reader_is_dropped(make_client: Any) -> None:
    class OneToken(FakeTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
            return [1]

    engine = FakeEngine(OneToken(), max_model_len=10**7)
    client = await make_client(engine, max_stream_stall_s=0.2)
    # The echo alone is more than any socket buffers, so the first write must wait for the reader.
    body = {"prompt": "x" * 12_000_000, "echo": True, "stream": True, "max_tokens": 10**6}
    reader, writer = await _raw_post(client, {**body, "ignore_eos": True})
    writer.transport.pause_reading()
    await until(lambda: engine.submitted)
    assert engine.running or engine.waiting
    await until(lambda: engine.finished["abort"] == 1)
    assert not engine.running
    writer.transport.resume_reading()
    received = await asyncio.wait_for(reader.read(), 5)
    assert not received.endswith(b"0\r\n\r\n")
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize(("url", "body"), ROUTES)
async def test_client_that_hangs_up_is_aborted(
    make_client: Any, url: str, body: Any, queued: bool, stream: bool
) -> None:
    engine = FakeEngine(step_s=0.005)
    if queued:
        engine.gate.clear()
    client = await make_client(engine)
    body = {**body, "max_tokens": 2000, "stream": stream}
    posts = [asyncio.create_task(_post(client, url, body)) for _ in range(10)]
    await until(lambda: len(engine.submitted) == 10)
    if not queued:
        await until(lambda: all(s.out for s in engine.submitted))
    for post in posts:
        post.cancel()
    await asyncio.gather(*posts, return_exceptions=True)
    await until(lambda: not engine.running and not engine.waiting, 1)
    assert engine.finished == {"abort": 10}


async def test_batch_of_prompts_is_aborted_as_a_whole(make_client: Any) -> None:
    engine = FakeEngine(step_s=0.005)
    client = await make_client(engine)
    body = {"prompt": [[1], [2], [3]], "max_tokens": 2000, "stream": True}
    post = asyncio.create_task(_post(client, COMPLETIONS, body))
    await until(lambda: len(engine.running) == 3)
    post.cancel()
    await until(lambda: engine.finished["abort"] == 3, 1)
    assert not engine.running


async def test_hangups_leave_healthy_requests_alone(make_client: Any) -> None:
    engine = FakeEngine(step_s=0.001, max_running=64)
    client = await make_client(engine)
    cold = await (await client.post(COMPLETIONS, json={"prompt": "h", "max_tokens": 30})).json()
    bad = [
        asyncio.create_task(_post(client, COMPLETIONS, {"prompt": "b", "max_tokens": 3000}))
        for _ in range(20)
    ]
    good = [
        asyncio.create_task(_post(client, COMPLETIONS, {"prompt": "h", "max_tokens": 30}))
        for _ in range(20)
    ]
    await until(lambda: len(engine.submitted) == 41)
    for post in bad:
        post.cancel()
    texts = [json.loads(text)["choices"][0]["text"] for text in await asyncio.gather(*good)]
    assert set(texts) == {cold["choices"][0]["text"]}
    await until(lambda: engine.finished["abort"] == 20)


async def test_queue_overflow_answers_everyone(make_client: Any) -> None:
    engine = FakeEngine(max_running=2, max_waiting=8)
    engine.gate.clear()
    client = await make_client(engine)

    async def post(i: int) -> tuple[int, str | None]:
        async with client.post(COMPLETIONS, json={"prompt": [i], "max_tokens": 2}) as response:
            await response.json()
            return response.status, response.headers.get("Retry-After")

    posts = [asyncio.create_task(post(i)) for i in range(60)]
    await until(lambda: sum(p.done() for p in posts) == 52)
    assert all(p.result() == (429, "2") for p in posts if p.done())
    engine.gate.set()
    assert sorted(await asyncio.gather(*posts))[:8] == [(200, None)] * 8


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
async def test_long_text_is_tokenized_beside_the_event_loop(make_client: Any, url: str) -> None:
    """While a text is being encoded, other requests are answered."""
    encoding, answered = threading.Event(), threading.Event()

    class WaitingTokenizer(FakeTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
            encoding.set()
            assert answered.wait(30), "the event loop stood still while a text was encoded"
            return super().encode(text)

    client = await make_client(FakeEngine(WaitingTokenizer(), max_model_len=100_000))
    text = "x" * 50_000
    body = {"messages": [{"role": "user", "content": text}], "prompt": text, "max_tokens": 1}
    post = asyncio.create_task(_post(client, url, body))
    await until(encoding.is_set)
    for _ in range(5):
        assert (await client.get("/health")).status == 200
    answered.set()
    assert "usage" in await post


async def test_no_task_or_handler_is_left_behind(client: Any, engine: FakeEngine) -> None:
    before = len(asyncio.all_tasks())
    for i in range(30):
        engine.fail_at = 2 if i % 3 == 0 else None
        body = {"prompt": ["a", "b"], "max_tokens": 4, "stream": i % 2 == 0}
        await (await client.post(COMPLETIONS, json=body)).read()
    await until(lambda: len(asyncio.all_tasks()) <= before + 1)
    assert not client.app[STATE].lifecycle.handlers
    assert not engine.running


async def _post(client: Any, url: str, body: Any) -> str:
    async with client.post(url, json=body) as response:
        return await response.text()


async def _raw_post(client: Any, body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(client.host, client.port)
    data = json.dumps(body).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(data), data)
    )
    return reader, writer
