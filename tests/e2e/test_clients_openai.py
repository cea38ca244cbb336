"""OpenAI's client on the default model: every promise of chat completions and completions."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from client_tools import ASK, CHAT_TOOLS, MODEL, Report, Tools

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

HELLO: Any = [{"role": "user", "content": "Say hello."}]
STEPS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather"}},
    {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "required",
            "tools": [{"type": "function", "function": {"name": "add"}}],
        },
    },
    "none",
]


@pytest.fixture
def chat(api: openai.OpenAI) -> Any:
    def chat(messages: Any = None, **fields: Any) -> Any:
        fields = {"temperature": 0, "max_tokens": 8, **fields}
        return api.chat.completions.create(model=MODEL, messages=messages or HELLO, **fields)

    return chat


def chosen(*texts: str) -> dict[str, Any]:
    """Return what makes the answer one of `texts`, whatever the model would rather say."""
    return {"extra_body": {"guided_choice": list(texts)}, "max_tokens": 32}


def deltas(stream: Any) -> list[str]:
    return [c.choices[0].delta.content for c in stream if c.choices and c.choices[0].delta.content]


def test_streamed_two_tool_loop_hits_all_it_computed(api: openai.OpenAI) -> None:
    tools, messages = Tools(), [{"role": "user", "content": ASK}]
    extra: dict[str, Any] = {"cache_salt": "openai"}
    computed = 0
    for choice in STEPS:
        if choice == "none":
            # The client's stream helper takes no answer that its limit cut off.
            extra["guided_choice"] = ["21 degrees, and 5."]
        fields: Any = {
            "model": MODEL, "messages": messages, "tools": CHAT_TOOLS, "tool_choice": choice,
            "parallel_tool_calls": False, "temperature": 0, "extra_body": extra,
            "max_completion_tokens": 60,
        }  # fmt: skip
        options: Any = {"include_usage": True}
        with api.chat.completions.stream(**fields, stream_options=options) as stream:
            answer: Any = stream.get_final_completion()
        assert answer.usage.prompt_tokens_details.cached_tokens == computed
        computed = answer.usage.prompt_tokens + answer.usage.completion_tokens - 1
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude={"parsed"}))
        for call in message.tool_calls or ():
            result = tools.run(call.function.name, json.loads(call.function.arguments))
            part = {"type": "text", "text": result}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": [part]})
    assert tools.called == ["get_weather", "add"]
    assert (message.content, message.tool_calls) == ("21 degrees, and 5.", None)


def test_a_model_parses_whole_and_streamed(api: openai.OpenAI) -> None:
    fields: Any = {
        "model": MODEL, "messages": [{"role": "user", "content": "Report on Lima."}],
        "response_format": Report, "temperature": 0, "max_tokens": 60,
    }  # fmt: skip
    whole = api.chat.completions.parse(**fields).choices[0].message.parsed
    assert isinstance(whole, Report)
    with api.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion().choices[0].message.parsed
    assert streamed == whole


def test_strict_tools_parse_their_arguments(api: openai.OpenAI) -> None:
    answer = api.chat.completions.parse(
        model=MODEL, messages=HELLO, tools=[openai.pydantic_function_tool(Report)],
        tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=60,
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Report)


def test_json_object_is_an_object(chat: Any) -> None:
    ask = [{"role": "user", "content": 'Answer with {"ok": true} and nothing else.'}]
    answer = chat(ask, response_format={"type": "json_object"}, max_tokens=100).choices[0]
    assert answer.finish_reason == "stop"
    assert isinstance(json.loads(answer.message.content), dict)


def test_forms_of_a_message_are_the_same_prompt(chat: Any) -> None:
    """Parts or a string, null or empty, `developer` or `system`: all but one token is found."""
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    first = [
        {"role": "system", "content": "Forms of messages."},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "5"},
    ]
    second = [
        {"role": "developer", "content": [{"type": "text", "text": "Forms of messages."}]},
        {"role": "user", "content": [{"type": "text", "text": "two"}], "name": None},
        {"role": "assistant", "content": None, "refusal": None, "audio": None,
         "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "5"}]},
    ]  # fmt: skip
    prompt = chat(first, tools=CHAT_TOOLS, max_tokens=1).usage.prompt_tokens
    usage = chat(second, tools=CHAT_TOOLS, max_tokens=1).usage
    assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (prompt, prompt - 1)


def test_logprobs_spell_the_answer_and_put_the_chosen_token_first(chat: Any) -> None:
    choice = chat(logprobs=True, top_logprobs=3, max_tokens=5).choices[0]
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries) == choice.message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)
        assert bytes(entry.bytes).decode() == entry.token


def test_streamed_logprobs_are_those_of_the_whole_answer(chat: Any) -> None:
    fields: Any = {"logprobs": True, "max_tokens": 5}
    whole = chat(**fields).choices[0].logprobs.content
    entries = [
        entry
        for chunk in chat(**fields, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [e.token for e in entries] == [e.token for e in whole]


def test_a_seed_repeats_an_answer(chat: Any) -> None:
    fields: Any = {"temperature": 1.5, "max_tokens": 6}
    first = chat(seed=1, **fields).choices[0].message.content
    assert chat(seed=1, **fields).choices[0].message.content == first
    assert {chat(seed=seed, **fields).choices[0].message.content for seed in (2, 3)} != {first}


def test_choices_are_numbered_and_their_prompt_counts_once(chat: Any) -> None:
    whole = chat(n=3, temperature=1, seed=5)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert whole.usage.prompt_tokens == chat().usage.prompt_tokens
    texts = {0: "", 1: "", 2: ""}
    for chunk in chat(n=3, temperature=1, seed=5, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(texts.values()) == [choice.message.content for choice in whole.choices]


def test_logit_bias_forces_a_token(api: openai.OpenAI, chat: Any, live_url: str) -> None:
    tokens = api.post(f"{live_url}/tokenize", body={"prompt": " yes"}, cast_to=object)
    (token,) = tokens["tokens"]  # type: ignore[index]
    assert chat(logit_bias={str(token): 100}, max_tokens=3).choices[0].message.content == " yes" * 3


def test_no_character_is_split_in_a_stream(chat: Any) -> None:
    text = "é漢字🙂👩‍🚀ñ"
    parts = deltas(chat(**chosen(text), stream=True))
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)
    assert len(parts) > 3


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_string_is_never_shown(chat: Any, streamed: bool) -> None:
    answer = chat(**chosen("alpha beta STOP gamma"), stop=["STOP", "gamma"], stream=streamed)
    if streamed:
        chunks = list(answer)
        parts = deltas(chunks)
        assert not any("S" in part for part in parts)
        assert ("".join(parts), chunks[-1].choices[0].finish_reason) == ("alpha beta ", "stop")
    else:
        (choice,) = answer.choices
        assert (choice.message.content, choice.finish_reason) == ("alpha beta ", "stop")


def test_a_stream_tells_usage_once_if_asked(chat: Any) -> None:
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == (
        chunks[-1].usage.prompt_tokens + chunks[-1].usage.completion_tokens
    )
    assert all(chunk.usage is None and chunk.choices for chunk in chat(stream=True))


def test_streamed_calls_tell_id_and_name_once_and_then_arguments(chat: Any) -> None:
    ask = [{"role": "user", "content": ASK}]
    chunks = list(chat(ask, tools=CHAT_TOOLS, tool_choice=STEPS[0], max_tokens=60, stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    first, *rest = calls
    assert (first.index, first.type, first.function.name) == (0, "function", "get_weather")
    assert first.id
    assert all(call.id is None and call.function.name is None for call in rest)
    assert "city" in json.loads("".join(call.function.arguments for call in calls))
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_what_frameworks_send_along_changes_nothing(chat: Any) -> None:
    """Hints, headers and fields nobody knows."""
    plain = chat().choices[0].message.content
    answer = chat(
        store=False,
        metadata={"trace": "1"},
        service_tier="auto",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        safety_identifier="s",
        reasoning_effort="low",
        verbosity="low",
        prediction={"type": "content", "content": "Hello"},
        parallel_tool_calls=True,
        modalities=["text"],
        user="u",
        n=1,
        stop=None,
        tools=[],
        extra_headers={"OpenAI-Organization": "o", "x-stainless-lang": "python"},
        extra_body={"nobody": {"knows": "this"}, "max_completion_tokens": None},
    )
    assert answer.choices[0].message.content == plain


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 9}, "temperature"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"web_search_options": {}, "extra_body": {"web_search_options": {"x": 1}}},
         "web_search_options"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "messages[0].content[0].type"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0]"),
        ({"tools": CHAT_TOOLS, "tool_choice": {"type": "allowed_tools"}},
         "tool_choice.allowed_tools.mode"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema":
          {"type": "nonsense"}}}}, "response_format"),
        ({"messages": HELLO * 3, "extra_body": {"continue_final_message": True}},
         "continue_final_message"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_a_bad_request(chat: Any, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(fields.pop("messages", None), **fields)
    assert refused.value.param == param


def test_errors_have_their_classes_and_codes(api: openai.OpenAI, chat: Any) -> None:
    with pytest.raises(openai.NotFoundError) as model:
        api.chat.completions.create(model="other", messages=HELLO)
    assert model.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        chat([{"role": "user", "content": "a b " * 10_000}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        api.embeddings.create(model=MODEL, input="a")
    assert long.value.request_id


def test_an_open_message_goes_on(chat: Any) -> None:
    ask = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "one, two,"}]
    body = {"continue_final_message": True, "add_generation_prompt": False}
    open_one = chat(ask, extra_body=body)
    closed = chat(ask)
    assert open_one.usage.prompt_tokens < closed.usage.prompt_tokens
    assert "three" in open_one.choices[0].message.content


def test_completions_take_every_form_of_prompt(api: openai.OpenAI, live_url: str) -> None:
    ids: Any = api.post(f"{live_url}/tokenize", body={"prompt": "One, two,"}, cast_to=object)
    fields: Any = {"model": MODEL, "temperature": 0, "max_tokens": 4}
    text = api.completions.create(prompt="One, two,", **fields)
    both = api.completions.create(prompt=["One, two,", "A B C"], **fields)
    assert api.completions.create(prompt=ids["tokens"], **fields).choices[0].text == (
        text.choices[0].text
    )
    assert both.choices[0].text == text.choices[0].text
    assert [choice.index for choice in both.choices] == [0, 1]
    echo = api.completions.create(prompt="One, two,", echo=True, **fields)
    assert echo.choices[0].text == "One, two," + text.choices[0].text
    back: Any = api.post(f"{live_url}/detokenize", body={"tokens": ids["tokens"]}, cast_to=object)
    assert back["prompt"] == "One, two,"


def test_completions_stream_stop_and_tell_logprobs(api: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "prompt": "One, two,", "temperature": 0, "max_tokens": 12}
    whole = api.completions.create(**fields, logprobs=2).choices[0]
    assert "".join(whole.logprobs.tokens) == whole.text  # type: ignore[union-attr,arg-type]
    cut = whole.text[4:6]
    options: Any = {"include_usage": True}
    chunks = list(api.completions.create(**fields, stop=cut, stream=True, stream_options=options))
    text = "".join(chunk.choices[0].text for chunk in chunks[:-1])
    assert text == whole.text[: whole.text.index(cut)]
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0  # type: ignore[union-attr]


def test_models_are_listed(api: openai.OpenAI) -> None:
    (model,) = api.models.list()
    assert (model.id, model.object) == (MODEL, "model")
    assert api.models.retrieve(MODEL) == model
