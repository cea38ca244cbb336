from __future__ import annotations

import json
import random
from typing import Any

import pytest

from radixkv.server.tool_parsers import (
    FAMILIES,
    CallArguments,
    CallStart,
    TextPart,
    ToolParser,
    family_of_template,
)

NAMES = ("get_weather", "add")
ARGS = {"city": 'Paris }{ "x" \\', "n": [1, {"a": None}], "s": "é🎈"}
CALL = json.dumps({"name": "get_weather", "arguments": ARGS}, ensure_ascii=False)
ADD = '{"arguments": {"a": 1}, "name": "add"}'
WANTED = ("get_weather", ARGS)


def read(parser: ToolParser, pieces: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    """Return the content and the calls (arguments as text) of an answer that comes in pieces."""
    text, calls = "", []
    for event in [e for p in pieces for e in parser.push(p)] + parser.finish():
        if isinstance(event, TextPart):
            assert event.text
            text += event.text
        elif isinstance(event, CallStart):
            assert event.index == len(calls)
            calls.append((event.name, ""))
        else:
            assert isinstance(event, CallArguments)
            assert event.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return text, calls


def cuts(text: str) -> list[list[str]]:
    """Return ways to cut a text: whole, by characters, and at random."""
    rng = random.Random(7)
    ways = [[text], list(text)]
    for _ in range(20):
        at = sorted(rng.sample(range(len(text)), min(5, len(text) - 1)))
        ways.append([text[i:j] for i, j in zip([0, *at], [*at, len(text)], strict=True)])
    return ways


CASES = {
    "hermes": [
        (f"<tool_call>\n{CALL}\n</tool_call>", "", [WANTED]),
        (
            f"Let me see.\n\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{ADD}</tool_call>",
            "Let me see.",
            [WANTED, ("add", {"a": 1})],
        ),
        (f"<tool_call>{CALL}</tool_call>\nDone.", "Done.", [WANTED]),
        ('<tool_call>{"name": "unknown"}</tool_call>', "", [("unknown", {})]),
        (
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}</tool_call>',
            "",
            [("add", {"a": 2})],
        ),
        ("a < b <tool </tool x\n ", "a < b <tool </tool x\n ", []),
        (f"{CALL}\n", f"{CALL}\n", []),
        ("<tool_call>\nadd(1)\n</tool_call> ok", "\nadd(1)\n ok", []),
        ('<tool_call>{"name": 3}</tool_call>', '{"name": 3}', []),
    ],
    "llama3": [
        (CALL.replace("arguments", "parameters"), "", [WANTED]),
        (f"<|python_tag|>{CALL}; {ADD}", "", [WANTED, ("add", {"a": 1})]),
        (
            '{"type": "function", "name": "add", "parameters": {"a": 1}}',
            "",
            [("add", {"a": 1})],
        ),
        (
            '{"type": "function", "function": {"name": "add", "parameters": {"a": 1}}}',
            "",
            [("add", {"a": 1})],
        ),
    ],
    "mistral": [
        (f"[TOOL_CALLS] [{CALL}, {ADD}]", "", [WANTED, ("add", {"a": 1})]),
        ('[TOOL_CALLS]add{"a": 1}', "", [("add", {"a": 1})]),
        (
            'Well. [TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[CALL_ID]x[ARGS]{}',
            "Well.",
            [("add", {"a": 1}), ("add", {})],
        ),
        ("see [TOOL] and [1]", "see [TOOL] and [1]", []),
    ],
    "generic": [
        (CALL, "", [WANTED]),
        (f"[{CALL}, {ADD}]", "", [WANTED, ("add", {"a": 1})]),
        (
            f"Right:\n{CALL}\n{ADD}\n\nThat is all.",
            "Right:That is all.",
            [WANTED, ("add", {"a": 1})],
        ),
        ('{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
        (' {"a": [1, {"b": 2}]} and\n [1] x\n[', ' {"a": [1, {"b": 2}]} and\n [1] x\n[', []),
        (f"In a line {CALL}", f"In a line {CALL}", []),
        ('x\n[{"name": "zzz"}]\n', 'x\n[{"name": "zzz"}]\n', []),
        ("", "", []),
        (" \n", " \n", []),
    ],
}


@pytest.mark.parametrize(
    ("family", "answer", "text", "calls"),
    [(family, *case) for family, cases in CASES.items() for case in cases],
)
def test_answer_is_split_alike_however_it_is_cut(
    family: str, answer: str, text: str, calls: list[Any]
) -> None:
    for pieces in cuts(answer) if answer else [[]]:
        found_text, found = read(ToolParser(FAMILIES[family], NAMES), pieces)
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls, pieces
        if calls and text:
            assert found_text.replace("\n", "") == text
        else:
            assert found_text == text, pieces


def test_name_comes_before_the_arguments_and_those_as_they_are_written() -> None:
    parser = ToolParser(FAMILIES["hermes"], NAMES)
    events = [
        parser.push(p) for p in ("<tool_call>", '{"name": "add", "arg', 'uments": {"a"', ": 1}")
    ]
    assert events[0] == []
    (start,) = events[1]
    assert isinstance(start, CallStart)
    assert start.name == "add"
    assert events[2:] == [[CallArguments(0, '{"a"')], [CallArguments(0, ": 1}")]]


def test_call_that_is_cut_off_keeps_what_came_of_it() -> None:
    parser = ToolParser(FAMILIES["generic"], NAMES)
    assert read(parser, ['{"name": "add", "arguments": {"a": 1']) == ("", [("add", '{"a": 1')])
    parser = ToolParser(FAMILIES["generic"], NAMES)
    assert read(parser, ['{"name": "ad']) == ('{"name": "ad', [])


def test_calls_beyond_the_limit_are_dropped() -> None:
    parser = ToolParser(FAMILIES["generic"], NAMES, max_calls=1)
    text, calls = read(parser, [f"{ADD}\n{CALL}\n", "end"])
    assert (text, [name for name, _ in calls]) == ("end", ["add"])


def test_ids_are_unique_and_fit_the_family() -> None:
    ids = {FAMILIES["mistral"].new_id() for _ in range(50)}
    assert len(ids) == 50
    assert all(len(i) == 9 and i.isalnum() for i in ids)
    assert FAMILIES["generic"].new_id().startswith("call_")


@pytest.mark.parametrize(
    ("template", "family"),
    [
        (None, "generic"),
        ("{{ messages }}", "generic"),
        ("return within <tool_call></tool_call> tags", "hermes"),
        ("{{ '[AVAILABLE_TOOLS]' }}{{ '[TOOL_CALLS]' }}", "mistral"),
        ("<|start_header_id|>ipython {{ tools }}", "llama3"),
        ("<|start_header_id|>user", "generic"),
    ],
)
def test_family_is_told_by_the_template(template: str | None, family: str) -> None:
    assert family_of_template(template).name == family
