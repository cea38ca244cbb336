"""The Messages API, called by Anthropic's client."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from server_fakes import STOP, FakeEngine, FakeTokenizer, hermes

URL = "/v1/messages"
KEY = "sk-test"
HELLO: Any = [{"role": "user", "content": "hello"}]
TOOLS: list[Any] = [
    {"name": "add", "description": "d", "input_schema": {"type": "object"}},
    {"name": "now", "input_schema": {"type": "object", "properties": {}}},
]
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(FakeTokenizer(hermes, supports_tools=True, chat_template="<tool_call>"))


@pytest.fixture
async def client(make_client: Any, engine: FakeEngine) -> Any:
    return await make_client(engine, api_key=KEY)


@pytest.fixture
async def api(client: Any) -> Any:
    url = str(client.make_url("/"))
    async with anthropic.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0) as api:
        yield api


def say(engine: FakeEngine, text: str) -> None:
    engine.script = [*text.encode(), STOP]


def sent(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.submitted[-1].prompt, skip_special_tokens=False)


async def post(client: Any, **fields: Any) -> Any:
    body = {"messages": HELLO, "max_tokens": 30, **fields}
    return await client.post(URL, json=body, headers={"X-API-Key": KEY})


async def read(response: Any) -> list[tuple[str, Any]]:
    """Return the (name, payload) of every event."""
    blocks = (await response.text()).strip().split("\n\n")
    pairs = [block.split("\n") for block in blocks]
    return [(n.removeprefix("event: "), json.loads(d.removeprefix("data: "))) for n, d in pairs]


async def test_text_whole_and_streamed(api: Any, engine: FakeEngine) -> None:
    say(engine, "Hi é")
    fields: Any = {"model": "fake", "messages": HELLO, "max_tokens": 30}
    whole = await api.messages.create(**fields, system="Be brief.")
    assert whole.content[0].text == "Hi é"
    assert (whole.stop_reason, whole.stop_sequence, whole.role) == ("end_turn", None, "assistant")
    assert whole.usage.input_tokens == len(engine.submitted[-1].prompt)
    assert whole.usage.output_tokens == len(engine.script)
    assert sent(engine).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user")
    async with api.messages.stream(
        **fields, system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    ) as stream:
        assert "".join([text async for text in stream.text_stream]) == "Hi é"
        streamed = await stream.get_final_message()
    assert sent(engine).startswith("<|im_start|>system\nBe\nbrief.<|im_end|>")
    assert streamed.stop_reason == "end_turn"


async def test_events_come_in_the_order_of_the_protocol(client: Any, engine: FakeEngine) -> None:
    say(engine, f"Ok\n{ADD}")
    events = await read(await post(client, stream=True, tools=TOOLS, max_tokens=99))
    assert all(name == payload["type"] for name, payload in events)
    names = [name for name, _ in events if name != "content_block_delta"]
    assert names == [
        "message_start",
        "content_block_start",
        "ping",
        "content_block_stop",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    starts = [p for n, p in events if n == "content_block_start"]
    assert [(p["index"], p["content_block"]["type"]) for p in starts] == [
        (0, "text"),
        (1, "tool_use"),
    ]
    assert starts[1]["content_block"]["input"] == {}
    deltas = [p["delta"] for n, p in events if n == "content_block_delta" and p["index"] == 1]
    assert {d["type"] for d in deltas} == {"input_json_delta"}
    assert json.loads("".join(d["partial_json"] for d in deltas)) == {"a": 1}
    assert events[0][1]["message"]["usage"]["input_tokens"] == len(engine.submitted[-1].prompt)
    delta = events[-2][1]
    assert delta["delta"]["stop_reason"] == "tool_use"
    assert delta["usage"]["output_tokens"] == len(engine.script)


async def test_agent_loop_with_two_tools_finishes_and_hits_all_it_computed(
    api: Any, engine: FakeEngine
) -> None:
    messages = list(HELLO)
    computed = 0
    for text in (f"Let me see.\n{ADD}\n{NOW}", ADD, "Done."):
        say(engine, text)
        async with api.messages.stream(
            model="fake", messages=messages, tools=TOOLS, max_tokens=200
        ) as stream:
            answer = await stream.get_final_message()
        usage = answer.usage
        assert usage.cache_read_input_tokens == computed
        computed += usage.input_tokens + usage.output_tokens - 1
        messages.append({"role": "assistant", "content": answer.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": f"result {i}"}
            for i, block in enumerate(answer.content)
            if block.type == "tool_use"
        ]
        if answer.stop_reason != "tool_use":
            break
        messages.append({"role": "user", "content": results})
    assert answer.content[0].text == "Done."
    assert "<|im_start|>tool\nresult 1<|im_end|>\n<|im_start|>tool\nresult 2" in sent(engine)


async def test_tool_choices_reach_the_grammar(client: Any, engine: FakeEngine) -> None:
    async def grammar(**choice: Any) -> str | None:
        response = await post(client, tools=TOOLS, tool_choice=choice, max_tokens=1)
        assert response.status == 200
        spec = engine.submitted[-1].params.grammar
        return spec.text if spec else None

    assert await grammar(type="auto") is None
    assert await grammar(type="none") is None
    several = await grammar(type="any") or ""
    assert "add" in several
    assert "now" in several
    assert "~0.." in several
    assert "~0.." not in (await grammar(type="any", disable_parallel_tool_use=True) or "")
    named = await grammar(type="tool", name="now") or ""
    assert "now" in named
    assert "tool_0" not in named


async def test_cache_control_pins_the_prompt_for_the_longest_time(
    client: Any, engine: FakeEngine
) -> None:
    def text(**marker: Any) -> Any:
        return [
            {"type": "text", "text": "x" * 40, "cache_control": {"type": "ephemeral", **marker}}
        ]

    for fields, seconds in (
        ({"system": text()}, 300),
        ({"system": text(ttl="1h"), "messages": [{"role": "user", "content": text()}]}, 3600),
        ({"cache_control": {"type": "ephemeral", "ttl": "5m"}}, 300),
        ({"tools": [{**TOOLS[0], **text(ttl="1h")[0], "type": "custom"}]}, 3600),
        ({}, None),
    ):
        response = await post(client, **fields)
        assert response.status == 200, await response.text()
        assert engine.submitted[-1].params.cache_pin_ttl == seconds
    body = {"system": text(ttl="1h"), "cache_salt": "new"}
    usages = [(await (await post(client, **body)).json())["usage"] for _ in range(2)]
    length = len(engine.submitted[-1].prompt)
    keys = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert [usages[0][k] for k in keys] == [length % 16, length // 16 * 16, 0]
    assert [usages[1][k] for k in keys] == [1, 0, length - 1]


async def test_stop_reasons(client: Any, engine: FakeEngine) -> None:
    say(engine, "one END two")
    stopped = await (await post(client, stop_sequences=["END"])).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "END")
    assert stopped["content"][0]["text"] == "one "
    cut = await (await post(client, max_tokens=2)).json()
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
    say(engine, ADD)
    cut = await (await post(client, tools=TOOLS, max_tokens=45)).json()
    assert cut["content"][0]["input"].keys() == {"raw_arguments"}


async def test_thoughts_of_earlier_turns_are_left_out(client: Any, engine: FakeEngine) -> None:
    content = [
        {"type": "thinking", "thinking": "hmm", "signature": "s"},
        {"type": "text", "text": "Hi"},
    ]
    messages = [*HELLO, {"role": "assistant", "content": content}, *HELLO]
    assert (await post(client, messages=messages, thinking={"type": "disabled"})).status == 200
    assert "assistant\nHi<|im_end|>" in sent(engine)


async def test_count_tokens_is_the_prompt_of_the_request(api: Any, engine: FakeEngine) -> None:
    fields: Any = {"model": "fake", "messages": HELLO, "tools": TOOLS, "system": "s"}
    count = await api.messages.count_tokens(**fields)
    await api.messages.create(**fields, max_tokens=1)
    assert count.input_tokens == len(engine.submitted[-1].prompt)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "banana", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [{"type": "tool_use"}]}]}, "id"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        ({"tools": [{"input_schema": {}}]}, "name"),
        ({"tools": TOOLS, "tool_choice": {"type": "x"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control"),
        ({"cache_control": {"type": "x"}}, "cache_control"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        (
            {
                "system": [
                    {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
                    for _ in range(5)
                ]
            },
            "at most 4",
        ),
    ],
)
async def test_bad_request_is_refused_in_the_form_of_the_api(
    client: Any, stream: bool, fields: Any, words: str
) -> None:
    response = await post(client, stream=stream, **fields)
    body = await response.json()
    assert response.status == 400
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert words in body["error"]["message"]
    assert body["request_id"] == response.headers["X-Request-ID"]


async def test_errors_have_their_classes(api: Any, client: Any, engine: FakeEngine) -> None:
    fields: Any = {"model": "fake", "messages": HELLO, "max_tokens": 5}
    with pytest.raises(anthropic.NotFoundError):
        await api.messages.create(**{**fields, "model": "other"})
    url = str(client.make_url("/"))
    async with anthropic.AsyncAnthropic(base_url=url, api_key="no", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError):
            await stranger.messages.create(**fields)
    engine.max_waiting = 0
    with pytest.raises(anthropic.RateLimitError):
        await api.messages.create(**fields)


async def test_failure_in_mid_stream_is_raised(api: Any, engine: FakeEngine) -> None:
    engine.fail_at = 2
    with pytest.raises(anthropic.APIError, match="injected"):
        async with api.messages.stream(model="fake", messages=HELLO, max_tokens=9) as stream:
            await stream.get_final_message()


async def test_output_format_reaches_the_grammar(client: Any, engine: FakeEngine) -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_config": {"format": wanted}}, {"output_format": wanted}):
        assert (await post(client, **fields)).status == 200
        spec = engine.submitted[-1].params.grammar
        assert spec is not None
        assert json.loads(spec.text) == {"type": "object"}
