"""The official client, unmodified, against a running server."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from server_fakes import STOP, FakeEngine

KEY = "sk-test"
HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.script = [*b"Hi", STOP]
    return engine


@pytest.fixture
async def base_url(make_client: Any, engine: FakeEngine) -> str:
    client = await make_client(engine, api_key=KEY)
    return str(client.make_url("/v1"))


@pytest.fixture
async def api(base_url: str) -> Any:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=KEY, max_retries=0) as api:
        yield api


async def test_chat_whole_and_streamed(api: Any) -> None:
    whole = await api.chat.completions.create(model="fake", messages=HELLO)
    assert whole.choices[0].message.content == "Hi"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    stream = await api.chat.completions.create(
        model="fake", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "Hi"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


async def test_stream_without_usage_never_has_empty_choices(api: Any) -> None:
    stream = await api.chat.completions.create(model="fake", messages=HELLO, stream=True)
    assert all(chunk.choices for chunk in [chunk async for chunk in stream])


async def test_completions_whole_and_streamed(api: Any) -> None:
    whole = await api.completions.create(model="fake", prompt=[1, 2], logprobs=1)
    assert whole.choices[0].text == "Hi"
    assert whole.choices[0].logprobs.tokens[:2] == ["H", "i"]
    stream = await api.completions.create(
        model="fake", prompt="x", stream=True, extra_body={"ignore_eos": False, "top_k": 3}
    )
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hi"


async def test_models(api: Any) -> None:
    assert [model.id async for model in api.models.list()] == ["fake"]
    assert (await api.models.retrieve("fake")).id == "fake"


async def test_errors_have_their_classes(api: Any, base_url: str, engine: FakeEngine) -> None:
    create = api.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        await create(model="fake", messages=HELLO, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        await api.completions.create(model="fake", prompt=[1] * 5000, stream=True)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        await create(model="other", messages=HELLO)
    assert missing.value.code == "model_not_found"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="no", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()
    engine.max_waiting = 0
    with pytest.raises(openai.RateLimitError):
        await create(model="fake", messages=HELLO)


@pytest.mark.parametrize("route", ["chat", "completions"])
async def test_error_in_mid_stream_is_raised(api: Any, engine: FakeEngine, route: str) -> None:
    engine.fail_at = 1
    if route == "chat":
        stream = await api.chat.completions.create(model="fake", messages=HELLO, stream=True)
    else:
        stream = await api.completions.create(model="fake", prompt="x", stream=True)
    with pytest.raises(openai.APIError, match="injected"):
        async for _ in stream:
            pass


async def test_sync_client_reads_the_same(base_url: str) -> None:
    def work() -> tuple[str | None, str]:
        with openai.OpenAI(base_url=base_url, api_key=KEY, max_retries=0) as api:
            whole = api.chat.completions.create(model="fake", messages=HELLO)
            stream = api.chat.completions.create(model="fake", messages=HELLO, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            with pytest.raises(openai.BadRequestError):
                api.completions.create(model="fake", prompt="")
            return whole.choices[0].message.content, text

    assert await asyncio.to_thread(work) == ("Hi", "Hi")


async def test_tools_and_developer_messages_are_taken(api: Any) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    answer = await api.chat.completions.create(
        model="fake",
        messages=[{"role": "developer", "content": "Be brief."}, *HELLO],
        tools=[tool],
        tool_choice="auto",
        max_completion_tokens=5,
    )
    assert answer.choices[0].message.content == "Hi"


async def test_session_turn_parses_as_a_chat_completion(api: Any) -> None:
    session: Any = await api.post("/sessions", body={}, cast_to=object)
    answer: Any = await api.post(
        f"/sessions/{session['id']}/messages", body={"content": "hello"}, cast_to=object
    )
    assert answer["session"]["turn"] == 1
    assert (
        openai.types.chat.ChatCompletion.model_validate(answer).choices[0].message.content == "Hi"
    )
