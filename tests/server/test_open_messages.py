"""An answer that goes on in the assistant's last message, over chat and Anthropic's API."""

from __future__ import annotations

from typing import Any

import pytest
from server_fakes import STOP, FakeEngine

CHAT = "/v1/chat/completions"
CLAUDE = "/v1/messages"
TURNS = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Well, "}]
OPEN = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nWell, "


def prompt_of(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.submitted[-1].prompt, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("url", "fields"),
    [(CHAT, {"continue_final_message": True}), (CLAUDE, {"max_tokens": 5})],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_ends_with_the_open_message(
    client: Any, engine: FakeEngine, url: str, fields: Any, stream: bool
) -> None:
    engine.script = [*b"yes", STOP]
    response = await client.post(url, json={"messages": TURNS, "stream": stream, **fields})
    assert response.status == 200, await response.text()
    assert prompt_of(engine).endswith(OPEN)


async def test_closed_message_is_the_default_of_chat(client: Any, engine: FakeEngine) -> None:
    await client.post(CHAT, json={"messages": TURNS})
    assert prompt_of(engine).endswith("Well, <|im_end|>\n<|im_start|>assistant\n")


async def test_open_message_that_was_an_answer_is_its_own_ids(
    client: Any, engine: FakeEngine
) -> None:
    """Two line breaks may be one token or two; those that were generated are used."""
    engine.script = [ord("\n"), ord("\n")]
    body = {"messages": TURNS[:1], "max_tokens": 2}
    first = await (await client.post(CHAT, json=body)).json()
    message = first["choices"][0]["message"]
    given = engine.submitted[-1].prompt
    body = {"messages": [*TURNS[:1], message], "continue_final_message": True}
    await client.post(CHAT, json=body)
    assert engine.submitted[-1].prompt == [*given, ord("\n"), ord("\n")]


async def test_tokens_of_an_open_message_are_counted(client: Any, engine: FakeEngine) -> None:
    body = {"messages": TURNS, "continue_final_message": True}
    tokens = (await (await client.post("/tokenize", json=body)).json())["tokens"]
    assert engine.tokenizer.decode(tokens, skip_special_tokens=False).endswith(OPEN)
    counted = await client.post(f"{CLAUDE}/count_tokens", json={"messages": TURNS})
    assert (await counted.json())["input_tokens"] == len(tokens)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": TURNS[:1]},
        {"messages": TURNS, "add_generation_prompt": True},
    ],
)
async def test_what_cannot_go_on_is_refused(client: Any, fields: Any) -> None:
    response = await client.post(CHAT, json={"continue_final_message": True, **fields})
    assert response.status == 400
    assert (await response.json())["error"]["param"] == "continue_final_message"
