"""Constrained answers of the default model: valid, whatever it would rather say."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from radixkv.engine import AsyncEngine, RequestOutput, SamplingParams
from radixkv.engine.factory import BuiltEngine
from radixkv.request import GrammarSpec

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

SHORT = {"type": "string", "maxLength": 12}
SCHEMAS: dict[str, Any] = {
    "flat": {
        "type": "object",
        "properties": {"name": SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {
            "home": {
                "type": "object",
                "properties": {
                    "city": SHORT,
                    "at": {
                        "type": "array",
                        "prefixItems": [
                            {"type": "integer", "minimum": -90, "maximum": 90},
                            {"type": "integer", "minimum": -180, "maximum": 180},
                        ],
                        "items": False,
                        "minItems": 2,
                    },
                },
                "required": ["city", "at"],
                "additionalProperties": False,
            }
        },
        "required": ["home"],
        "additionalProperties": False,
    },
    "enum": {"enum": ["red", "green", 7, None, {"deep": [True]}]},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "number": {"type": "number", "minimum": -1.5, "maximum": 2.25, "multipleOf": 0.25},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 99},
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"const": "x"}, "c": {"type": "null"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "refs": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer", "minimum": 0, "maximum": 9},
                    "left": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]},
                },
                "required": ["value", "left"],
                "additionalProperties": False,
            },
            "leaf": {"enum": ["leaf", "bud"]},
        },
    },
    "unicode": {
        "type": "object",
        "properties": {"größe": {"enum": ["klein 小", "groß 🎈"]}, "日本": {"const": 'é\n"q"'}},
        "required": ["größe", "日本"],
        "additionalProperties": False,
    },
    "any_of": {"anyOf": [{"type": "integer", "maximum": 50, "minimum": 40}, {"const": "none"}]},
    "pattern": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2}$"},
    "date": {"type": "string", "format": "date"},
    "map": {
        "type": "object",
        "properties": {"id": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["id"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 3,
    },
}
PROMPT = "Describe a small animal, as data.\n"
PHONE = r"\+[1-9]{2} \d{3}-\d{4}"
COLOURS = ["dark red", "dark green", "blue"]
SUM = 'start: term (" + " term)~1..3 " = " /[0-9]{1,3}/\nterm: /[1-9][0-9]?/\n'


@pytest.fixture
async def served(build: Callable[..., BuiltEngine]) -> AsyncIterator[AsyncEngine]:
    engine = build().engine
    await engine.start()
    yield engine
    await engine.check_integrity()
    await engine.shutdown()


async def ask(
    engine: AsyncEngine, grammar: GrammarSpec | None = None, prompt: str = PROMPT, **params: Any
) -> list[list[RequestOutput]]:
    """Return the increments of each answer."""
    params = {"temperature": 0.0, "max_tokens": 100, **params}
    sampling = SamplingParams(grammar=grammar, **params)
    compiled = None if grammar is None else await engine.compile_grammar(grammar)
    ids = engine.tokenizer.encode(prompt)
    answers: list[list[RequestOutput]] = [[] for _ in range(sampling.n)]
    async for output in engine.submit(ids, sampling, grammar=compiled):
        answers[output.index].append(output)
    return answers


def text_of(answer: list[RequestOutput]) -> str:
    return "".join(output.text for output in answer)


def schema_spec(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))


def assert_valid(schema: Any, answer: list[RequestOutput]) -> None:
    assert answer[-1].finish_reason == "stop", text_of(answer)
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    validator.validate(json.loads(text_of(answer)))


async def test_answers_validate_against_their_schemas_and_free_ones_do_not_change(
    served: AsyncEngine,
) -> None:
    """All run at once, each under a grammar of its own, some greedy and some drawn."""
    free = [f"Once upon a time, number {i} " for i in range(3)]
    alone = [text_of((await ask(served, prompt=p, max_tokens=24))[0]) for p in free]
    bound = [
        ask(served, schema_spec(schema), seed=i, temperature=(i % 2) * 0.9)
        for i, schema in enumerate(SCHEMAS.values())
    ]
    unbound = [ask(served, prompt=p, max_tokens=24) for p in free]
    *answers, a, b, c = await asyncio.gather(*bound, *unbound)
    for schema, (answer,) in zip(SCHEMAS.values(), answers, strict=True):
        assert_valid(schema, answer)
    assert [text_of(answer[0]) for answer in (a, b, c)] == alone


async def test_branches_and_beams_validate(served: AsyncEngine) -> None:
    for how in (
        {"n": 3, "temperature": 1.0, "seed": 4},
        {"n": 2, "best_of": 3, "use_beam_search": True},
    ):
        answers = await ask(served, schema_spec(SCHEMAS["flat"]), **how)
        assert len({text_of(a) for a in answers}) > 1
        for answer in answers:
            assert_valid(SCHEMAS["flat"], answer)


async def test_regexes_choices_and_grammars_hold(served: AsyncEngine) -> None:
    wanted = [
        (GrammarSpec("regex", PHONE), lambda text: re.fullmatch(PHONE, text)),
        (GrammarSpec("choice", json.dumps(COLOURS)), lambda text: text in COLOURS),
        (
            GrammarSpec("grammar", SUM),
            lambda text: re.fullmatch(r"[1-9]\d?( \+ [1-9]\d?){1,3} = \d{1,3}", text),
        ),
    ]
    answers = await asyncio.gather(
        *(ask(served, grammar, n=3, temperature=0.8, seed=2) for grammar, _ in wanted)
    )
    for (_, holds), choices in zip(wanted, answers, strict=True):
        for answer in choices:
            assert answer[-1].finish_reason == "stop"
            assert holds(text_of(answer)), text_of(answer)


async def test_cut_off_object_is_the_beginning_of_one(served: AsyncEngine) -> None:
    """Cut before its end, and then by a stop string that can't be missed."""
    grammar = schema_spec({"type": "object"})
    (answer,) = await ask(served, grammar, max_tokens=12)
    (cut,) = await ask(served, grammar, max_tokens=12, stop=('"',))
    assert answer[-1].finish_reason == "length"
    assert text_of(answer).startswith("{")
    assert text_of(cut) == text_of(answer).partition('"')[0]
