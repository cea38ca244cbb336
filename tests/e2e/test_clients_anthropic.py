"""Anthropic's client on the default model: every promise of the Messages API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import pytest
from client_tools import ANTHROPIC_TOOLS, ASK, MODEL, Tools
from pydantic import BaseModel

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

HELLO: Any = [{"role": "user", "content": "Say hello."}]
STEPS: list[Any] = [
    {"type": "tool", "name": "get_weather"},
    {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
    {"type": "none"},
]
MARK: Any = {"type": "ephemeral", "ttl": "1h"}


class Report(BaseModel):
    """What a report says."""

    city: Literal["Lima", "Paris"]
    sunny: bool


@pytest.fixture
def api(live_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=live_url, api_key="none", max_retries=0) as api:
        yield api


@pytest.fixture
def say(api: anthropic.Anthropic) -> Any:
    def say(messages: Any = None, **fields: Any) -> Any:
        fields = {"max_tokens": 8, "extra_body": {"temperature": 0}, **fields}
        return api.messages.create(model=MODEL, messages=messages or HELLO, **fields)

    return say


def test_streamed_two_tool_loop_reads_all_it_wrote(api: anthropic.Anthropic) -> None:
    tools, messages = Tools(), [{"role": "user", "content": ASK}]
    computed, written = 0, []
    for choice in STEPS:
        fields: Any = {
            "model": MODEL, "messages": messages, "tools": ANTHROPIC_TOOLS, "tool_choice": choice,
            "system": [{"type": "text", "text": "You use tools.", "cache_control": MARK}],
            "max_tokens": 8 if choice["type"] == "none" else 60,
            "extra_body": {"temperature": 0, "cache_salt": "claude"},
        }  # fmt: skip
        with api.messages.stream(**fields) as stream:
            answer = stream.get_final_message()
        usage: Any = answer.usage
        assert usage.cache_read_input_tokens == computed
        prompt = computed + usage.cache_creation_input_tokens + usage.input_tokens
        assert usage.cache_creation.ephemeral_1h_input_tokens == usage.cache_creation_input_tokens
        written.append(usage.cache_creation_input_tokens)
        computed = prompt + usage.output_tokens - 1
        messages.append({"role": "assistant", "content": answer.content})
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": [{"type": "text", "text": tools.run(block.name, block.input)}],
            }
            for block in answer.content
            if block.type == "tool_use"
        ]
        if results:
            messages.append({"role": "user", "content": results})
    assert tools.called == ["get_weather", "add"]
    assert written[0] > 0
    assert answer.content[0].text  # type: ignore[union-attr]
    assert answer.stop_reason in ("end_turn", "max_tokens")


def test_the_tool_runner_runs_both_tools(api: anthropic.Anthropic) -> None:
    tools = Tools()

    @anthropic.beta_tool(input_schema=ANTHROPIC_TOOLS[0]["input_schema"])
    def get_weather(city: str) -> str:
        """Return the weather."""
        return tools.run("get_weather", {"city": city})

    @anthropic.beta_tool(input_schema=ANTHROPIC_TOOLS[1]["input_schema"])
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return tools.run("add", {"a": a, "b": b})

    runner = api.beta.messages.tool_runner(
        model=MODEL, max_tokens=60, tools=[get_weather, add], tool_choice=STEPS[0],
        messages=[{"role": "user", "content": ASK}],
    )  # fmt: skip
    for step, message in enumerate(runner, 1):
        last = message
        if step < len(STEPS):
            choice = STEPS[step]
            runner.set_messages_params(lambda p, c=choice: {**p, "tool_choice": c})
    assert tools.called == ["get_weather", "add"]
    assert last.stop_reason in ("end_turn", "max_tokens")
    assert last.usage.cache_read_input_tokens > 0


def test_stream_has_every_event_in_order(say: Any) -> None:
    kinds = [event.type for event in say(stream=True, max_tokens=3)]
    # The client keeps pings to itself.
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_sequence_ends_the_answer_and_is_named(
    api: anthropic.Anthropic, streamed: bool
) -> None:
    schema = {"const": "alpha beta STOP gamma"}
    fields: Any = {
        "model": MODEL, "messages": HELLO, "max_tokens": 30, "stop_sequences": ["STOP"],
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
    }  # fmt: skip
    if streamed:
        with api.messages.stream(**fields) as stream:
            assert not any("S" in text for text in stream.text_stream)
            answer = stream.get_final_message()
    else:
        answer = api.messages.create(**fields)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "STOP")
    assert answer.content[0].text == '"alpha beta '  # type: ignore[union-attr]


def test_a_model_parses(api: anthropic.Anthropic) -> None:
    answer = api.messages.parse(model=MODEL, messages=HELLO, max_tokens=60, output_format=Report)
    assert isinstance(answer.parsed_output, Report)


def test_an_answer_goes_on_in_the_assistants_last_message(say: Any) -> None:
    ask = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "one, two,"}]
    answer = say(ask)
    assert "three" in answer.content[0].text
    assert not answer.content[0].text.startswith("one")


def test_tokens_are_counted_as_they_are_used(api: anthropic.Anthropic, say: Any) -> None:
    fields: Any = {"tools": ANTHROPIC_TOOLS, "system": "Be brief."}
    count = api.messages.count_tokens(model=MODEL, messages=HELLO, **fields)
    usage = say(**fields, max_tokens=1).usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_what_agents_send_along_changes_nothing(api: anthropic.Anthropic, say: Any) -> None:
    plain = say().content
    answer = say(
        metadata={"user_id": "u"},
        service_tier="auto",
        thinking={"type": "disabled"},
        extra_headers={"anthropic-beta": "x"},
        extra_body={
            "temperature": 0,
            "nobody": {"knows": "this"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        },
    )
    assert answer.content == plain
    assert answer.usage.service_tier == "standard"


@pytest.mark.parametrize(
    "fields",
    [
        {"extra_body": {"temperature": 9}},
        {"extra_body": {"mcp_servers": [{"url": "x"}]}},
        {"extra_body": {"thread": {"type": "create"}}},
        {"extra_body": {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}},
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    ],
)
def test_what_cannot_be_done_is_a_bad_request(say: Any, fields: Any) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        say(fields.pop("messages", None), **fields)
    body: Any = refused.value.body
    assert body["error"]["type"] == "invalid_request_error"
    assert refused.value.request_id == body["request_id"]


def test_unknown_models_are_not_found(api: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        api.messages.create(model="other", messages=HELLO, max_tokens=1)
    body: Any = missing.value.body
    assert body["error"]["type"] == "not_found_error"


def test_models_are_listed(api: anthropic.Anthropic) -> None:
    (model,) = api.models.list()
    assert (model.id, model.display_name, model.type) == (MODEL, MODEL, "model")
    assert model.max_input_tokens == 8192
    assert api.models.retrieve(MODEL) == model
