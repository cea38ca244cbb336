from __future__ import annotations

from typing import Any

import pytest
from server_fakes import STOP, FakeEngine, FakeTokenizer, chatml_tools, read_events

URL = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
EMOJI = list("hi\N{GRINNING FACE}é".encode())


async def test_answer_has_openai_shape(client: Any, engine: FakeEngine) -> None:
    engine.script = [*b"Hi there", STOP]
    response = await client.post(URL, json={"model": "fake", "messages": HELLO})
    body = await response.json()
    assert response.status == 200
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "fake"
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hi there", "refusal": None}
    assert choice["finish_reason"] == "stop"
    prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert engine.submitted[0].prompt == FakeTokenizer().encode(prompt)
    assert body["usage"] == {
        "prompt_tokens": len(engine.submitted[0].prompt),
        "completion_tokens": 9,
        "total_tokens": len(engine.submitted[0].prompt) + 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("usage", [False, True])
async def test_stream_has_the_order_of_the_protocol(
    client: Any, engine: FakeEngine, usage: bool
) -> None:
    engine.script = [*b"abc", STOP]
    body: dict[str, Any] = {"messages": HELLO, "stream": True}
    if usage:
        body["stream_options"] = {"include_usage": True}
    response = await client.post(URL, json=body)
    events = await read_events(response)
    assert events.pop() == "[DONE]"
    if usage:
        last = events.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 4
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert all(event["usage"] is None for event in events)
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["delta"].get("content") for c in choices[1:-1]] == ["a", "b", "c"]
    assert choices[-1]["delta"] == {}
    assert [c["finish_reason"] for c in choices] == [None] * 4 + ["stop"]
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1
    assert events[0]["object"] == "chat.completion.chunk"


async def test_stream_text_equals_whole_text_when_characters_are_split(
    client: Any, engine: FakeEngine
) -> None:
    engine.script = [*EMOJI, 0xFF, *b"ok", *b"stop here"]
    body = {"messages": HELLO, "max_tokens": 30, "stop": ["p her"]}
    whole = await (await client.post(URL, json=body)).json()
    events = await read_events(await client.post(URL, json={**body, "stream": True}))
    deltas = [e["choices"][0]["delta"].get("content", "") for e in events[:-1]]
    text = "hi\N{GRINNING FACE}é\N{REPLACEMENT CHARACTER}oksto"
    assert "".join(deltas) == whole["choices"][0]["message"]["content"] == text
    assert deltas[:4] == ["", "h", "i", "\N{GRINNING FACE}"]
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["choices"][0]["stop_reason"] == "p her"


async def test_continuous_usage_is_in_every_chunk(client: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": HELLO, "max_tokens": 3, "stream": True, "stream_options": options}
    events = await read_events(await client.post(URL, json=body))
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == [0, 1, 2, 3, 3, 3]


async def test_logprobs_have_tokens_bytes_and_alternatives(client: Any, engine: FakeEngine) -> None:
    engine.script = [*b"ab"]
    body = {"messages": HELLO, "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
    whole = await (await client.post(URL, json=body)).json()
    content = whole["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "b"]
    assert content[0]["bytes"] == [97]
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["a", "b"]
    assert content[0]["top_logprobs"][1]["logprob"] == -1.5
    events = await read_events(await client.post(URL, json={**body, "stream": True}))
    streamed = [e["choices"][0]["logprobs"] for e in events[1:3]]
    assert [c for part in streamed for c in part["content"]] == content


async def test_sampling_fields_reach_the_engine(client: Any, engine: FakeEngine) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": -1,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
        "min_tokens": 2, "ignore_eos": True, "skip_special_tokens": False,
    }  # fmt: skip
    body = {
        **fields, "messages": HELLO, "max_tokens": 9, "max_completion_tokens": 4, "stop": "END",
        "stop_token_ids": [5], "logit_bias": {"5": 1}, "user": "u", "metadata": {"a": "b"},
        "n": 1, "nonsense": 1, "parallel_tool_calls": True,
    }  # fmt: skip
    response = await client.post(URL, json=body)
    assert response.status == 200
    params = engine.submitted[0].params
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.max_tokens == 4
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("END",), (5,), ((5, 1.0),))


async def test_null_means_left_out(client: Any, engine: FakeEngine) -> None:
    names = ["temperature", "top_p", "seed", "stop", "n", "logit_bias", "stream", "tools", "user"]
    body = dict.fromkeys(names)
    response = await client.post(URL, json={**body, "messages": HELLO, "max_tokens": 1})
    assert response.status == 200
    assert engine.submitted[0].params.temperature == 1.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "xml"}),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("functions", [{"name": "f"}]),
        ("prompt_logprobs", 1),
        ("modalities", ["audio"]),
        ("top_logprobs", 2),
        ("stream_options", {"include_usage": True}),
    ],
)
async def test_unsupported_option_is_refused_by_name(client: Any, field: str, value: Any) -> None:
    response = await client.post(URL, json={"messages": HELLO, field: value})
    body = await response.json()
    assert response.status == 400
    assert body["error"]["param"] == field
    assert field in body["error"]["message"]


async def test_tools_reach_a_template_that_knows_them(make_client: Any) -> None:
    engine = FakeEngine(FakeTokenizer(chatml_tools, supports_tools=True))
    client = await make_client(engine)
    tool = {"type": "function", "function": {"name": "f", "z": 1, "a": 2}}
    body = {"messages": HELLO, "tools": [tool], "tool_choice": "auto", "max_tokens": 1}
    assert (await client.post(URL, json=body)).status == 200
    assert '{"name": "f", "z": 1, "a": 2}' in engine.tokenizer.encoded[-1]


async def test_tools_are_put_after_the_system_prompt_for_other_templates(
    client: Any, engine: FakeEngine
) -> None:
    tool = {"type": "function", "function": {"name": "f", "z": 1, "a": 2}}
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    for given in (messages, HELLO):
        body = {"messages": given, "tools": [tool], "max_tokens": 1}
        assert (await client.post(URL, json=body)).status == 200
    with_system, without = engine.tokenizer.encoded
    assert with_system.startswith("<|im_start|>system\nBe brief.\n\nYou can call")
    assert without.startswith("<|im_start|>system\nYou can call")
    assert '{"type":"function","function":{"name":"f","z":1,"a":2}}' in with_system


@pytest.mark.parametrize("tool", [{}, {"type": "function"}, {"type": "x", "function": {}}])
async def test_malformed_tool_is_refused(client: Any, tool: Any) -> None:
    response = await client.post(URL, json={"messages": HELLO, "tools": [tool]})
    assert response.status == 400
    assert (await response.json())["error"]["param"].startswith("tools[0]")


async def test_model_without_chat_template_is_refused(make_client: Any) -> None:
    client = await make_client(FakeEngine(FakeTokenizer(None)))
    response = await client.post(URL, json={"messages": HELLO})
    assert response.status == 400
    assert "chat template" in (await response.json())["error"]["message"]
