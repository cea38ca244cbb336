"""Pins, warming and flushes over HTTP, over the real engine with a fake model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fakes import make_engine
from server_fakes import END, STOP, FakeTokenizer
from test_admin import scrape

from radixkv.cache import RadixCache
from radixkv.engine import AsyncEngine

PIN, PINS, WARM = "/admin/cache/pin", "/admin/cache/pins", "/admin/cache/warm"
FLUSH = "/admin/cache/flush"
FIELDS = {"max_tokens": 4, "ignore_eos": True, "temperature": 0}
PROMPT = "x" * 64  # four blocks

Serve = Callable[..., Awaitable[tuple[Any, RadixCache]]]


@pytest.fixture
def serve(make_client: Any) -> Serve:
    async def start(num_blocks: int = 64, pin_share: float = 0.5, **options: Any) -> Any:
        engine = make_engine(
            num_blocks, 16, max_num_batched_tokens=256, eos_token_ids=(END, STOP), max_model_len=900
        )
        engine.cache.pins.max_blocks = int(pin_share * num_blocks)
        served = AsyncEngine(engine, FakeTokenizer(), model_name="real")  # type: ignore[arg-type]
        return await make_client(served, **options), engine.cache

    return start


async def post(client: Any, url: str, body: Any = None, status: int = 200) -> Any:
    response = await client.post(url, json=body)
    assert response.status == status, await response.text()
    assert await (await client.get("/admin/check")).json() == {"ok": True}
    return await response.json()


async def complete(client: Any, prompt: Any, **fields: Any) -> int:
    """Run a prompt; return its cached tokens."""
    answer = await post(client, "/v1/completions", {**FIELDS, "prompt": prompt, **fields})
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def pins_of(client: Any) -> list[Any]:
    return list((await (await client.get(PINS)).json())["data"])


async def fill(client: Any, count: int) -> None:
    """Push other prompts of 14 blocks each through the cache."""
    for i in range(count):
        await complete(client, [i + 1] * 224)


async def open_session(client: Any, *turns: str) -> str:
    session = str((await post(client, "/v1/sessions"))["id"])
    for content in turns:
        await post(client, f"/v1/sessions/{session}/messages", {**FIELDS, "content": content})
    return session


async def test_a_pinned_prompt_outlives_others_and_an_unpinned_one_does_not(serve: Serve) -> None:
    client, _ = await serve()
    await complete(client, PROMPT)
    pin = await post(client, PIN, {"prompt": PROMPT, "ttl_seconds": 600})
    assert pin["object"] == "cache.pin"
    assert (pin["pinned_tokens"], pin["pinned_blocks"], pin["prompt_tokens"]) == (64, 4, 64)
    assert (pin["ttl_seconds"], pin["namespace"], pin["source"]) == (600, "default", "prompt")
    await fill(client, 10)
    assert await complete(client, PROMPT) == 63
    assert [p["id"] for p in await pins_of(client)] == [pin["id"]]
    gone = await client.delete(f"{PIN}/{pin['id']}")
    assert await gone.json() == {"id": pin["id"], "object": "cache.pin.deleted", "deleted": True}
    await fill(client, 10)
    assert await complete(client, PROMPT) == 0
    assert await pins_of(client) == []


async def test_a_prompt_is_pinned_by_ids_messages_and_salt(serve: Serve) -> None:
    client, _ = await serve()
    messages = [{"role": "user", "content": "a question that is long enough"}]
    await post(client, "/v1/chat/completions", {**FIELDS, "messages": messages})
    await complete(client, PROMPT, cache_salt="s/1")
    by_messages = await post(client, PIN, {"messages": messages})
    assert by_messages["pinned_tokens"] > 0
    assert by_messages["ttl_seconds"] == 3600
    by_salt = await post(client, PIN, {"prompt": list(PROMPT.encode()), "cache_salt": "s/1"})
    assert (by_salt["namespace"], by_salt["pinned_tokens"]) == ("/s%2F1", 64)
    by_label = await post(client, PIN, {"prompt": PROMPT, "namespace": "/s%2F1"})
    assert by_label["namespace"] == "/s%2F1"
    assert by_label["id"] != by_salt["id"]
    missing = await post(client, PIN, {"prompt": PROMPT}, 404)
    assert missing["error"]["code"] == "not_cached"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [5, 10**6]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"prompt": "never seen, never computed"}, 404, "prompt"),
        ({"prompt": PROMPT, "ttl_seconds": 0}, 400, "ttl_seconds"),
        ({"prompt": PROMPT, "ttl_seconds": -3.5}, 400, "ttl_seconds"),
        ({"prompt": PROMPT, "ttl_seconds": 604801}, 400, "ttl_seconds"),
        ({"prompt": PROMPT, "ttl_seconds": 10**30}, 400, "ttl_seconds"),
        ({"prompt": PROMPT, "ttl_seconds": "60"}, 400, "ttl_seconds"),
        ({"prompt": PROMPT, "ttl_seconds": True}, 400, "ttl_seconds"),
        ({"prompt": PROMPT, "cache_salt": ""}, 400, "cache_salt"),
        ({"prompt": PROMPT, "namespace": ""}, 400, "namespace"),
        ({"prompt": PROMPT, "namespace": "a/b", "cache_salt": "b"}, 400, "namespace"),
        ({"session": "sess_none"}, 404, "session_id"),
        ({"session": "sess_none", "prompt": PROMPT}, 400, "session"),
    ],
)
async def test_a_pin_that_cannot_be_made_is_refused(
    serve: Serve, body: Any, status: int, param: str
) -> None:
    client, _ = await serve()
    error = (await post(client, PIN, body, status))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert await pins_of(client) == []


@pytest.mark.parametrize("name", ["pin_0", "pin_", "pin_-1", "0", "pin_1e3", "pin_" + "9" * 30])
async def test_an_unknown_pin_is_not_found(serve: Serve, name: str) -> None:
    client, _ = await serve()
    response = await client.delete(f"{PIN}/{name}")
    assert response.status == 404
    assert (await response.json())["error"]["code"] == "not_found"


async def test_pins_keep_to_their_budget_and_lapses_are_counted(serve: Serve) -> None:
    client, _ = await serve(pin_share=0.25)  # 16 blocks
    pinned = []
    for i in range(4):
        prompt = [i + 1] * 96  # six blocks
        await complete(client, prompt)
        pinned.append((await post(client, PIN, {"prompt": prompt}))["id"])
    report = await (await client.get(PINS)).json()
    assert [p["id"] for p in report["data"]] == [pinned[3], pinned[2]]
    usage = {"count": 2, "blocks": 12, "max_blocks": 16, "expired": 0, "lapsed": 2}
    assert report["usage"] == usage
    assert (await (await client.get("/admin/cache")).json())["pins"] == usage
    samples = await scrape(client)
    assert samples["radixkv:pinned_blocks", ""] == 12
    assert samples["radixkv:pin_budget_blocks", ""] == 16
    assert samples["radixkv:pins_lapsed_total", ""] == 2


async def test_pins_expire_and_a_use_restarts_their_time(serve: Serve) -> None:
    client, cache = await serve()
    now = 1000.0
    cache.clock = lambda: now
    await complete(client, PROMPT)
    await post(client, PIN, {"prompt": PROMPT, "ttl_seconds": 60})
    now += 50
    await complete(client, PROMPT + "y" * 16)
    now += 50
    assert len(await pins_of(client)) == 1
    now += 20
    assert await pins_of(client) == []
    assert (await (await client.get("/admin/cache")).json())["pins"]["expired"] == 1


async def test_pins_never_keep_a_request_from_running(serve: Serve) -> None:
    client, _ = await serve(num_blocks=24, pin_share=0.9)
    await complete(client, PROMPT * 4)
    await post(client, PIN, {"prompt": PROMPT * 4})
    assert await complete(client, [7] * 300) == 0
    assert (await (await client.get("/admin/cache")).json())["pins"]["lapsed"] == 1


async def test_pins_can_be_off(serve: Serve) -> None:
    client, _ = await serve(pin_share=0.0)
    assert await complete(client, PROMPT, cache_pin_ttl=60) == 0
    error = (await post(client, PIN, {"prompt": PROMPT}, 400))["error"]
    assert error["code"] == "pins_off"
    assert "--pin-share" in error["message"]


async def test_a_request_pins_its_prompt_once_however_often_it_comes(serve: Serve) -> None:
    client, _ = await serve()
    for ttl in (100, 500, 20):
        await complete(client, PROMPT, cache_pin_ttl=ttl)
    (pin,) = await pins_of(client)
    assert pin["source"].startswith("request ")
    assert (pin["pinned_tokens"], pin["ttl_seconds"]) == (64, 500)
    await fill(client, 10)
    assert await complete(client, PROMPT) == 63


async def test_a_request_without_a_whole_block_pins_nothing(serve: Serve) -> None:
    client, _ = await serve()
    await complete(client, "short", cache_pin_ttl=60)
    assert await pins_of(client) == []


@pytest.mark.parametrize("url", ["/v1/completions", "/v1/chat/completions", "session"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cache_pin_ttl", 0),
        ("cache_pin_ttl", 604801),
        ("cache_pin_ttl", "60"),
        ("cache_pin_ttl", 10**30),
        ("cache_priority", -1),
        ("cache_priority", 1001),
        ("cache_priority", 1.5),
        ("cache_priority", True),
    ],
)
async def test_fields_out_of_range_are_refused_by_name(
    serve: Serve, url: str, field: str, value: Any
) -> None:
    client, _ = await serve()
    body: dict[str, Any] = {**FIELDS, field: value}
    if url == "session":
        url, body["content"] = f"/v1/sessions/{await open_session(client)}/messages", "hi"
    elif "chat" in url:
        body["messages"] = [{"role": "user", "content": "hi"}]
    else:
        body["prompt"] = "hi"
    error = (await post(client, url, body, 400))["error"]
    assert error["param"] == field
    assert field in error["message"]


async def test_priority_reaches_the_tree(serve: Serve) -> None:
    client, cache = await serve()
    await complete(client, PROMPT, cache_priority=7)
    await complete(client, [3] * 64)
    found = {node.priority for node in cache.tree.nodes() if node.tokens[:1] == b"x"}
    others = {node.priority for node in cache.tree.nodes() if node.tokens[:1] == b"\3"}
    assert (found, others) == ({7}, {0})


async def test_a_session_is_pinned_again_in_the_place_of_its_last_pin(serve: Serve) -> None:
    client, _ = await serve()
    session = await open_session(client, "a question of some length")
    url = f"/v1/sessions/{session}"
    first = await post(client, f"{url}/pin", {"ttl_seconds": 60})
    assert (first["session"], first["source"]) == (session, f"session {session}")
    await post(client, f"{url}/messages", {**FIELDS, "content": "another one, also long"})
    second = await post(client, PIN, {"session": session, "ttl_seconds": 90})
    assert second["pinned_tokens"] > first["pinned_tokens"]
    assert [(p["id"], p["ttl_seconds"]) for p in await pins_of(client)] == [(second["id"], 90)]
    for unpinned in (True, False):
        answer = await post(client, f"{url}/unpin")
        assert answer == {"id": session, "object": "session.unpinned", "unpinned": unpinned}
    assert await pins_of(client) == []


async def test_a_deleted_session_leaves_no_pin(serve: Serve) -> None:
    client, _ = await serve()
    session = await open_session(client, "a question of some length")
    await post(client, f"/v1/sessions/{session}/pin")
    assert (await client.delete(f"/v1/sessions/{session}")).status == 200
    assert await pins_of(client) == []
    assert (await post(client, f"/v1/sessions/{session}/pin", {}, 404))["error"]["code"] == (
        "session_not_found"
    )


async def test_a_session_without_turns_cannot_be_pinned(serve: Serve) -> None:
    client, _ = await serve()
    session = await open_session(client)
    error = (await post(client, f"/v1/sessions/{session}/pin", {"ttl_seconds": 5}, 404))["error"]
    assert (error["code"], error["param"]) == ("not_cached", "session")
    refused = await post(client, f"/v1/sessions/{session}/pin", {"ttl_seconds": 0}, 400)
    assert refused["error"]["param"] == "ttl_seconds"


async def test_a_warmed_prompt_is_there_and_pinned_if_asked(serve: Serve) -> None:
    client, _ = await serve()
    answer = await post(client, WARM, {"prompt": PROMPT, "ttl_seconds": 60, "cache_salt": "s"})
    assert (answer["prompt_tokens"], answer["computed_tokens"], answer["cached_tokens"]) == (
        64, 64, 0,
    )  # fmt: skip
    assert answer["namespace"] == "/s"
    assert answer["pin"]["pinned_tokens"] == 64
    assert [p["id"] for p in await pins_of(client)] == [answer["pin"]["id"]]
    assert await complete(client, PROMPT, cache_salt="s") == 63
    messages = [{"role": "user", "content": "a question that is long enough"}]
    again = await post(client, WARM, {"messages": messages, "namespace": "/other"})
    assert (again["namespace"], again["pin"]) == ("/other", None)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a" * 900}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"messages": []}, "messages"),
        ({"prompt": "a", "ttl_seconds": 0}, "ttl_seconds"),
        ({"prompt": "a", "cache_priority": 1001}, "cache_priority"),
        ({"prompt": "a", "namespace": "a", "cache_salt": "a"}, "namespace"),
    ],
)
async def test_a_prompt_that_cannot_be_warmed_is_refused(
    serve: Serve, body: Any, param: str
) -> None:
    client, _ = await serve()
    assert (await post(client, WARM, body, 400))["error"]["param"] == param


async def test_one_namespace_is_flushed_with_its_pins_and_no_other(serve: Serve) -> None:
    client, _ = await serve()
    for salt in ("a", "b"):
        await complete(client, PROMPT, cache_salt=salt)
        await post(client, PIN, {"prompt": PROMPT, "cache_salt": salt})
    flushed = await post(client, FLUSH, {"cache_salt": "a"})
    # Four blocks, and the answer's tail.
    assert flushed == {"success": True, "namespace": "/a", "freed_blocks": 5}
    assert [p["namespace"] for p in await pins_of(client)] == ["/b"]
    assert await complete(client, PROMPT, cache_salt="a") == 0
    assert await complete(client, PROMPT, cache_salt="b") == 63
    nothing = await post(client, FLUSH, {"namespace": "never/seen"})
    assert nothing["freed_blocks"] == 0
    refused = await post(client, FLUSH, {"namespace": "/a", "cache_salt": "a"}, 400)
    assert refused["error"]["param"] == "namespace"


async def test_a_namespace_in_use_is_not_flushed(serve: Serve) -> None:
    client, cache = await serve()
    await complete(client, PROMPT, cache_salt="a")
    sequence = cache.create_sequence(list(PROMPT.encode()), ("", "a"))
    sequence.reuse()
    error = (await post(client, FLUSH, {"cache_salt": "a"}, 409))["error"]
    assert error["code"] == "busy"
    assert (await post(client, FLUSH, {"cache_salt": "b"}))["freed_blocks"] == 0
    sequence.free()
    assert (await post(client, FLUSH, {"cache_salt": "a"}))["freed_blocks"] == 5


@pytest.mark.parametrize(("method", "url"), [("post", FLUSH), ("post", "/flush_cache"),
                                             ("get", "/flush_cache")])  # fmt: skip
async def test_a_flush_of_all_drops_pins_too(serve: Serve, method: str, url: str) -> None:
    client, cache = await serve()
    await complete(client, PROMPT)
    await post(client, PIN, {"prompt": PROMPT})
    answer = await (await getattr(client, method)(url)).json()
    assert answer == {"success": True, "freed_blocks": 5}
    assert await pins_of(client) == []
    assert cache.num_free_blocks == cache.num_blocks
    cache.check_integrity()


@pytest.mark.parametrize(
    ("method", "url"),
    [
        ("get", PINS),
        ("post", PIN),
        ("post", WARM),
        ("post", FLUSH),
        ("get", "/flush_cache"),
        ("delete", f"{PIN}/pin_0"),
        ("post", "/v1/sessions/x/pin"),
        ("post", "/v1/sessions/x/unpin"),
    ],
)
async def test_the_key_is_wanted(serve: Serve, method: str, url: str) -> None:
    client, _ = await serve(api_key="sesame")
    response = await getattr(client, method)(url)
    assert response.status == 401
