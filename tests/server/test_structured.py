"""The fields that constrain answers, over the real engine with a model that writes noise."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from server_fakes import read_events

from radixkv.engine.grammar_compiler import GrammarCompiler

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}, "count": {"enum": [1, 20, 300]}},
    "required": ["size", "count"],
    "additionalProperties": False,
}
WRAPPED = {"type": "json_schema", "json_schema": {"name": "box", "strict": True, "schema": SCHEMA}}
LARK = 'start: "<" /[a-c]{2}/ ">"'
CHOICES = ["red", "green", "blü"]


def is_box(text: str) -> bool:
    value = json.loads(text)
    return value["size"] in ("small", "large") and value["count"] in (1, 20, 300)


def is_word(text: str) -> bool:
    return re.fullmatch("<[a-c]{2}>", text) is not None


def is_choice(text: str) -> bool:
    return text in CHOICES


WAYS: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": WRAPPED}, is_box),
    ({"structured_outputs": {"json": SCHEMA}}, is_box),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, is_box),
    ({"guided_json": SCHEMA}, is_box),
    ({"structured_outputs": {"regex": "<[a-c]{2}>"}}, is_word),
    ({"guided_regex": "<[a-c]{2}>"}, is_word),
    ({"structured_outputs": {"choice": CHOICES}}, is_choice),
    ({"guided_choice": CHOICES}, is_choice),
    ({"structured_outputs": {"grammar": LARK}}, is_word),
    ({"guided_grammar": 'root ::= "<" [a-c] [a-c] ">"'}, is_word),
]


@pytest.fixture
async def client(serve: Any) -> Any:
    client, served = await serve()
    served.engine.grammars = GrammarCompiler(
        served.tokenizer, served.vocab_size, served.engine.eos_token_ids
    )
    return client


def body_of(route: str, **fields: Any) -> dict[str, Any]:
    where: dict[str, Any] = {"prompt": "x" * 20}
    if route == CHAT:
        where = {"messages": [{"role": "user", "content": "x" * 20}]}
    return {"max_tokens": 80, "seed": 1, **where, **fields}


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "check"), WAYS, ids=lambda value: getattr(value, "__name__", str(value)[:40])
)
async def test_answers_have_the_form_asked_for(
    client: Any, route: str, fields: dict[str, Any], check: Any
) -> None:
    response = await client.post(route, json=body_of(route, n=2, **fields))
    assert response.status == 200, await response.text()
    for choice in (await response.json())["choices"]:
        assert choice["finish_reason"] == "stop"
        assert check(text_of(choice)), text_of(choice)


async def test_streamed_answer_is_the_whole_one(client: Any) -> None:
    body = body_of(CHAT, response_format=WRAPPED)
    whole = (await (await client.post(CHAT, json=body)).json())["choices"][0]
    events = await read_events(await client.post(CHAT, json={**body, "stream": True}))
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == text_of(whole)
    assert is_box(text_of(whole))


async def test_any_object_begins_as_one(client: Any) -> None:
    for fields in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
    ):
        answer = await (await client.post(CHAT, json=body_of(CHAT, **fields))).json()
        assert text_of(answer["choices"][0]).startswith("{")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {"json_object": False, "choice": None}},
        {"structured_outputs": None, "guided_json": None},
    ],
)
async def test_fields_that_ask_for_nothing_change_nothing(
    client: Any, fields: dict[str, Any]
) -> None:
    body = body_of(COMPLETIONS, ignore_eos=True)
    plain = await (await client.post(COMPLETIONS, json=body)).json()
    answer = await (await client.post(COMPLETIONS, json={**body, **fields})).json()
    assert answer["choices"] == plain["choices"]


async def test_session_goes_on_from_a_constrained_turn(client: Any) -> None:
    session = (await (await client.post("/v1/sessions")).json())["id"]
    url = f"/v1/sessions/{session}/messages"
    body = {"content": "x", "guided_choice": CHOICES}
    first = await (await client.post(url, json=body)).json()
    assert is_choice(text_of(first["choices"][0]))
    second = await (await client.post(url, json={**body, "guided_choice": ["ok"]})).json()
    assert text_of(second["choices"][0]) == "ok"
    known = first["session"]["num_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= known - 1


BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {}}, "response_format"),
    ({"response_format": "json_object"}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": []}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": 5, "schema": {}}}},
        "response_format",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "a"}}},
        "response_format",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
        "response_format",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "a"}}}},
        "response_format",
    ),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": json.dumps({"enum": ["\ud800"]})}, "guided_json"),
    ({"guided_json": {"description": "x" * 70000}}, "guided_json"),
    ({"guided_regex": ["a"]}, "guided_regex"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_regex": "(a"}, "guided_regex"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", 1]}, "guided_choice"),
    ({"guided_grammar": "start: ("}, "guided_grammar"),
    ({"structured_outputs": "a"}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": {"a": 1}}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {}, "name": "a" * 9},
            },
            "guided_choice": ["a"],
        },
        "guided_choice",
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:50])
async def test_bad_constraint_is_a_bad_request(
    client: Any, fields: dict[str, Any], param: str, stream: bool
) -> None:
    """In a stream too it is an answer with a status, not an event."""
    response = await client.post(CHAT, json=body_of(CHAT, stream=stream, **fields))
    assert response.status == 400, await response.text()
    error = (await response.json())["error"]
    assert error["param"] == param
    assert param in error["message"]
    assert len(error["message"]) < 500


async def test_engine_without_grammars_says_so(serve: Any) -> None:
    client, _ = await serve()
    response = await client.post(CHAT, json=body_of(CHAT, guided_regex="a"))
    assert response.status == 400
    assert "not supported" in (await response.json())["error"]["message"]
