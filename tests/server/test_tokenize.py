from __future__ import annotations

from typing import Any

import pytest
from server_fakes import PAIR, START, FakeEngine


async def post(client: Any, route: str, **body: Any) -> Any:
    response = await client.post(route, json=body)
    return response.status, await response.json()


async def test_text_goes_to_ids_and_back(client: Any) -> None:
    text = "é\n\n<|im_start|>"
    status, body = await post(
        client, "/tokenize", model="fake", prompt=text, return_token_strs=True
    )
    assert status == 200
    assert body == {
        "count": 4,
        "max_model_len": 4096,
        "tokens": [*"é".encode(), PAIR, START],
        "token_strs": ["\N{REPLACEMENT CHARACTER}"] * 2 + ["\n\n", "<|im_start|>"],
    }
    assert await post(client, "/detokenize", tokens=body["tokens"]) == (200, {"prompt": text})


async def test_conversation_has_the_ids_of_a_chat(client: Any, engine: FakeEngine) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "q"}], "tools": [tool]}
    _, body = await post(client, "/tokenize", **fields)
    await post(client, "/v1/chat/completions", **fields, max_tokens=1)
    assert body["tokens"] == engine.submitted[-1].prompt
    assert body["token_strs"] is None


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "x" * 100_000}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, 260]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
async def test_bad_body_is_refused_by_name(client: Any, route: str, body: Any, param: str) -> None:
    status, answer = await post(client, route, **body)
    assert status == 400
    assert answer["error"]["param"] == param
