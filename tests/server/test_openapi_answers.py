"""Answers of every route, held to the OpenAPI document: whole, streamed, and errors."""

from __future__ import annotations

import copy
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fakes import make_engine
from openapi_checks import CheckedClient
from server_fakes import END, STOP, FakeEngine, FakeTokenizer, hermes

from radixkv.engine import AsyncEngine
from radixkv.server import create_app
from radixkv.server.openapi import document
from radixkv.server.openapi_routes import ROUTES

HELLO = [{"role": "user", "content": "hello"}]
SHORT = {"max_tokens": 4, "ignore_eos": True, "temperature": 0}
CHAT = "/v1/chat/completions"
PROMPT = "x" * 64  # four blocks
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"name": "add", "parameters": {"type": "object"}}
STREAM = {"stream": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}

Api = CheckedClient
DOCUMENT = document(create_app(FakeEngine()))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(FakeTokenizer(hermes, supports_tools=True, chat_template="<tool_call>"))


@pytest.fixture
async def fake(client: Any) -> Api:
    """A server whose model says what it is told to."""
    return checked(client)


@pytest.fixture
async def real(make_client: Any) -> Api:
    """A server with a real cache."""
    engine = make_engine(
        256, 16, max_num_batched_tokens=256, eos_token_ids=(END, STOP), max_model_len=900
    )
    engine.cache.pins.max_blocks = 64
    engine.tokenizer = tokenizer = FakeTokenizer()
    return checked(await make_client(AsyncEngine(engine, tokenizer, model_name="real")))


def checked(client: Any) -> Api:
    return Api(client, DOCUMENT)


def say(engine: FakeEngine, text: str) -> None:
    engine.script = [*text.encode(), STOP]


# --- what each route answers on success ---------------------------------------------------------


async def session_of(api: Api, *turns: str, **fields: Any) -> str:
    """Open a session and answer the turns; return its path."""
    session = await api.post("/v1/sessions", json={"system": "s" * 64, **fields})
    path = f"/v1/sessions/{session['id']}"
    for turn in turns:
        await api.post(f"{path}/messages", json={**SHORT, "content": turn})
    return path


async def response_of(api: Api) -> str:
    response = await api.post("/v1/responses", json={"input": "hello", "max_output_tokens": 2})
    return f"/v1/responses/{response['id']}"


async def chat(api: Api) -> None:
    for extra in ({}, {"logprobs": True, "top_logprobs": 2, "n": 2}, STREAM, USAGE):
        await api.post(CHAT, json={**SHORT, "messages": HELLO, **extra})
    usage = {"include_usage": True, "continuous_usage_stats": True}
    body = {**SHORT, "messages": HELLO, "stream": True, "stream_options": usage, "logprobs": True}
    await api.post(CHAT, json=body)
    await api.post(CHAT, json={**SHORT, "messages": HELLO, "stop_token_ids": [*range(97, 123)]})
    for extra in ({}, STREAM):
        body = {**SHORT, "messages": HELLO, "session_id": "mine", **extra}
        await api.post(CHAT, json=body)


async def completions(api: Api) -> None:
    for extra in ({}, {"logprobs": 2, "n": 2}, STREAM, {**USAGE, "logprobs": 1}, {"echo": True}):
        await api.post("/v1/completions", json={**SHORT, "prompt": ["a", "b"], **extra})


async def messages(api: Api) -> None:
    for extra in ({}, STREAM, {"cache_control": {"type": "ephemeral"}}):
        body = {"messages": HELLO, "max_tokens": 4, "ignore_eos": True, **extra}
        await api.post("/v1/messages", json=body)


async def responses(api: Api) -> None:
    for extra in ({}, STREAM, {"max_output_tokens": 1}, {**STREAM, "max_output_tokens": 1}):
        await api.post("/v1/responses", json={"input": "hello", "max_output_tokens": 40, **extra})


async def turn(api: Api) -> None:
    path = await session_of(api, "hello")
    for extra in (STREAM, USAGE):
        await api.post(f"{path}/messages", json={**SHORT, "content": "and?", **extra})


async def explained(api: Api) -> None:
    """A miss of every kind that one engine shows."""
    for prompt in (PROMPT, PROMPT, PROMPT[:20] + "y" * 40, "z"):
        answer = await api.post("/v1/completions", json={**SHORT, "prompt": prompt})
        await api.get(f"/admin/cache/explain/{answer['id']}?index=0&reveal=true")
    path = await session_of(api, "hello", "again")
    await api.get(f"/admin/cache/explain/{path.rpartition('/')[2]}")


async def misses(api: Api) -> None:
    await explained(api)
    assert len((await api.get("/admin/cache/misses?limit=3&reveal=1"))["data"]) == 3


async def tree(api: Api) -> None:
    await session_of(api, "hello", "again")
    await api.post("/v1/completions", json={**SHORT, "prompt": PROMPT, "cache_salt": "a"})
    report = await api.get("/admin/cache/tree?depth=3&breadth=5")
    assert len(report["namespaces"]) == 2
    await api.get("/admin/cache/tree?namespace=default")


async def pin_prompt(api: Api) -> None:
    await api.post("/v1/completions", json={**SHORT, "prompt": PROMPT})
    pin = await api.post("/admin/cache/pin", json={"prompt": PROMPT, "ttl_seconds": 60})
    path = await session_of(api, "hello")
    session = path.rpartition("/")[2]
    await api.post("/admin/cache/pin", json={"session": session})
    assert len((await api.get("/admin/cache/pins"))["data"]) >= 2
    await api.delete(f"/admin/cache/pin/{pin['id']}")


async def pin_session(api: Api) -> None:
    path = await session_of(api, "hello")
    await api.post(f"{path}/pin")
    assert (await api.post(f"{path}/unpin"))["unpinned"]


async def warm(api: Api) -> None:
    await api.post("/admin/cache/warm", json={"prompt": PROMPT})
    await api.post("/admin/cache/warm", json={"prompt": PROMPT, "ttl_seconds": 9})


async def flush(api: Api) -> None:
    await api.post("/admin/cache/flush")
    await api.post("/admin/cache/flush", json={"cache_salt": "a"})


async def sessions(api: Api) -> None:
    path = await session_of(api, "hello", metadata={"a": "b"})
    await session_of(api)
    await api.post("/v1/sessions")
    listed = await api.get("/v1/sessions?limit=1")
    assert listed["has_more"]
    await api.get(f"/v1/sessions?after={listed['data'][0]['id']}")
    await api.get(path)
    assert len((await api.get(f"{path}/messages"))["data"]) == 2
    await api.post(f"{path}/fork", json={"at_turn": 1})
    await api.post(f"{path}/fork")
    assert (await api.post(f"{path}/rollback", json={"to_turn": 0}))["num_turns"] == 0
    await api.get("/admin/sessions?limit=2&order=tokens")
    await api.delete(path)


async def stored(api: Api) -> None:
    path = await response_of(api)
    await api.get(path)
    assert len((await api.get(f"{path}/input_items?order=asc&limit=5"))["data"]) == 1
    await api.post(f"{path}/cancel", status=400)
    await api.delete(path)


async def tokens(api: Api) -> None:
    body = {"prompt": "hello", "return_token_strs": True}
    found = await api.post("/tokenize", json=body)
    assert (await api.post("/detokenize", json={"tokens": found["tokens"]}))["prompt"] == "hello"
    await api.post("/tokenize", json={"messages": HELLO})


async def reports(api: Api) -> None:
    await session_of(api, "hello")
    for path in ("cache", "engine", "check", "timeline"):
        await api.get(f"/admin/{path}")
    assert "radixkv" in await api.get("/metrics")


async def requests(api: Api) -> None:
    answer = await api.post("/v1/completions", json={**SHORT, "prompt": PROMPT})
    await api.get(f"/admin/requests/{answer['id']}?index=0")
    assert (await api.get("/admin/requests?limit=2&state=finished"))["recent"]


async def page(api: Api) -> None:
    await api.get("/admin", status=308)
    names = re.findall(r'"assets/([^"]+)"', await api.get("/admin/"))
    assert names
    await api.get(f"/admin/assets/{names[0]}")


def plain(method: str, path: str, **options: Any) -> Callable[[Api], Awaitable[None]]:
    async def send(api: Api) -> None:
        await api.send(method, path, **options)

    return send


SCENARIOS: dict[str, Callable[[Api], Awaitable[None]]] = {
    "POST /v1/chat/completions": chat,
    "POST /v1/completions": completions,
    "GET /v1/models": plain("GET", "/v1/models"),
    "GET /v1/models/{model}": plain("GET", "/v1/models/real"),
    "POST /v1/responses": responses,
    "POST /v1/responses/input_tokens": plain(
        "POST", "/v1/responses/input_tokens", json={"input": "hello"}
    ),
    "GET /v1/responses/{response_id}": stored,
    "POST /v1/messages": messages,
    "POST /v1/messages/count_tokens": plain(
        "POST", "/v1/messages/count_tokens", json={"messages": HELLO}
    ),
    "POST /tokenize": tokens,
    "POST /v1/sessions": sessions,
    "POST /v1/sessions/{session_id}/messages": turn,
    "POST /v1/sessions/{session_id}/pin": pin_session,
    "GET /health": plain("GET", "/health"),
    "GET /openapi.json": plain("GET", "/openapi.json"),
    "GET /admin/cache": reports,
    "GET /admin/requests": requests,
    "GET /admin/": page,
    "GET /admin/cache/explain/{request}": explained,
    "POST /admin/cache/explain": plain("POST", "/admin/cache/explain", json={"prompt": PROMPT}),
    "GET /admin/cache/misses": misses,
    "GET /admin/cache/tree": tree,
    "POST /admin/cache/pin": pin_prompt,
    "POST /admin/cache/warm": warm,
    "POST /admin/cache/flush": flush,
    "POST /flush_cache": plain("POST", "/flush_cache"),
    "GET /flush_cache": plain("GET", "/flush_cache"),
}


async def test_answers_of_every_route_are_as_declared(real: Api) -> None:
    for scenario in dict.fromkeys(SCENARIOS.values()):
        await scenario(real)
    assert await real.get("/admin/check") == {"ok": True}
    answered = {f"{method} {path}" for method, path, _, _ in real.seen}
    assert answered == ROUTES.keys()
    streamed = {path for _, path, _, kind in real.seen if kind == "text/event-stream"}
    declared = {name.split(" ")[1] for name, route in ROUTES.items() if route.events is not None}
    assert streamed == declared


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_of_tools_are_as_declared(fake: Api, engine: FakeEngine, stream: bool) -> None:
    say(engine, "Now: " + CALL)
    options = {"stream": stream}
    tools = [{"type": "function", "function": TOOL}]
    await fake.post(CHAT, json={"messages": HELLO, "tools": tools, **options})
    tools = [{"type": "function", **TOOL}]
    await fake.post("/v1/responses", json={"input": "hello", "tools": tools, **options})
    tools = [{"name": "add", "input_schema": {"type": "object"}}]
    body = {"messages": HELLO, "tools": tools, "max_tokens": 99, **options}
    answer = await fake.post("/v1/messages", json=body)
    assert "tool_use" in str(answer)


async def test_a_rewritten_history_is_as_declared(make_client: Any) -> None:
    engine = make_engine(256, 16, eos_token_ids=(END, STOP), max_model_len=900)
    engine.tokenizer = tokenizer = FakeTokenizer(
        lambda messages, *_: "".join(f"{m['role']}: {m['content'].strip()} " for m in messages)
    )
    api = checked(await make_client(AsyncEngine(engine, tokenizer, model_name="real")))
    answer = await api.post(CHAT, json={**SHORT, "messages": HELLO})
    said = {**answer["choices"][0]["message"], "content": " edited "}
    turns = [*HELLO, said, *HELLO]
    again = await api.post(CHAT, json={**SHORT, "messages": turns})
    await api.get(f"/admin/cache/explain/{again['id']}")


ERRORS = [
    ("POST", CHAT, {"json": {}}, 400),
    ("POST", CHAT, {"json": {"messages": HELLO, "model": "other"}}, 404),
    ("POST", CHAT, {"data": b"{", "headers": {"Content-Type": "application/json"}}, 400),
    ("POST", CHAT, {"data": b"a=b", "headers": {"Content-Type": "text/plain"}}, 415),
    ("POST", CHAT, {"json": {"messages": [{"role": "user", "content": "x" * 9000}]}}, 413),
    ("POST", "/v1/completions", {"json": {"prompt": []}}, 400),
    ("POST", "/v1/messages", {"json": {}}, 400),
    ("POST", "/v1/messages", {"json": {"messages": HELLO, "max_tokens": 1, "model": "x"}}, 404),
    ("POST", "/v1/messages/count_tokens", {"json": {"messages": []}}, 400),
    ("POST", "/v1/responses", {"json": {"input": []}}, 400),
    ("GET", "/v1/responses/resp_none", {}, 404),
    ("GET", "/v1/responses/resp_none/input_items", {}, 404),
    ("GET", "/v1/models/none", {}, 404),
    ("POST", "/tokenize", {"json": {}}, 400),
    ("POST", "/detokenize", {"json": {"tokens": [-1]}}, 400),
    ("GET", "/v1/sessions?limit=0", {}, 400),
    ("GET", "/v1/sessions/sess_none", {}, 404),
    ("POST", "/v1/sessions/sess_none/messages", {"json": {"content": "a"}}, 404),
    ("POST", "/v1/sessions/sess_none/fork", {}, 404),
    ("GET", "/admin/requests?state=x", {}, 400),
    ("GET", "/admin/requests/none", {}, 404),
    ("GET", "/admin/cache/explain/none", {}, 404),
    ("GET", "/admin/cache/explain/none?index=x", {}, 400),
    ("GET", "/admin/cache/tree?depth=0", {}, 400),
    ("DELETE", "/admin/cache/pin/none", {}, 404),
    ("POST", "/admin/cache/pin", {"json": {"prompt": PROMPT}}, 404),
    ("GET", "/admin/assets/none", {}, 404),
]


@pytest.mark.parametrize(("method", "url", "options", "status"), ERRORS)
async def test_errors_are_as_declared(
    make_client: Any, method: str, url: str, options: Any, status: int
) -> None:
    engine = make_engine(64, 16, eos_token_ids=(END, STOP), max_model_len=900)
    engine.cache.pins.max_blocks = 8
    engine.tokenizer = tokenizer = FakeTokenizer()
    served = AsyncEngine(engine, tokenizer, model_name="real")
    api = checked(await make_client(served, max_body_bytes=8192))
    await api.send(method, url, status=status, **options)


async def test_a_missing_key_is_as_declared(make_client: Any) -> None:
    client = await make_client(api_key="secret")
    api = checked(client)
    for name in ROUTES:
        method, path = name.split(" ")
        if "401" in api.document["paths"][path][method.lower()]["responses"]:
            await api.send(method, path.format(**dict.fromkeys(PATHS, "x")), status=401)
    assert len({path for _, path, _, _ in api.seen}) > 30


PATHS = ("model", "response_id", "session_id", "request", "pin", "name")


async def test_failures_of_the_engine_are_as_declared(fake: Api, engine: FakeEngine) -> None:
    engine.fail_at = 1
    body = {"messages": HELLO, "max_tokens": 4}
    for url in (CHAT, "/v1/messages"):
        await fake.post(url, json=body, status=500)
        assert "error" in (await fake.post(url, json={**body, "stream": True}))[-1]
    events = await fake.post("/v1/responses", json={"input": "hello", "stream": True})
    assert events[-1]["type"] in ("error", "response.failed")


async def test_an_unfit_engine_is_as_declared(fake: Api, engine: FakeEngine) -> None:
    engine.corrupt = True
    assert not (await fake.get("/admin/check", status=500))["ok"]
    engine.dead = True
    assert (await fake.get("/health", status=503))["status"] == "dead"
    await fake.post(CHAT, json={"messages": HELLO}, status=503)


async def test_a_full_queue_is_as_declared(fake: Api, engine: FakeEngine) -> None:
    engine.max_waiting = 0
    await fake.post(CHAT, json={"messages": HELLO}, status=429)


async def test_a_busy_session_is_as_declared(make_client: Any, engine: FakeEngine) -> None:
    client = await make_client(engine)
    api = checked(client)
    path = f"/v1/sessions/{(await api.post('/v1/sessions'))['id']}"
    engine.gate.clear()
    body = {"content": "a", "stream": True, "max_tokens": 2}
    async with client.post(f"{path}/messages", json=body):
        await api.post(f"{path}/messages", json={"content": "b"}, status=409)
        engine.gate.set()


async def test_a_field_that_nobody_declared_is_noticed(fake: Api) -> None:
    narrow = copy.deepcopy(DOCUMENT)
    schema = narrow["components"]["schemas"]["Health"]
    closed = {
        **schema,
        "properties": {k: v for k, v in schema["properties"].items() if k != "loop"},
    }
    closed["required"] = [name for name in schema["required"] if name != "loop"]
    narrow["components"]["schemas"]["Health"] = closed
    await fake.get("/health")
    with pytest.raises(AssertionError, match="loop"):
        await Api(fake.client, narrow).get("/health")
