"""What the admin routes tell about misses and about the tree, over the real engine."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fakes import make_engine
from server_fakes import END, STOP, FakeTokenizer, chatml_tools, read_events

from radixkv.engine import AsyncEngine
from radixkv.server.request_ids import RequestIds

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EXPLAIN = "/admin/cache/explain"
FIELDS = {"max_tokens": 4, "ignore_eos": True, "temperature": 0}

Serve = Callable[..., Awaitable[Any]]


@pytest.fixture
def serve(make_client: Any) -> Serve:
    async def start(**options: Any) -> Any:
        engine = make_engine(
            256, 16, max_num_batched_tokens=256, eos_token_ids=(END, STOP), max_model_len=2048
        )
        tokenizer = FakeTokenizer(chatml_tools, supports_tools=True)
        engine.tokenizer = tokenizer
        return await make_client(AsyncEngine(engine, tokenizer, model_name="real"), **options)

    return start


async def ask(client: Any, url: str, headers: Any = None, **body: Any) -> Any:
    response = await client.post(url, json={**FIELDS, **body}, headers=headers or {})
    assert response.status == 200, await response.text()
    return await response.json()


async def chat(client: Any, system: str, user: str, **body: Any) -> Any:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return await ask(client, CHAT, messages=messages, **body)


async def explain(client: Any, name: str, **query: Any) -> Any:
    response = await client.get(f"{EXPLAIN}/{name}", params=query)
    assert response.status == 200, await response.text()
    return await response.json()


async def test_a_completion_is_explained_by_its_id(serve: Serve) -> None:
    client = await serve()
    prompt = "x" * 40
    first = await ask(client, COMPLETIONS, prompt=prompt)
    second = await ask(client, COMPLETIONS, prompt=prompt)
    cold = await explain(client, first["id"])
    assert (cold["reason"], cold["cached_tokens"], cold["computed_tokens"]) == ("never_seen", 0, 40)
    assert cold["window"]["prompt"]["after"] == "x" * 32
    warm = await explain(client, second["id"])
    assert warm["request"] == second["id"].removeprefix("cmpl-")
    assert warm["namespace"] == "default"
    usage = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert warm["cached_tokens"] == warm["hit"]["tokens"] == usage == 39
    assert warm["hit"] == {"tokens": 39, "whole_blocks": 2, "partial_tokens": 7}
    assert warm["reason"] == "complete"
    assert "window" not in warm


async def test_a_stream_is_explained_by_the_clients_own_request_id(serve: Serve) -> None:
    client = await serve()
    for name in ("job/1", "job/2"):
        response = await client.post(
            CHAT,
            json={**FIELDS, "stream": True, "messages": [{"role": "user", "content": "hello"}]},
            headers={"X-Request-ID": name},
        )
        await read_events(response)
    assert (await explain(client, "job/1"))["reason"] in {"never_seen", "below_block"}
    assert (await explain(client, "job/2"))["reason"] == "complete"


async def test_each_prompt_of_a_completion_is_explained(serve: Serve) -> None:
    client = await serve()
    answer = await ask(client, COMPLETIONS, prompt=["a" * 20, "b" * 40])
    lengths = [(await explain(client, answer["id"], index=i))["prompt_tokens"] for i in (0, 1)]
    assert lengths == [20, 40]
    assert (await explain(client, answer["id"]))["prompt_tokens"] == 20
    response = await client.get(f"{EXPLAIN}/{answer['id']}", params={"index": 2})
    assert response.status == 404


async def test_a_sessions_last_turn_is_explained_by_the_sessions_id(serve: Serve) -> None:
    client = await serve()
    session = (await (await client.post("/v1/sessions")).json())["id"]
    for content in ("first question", "second question"):
        await ask(client, f"/v1/sessions/{session}/messages", content=content)
    last = await explain(client, session)
    assert last["reason"] in {"never_seen", "below_block"}
    assert last["position"] == last["cached_tokens"] > 30
    assert "second question" in last["window"]["prompt"]["after"]


async def test_a_timestamp_in_the_system_prompt_is_visible(serve: Serve) -> None:
    client = await serve()
    system = "You are an agent that books flights. Now: {}. Be brief."
    await chat(client, system.format("2026-11-30 23:59:59"), "hello")
    answer = await chat(client, system.format("2026-12-01 00:00:01"), "hello")
    found = await explain(client, answer["id"])
    assert found["reason"] == "diverged"
    prompt, cached = found["window"]["prompt"], found["window"]["cached"]
    assert prompt["before"].endswith("flights. Now: 2026-1")
    assert prompt["before"] == cached["before"]
    assert prompt["after"].startswith("2-01 00:00:01. Be brief.")
    assert cached["after"].startswith("1-30 23:59:59. Be brief.")
    assert found["message"] == (
        f"The prompt equals a cached path up to token {found['position']}, where the two differ."
    )


async def test_a_reordered_tool_list_is_visible(serve: Serve) -> None:
    client = await serve()
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {}}}
        for name in ("search_flights", "book_seat")
    ]
    await chat(client, "Help.", "hi", tools=tools)
    answer = await chat(client, "Help.", "hi", tools=tools[::-1])
    found = (await explain(client, answer["id"]))["window"]
    assert found["prompt"]["after"].startswith("book_seat")
    assert found["cached"]["after"].startswith("search_flights")


async def test_a_rewritten_earlier_turn_is_visible(serve: Serve) -> None:
    client = await serve()
    history = [
        {"role": "user", "content": "What is 2+2?"},
        {"role": "assistant", "content": "<think>An easy one.</think>It is 4."},
        {"role": "user", "content": "And 3+3?"},
    ]
    await ask(client, CHAT, messages=history)
    history[1] = {"role": "assistant", "content": "It is 4."}
    answer = await ask(client, CHAT, messages=history)
    found = (await explain(client, answer["id"]))["window"]
    assert found["prompt"]["before"].endswith("<|im_start|>assistant\n")
    assert found["prompt"]["after"].startswith("It is 4.<|im_end|>\n")
    assert found["cached"]["after"].startswith("<think>An easy one.</think>")


async def test_a_flush_is_named_as_the_cause(serve: Serve) -> None:
    client = await serve()
    await ask(client, COMPLETIONS, prompt="y" * 40)
    assert (await client.post("/admin/cache/flush")).status == 200
    answer = await ask(client, COMPLETIONS, prompt="y" * 40)
    found = await explain(client, answer["id"])
    assert (found["reason"], found["evicted"]["by"]) == ("evicted", "flush")
    assert 0 <= found["evicted"]["seconds_ago"] < 60
    assert "dropped by a flush" in found["message"]


async def test_another_namespace_is_named_only_when_asked(serve: Serve) -> None:
    client = await serve(api_key="sesame")
    headers = {"Authorization": "Bearer sesame"}
    await ask(client, COMPLETIONS, headers, prompt="z" * 40, cache_salt="mine")
    answer = await ask(client, COMPLETIONS, headers, prompt="z" * 40)
    url = f"{EXPLAIN}/{answer['id']}"
    found = await (await client.get(url, headers=headers)).json()
    assert found["reason"] == "other_namespace"
    assert "mine" not in json.dumps(found)
    found = await (await client.get(url, headers=headers, params={"reveal": "true"})).json()
    assert found["other_namespace"].endswith("/mine")


async def test_a_prompt_is_explained_without_running_it(serve: Serve) -> None:
    client = await serve()
    await chat(client, "Be kind.", "hello there, how are you?")
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hello there, who are you?"},
    ]
    response = await client.post(EXPLAIN, json={"messages": messages})
    found = await response.json()
    assert found["reason"] == "diverged"
    assert found["window"]["prompt"]["after"].startswith("who are you?")
    assert found["window"]["cached"]["after"].startswith("how are you?")
    text = (await (await client.post(EXPLAIN, json={"prompt": "<|im_start|>system\n"})).json())[
        "hit"
    ]
    ids = FakeTokenizer().encode("<|im_start|>system\n")
    assert (await (await client.post(EXPLAIN, json={"prompt": ids})).json())["hit"] == text
    salted = await client.post(EXPLAIN, json={"messages": messages, "cache_salt": "s"})
    assert (await salted.json())["hit"]["tokens"] == 0
    stats = await (await client.get("/admin/cache")).json()
    assert stats["requests"]["admitted"] == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [5, 10**6]}, "prompt"),
        ({"prompt": "a" * 3000}, "prompt"),
        ({"messages": []}, "messages"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": 5}, "prompt"),
    ],
)
async def test_a_prompt_that_cannot_be_explained_is_refused(
    serve: Serve, body: Any, param: str
) -> None:
    response = await (await serve()).post(EXPLAIN, json=body)
    assert response.status == 400
    assert (await response.json())["error"]["param"] == param


async def test_misses_are_listed_latest_first(serve: Serve) -> None:
    client = await serve()
    ids = [(await ask(client, COMPLETIONS, prompt=p * 40))["id"] for p in ("a", "b", "a", "c")]
    listed = await (await client.get("/admin/cache/misses")).json()
    names = [f"cmpl-{entry['request']}" for entry in listed["data"]]
    assert (listed["object"], names) == ("list", [ids[3], ids[1], ids[0]])
    listed = await (await client.get("/admin/cache/misses", params={"limit": 1})).json()
    assert [f"cmpl-{entry['request']}" for entry in listed["data"]] == [ids[3]]


async def test_the_tree_is_shown_with_texts(serve: Serve) -> None:
    client = await serve()
    for user in ("one", "two", "three"):
        await chat(client, "You are a helpful agent for travel.", user)
    await ask(client, COMPLETIONS, prompt="salted prompt, long enough", cache_salt="s/1")
    report = await (await client.get("/admin/cache/tree")).json()
    assert (report["object"], report["block_size"]) == ("cache.tree", 16)
    assert [e["namespace"] for e in report["namespaces"]] == ["/s%2F1", "default"]
    (top,) = report["namespaces"][1]["children"]
    assert top["text"].startswith("<|im_start|>system\nYou are")
    assert top["hits"] == 2
    query = {"namespace": "default", "depth": 1}
    report = await (await client.get("/admin/cache/tree", params=query)).json()
    assert [e["namespace"] for e in report["namespaces"]] == ["default"]
    assert report["namespaces"][0]["children"][0]["elided_children"] > 0


async def test_the_tree_shows_where_the_callers_sessions_end(serve: Serve) -> None:
    client = await serve()
    session = (await (await client.post("/v1/sessions")).json())["id"]
    await ask(client, f"/v1/sessions/{session}/messages", content="a question")
    report = await (await client.get("/admin/cache/tree", params={"depth": 64})).json()
    entries = report["namespaces"][0]["children"]
    found = []
    while entries:
        node = entries.pop()
        found += node["sessions"]
        entries += node["children"]
    assert found == [session]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/admin/cache/tree?depth=0", 400),
        ("/admin/cache/tree?breadth=1001", 400),
        ("/admin/cache/tree?depth=x", 400),
        ("/admin/cache/tree?namespace=nobody", 400),
        ("/admin/cache/misses?limit=0", 400),
        (f"{EXPLAIN}/unknown", 404),
        (f"{EXPLAIN}/x?index=-1", 400),
    ],
)
async def test_what_cannot_be_shown_is_refused(serve: Serve, path: str, status: int) -> None:
    response = await (await serve()).get(path)
    assert response.status == status
    assert set((await response.json())["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ["/admin/cache/tree", "/admin/cache/misses", f"{EXPLAIN}/x"])
async def test_the_key_is_wanted(serve: Serve, path: str) -> None:
    client = await serve(api_key="sesame")
    assert (await client.get(path)).status == 401
    assert (await client.post(EXPLAIN, json={"prompt": "a"})).status == 401


def test_request_ids_are_bounded_and_the_later_one_wins() -> None:
    names = RequestIds(capacity=4)
    names.remember("g1", 1, "client")
    names.remember("g2", 2, "client")
    assert names.resolve("client", 1) == "g2-1"
    assert (names.resolve("cmpl-g1"), names.resolve("chatcmpl-g2")) == ("g1", "g2-0")
    names.remember("g3", 3, "a", "b")
    assert names.resolve("g2", 0) == "g2", "forgotten, and so taken for an engine's name"
    assert names.resolve("b", 2) == "g3-2"
