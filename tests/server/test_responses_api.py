"""The Responses API, called by the official client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from server_fakes import STOP, FakeEngine, FakeTokenizer, hermes

from radixkv.request import GrammarSpec
from radixkv.server.protocol import Message
from radixkv.server.request_ids import RequestIds
from radixkv.server.response_store import ResponseStore, StoredResponse

URL = "/v1/responses"
TOOLS: list[Any] = [
    {"type": "function", "name": "add", "description": "d", "parameters": {"type": "object"}},
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(FakeTokenizer(hermes, supports_tools=True, chat_template="<tool_call>"))


@pytest.fixture
async def api(client: Any) -> Any:
    url = str(client.make_url("/v1"))
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as api:
        yield api


def say(engine: FakeEngine, text: str) -> None:
    engine.script = [*text.encode(), STOP]


def sent(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.submitted[-1].prompt, skip_special_tokens=False)


async def test_text_whole_and_streamed(api: Any, engine: FakeEngine) -> None:
    say(engine, "Hi é")
    whole = await api.responses.create(model="fake", input="hello", instructions="Be brief.")
    assert (whole.output_text, whole.status, whole.error) == ("Hi é", "completed", None)
    assert sent(engine).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user")
    stream = await api.responses.create(
        model="fake", input=[{"role": "user", "content": "hello"}], stream=True
    )
    events = [event async for event in stream]
    kinds = [e.type for e in events]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 4,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Hi é"
    last = events[-1].response
    assert (last.output_text, last.usage.output_tokens) == ("Hi é", len(engine.script))
    assert events[2].item.id == events[-2].item.id == last.output[0].id


async def test_calls_and_text_are_items_in_order(api: Any, engine: FakeEngine) -> None:
    say(engine, f"Well.\n{ADD}\n{NOW}")
    async with api.responses.stream(model="fake", input="hello", tools=TOOLS) as stream:
        kinds = [event.type async for event in stream]
        streamed = await stream.get_final_response()
    whole = await api.responses.create(model="fake", input="hello", tools=TOOLS)
    for response in (whole, streamed):
        text, add, now = response.output
        assert text.content[0].text == "Well."
        assert (add.name, json.loads(add.arguments), add.status) == ("add", {"a": 1}, "completed")
        assert (now.name, now.arguments) == ("now", "{}")
        assert add.call_id != now.call_id
    assert kinds.count("response.output_item.added") == 3
    assert kinds.count("response.function_call_arguments.done") == 2


async def test_calls_and_their_results_are_rendered_as_chat_messages(
    api: Any, engine: FakeEngine
) -> None:
    say(engine, f"Well.\n{ADD}\n{NOW}")
    first = await api.responses.create(model="fake", input="hello", tools=TOOLS)
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"r{i}"}
        for i, item in enumerate(first.output)
        if item.type == "function_call"
    ]
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
    items += [item.model_dump(exclude_none=True) for item in first.output]
    say(engine, "Done.")
    second = await api.responses.create(model="fake", input=items + outputs, tools=TOOLS)
    assert f"assistant\nWell.\n{ADD}\n{NOW}<|im_end|>\n<|im_start|>tool\nr1<|im_end|>" in sent(
        engine
    )
    prompt = engine.submitted[-1].prompt
    third = await api.responses.create(
        model="fake", input=outputs, tools=TOOLS, previous_response_id=first.id
    )
    assert engine.submitted[-1].prompt == prompt
    computed = first.usage.input_tokens + first.usage.output_tokens - 1
    assert second.usage.input_tokens_details.cached_tokens == computed
    assert third.previous_response_id == first.id


async def test_instructions_are_not_carried_over(api: Any, engine: FakeEngine) -> None:
    say(engine, "Hi")
    first = await api.responses.create(model="fake", input="a", instructions="One.")
    await api.responses.create(
        model="fake", input="b", instructions="Two.", previous_response_id=first.id
    )
    assert "Two.<|im_end|>\n<|im_start|>user\na<|im_end|>" in sent(engine)
    assert "One." not in sent(engine)


async def test_stored_response_can_be_read_and_deleted(api: Any) -> None:
    response = await api.responses.create(model="fake", input="hello", max_output_tokens=2)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    again = await api.responses.retrieve(response.id)
    assert again.output == response.output
    items = [item async for item in api.responses.input_items.list(response.id)]
    assert items[0].content[0].text == "hello"
    assert RequestIds().resolve(response.id) == response.id.removeprefix("resp_")
    await api.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        await api.responses.retrieve(response.id)
    unstored = await api.responses.create(model="fake", input="a", store=False, max_output_tokens=1)
    with pytest.raises(openai.NotFoundError) as missing:
        await api.responses.create(model="fake", input="b", previous_response_id=unstored.id)
    assert missing.value.param == "previous_response_id"


async def test_text_format_reaches_the_grammar(api: Any, engine: FakeEngine) -> None:
    schema = {"type": "object", "properties": {}}
    text: Any = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    await api.responses.create(model="fake", input="a", text=text, max_output_tokens=1)
    assert engine.submitted[-1].params.grammar == GrammarSpec("json_schema", json.dumps(schema))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "truncation": "auto"}, "truncation"),
        ({"input": "a", "temperature": 9}, "temperature"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "a", "tools": TOOLS, "tool_choice": {"type": "x"}}, "tool_choice"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice"),
        ({"input": "a", "max_output_tokens": 10**30}, "max_output_tokens"),
        ({"input": "a", "user": {"n": 10**30}}, "user"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        ({"input": [{"role": "banana", "content": "x"}]}, "input[0].role"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"role": "assistant", "content": "x"}]}, "input"),
        ({"input": "a", "previous_response_id": "resp_x"}, "previous_response_id"),
    ],
)
async def test_bad_request_names_the_field(
    client: Any, stream: bool, fields: Any, param: str
) -> None:
    response = await client.post(URL, json={"stream": stream, **fields})
    assert response.status in (400, 404), await response.text()
    assert (await response.json())["error"]["param"] == param


async def test_failure_in_mid_stream_is_raised(api: Any, engine: FakeEngine) -> None:
    engine.fail_at = 2
    stream = await api.responses.create(model="fake", input="a", stream=True)
    with pytest.raises(openai.APIError, match="injected"):
        async for _ in stream:
            pass
    with pytest.raises(openai.InternalServerError):
        await api.responses.create(model="fake", input="a")


async def test_empty_answer_has_an_empty_message(api: Any, engine: FakeEngine) -> None:
    engine.script = [STOP]
    async with api.responses.stream(model="fake", input="hello") as stream:
        streamed = await stream.get_final_response()
    whole = await api.responses.create(model="fake", input="hello")
    assert [streamed.output_text, whole.output_text] == ["", ""]
    assert whole.output[0].type == streamed.output[0].type == "message"


def stored(name: str, chars: int, tenant: str = "") -> StoredResponse:
    namespace = (tenant, "") if tenant else ()
    body = {"id": name, "output": []}
    return StoredResponse(namespace, body, [], [Message(role="user")], chars)


def test_store_is_bounded_by_number_and_size() -> None:
    store = ResponseStore(max_responses=3, max_chars=100)
    for name in "abc":
        store.put(stored(name, 10))
    store.get("a", "", "x")
    store.put(stored("d", 10))
    assert (len(store), store.num_chars) == (3, 30)
    assert store.get("a", "", "x").id == "a"
    store.put(stored("e", 85))
    assert (len(store), store.num_chars) == (2, 95)
    assert store.get("a", "", "x").id == "a"
    store.delete(store.get("e", "", "x"))
    assert store.num_chars == 10


def test_store_shows_a_response_to_its_tenant_alone() -> None:
    store = ResponseStore()
    store.put(stored("a", 1, tenant="t"))
    assert store.get("a", "t", "x").id == "a"
    with pytest.raises(Exception, match="no response"):
        store.get("a", "", "x")


def test_store_finds_items_of_the_same_tenant_until_their_response_goes() -> None:
    store = ResponseStore(max_responses=2)
    for tenant in ("t", "u"):
        body = {"id": tenant, "output": [{"id": "msg", "of": tenant}]}
        store.put(StoredResponse((tenant, ""), body, [{"id": f"in_{tenant}"}], [], 1))
    assert store.item("msg", "t", "x")["of"] == "t"
    assert store.item("in_u", "u", "x") == {"id": "in_u"}
    for item, tenant in (("in_u", "t"), ("msg", "")):
        with pytest.raises(Exception, match="no item"):
            store.item(item, tenant, "x")
    store.delete(store.get("u", "u", "x"))
    store.put(StoredResponse((), {"id": "a", "output": []}, [], [], 1))
    store.put(StoredResponse((), {"id": "b", "output": []}, [], [], 1))
    for tenant in ("t", "u"):
        with pytest.raises(Exception, match="no item"):
            store.item("msg", tenant, "x")


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_are_those_of_the_text_and_not_of_calls(
    api: Any, engine: FakeEngine, stream: bool
) -> None:
    say(engine, f"Hé{ADD}")
    fields: Any = {"model": "fake", "input": "a", "tools": TOOLS, "top_logprobs": 1}
    response = await api.responses.create(**fields, stream=stream)
    if stream:
        response = [event async for event in response][-1].response
    text, call = response.output
    spelled = b"".join(bytes(entry.bytes) for entry in text.content[0].logprobs)
    assert spelled == "Hé".encode()
    assert call.name == "add"
