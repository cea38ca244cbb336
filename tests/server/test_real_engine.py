"""The server over the real engine, with the fake model that reads its history through the cache."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from server_fakes import read_events, until

IDS = [5 + i % 200 for i in range(65)]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


async def complete(client: Any, ids: list[int], **fields: Any) -> Any:
    body = {"prompt": ids, "max_tokens": 8, "ignore_eos": True, "temperature": 0, **fields}
    response = await client.post(COMPLETIONS, json=body)
    assert response.status == 200, await response.text()
    return await response.json()


async def cached_of(client: Any, url: str, body: Any, stream: bool) -> tuple[int, int]:
    """Return (cached tokens, prompt tokens) as the answer's usage has them."""
    body = {"max_tokens": 4, "ignore_eos": True, "temperature": 0, **body}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        usage = (await read_events(await client.post(url, json=body)))[-2]["usage"]
    else:
        usage = (await (await client.post(url, json=body)).json())["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert type(cached) is int
    return cached, usage["prompt_tokens"]


async def open_session(client: Any) -> str:
    return f"/v1/sessions/{(await (await client.post('/v1/sessions')).json())['id']}"


async def hits(client: Any) -> int:
    return (await (await client.get("/admin/cache")).json())["tokens"]["hit"]


async def assert_sound(client: Any) -> None:
    response = await client.get("/admin/check")
    assert response.status == 200, await response.text()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["chat", "completions", "sessions"])
async def test_cached_tokens_are_in_every_shape_cold_and_warm(
    serve: Any, route: str, stream: bool
) -> None:
    client, _ = await serve()
    before = await hits(client)
    total = 0
    for turn in range(2):
        if route == "completions":
            cached, length = await cached_of(client, COMPLETIONS, {"prompt": IDS}, stream)
        elif route == "chat":
            body = {"messages": [{"role": "user", "content": "x" * 40}]}
            cached, length = await cached_of(client, CHAT, body, stream)
        else:
            url = f"{await open_session(client)}/messages"
            cached, length = await cached_of(client, url, {"content": "x" * 40}, stream)
        assert cached == (length - 1 if turn else 0)
        total += cached
    assert await hits(client) - before == total
    await assert_sound(client)


async def test_session_turns_hit_everything_computed_before(serve: Any) -> None:
    client, _ = await serve()
    url = await open_session(client)
    known = 0
    for turn in range(6):
        body = {"content": f"turn {turn}", "max_tokens": 20, "ignore_eos": True}
        answer = await (await client.post(f"{url}/messages", json=body)).json()
        usage = answer["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == max(0, known - 1)
        known = usage["total_tokens"]
        assert answer["session"]["num_tokens"] == known
    await assert_sound(client)


async def test_fork_hits_the_whole_shared_past(serve: Any) -> None:
    client, _ = await serve()
    url = await open_session(client)
    body = {"content": "a", "max_tokens": 20, "ignore_eos": True}
    first = await (await client.post(f"{url}/messages", json=body)).json()
    child = await (await client.post(f"{url}/fork")).json()
    await client.delete(url)
    child_url = f"/v1/sessions/{child['id']}/messages"
    second = await (await client.post(child_url, json=body)).json()
    shared = first["session"]["num_tokens"] - 1
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == shared
    await assert_sound(client)


async def test_idle_sessions_larger_than_the_pool_block_nobody(serve: Any) -> None:
    body = {"max_tokens": 30, "ignore_eos": True, "temperature": 0}
    client, engine = await serve(num_blocks=24)
    urls = [await open_session(client) for _ in range(20)]
    for i, url in enumerate(urls):
        answer = await client.post(f"{url}/messages", json={**body, "content": f"session {i}"})
        assert answer.status == 200
    assert engine.stats().evicted_blocks > 0
    assert (await complete(client, IDS))["usage"]["completion_tokens"] == 8
    again = await client.post(f"{urls[0]}/messages", json={**body, "content": "more"})
    evicted = await again.json()
    fresh, _ = await serve()
    cold_url = await open_session(fresh)
    await fresh.post(f"{cold_url}/messages", json={**body, "content": "session 0"})
    response = await fresh.post(f"{cold_url}/messages", json={**body, "content": "more"})
    cold = await response.json()
    assert evicted["choices"] == cold["choices"]
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in (evicted, cold)]
    assert cached[0] < cached[1]
    await assert_sound(client)


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
async def test_stream_text_equals_whole_text_and_stops_alike(serve: Any, url: str) -> None:
    client, _ = await serve()
    body: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "seed": 7, "stop": ["\n", "q"]}
    if url == CHAT:
        body["messages"] = [{"role": "user", "content": "x"}]
    else:
        body["prompt"] = "x"
    whole = (await (await client.post(url, json=body)).json())["choices"][0]
    events = await read_events(await client.post(url, json={**body, "stream": True}))
    choices = [event["choices"][0] for event in events[:-1]]
    if url == CHAT:
        text = "".join(c["delta"].get("content", "") for c in choices)
        assert whole["message"]["content"] == text
    else:
        text = "".join(c["text"] for c in choices)
        assert whole["text"] == text
    assert text
    assert "q" not in text
    assert choices[-1]["finish_reason"] == whole["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
async def test_clients_that_hang_up_free_everything(serve: Any, stream: bool) -> None:
    client, engine = await serve(num_blocks=2048, max_num_seqs=8)
    cold = await complete(client, IDS)

    async def post(ids: list[int], max_tokens: int) -> Any:
        body = {"prompt": ids, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        body["stream"] = stream and max_tokens > 8
        async with client.post(COMPLETIONS, json=body) as response:
            return await response.read()

    bad = [asyncio.create_task(post([i, 2, 3], 2000)) for i in range(20)]
    good = [asyncio.create_task(complete(client, IDS)) for _ in range(5)]
    await until(lambda: engine.health().num_running)
    for task in bad:
        task.cancel()
    answers = await asyncio.gather(*good)
    assert {a["choices"][0]["text"] for a in answers} == {cold["choices"][0]["text"]}
    await until(lambda: not engine.health().busy)
    stats = engine.stats()
    assert stats.requests_finished["abort"] == 20
    assert stats.blocks_referenced == 0
    await assert_sound(client)


async def test_flush_is_refused_while_busy_and_real_when_idle(serve: Any) -> None:
    client, engine = await serve()
    await complete(client, IDS)
    warm = await complete(client, IDS)
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    body = {"prompt": [1], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    async with client.post(COMPLETIONS, json=body) as response:
        await response.content.readany()
        busy = await client.post("/flush_cache")
        assert busy.status == 409
        assert "blocks" in (await busy.json())["error"]["message"]
    await until(lambda: not engine.health().busy)
    assert (await client.post("/flush_cache")).status == 200
    cold = await complete(client, IDS)
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert cold["choices"] == warm["choices"]


@pytest.mark.parametrize("max_tokens", [100, None, 6])
async def test_answer_is_cut_to_the_context(serve: Any, max_tokens: int | None) -> None:
    client, _ = await serve(max_model_len=256)
    answer = await complete(client, [7] * 250, max_tokens=max_tokens)
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["choices"][0]["finish_reason"] == "length"
    refused = await client.post(CHAT, json={"messages": [{"role": "user", "content": "x" * 256}]})
    error = (await refused.json())["error"]
    assert (refused.status, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == "messages"


async def test_salts_and_several_prompts_keep_apart(serve: Any) -> None:
    client, _ = await serve()

    async def cached(salt: str | None) -> int:
        usage = (await complete(client, IDS, cache_salt=salt))["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [await cached(s) for s in (None, None, "a", "a", "b")] == [0, 64, 0, 64, 0]
    both = await complete(client, [IDS, IDS[:40]], cache_salt="c")  # type: ignore[list-item]
    singles = [await complete(client, ids) for ids in (IDS, IDS[:40])]
    assert [c["text"] for c in both["choices"]] == [s["choices"][0]["text"] for s in singles]


async def test_queue_overflow_is_a_429(serve: Any) -> None:
    client, engine = await serve(max_num_seqs=1, max_num_waiting=1)
    body = {"prompt": [1], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    async with client.post(COMPLETIONS, json=body), client.post(COMPLETIONS, json=body):
        refused = await client.post(COMPLETIONS, json=body)
        assert refused.status == 429
        assert "Retry-After" in refused.headers
    await until(lambda: not engine.health().busy)


async def test_logprobs_of_the_engine_fit_the_shapes(serve: Any) -> None:
    client, _ = await serve()
    answer = await complete(client, IDS, logprobs=3)
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 8
    triples = zip(*(logprobs[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True)
    # Greedy, so the chosen token is the likeliest of those listed.
    assert all(top[token] == max(top.values()) == value <= 0 for token, value, top in triples)


async def test_failing_engine_ends_streams_and_turns_health_red(serve: Any) -> None:
    client, engine = await serve()
    engine.engine.runner.fail_at = 3
    body = {"prompt": IDS, "max_tokens": 50, "ignore_eos": True, "stream": True}
    events = await read_events(await client.post(COMPLETIONS, json=body))
    assert "error" in events[-1]
    assert "injected" not in str(events[-1])
    status = (await client.get("/health")).status
    follow = await client.post(COMPLETIONS, json={"prompt": [1], "max_tokens": 1})
    # Either the engine survived the failed step, or it says so on both routes.
    assert (status, follow.status) in ((200, 200), (503, 503))


async def test_metrics_page_renders_real_stats(serve: Any) -> None:
    client, _ = await serve()
    await complete(client, IDS)
    text = await (await client.get("/metrics")).text()
    assert 'vllm:prefix_cache_queries_total{model_name="real"} 65.0' in text
    assert 'vllm:time_to_first_token_seconds_count{model_name="real"} 1.0' in text
    assert 'vllm:inter_token_latency_seconds_count{model_name="real"} 7.0' in text
