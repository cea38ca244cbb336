"""What a client gets when its answer takes too long, on every route that generates."""

from __future__ import annotations

from typing import Any

import pytest
from server_fakes import FakeEngine

MESSAGES = [{"role": "user", "content": "x"}]
ROUTES = [
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/responses", {"input": "x"}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}),
    ("session", {"content": "x"}),
]


@pytest.fixture
def stuck() -> FakeEngine:
    engine = FakeEngine()
    engine.gate.clear()
    return engine


async def place(client: Any, url: str) -> str:
    if url != "session":
        return url
    session = await (await client.post("/v1/sessions", json={})).json()
    return f"/v1/sessions/{session['id']}/messages"


@pytest.mark.parametrize(("url", "body"), ROUTES)
async def test_a_whole_answer_that_takes_too_long_is_a_504(
    make_client: Any, stuck: FakeEngine, url: str, body: Any
) -> None:
    client = await make_client(stuck, request_timeout_s=0.05)
    response = await client.post(await place(client, url), json=body)
    assert response.status == 504
    answer = await response.json()
    assert answer["error"]["type"] == "timeout_error"
    assert (answer.get("type") == "error") is (url == "/v1/messages")
    assert "0.05 s" in answer["error"]["message"]
    assert not stuck.waiting


@pytest.mark.parametrize(("url", "body"), ROUTES)
async def test_a_stream_that_takes_too_long_ends_with_an_error_event(
    make_client: Any, stuck: FakeEngine, url: str, body: Any
) -> None:
    client = await make_client(stuck, request_timeout_s=0.05)
    response = await client.post(await place(client, url), json={**body, "stream": True})
    text = await response.text()
    assert response.status == 200
    last = text.rstrip().rsplit("\n\n", 1)[-1]
    assert "0.05 s" in last
    assert "error" in last
    assert "[DONE]" not in text
    assert not stuck.waiting
