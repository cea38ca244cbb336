from __future__ import annotations

from typing import Any

import pytest
from server_fakes import VOCAB, FakeEngine, read_events

URL = "/v1/completions"


@pytest.mark.parametrize("prompt", ["ab", [97, 98], ["ab"], [[97, 98]]])
async def test_prompt_forms_give_the_same_ids(client: Any, engine: FakeEngine, prompt: Any) -> None:
    response = await client.post(URL, json={"model": "fake", "prompt": prompt, "max_tokens": 2})
    body = await response.json()
    assert response.status == 200
    assert body["object"] == "text_completion"
    assert engine.submitted[0].prompt == [97, 98]
    assert len(body["choices"][0]["text"]) == 2
    assert body["choices"][0]["finish_reason"] == "length"


async def test_max_tokens_left_out_is_16_and_null_is_the_context(make_client: Any) -> None:
    client = await make_client(FakeEngine(max_model_len=64))
    counts = []
    for fields in ({}, {"max_tokens": None}):
        response = await client.post(URL, json={"prompt": [1] * 4, **fields})
        counts.append((await response.json())["usage"]["completion_tokens"])
    assert counts == [16, 60]


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_give_one_choice_each(client: Any, stream: bool) -> None:
    prompts = [[97] * n for n in (3, 4, 5)]
    body = {"prompt": prompts, "max_tokens": 6}
    singles = [
        await (await client.post(URL, json={"prompt": p, "max_tokens": 6})).json() for p in prompts
    ]
    wanted = [single["choices"][0]["text"] for single in singles]
    if not stream:
        whole = await (await client.post(URL, json=body)).json()
        assert [c["text"] for c in whole["choices"]] == wanted
        assert [c["index"] for c in whole["choices"]] == [0, 1, 2]
        assert whole["usage"]["prompt_tokens"] == 12
        assert whole["usage"]["completion_tokens"] == 18
        return
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    events = await read_events(await client.post(URL, json=body))
    assert events[-1] == "[DONE]"
    assert events[-2]["usage"]["completion_tokens"] == 18
    choices = [event["choices"][0] for event in events[:-2]]
    for index in range(3):
        mine = [c for c in choices if c["index"] == index]
        assert "".join(c["text"] for c in mine) == wanted[index]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]


async def test_prompts_are_all_admitted_or_none(make_client: Any) -> None:
    engine = FakeEngine(max_waiting=2)
    engine.gate.clear()
    client = await make_client(engine)
    response = await client.post(URL, json={"prompt": [[1], [2], [3]]})
    assert response.status == 429
    assert response.headers["Retry-After"] == "2"
    assert not engine.waiting


@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
async def test_echo_puts_the_prompt_first(client: Any, engine: FakeEngine, prompt: Any) -> None:
    engine.script = [*b"cd"]
    body = {"prompt": prompt, "max_tokens": 2, "echo": True}
    whole = await (await client.post(URL, json=body)).json()
    events = await read_events(await client.post(URL, json={**body, "stream": True}))
    text = "".join(event["choices"][0]["text"] for event in events[:-1])
    assert whole["choices"][0]["text"] == text == "abcd"


async def test_logprobs_have_the_completions_shape(client: Any, engine: FakeEngine) -> None:
    engine.script = [*b"ab"]
    body = {"prompt": "x", "max_tokens": 2, "logprobs": 1}
    whole = await (await client.post(URL, json=body)).json()
    logprobs = whole["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b"]
    assert logprobs["token_logprobs"] == [-0.5, -0.5]
    assert logprobs["top_logprobs"] == [{"a": -0.5}, {"b": -0.5}]
    assert logprobs["text_offset"] == [0, 1]
    events = await read_events(await client.post(URL, json={**body, "stream": True}))
    offsets = [e["choices"][0]["logprobs"]["text_offset"] for e in events[:2]]
    assert offsets == [[0], [1]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [VOCAB]}, "prompt"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [[1]] * 129}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "a", "cache_salt": "x" * 257}, "cache_salt"),
    ],
)
async def test_bad_prompt_is_refused(
    client: Any, engine: FakeEngine, fields: Any, param: str
) -> None:
    response = await client.post(URL, json=fields)
    assert response.status == 400
    assert (await response.json())["error"]["param"] == param
    assert not engine.submitted


@pytest.mark.parametrize(
    ("length", "max_tokens", "generated"),
    [(250, 100, 6), (250, None, 6), (250, 6, 6), (250, 10**9, 6), (255, 100, 1)],
)
async def test_max_tokens_is_cut_to_the_room_left(
    make_client: Any, length: int, max_tokens: int | None, generated: int
) -> None:
    client = await make_client(FakeEngine(max_model_len=256))
    body = {"prompt": [1] * length, "max_tokens": max_tokens, "ignore_eos": True}
    answer = await (await client.post(URL, json=body)).json()
    assert answer["usage"]["prompt_tokens"] == length
    assert answer["usage"]["completion_tokens"] == generated
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [256, 257])
async def test_prompt_that_fills_the_context_is_refused(
    make_client: Any, length: int, stream: bool
) -> None:
    client = await make_client(FakeEngine(max_model_len=256))
    response = await client.post(URL, json={"prompt": [1] * length, "stream": stream})
    error = (await response.json())["error"]
    assert response.status == 400
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "prompt"
    assert "256" in error["message"]
    assert str(length) in error["message"]


async def test_text_far_beyond_the_context_is_not_tokenized(make_client: Any) -> None:
    engine = FakeEngine(max_model_len=256)
    client = await make_client(engine)
    long = "x" * (256 * engine.tokenizer.max_token_chars + 1)
    for url, body in (
        (URL, {"prompt": long}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
    ):
        response = await client.post(url, json=body)
        assert response.status == 400
        assert (await response.json())["error"]["code"] == "context_length_exceeded"
    assert engine.tokenizer.encoded == []


async def test_cache_salt_separates_and_equal_salts_share(client: Any) -> None:
    async def cached(salt: str | None) -> int:
        body = {"prompt": [7] * 65, "max_tokens": 1, "cache_salt": salt}
        usage = (await (await client.post(URL, json=body)).json())["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [await cached(s) for s in (None, None, "a", "a", "b")] == [0, 64, 0, 64, 0]
