"""OpenAI's client on the default model: every promise of the Responses API."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from client_tools import ASK, MODEL, RESPONSES_TOOLS, Report, Tools

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

STEPS: list[Any] = [
    {"type": "function", "name": "get_weather"},
    {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]},
    "none",
]


@pytest.fixture
def respond(api: openai.OpenAI) -> Any:
    def respond(given: Any = "Say hello.", **fields: Any) -> Any:
        fields = {"temperature": 0, "max_output_tokens": 8, **fields}
        return api.responses.create(model=MODEL, input=given, **fields)

    return respond


def test_two_tool_loop_of_a_client_with_its_own_history_hits_all_it_computed(
    respond: Any,
) -> None:
    tools, computed = Tools(), 0
    items: list[Any] = [{"role": "user", "content": ASK}]
    for choice in STEPS:
        response = respond(
            items,
            instructions="You use tools.",
            tools=RESPONSES_TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            store=False,
            include=["reasoning.encrypted_content"],
            max_output_tokens=8 if choice == "none" else 60,
            extra_body={"cache_salt": "responses"},
        )
        assert response.usage.input_tokens_details.cached_tokens == computed
        computed = response.usage.input_tokens + response.usage.output_tokens - 1
        items += response.output
        for call in response.output:
            if call.type == "function_call":
                result = tools.run(call.name, json.loads(call.arguments))
                output = {"type": "function_call_output", "call_id": call.call_id}
                items.append({**output, "output": result})
    assert tools.called == ["get_weather", "add"]
    assert response.output_text


def test_a_stored_response_goes_on_and_hits_all_it_computed(respond: Any) -> None:
    # Others' conversations go on after the same answer, and more of this one could be found there.
    own = {"cache_salt": "stored"}
    first = respond("Say hello.", extra_body=own)
    second = respond("Say more.", previous_response_id=first.id, extra_body=own)
    assert second.previous_response_id == first.id
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached == first.usage.input_tokens + first.usage.output_tokens - 1


def test_streamed_events_have_their_types_and_build_the_response(api: openai.OpenAI) -> None:
    with api.responses.stream(
        model=MODEL, input=ASK, tools=RESPONSES_TOOLS, tool_choice=STEPS[0], temperature=0,
        max_output_tokens=60,
    ) as stream:  # fmt: skip
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    assert type(events[0]).__name__ == "ResponseCreatedEvent"
    (call,) = final.output
    arguments = "".join(
        event.delta for event in events if event.type == "response.function_call_arguments.delta"
    )
    assert arguments == call.arguments
    assert (call.type, call.status) == ("function_call", "completed")


@pytest.mark.parametrize("streamed", [False, True])
def test_logprobs_spell_the_text(respond: Any, streamed: bool) -> None:
    fields: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = respond(**fields, stream=streamed)
    if streamed:
        events = list(response)
        response = events[-1].response
        shown = [
            entry
            for event in events
            if event.type == "response.output_text.delta"
            for entry in event.logprobs
        ]
    (part,) = response.output[0].content
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    assert response.top_logprobs == 2
    if streamed:
        assert [e.token for e in shown] == [e.token for e in part.logprobs]
    assert respond().output[0].content[0].logprobs == []


def test_a_model_parses(api: openai.OpenAI) -> None:
    response = api.responses.parse(
        model=MODEL, input="Report on Lima.", text_format=Report, temperature=0,
        max_output_tokens=60,
    )  # fmt: skip
    assert isinstance(response.output_parsed, Report)


def test_an_item_of_a_stored_response_can_be_referred_to(respond: Any) -> None:
    first = respond("My name is Ada.")
    items: list[Any] = [{"role": "user", "content": "My name is Ada."}]
    items.append({"type": "item_reference", "id": first.output[0].id})
    items.append({"role": "user", "content": "Who am I?"})
    by_reference = respond(items)
    by_value = respond([items[0], first.output[0], items[2]])
    assert by_reference.usage.input_tokens == by_value.usage.input_tokens
    assert by_reference.output_text == by_value.output_text
    again = respond([{"type": "item_reference", "id": by_reference.output[0].id}, items[2]])
    assert again.usage.input_tokens > 0
    with pytest.raises(openai.NotFoundError) as missing:
        respond([{"type": "item_reference", "id": "msg_nobody"}])
    assert missing.value.param == "input[0].id"


def test_input_tokens_are_counted_as_they_are_used(api: openai.OpenAI, respond: Any) -> None:
    fields: Any = {"instructions": "Be brief.", "tools": RESPONSES_TOOLS}
    count = api.responses.input_tokens.count(model=MODEL, input=ASK, **fields)
    assert count.input_tokens == respond(ASK, **fields).usage.input_tokens


def test_input_items_come_in_pages(api: openai.OpenAI, respond: Any) -> None:
    response = respond([{"role": "user", "content": text} for text in "abc"])
    list_items = api.responses.input_items.list
    shown = [item.content for item in list_items(response.id, limit=1)]  # type: ignore[union-attr]
    assert shown == ["c", "b", "a"]
    first = list_items(response.id, order="asc", limit=2)
    assert ([item.content for item in first.data], first.has_more) == (["a", "b"], True)  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError):
        list_items(response.id, after="nobody")


def test_a_stored_response_is_read_again_but_not_streamed_or_cancelled(
    api: openai.OpenAI, respond: Any
) -> None:
    response = respond()
    assert api.responses.retrieve(response.id).output == response.output
    for refused in (
        lambda: api.responses.retrieve(response.id, stream=True),
        lambda: api.responses.cancel(response.id),
    ):
        with pytest.raises(openai.BadRequestError):
            refused()
    api.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(response.id)


def test_what_frameworks_send_along_changes_nothing(respond: Any) -> None:
    plain = respond()
    response = respond(
        [{"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "Say hello."}]}],
        reasoning={"effort": "low", "summary": "auto"},
        include=["reasoning.encrypted_content", "file_search_call.results"],
        metadata={"trace": "1"},
        service_tier="auto",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        safety_identifier="s",
        max_tool_calls=3,
        truncation="disabled",
        text={"verbosity": "low"},
        user="u",
        background=False,
        extra_body={"nobody": {"knows": "this"}},
    )  # fmt: skip
    assert response.output_text == plain.output_text
    assert (response.metadata, response.max_tool_calls) == ({"trace": "1"}, 3)
    assert (response.prompt_cache_key, response.safety_identifier) == ("k", "s")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": RESPONSES_TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto"}},
         "tool_choice.tools"),
        ({"tools": RESPONSES_TOOLS, "tool_choice": {"type": "function", "name": "other"}},
         "tool_choice"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_a_bad_request(respond: Any, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        respond(**fields)
    assert refused.value.param == param


def test_a_cut_off_answer_is_incomplete(respond: Any) -> None:
    response = respond("Tell me a long story.", max_output_tokens=3)
    assert (response.status, response.output[0].status) == ("incomplete", "incomplete")
    assert response.incomplete_details.reason == "max_output_tokens"
    events = list(respond("Tell me a long story.", max_output_tokens=3, stream=True))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == response.output_text
