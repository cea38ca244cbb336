from __future__ import annotations

from typing import Any

import pytest
from server_fakes import FakeEngine, until

CHAT = "/v1/chat/completions"
BAD = [
    ("temperature", "NaN", None),
    ("temperature", "Infinity", None),
    ("temperature", "1e999", "temperature"),
    ("temperature", "-1", "temperature"),
    ("temperature", "2.1", "temperature"),
    ("temperature", '"0.5"', "temperature"),
    ("temperature", "true", "temperature"),
    ("top_p", "0", "top_p"),
    ("top_p", "1.1", "top_p"),
    ("top_p", "NaN", None),
    ("top_k", "-2", "top_k"),
    ("min_p", "2", "min_p"),
    ("presence_penalty", "10", "presence_penalty"),
    ("frequency_penalty", "10", "frequency_penalty"),
    ("repetition_penalty", "0", "repetition_penalty"),
    ("max_tokens", "-1", "max_tokens"),
    ("max_tokens", "0", "max_tokens"),
    ("max_tokens", "1.5", "max_tokens"),
    ("max_completion_tokens", "0", "max_completion_tokens"),
    ("min_tokens", "-1", "min_tokens"),
    ("n", "0", "n"),
    ("n", "-1", "n"),
    ("n", "1000", "n"),
    ("seed", "18446744073709551616", "seed"),
    ("top_logprobs", "21", "top_logprobs"),
    ("logit_bias", '{"99999999":1}', "logit_bias"),
    ("logit_bias", '{"-1":1}', "logit_bias"),
    ("logit_bias", '{"x":1}', "logit_bias"),
    ("logit_bias", '{"5":1000}', "logit_bias"),
    ("logit_bias", '{"5":NaN}', None),
    ("logit_bias", '{"5":"1"}', "logit_bias[...]"),
    ("stop", "[" + ",".join(['"s"'] * 1000) + "]", "stop"),
    ("stop", '[""]', "stop"),
    ("stop", '""', "stop"),
    ("stop_token_ids", "[-1]", "stop_token_ids"),
    ("stop_token_ids", "[100000]", "stop_token_ids"),
    ("stream", '"yes"', "stream"),
]


async def send(client: Any, field: str, literal: str) -> Any:
    body = f'{{"messages":[{{"role":"user","content":"x"}}],"{field}":{literal}}}'
    return await client.post(CHAT, data=body, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize(("field", "literal", "param"), BAD)
async def test_bad_number_is_refused_by_name(
    client: Any, engine: FakeEngine, field: str, literal: str, param: str | None
) -> None:
    response = await send(client, field, literal)
    error = (await response.json())["error"]
    assert response.status == 400
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert not engine.submitted


@pytest.mark.parametrize(
    ("field", "literal", "value"),
    [
        ("temperature", "1e-4", 1e-4),
        ("temperature", "1e-40", 1e-40),
        ("temperature", "1", 1),
        ("max_tokens", "1e9", 10**9),
        ("max_tokens", "3.0", 3),
        ("seed", "-1", -1),
        ("stop", "null", ()),
        ("top_k", "-1", -1),
    ],
)
async def test_unusual_but_valid_number_is_taken(
    make_client: Any, field: str, literal: str, value: Any
) -> None:
    engine = FakeEngine(max_model_len=128)
    response = await send(await make_client(engine), field, literal)
    assert response.status == 200
    assert getattr(engine.submitted[0].params, field) == value


async def test_healthy_stream_is_unaffected_by_bad_neighbours(
    client: Any, engine: FakeEngine
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 40}
    alone = await (await client.post(CHAT, json=body)).json()
    engine.step_s = 0.002
    async with client.post(CHAT, json={**body, "stream": True}) as healthy:
        await until(lambda: engine.running)
        for field, literal, _ in BAD:
            assert (await send(client, field, literal)).status == 400
        assert b"[DONE]" in await healthy.read()
    assert engine.submitted[1].text == alone["choices"][0]["message"]["content"]
