"""Tool calls over chat completions and session turns; the syntax alone is in test_tool_parsers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator
from server_fakes import STOP, FakeEngine, FakeTokenizer, hermes, read_events

from radixkv.engine.grammar_compiler import GrammarCompiler
from radixkv.errors import ConfigError
from radixkv.server import ServerConfig

URL = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "title": "A title",
    "properties": {
        "city": {"enum": ["Paris", "Lima"], "description": "where"},
        "title": {"type": "string", "maxLength": 3},
    },
    "required": ["city", "title"],
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Lima", "title": "é"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture
def engine() -> FakeEngine:
    source = "in <tool_call> tags"
    return FakeEngine(FakeTokenizer(hermes, supports_tools=True, chat_template=source))


@pytest.fixture
async def api(client: Any) -> Any:
    url = str(client.make_url("/v1"))
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as api:
        yield api


@pytest.fixture
async def forced(serve: Any) -> Any:
    """A client of the real engine, whose model of random weights would never call by itself."""
    return await force(serve)


async def force(serve: Any, **options: Any) -> Any:
    client, served = await serve(**options)
    served.engine.grammars = GrammarCompiler(
        served.tokenizer, served.vocab_size, served.engine.eos_token_ids
    )
    return client


def say(engine: FakeEngine, text: str) -> None:
    engine.script = [*text.encode(), STOP]


async def test_calls_and_content_are_told_apart_whole_and_streamed(
    api: Any, engine: FakeEngine
) -> None:
    say(engine, f"Let me see.\n{CALL}\n{NOW}")
    fields: Any = {"model": "fake", "messages": HELLO, "tools": TOOLS}
    whole = (await api.chat.completions.create(**fields)).choices[0]
    assert whole.message.content == "Let me see."
    assert whole.finish_reason == "tool_calls"
    calls = [(c.function.name, c.function.arguments) for c in whole.message.tool_calls]
    assert calls == [("weather", '{"city": "Lima", "title": "é"}'), ("now", "{}")]
    assert len({c.id for c in whole.message.tool_calls}) == 2
    async with api.chat.completions.stream(**fields) as stream:
        streamed = (await stream.get_final_completion()).choices[0]
    assert streamed.message.content == "Let me see."
    assert streamed.finish_reason == "tool_calls"
    assert [(c.function.name, c.function.arguments) for c in streamed.message.tool_calls] == calls


async def test_stream_tells_a_name_first_and_arguments_as_they_come(
    client: Any, engine: FakeEngine
) -> None:
    say(engine, CALL)
    body = {"messages": HELLO, "tools": TOOLS, "stream": True}
    events = await read_events(await client.post(URL, json=body))
    choices = [event["choices"][0] for event in events[:-1]]
    deltas = [d["tool_calls"][0] for c in choices if "tool_calls" in (d := c["delta"])]
    assert deltas[0]["function"] == {"name": "weather", "arguments": ""}
    assert {d["index"] for d in deltas} == {0}
    assert all(d.keys() == {"index", "function"} for d in deltas[1:])
    assert len(deltas) > 20  # the fake engine tells a byte at a time
    assert not any(c["delta"].get("content") for c in choices)
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["tool_calls"]


async def test_logprobs_come_once_where_one_token_tells_a_name_and_arguments(
    client: Any, engine: FakeEngine
) -> None:
    say(engine, '<tool_call>{"arguments": {"city": "Lima"}, "name": "weather"}</tool_call>')
    body = {"messages": HELLO, "tools": TOOLS, "stream": True, "logprobs": True}
    events = await read_events(await client.post(URL, json=body))
    choices = [event["choices"][0] for event in events[:-1]]
    logprobs = sum(len(c["logprobs"]["content"]) for c in choices if c["logprobs"])
    assert logprobs == len(engine.script)


async def test_choice_none_shows_the_tools_and_reads_no_calls(
    client: Any, engine: FakeEngine
) -> None:
    say(engine, CALL)
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "none"}
    choice = (await (await client.post(URL, json=body)).json())["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
    assert '"weather"' in engine.tokenizer.encoded[-1]


async def test_parallel_false_keeps_one_call(client: Any, engine: FakeEngine) -> None:
    say(engine, f"{CALL}\n{NOW}")
    body = {"messages": HELLO, "tools": TOOLS, "parallel_tool_calls": False}
    message = (await (await client.post(URL, json=body)).json())["choices"][0]["message"]
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["weather"]


async def test_cut_off_call_has_the_reason_length(client: Any, engine: FakeEngine) -> None:
    say(engine, CALL)
    body = {"messages": HELLO, "tools": TOOLS, "max_tokens": 60}
    choice = (await (await client.post(URL, json=body)).json())["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"city"')


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "banana"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
    ],
)
async def test_bad_choice_is_refused_by_name(client: Any, fields: Any, param: str) -> None:
    response = await client.post(URL, json={"messages": HELLO, "stream": True, **fields})
    assert response.status == 400
    assert (await response.json())["error"]["param"] == param


async def test_schema_the_grammar_library_refuses_names_the_tools(forced: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"uniqueItems": "x"}}}
    body = {"messages": HELLO, "tools": [tool], "tool_choice": "required"}
    response = await forced.post(URL, json=body)
    assert response.status == 400
    assert (await response.json())["error"]["param"] == "tools"


async def test_required_calls_are_valid_whatever_the_model_would_say(forced: Any) -> None:
    body = {
        "messages": HELLO, "tools": TOOLS, "tool_choice": "required", "n": 6, "seed": 5,
        "temperature": 1.5, "max_tokens": 900,
    }  # fmt: skip
    choices = (await (await forced.post(URL, json=body)).json())["choices"]
    calls = [call["function"] for c in choices for call in c["message"]["tool_calls"]]
    assert {c["finish_reason"] for c in choices} == {"tool_calls"}
    assert {c["message"]["content"] for c in choices} == {None}
    assert max(len(c["message"]["tool_calls"]) for c in choices) > 1
    assert {call["name"] for call in calls} == {"weather", "now"}
    for call in calls:
        schema = SCHEMA if call["name"] == "weather" else {"maxProperties": 0}
        Draft202012Validator(schema).validate(json.loads(call["arguments"]))


@pytest.mark.parametrize("family", ["generic", "hermes", "llama3", "mistral", "mistral-args"])
async def test_forced_call_is_read_in_every_family(serve: Any, family: str) -> None:
    """The schema refers to parts of itself, wherever the family puts it."""
    client = await force(serve, tool_parser=family)
    schema = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/properties/at"}},
        "required": ["at", "to"],
        "$defs": {"point": {"enum": [1, 2]}},
    }
    tool = {"type": "function", "function": {"name": "go", "parameters": schema}}
    body = {"messages": HELLO, "tools": [tool], "tool_choice": "required", "max_tokens": 2000}
    choice = (await (await client.post(URL, json={**body, "seed": 1})).json())["choices"][0]
    for call in choice["message"]["tool_calls"]:
        assert call["function"]["name"] == "go"
        arguments = json.loads(call["function"]["arguments"])
        Draft202012Validator(schema).validate(arguments)
        # As chat templates write it, so that the turn is found again.
        assert call["function"]["arguments"] == json.dumps(arguments)
    assert choice["message"]["content"] is None


async def test_named_call_is_the_only_one(forced: Any) -> None:
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": NAMED, "max_tokens": 90}
    choice = (await (await forced.post(URL, json=body)).json())["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"], choice["finish_reason"]) == (
        {"name": "now", "arguments": "{}"},
        "tool_calls",
    )


async def test_answer_with_a_schema_and_tools_is_a_call_or_follows_the_schema(forced: Any) -> None:
    schema = {"type": "object", "properties": {"done": {"type": "boolean"}}, "required": ["done"]}
    body: dict[str, Any] = {
        "messages": HELLO, "tools": TOOLS, "max_tokens": 900, "temperature": 0,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}},
        },
    }  # fmt: skip
    messages = []
    for char in "nd":  # of "name" and of "done", where the two part
        body["logit_bias"] = {str(ord(char)): 100}
        answer = await (await forced.post(URL, json=body)).json()
        messages.append(answer["choices"][0]["message"])
    called, answered = messages
    assert called["tool_calls"]
    assert "tool_calls" not in answered
    Draft202012Validator(schema).validate(json.loads(answered["content"]))


async def test_special_marker_is_a_token_of_its_own(make_client: Any) -> None:
    """As Mistral's is: it must reach the parser, and the grammar must ask for the token."""
    tokenizer = FakeTokenizer(hermes, supports_tools=True, chat_template="[TOOL_CALLS]")
    tokenizer.encode = lambda text, **_: [257] if text == "[TOOL_CALLS]" else list(text.encode())  # type: ignore[method-assign, assignment, misc]
    engine = FakeEngine(tokenizer)
    client = await make_client(engine)
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "required", "max_tokens": 1}
    assert (await client.post(URL, json=body)).status == 200
    params = engine.submitted[-1].params
    assert params.skip_special_tokens is False
    assert "<[257]>" in params.grammar.text


async def test_parser_can_be_chosen(make_client: Any, engine: FakeEngine) -> None:
    client = await make_client(engine, tool_parser="generic")
    say(engine, '{"name": "now", "arguments": {}}')
    body = {"messages": HELLO, "tools": TOOLS}
    choice = (await (await client.post(URL, json=body)).json())["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    with pytest.raises(ConfigError, match="tool_parser"):
        ServerConfig(tool_parser="banana")


async def test_agent_loop_with_two_tools_finishes_and_hits_all_it_computed(
    api: Any, engine: FakeEngine
) -> None:
    """The template knows tools, and writes the calls just as the model did."""
    results = {"weather": "rain", "now": "noon"}
    messages: list[Any] = list(HELLO)
    computed = 0
    for text in (CALL, NOW, "It rains."):
        say(engine, text)
        async with api.chat.completions.stream(
            model="fake",
            messages=messages,
            tools=TOOLS,
            stream_options={"include_usage": True},
        ) as stream:
            answer = await stream.get_final_completion()
        assert answer.usage.prompt_tokens_details.cached_tokens == computed
        computed = answer.usage.prompt_tokens + answer.usage.completion_tokens - 1
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            content = results[call.function.name]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    assert [m["role"] for m in messages] == ["user", *["assistant", "tool"] * 2, "assistant"]
    assert message.content == "It rains."


async def test_session_turns_call_tools_too(client: Any, engine: FakeEngine) -> None:
    session = await (await client.post("/v1/sessions", json={"tools": TOOLS})).json()
    url = f"/v1/sessions/{session['id']}/messages"
    say(engine, CALL)
    first = await (await client.post(url, json={"content": "hello"})).json()
    (call,) = first["choices"][0]["message"]["tool_calls"]
    say(engine, "Rain.")
    body = {"role": "tool", "content": "rain", "tool_call_id": call["id"], "stream": True}
    events = await read_events(await client.post(url, json=body))
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    prompt = engine.tokenizer.decode(engine.submitted[-1].prompt, skip_special_tokens=False)
    assert f"assistant\n{CALL}<|im_end|>\n<|im_start|>tool\nrain" in prompt
    kept = (await (await client.get(url)).json())["data"]
    assert kept[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Lima", "title": "é"}


async def test_session_turn_can_be_forced_to_call(forced: Any) -> None:
    session = await (await forced.post("/v1/sessions", json={"tools": TOOLS})).json()
    body = {"content": "hello", "tool_choice": NAMED, "max_tokens": 90}
    response = await forced.post(f"/v1/sessions/{session['id']}/messages", json=body)
    choice = (await response.json())["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "now"


async def test_client_that_leaves_in_a_call_ends_the_request(
    client: Any, engine: FakeEngine
) -> None:
    engine.step_s = 0.01
    engine.script = list(CALL.encode() * 20)
    body = {"messages": HELLO, "tools": TOOLS, "stream": True}
    async with client.post(URL, json=body) as response:
        await response.content.readany()
    for _ in range(200):
        if engine.finished["abort"]:
            break
        await asyncio.sleep(0.01)
    assert engine.finished["abort"] == 1
