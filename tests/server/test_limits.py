"""Limits of keys: requests and tokens a minute, concurrency, and the length of answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from server_fakes import FakeEngine, until

from radixkv.request import SamplingParams
from radixkv.server.api_keys import ApiKey, KeyLimits
from radixkv.server.errors import ApiError
from radixkv.server.limits import KeyUse, RateLimits, duration
from radixkv.server.state import STATE

KEY = "sk-alice-0123456789"
HEADERS = {"Authorization": f"Bearer {KEY}"}
COMPLETIONS = "/v1/completions"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limited(make_client: Any, tmp_path: Path, clock: Clock) -> Any:
    """Serve an engine to one key; keyword arguments are its limits."""

    async def make(engine: Any = None, **limits: int) -> tuple[Any, Any]:
        path = tmp_path / "keys.toml"
        path.touch(0o600)
        lines = [f"{name} = {value}" for name, value in limits.items()]
        path.write_text("\n".join(["[keys.alice]", f'key = "{KEY}"', *lines]))
        client = await make_client(engine or FakeEngine(), api_keys=path)
        # Its time stands still, so that nothing comes back while a test looks.
        client.app[STATE].limits._clock = clock
        return client, client.app[STATE]

    return make


async def post(client: Any, url: str = COMPLETIONS, **body: Any) -> Any:
    return await client.post(url, json={"prompt": [1], "max_tokens": 1, **body}, headers=HEADERS)


def test_requests_come_back_evenly_within_a_minute(clock: Clock) -> None:
    use = KeyUse(KeyLimits(requests_per_minute=3), clock)
    for _ in range(3):
        use.begin()
    with pytest.raises(ApiError, match="3 requests a minute") as refused:
        use.begin()
    assert refused.value.headers["Retry-After"] == "20"
    assert use.running == 3
    clock.now += 20
    use.begin()
    with pytest.raises(ApiError):
        use.begin()
    clock.now += 3600  # rest does not pile up
    assert use.headers()["x-ratelimit-remaining-requests"] == "3"


def test_tokens_of_answers_are_taken_afterwards_and_may_overdraw(clock: Clock) -> None:
    use = KeyUse(KeyLimits(tokens_per_minute=60), clock)
    use.begin_tokens(50)
    use.add_tokens(40)
    assert use.headers()["x-ratelimit-remaining-tokens"] == "0"
    with pytest.raises(ApiError, match="the prompt has 5, and 0 are left") as refused:
        use.begin_tokens(5)
    assert refused.value.headers["Retry-After"] == "35"
    clock.now += 34.9
    with pytest.raises(ApiError):
        use.begin_tokens(5)
    clock.now += 0.1
    use.begin_tokens(5)


def test_a_prompt_over_the_limit_itself_is_not_to_be_repeated(clock: Clock) -> None:
    use = KeyUse(KeyLimits(tokens_per_minute=60), clock)
    with pytest.raises(ApiError, match="60 tokens a minute") as refused:
        use.begin_tokens(61)
    assert refused.value.headers["x-should-retry"] == "false"
    assert use.headers()["x-ratelimit-remaining-tokens"] == "60"


def test_other_limits_apply_at_once_and_what_runs_is_kept(clock: Clock) -> None:
    limits = RateLimits(clock)
    key = ApiKey("a", "a", False, KeyLimits(concurrent_requests=1))
    use = limits.use_of(key)
    assert use is not None
    use.begin()
    wider = ApiKey("a", "a", False, KeyLimits(concurrent_requests=2, requests_per_minute=1))
    assert limits.use_of(wider) is use
    use.begin()
    with pytest.raises(ApiError):
        use.begin()
    assert use.running == 2
    assert limits.use_of(ApiKey("b", "b", False)) is None


@pytest.mark.parametrize(
    ("given", "cut"),
    [((None, 0), (8, 0)), ((9, 0), (8, 0)), ((3, 2), (3, 2)), ((None, 20), (8, 8))],
)
def test_answers_are_cut_to_the_key(given: tuple[int | None, int], cut: tuple[int, int]) -> None:
    params = KeyUse(KeyLimits(max_tokens=8)).cut(
        SamplingParams(max_tokens=given[0], min_tokens=given[1])
    )
    assert (params.max_tokens, params.min_tokens) == cut


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.0004, "1ms"), (1, "1s"), (59.9999, "1m0s"), (61.5, "1m1.5s"), (600, "10m0s")],
)
def test_times_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


async def test_over_the_rate_is_a_429_with_the_headers_of_openai(limited: Any) -> None:
    client, _ = await limited(requests_per_minute=2, tokens_per_minute=1000)
    first = await post(client)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-limit-tokens"] == "1000"
    assert first.headers["x-ratelimit-remaining-tokens"] == "998"
    assert first.headers["x-ratelimit-reset-requests"].endswith("s")
    stream = await post(client, stream=True)
    assert stream.headers["x-ratelimit-remaining-requests"] == "0"
    refused = await post(client)
    assert refused.status == 429
    assert refused.headers["Retry-After"] == "30"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    error = (await refused.json())["error"]
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    # Reading costs nothing, and other callers of the server aren't named.
    assert (await client.get("/v1/models", headers=HEADERS)).status == 200


async def test_limits_hold_on_every_route_that_generates(limited: Any) -> None:
    engine = FakeEngine()
    client, _ = await limited(engine, tokens_per_minute=10_000, max_tokens=5)
    session = await (await client.post("/v1/sessions", json={}, headers=HEADERS)).json()
    messages = [{"role": "user", "content": "x"}]
    left = 10_000
    for url, body in (
        ("/v1/chat/completions", {"messages": messages}),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 90}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": messages, "max_tokens": 90}),
        (f"/v1/sessions/{session['id']}/messages", {"content": "x"}),
    ):
        response = await client.post(url, json=body, headers=HEADERS)
        assert response.status == 200, await response.text()
        usage = (await response.json())["usage"]
        assert usage.get("completion_tokens", usage.get("output_tokens")) == 5
        prompt = engine.submitted[-1].prompt
        left -= len(prompt) + 5
        assert response.headers["x-ratelimit-remaining-tokens"] == str(left)


async def test_tokens_of_a_refused_prompt_are_given_back(limited: Any) -> None:
    client, state = await limited(FakeEngine(max_model_len=64), tokens_per_minute=1000)
    assert (await post(client, prompt=[1] * 64)).status == 400
    (use,) = state.limits._uses.values()
    assert use.headers()["x-ratelimit-remaining-tokens"] == "1000"


async def test_generated_answers_count_even_if_they_are_not_chosen(limited: Any) -> None:
    client, _ = await limited(tokens_per_minute=1_000_000)
    response = await post(client, n=1, best_of=4, max_tokens=1)
    # The fake engine gives one answer, for which four were generated.
    left = int(response.headers["x-ratelimit-remaining-tokens"])
    assert left == 1_000_000 - 1 - 4


async def test_concurrency_is_bounded_and_given_back_whatever_ends_a_request(
    limited: Any,
) -> None:
    engine = FakeEngine()
    client, state = await limited(engine, concurrent_requests=1)

    async def running() -> int:
        return sum(use.running for use in state.limits._uses.values())

    async def check_free() -> None:
        for _ in range(400):
            if not await running():
                break
            await asyncio.sleep(0.005)
        assert await running() == 0
        assert (await post(client)).status == 200

    await check_free()
    # Faulty, refused by the engine, failing, and failing in a stream.
    assert (await post(client, temperature=9)).status == 400
    await check_free()
    assert (await post(client, prompt=[1] * 5000)).status == 400
    await check_free()
    engine.fail_at = 0
    assert (await post(client)).status == 500
    await (await post(client, stream=True)).read()
    engine.fail_at = None
    await check_free()
    # Given up while it waits, whole and streamed.
    for stream in (False, True):
        engine.gate.clear()
        task = asyncio.create_task(post(client, stream=stream))
        await until(lambda: engine.waiting)
        refused = await post(client)
        assert refused.status == 429
        assert refused.headers["Retry-After"] == "1"
        if stream:
            (await task).close()
        else:
            task.cancel()
        await until(lambda: not engine.waiting)
        engine.gate.set()
        await check_free()
    # A body that never comes in full.
    _, writer = await asyncio.open_connection(client.host, client.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\n"
        b"Content-Length: 99\r\n\r\n{" % KEY.encode()
    )
    for _ in range(400):
        if await running():
            break
        await asyncio.sleep(0.005)
    assert await running() == 1
    writer.close()
    await check_free()
