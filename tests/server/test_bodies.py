from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import pytest
from server_fakes import FakeEngine

from radixkv.server import body as bodies
from radixkv.server.errors import ApiError, error_response

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
JSON = {"Content-Type": "application/json"}
DEEP = b"[" * 100_000


async def refusal(client: Any, data: bytes) -> Any:
    response = await client.post(COMPLETIONS, data=data, headers=JSON)
    assert response.status == 400
    return (await response.json())["error"]


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


@pytest.mark.parametrize(
    "content_type",
    ["application/json; charset=utf-8", "Application/JSON; charset=UTF8", "application/json;x=y"],
)
async def test_json_in_utf8_may_say_so_and_other_charsets_are_refused(
    client: Any, content_type: str
) -> None:
    body = json.dumps({"prompt": [1], "max_tokens": 1}).encode()
    good = await client.post(COMPLETIONS, data=body, headers={"Content-Type": content_type})
    assert good.status == 200
    other = {"Content-Type": "application/json; charset=latin-1"}
    refused = await client.post(COMPLETIONS, data=body, headers=other)
    assert refused.status == 415


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt":[1],"prompt":[2]}', "prompt"),
        (b'{"prompt":[1],"pr\\u006fmpt":[2]}', "prompt"),
        (b'{"prompt":[1],"logit_bias":{"5":1,"5":2}}', "5"),
        (b'{"prompt":[1],"unknown":{"a":[{"b":1,"b":1}]}}', "b"),
    ],
)
async def test_a_name_that_occurs_twice_is_refused(client: Any, body: bytes, param: str) -> None:
    error = await refusal(client, body)
    assert (error["code"], error["param"]) == ("duplicate_field", param)


@pytest.mark.parametrize("field", ["response_format", "guided_json", "metadata_x"])
async def test_nesting_is_bounded_and_the_field_named(client: Any, field: str) -> None:
    def nested(levels: int) -> bytes:
        value = b'{"a":' * levels + b"1" + b"}" * levels
        # Brackets in strings are none.
        return b'{"prompt":"[[[[\\"[[","%b":%b}' % (field.encode(), value)

    error = await refusal(client, nested(128))
    assert (error["code"], error["param"]) == ("nested_too_deeply", field)
    if field == "metadata_x":
        response = await client.post(COMPLETIONS, data=nested(127), headers=JSON)
        assert response.status == 200


def test_brackets_are_counted_outside_of_strings_in_one_pass() -> None:
    assert bodies._brackets(rb'{"a[":["]\\",["\"["]]}') == b"{[[]]}"
    assert bodies._depth(b"{[[]][]}") == 3
    # From every quote anew, this would take hours.
    assert bodies._brackets(b'["' + b'\\"' * 2_000_000) == b"["


async def test_too_many_arrays_and_objects_are_refused(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MAX_CONTAINERS", 200)
    for count, refused in ((199, False), (200, True)):
        data = b'{"prompt":"x","max_tokens":1,"unknown":[%b]}' % b",".join([b"[]"] * (count - 1))
        response = await client.post(COMPLETIONS, data=data, headers=JSON)
        assert (response.status == 400) is refused


@pytest.mark.parametrize(
    ("literal", "param", "message"),
    [
        ('"temperature":3', "temperature", "temperature must be at most 2"),
        ('"top_p":0', "top_p", "top_p must be greater than 0"),
        ('"stop":["' + "x" * 1025 + '"]', "stop[0]", "stop[0] must have at most 1024 characters"),
        ('"stop":[' + '"x",' * 64 + '"x"]', "stop", "stop must have at most 64 items"),
        ('"metadata":{"a":1}', "metadata[...]", "metadata[...]: Expected `str`, got `int`"),
        ('"seed":1' + "0" * 400, "seed", "seed"),
        ('"temperature":1' + "0" * 400, "temperature", "temperature"),
        ('"max_tokens":1' + "0" * 5000, "max_tokens", "max_tokens"),
    ],
)
async def test_limits_of_fields_are_told_in_words(
    client: Any, literal: str, param: str, message: str
) -> None:
    error = await refusal(client, f'{{"prompt":"x",{literal}}}'.encode())
    assert error["param"] == param
    assert error["message"].startswith(message)


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
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/models/%ff", 404),
        ("GET", CHAT, 405),
        ("POST", "/health", 405),
    ],
)
async def test_unknown_route_or_method_has_openai_form(
    client: Any, method: str, path: str, status: int
) -> None:
    response = await client.request(method, path)
    assert response.status == status
    assert "message" in (await response.json())["error"]
    assert ("Allow" in response.headers) == (status == 405)


def test_an_error_about_bytes_that_are_no_text_can_be_written() -> None:
    response = error_response(ApiError(404, "There is no /caf\udce9"))
    assert json.loads(response.body)["error"]["message"] == "There is no /caf?"  # type: ignore[arg-type]
