"""The default model over HTTP, called by the official client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import openai
import pytest

from radixkv.engine.factory import BuiltEngine
from radixkv.server import ServerConfig, create_app

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

SYSTEM = "You are a helpful librarian. " + "Answer briefly and name one book per question. " * 6
BLOCK = 16


@pytest.fixture
async def client(aiohttp_client: Any, build: Callable[..., BuiltEngine]) -> Any:
    return await aiohttp_client(create_app(build().engine, ServerConfig()))


@pytest.fixture
async def api(client: Any) -> Any:
    async with openai.AsyncOpenAI(
        base_url=str(client.make_url("/v1")), api_key="none", max_retries=0
    ) as api:
        yield api


async def chat(api: Any, messages: list[Any], **fields: Any) -> tuple[str, Any]:
    answer = await api.chat.completions.create(
        model="SmolLM2-135M-Instruct", messages=messages, temperature=0, **fields
    )
    return answer.choices[0].message.content, answer.usage


async def report(client: Any) -> dict[str, Any]:
    response = await client.get("/admin/cache")
    assert response.status == 200
    body: dict[str, Any] = await response.json()
    return body


async def test_second_turn_reuses_prompt_and_answer(api: Any) -> None:
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Which book should I read about whales?"},
    ]
    text, first = await chat(api, messages, max_tokens=40)
    assert first.prompt_tokens_details.cached_tokens == 0
    messages += [
        {"role": "assistant", "content": text},
        {"role": "user", "content": "And about the sea?"},
    ]
    _, second = await chat(api, messages, max_tokens=8)
    computed = first.prompt_tokens + first.completion_tokens - 1
    cached = second.prompt_tokens_details.cached_tokens
    assert computed // BLOCK * BLOCK <= cached <= computed
    assert cached < second.prompt_tokens


async def test_streamed_and_whole_answers_are_equal(api: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "Write two words, then an emoji: 🎈"}]
    text, usage = await chat(api, messages, max_tokens=24)
    stream = await api.chat.completions.create(
        model="SmolLM2-135M-Instruct",
        messages=messages,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == text
    assert chunks[-1].usage.completion_tokens == usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


async def test_session_computes_only_the_new_message(client: Any) -> None:
    """The partly filled block at the end of a turn is reused too, by both sides of a fork."""
    session = await (await client.post("/v1/sessions", json={"system": SYSTEM})).json()
    turn = {"content": "Name a book about bees.", "temperature": 0, "max_tokens": 21}
    url = f"/v1/sessions/{session['id']}"
    first = await (await client.post(f"{url}/messages", json=turn)).json()
    held = first["session"]["num_tokens"]
    fork = await (await client.post(f"{url}/fork", json={})).json()
    before = await report(client)
    turn["content"] = "And one about ants?"
    answers = [
        await (await client.post(f"/v1/sessions/{i}/messages", json=turn)).json()
        for i in (session["id"], fork["id"])
    ]
    # All that was computed in turn 1: everything but its last token, which was only sampled.
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
    assert cached[0] == held - 1
    assert cached[1] >= held - 1
    after = await report(client)
    looked_up = sum(a["usage"]["prompt_tokens"] for a in answers)
    assert after["tokens"]["computed"] - before["tokens"]["computed"] == looked_up - sum(cached)
    texts = [a["choices"][0]["message"]["content"] for a in answers]
    assert texts[0] == texts[1]


async def test_other_session_reuses_the_system_prompt(client: Any) -> None:
    cached = []
    for question in ("Name a book about rain.", "What is a good book on clocks?"):
        session = await (await client.post("/v1/sessions", json={"system": SYSTEM})).json()
        turn = {"content": question, "temperature": 0, "max_tokens": 4}
        answer = await client.post(f"/v1/sessions/{session['id']}/messages", json=turn)
        usage = (await answer.json())["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0
    assert cached[1] > 50


async def test_fifty_clients_killed_in_mid_stream_leave_nothing_behind(client: Any) -> None:
    body = {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": "Tell me a very long story."},
        ],
        "max_tokens": 2000,
        "stream": True,
        "ignore_eos": True,
    }

    async def kill(number: int) -> None:
        async with aiohttp.ClientSession() as session:
            url = client.make_url("/v1/chat/completions")
            async with session.post(url, json={**body, "seed": number}) as response:
                async for line in response.content:
                    if b'"content":"' in line:
                        break
                response.close()

    for start in range(0, 50, 10):
        await asyncio.gather(*(kill(i) for i in range(start, start + 10)))
    for _ in range(200):
        state = await report(client)
        if state["requests"]["running"] == 0 and state["requests"]["waiting"] == 0:
            break
        await asyncio.sleep(0.05)
    assert state["requests"]["finished"] == {"abort": 50}
    assert state["blocks"]["referenced"]["blocks"] == 0
    check = await client.get("/admin/check")
    assert (check.status, await check.json()) == (200, {"ok": True})
