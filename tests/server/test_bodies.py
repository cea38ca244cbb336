from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import pytest
from server_fakes import FakeEngine

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
JSON = {"Content-Type": "application/json"}
DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m", x}',
        b"",
        b"[]",
        b"null",
        b'{"messages":[{"role":"user","content":"\xff"}]}',
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        DEEP,
        b'{"messages":' + DEEP,
        b'{"unknown":' + DEEP + b"]" * 100_000 + b"}",
        b'{"messages":[],"tools":[{"a":' + DEEP,
        b'{"messages":[],"response_format":{"a":' + DEEP,
    ],
    ids=lambda body: repr(body[:24]),
)
async def test_malformed_body_is_a_400_in_openai_form(client: Any, body: bytes) -> None:
    for url in (CHAT, COMPLETIONS):
        response = await client.post(url, data=body, headers=JSON)
        error = (await response.json())["error"]
        assert response.status == 400
        assert set(error) == {"message", "type", "param", "code"}
    plain = {"prompt": [1, 2], "max_tokens": 1}
    assert (await client.post(COMPLETIONS, json=plain)).status == 200


async def test_wrong_content_type_is_refused_and_a_missing_one_is_json(client: Any) -> None:
    body = json.dumps({"prompt": [1], "max_tokens": 1}).encode()
    wrong = await client.post(COMPLETIONS, data=body, headers={"Content-Type": "text/plain"})
    assert wrong.status == 415
    assert "application/json" in (await wrong.json())["error"]["message"]
    none = await client.post(COMPLETIONS, data=body, skip_auto_headers=["Content-Type"])
    assert none.status == 200


@pytest.mark.parametrize("size", [1_200_000, 5_000_000])
async def test_long_history_is_accepted(make_client: Any, size: int) -> None:
    engine = FakeEngine(max_model_len=6_000_000)
    client = await make_client(engine)
    body = {"messages": [{"role": "user", "content": "x" * size}], "max_tokens": 1}
    data = io.BytesIO(json.dumps(body).encode())
    response = await client.post(CHAT, data=data, headers=JSON)
    assert response.status == 200, await response.text()
    assert len(engine.submitted[0].prompt) > size


@pytest.mark.parametrize("chunked", [False, True])
async def test_body_one_byte_over_the_limit_is_a_413(make_client: Any, chunked: bool) -> None:
    client = await make_client(max_body_bytes=1000)
    frame = len(b'{"prompt":""}')

    async def post(size: int) -> Any:
        body = b'{"prompt":"%b"}' % (b"x" * (size - frame))

        async def pieces() -> Any:
            yield body[:500]
            yield body[500:]

        return await client.post(COMPLETIONS, data=pieces() if chunked else body, headers=JSON)

    assert (await post(1000)).status == 200
    refused = await post(1001)
    assert refused.status == 413
    assert refused.content_type == "application/json"
    assert "1000 bytes" in (await refused.json())["error"]["message"]


async def test_body_that_never_arrives_is_a_408(make_client: Any) -> None:
    client = await make_client(body_timeout_s=0.1)
    reader, writer = await asyncio.open_connection(client.host, client.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 100\r\n\r\n{"
    )
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    assert b" 408 " in head
    assert b"application/json" in head
    writer.close()
    await writer.wait_closed()


async def test_unknown_model_is_a_404(client: Any) -> None:
    for url, body in (
        (CHAT, {"messages": [{"role": "user", "content": "x"}]}),
        (COMPLETIONS, {"prompt": "x"}),
        ("/v1/sessions", {}),
    ):
        response = await client.post(url, json={**body, "model": "other"})
        error = (await response.json())["error"]
        assert response.status == 404
        assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", CHAT, 405), ("POST", "/health", 405)],
)
async def test_unknown_route_or_method_has_openai_form(
    client: Any, method: str, path: str, status: int
) -> None:
    response = await client.request(method, path)
    assert response.status == status
    assert "message" in (await response.json())["error"]
    assert ("Allow" in response.headers) == (status == 405)
