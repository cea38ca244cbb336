"""Agents on the default model: forced calls, exact history, and the three APIs of their clients."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest
from jsonschema import Draft202012Validator

from radixkv.engine.factory import BuiltEngine
from radixkv.server import ServerConfig, create_app

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

MODEL = "SmolLM2-135M-Instruct"
SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Paris", "Lima"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
    },
    "add": {
        "type": "object",
        "properties": {k: {"type": "integer", "minimum": 0, "maximum": 99} for k in "ab"},
        "required": ["a", "b"],
    },
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
ASK: Any = {"role": "user", "content": "What is the weather in Lima, and what is 2 + 2?"}


@pytest.fixture
async def client(aiohttp_client: Any, build: Callable[..., BuiltEngine]) -> Any:
    client = await aiohttp_client(create_app(build().engine, ServerConfig()))
    yield client
    assert (await client.get("/admin/check")).status == 200


@pytest.fixture
async def api(client: Any) -> Any:
    url = str(client.make_url("/v1"))
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as api:
        yield api


@pytest.fixture
async def claude(client: Any) -> Any:
    url = str(client.make_url("/"))
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as api:
        yield api


def assert_valid(name: str, arguments: Any) -> None:
    Draft202012Validator(SCHEMAS[name]).validate(arguments)


async def test_forced_calls_are_valid_whole_and_streamed(api: Any) -> None:
    fields: Any = {
        "model": MODEL, "messages": [ASK], "tools": TOOLS, "max_tokens": 60, "temperature": 0,
        "parallel_tool_calls": False,
    }  # fmt: skip
    choice = (await api.chat.completions.create(**fields, tool_choice="required")).choices[0]
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    (call,) = choice.message.tool_calls
    assert_valid(call.function.name, json.loads(call.function.arguments))
    named = {"type": "function", "function": {"name": call.function.name}}
    async with api.chat.completions.stream(**fields, tool_choice=named) as stream:
        streamed = (await stream.get_final_completion()).choices[0]
    (again,) = streamed.message.tool_calls
    assert again.function.name == call.function.name
    assert again.function.arguments == call.function.arguments
    assert (streamed.message.content or None, streamed.finish_reason) == (None, "tool_calls")


async def test_agent_with_two_tools_finishes_and_hits_all_it_computed(api: Any) -> None:
    messages = [ASK]
    steps: list[Any] = [{"type": "function", "function": {"name": n}} for n in SCHEMAS]
    called, computed = [], 0
    for choice in [*steps, "none"]:
        answer = await api.chat.completions.create(
            model=MODEL, messages=messages, tools=TOOLS, tool_choice=choice,
            max_tokens=8 if choice == "none" else 50,
            temperature=0,
        )  # fmt: skip
        usage, message = answer.usage, answer.choices[0].message
        assert usage.prompt_tokens_details.cached_tokens == computed
        computed = usage.prompt_tokens + usage.completion_tokens - 1
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            called.append(call.function.name)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "21"})
    assert called == list(SCHEMAS)
    assert message.content


async def test_each_turn_of_a_stateless_chat_hits_all_that_was_computed(
    client: Any, api: Any
) -> None:
    """The answers are one token over and over, which encode otherwise than they were generated."""
    engine = client.app.values()
    tokenizer = next(v.engine.tokenizer for v in engine if hasattr(v, "engine"))
    (token,) = tokenizer.encode("a")
    messages: list[Any] = [{"role": "user", "content": "Say a."}]
    computed = 0
    for _ in range(4):
        answer = await api.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=7, logit_bias={str(token): 100},
            temperature=0,
        )  # fmt: skip
        text, usage = answer.choices[0].message.content, answer.usage
        assert tokenizer.encode(text) != [token] * 7
        assert usage.prompt_tokens_details.cached_tokens == computed
        computed = usage.prompt_tokens + usage.completion_tokens - 1
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "More."}]


async def test_responses_call_and_go_on(api: Any) -> None:
    tools: Any = [{"type": "function", "name": n, "parameters": s} for n, s in SCHEMAS.items()]
    fields: Any = {"model": MODEL, "tools": tools, "max_output_tokens": 40, "temperature": 0}
    async with api.responses.stream(
        **fields, input="What is 2 + 2?", tool_choice={"type": "function", "name": "add"}
    ) as stream:
        kinds = [event.type async for event in stream]
        first = await stream.get_final_response()
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed"
    (call,) = first.output
    assert_valid("add", json.loads(call.arguments))
    second = await api.responses.create(
        **{**fields, "max_output_tokens": 8},
        previous_response_id=first.id,
        tool_choice="none",
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "4"}],
    )
    assert second.output_text
    computed = first.usage.input_tokens + first.usage.output_tokens - 1
    assert second.usage.input_tokens_details.cached_tokens == computed


async def test_anthropic_agent_calls_and_reads_what_it_wrote_to_the_cache(
    client: Any, claude: Any
) -> None:
    tools: Any = [{"name": n, "input_schema": s} for n, s in SCHEMAS.items()]
    tools[-1]["cache_control"] = {"type": "ephemeral", "ttl": "1h"}
    messages = [ASK]
    fields: Any = {"model": MODEL, "tools": tools, "max_tokens": 50}
    fields["extra_body"] = {"temperature": 0}
    count = await claude.messages.count_tokens(model=MODEL, messages=messages, tools=tools)
    async with claude.messages.stream(
        **fields, messages=messages, tool_choice={"type": "tool", "name": "get_weather"}
    ) as stream:
        first = await stream.get_final_message()
    (block,) = first.content
    assert_valid("get_weather", block.input)
    assert first.stop_reason == "tool_use"
    usage = first.usage
    assert usage.cache_creation_input_tokens > 0
    assert usage.cache_read_input_tokens == 0
    assert usage.cache_creation_input_tokens + usage.input_tokens == count.input_tokens
    messages += [
        {"role": "assistant", "content": [block.model_dump(exclude_none=True)]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}],
        },
    ]
    second = await claude.messages.create(**{**fields, "max_tokens": 8}, messages=messages)
    assert second.stop_reason in ("end_turn", "max_tokens")
    assert second.content[0].text
    assert second.usage.cache_read_input_tokens == count.input_tokens + usage.output_tokens - 1
    pins = (await (await client.get("/admin/cache/pins")).json())["data"]
    assert max(pin["ttl_seconds"] for pin in pins) == 3600
