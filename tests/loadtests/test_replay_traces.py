from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_replay_text import WordCounter

from loadtests.openai_client import CHAT
from loadtests.replay_traces import (
    COMPLETIONS,
    Trace,
    is_mooncake,
    load_blocks,
    load_recorded,
    write_blocks,
)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(timestamp: float, length: int, ids: list[int], output: int = 100) -> dict[str, Any]:
    return {
        "timestamp": timestamp,
        "input_length": length,
        "output_length": output,
        "hash_ids": ids,
    }


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [row(1000, 1300, [4, 5, 6]), row(1500, 1200, [4, 5, 7]), row(4000, 600, [9, 10], 3)]
    return write(tmp_path / "trace.jsonl", rows)


def turns_of(trace: Trace) -> list[Any]:
    return [turn for session in trace.sessions for turn in session.turns]


async def test_blocks_become_prompts_of_the_right_length_and_sharing(trace: Path) -> None:
    loaded = await load_blocks(trace, WordCounter(beside=1))
    assert loaded.route == COMPLETIONS
    assert [session.arrival for session in loaded.sessions] == [0.0, 0.5, 3.0]
    turns = turns_of(loaded)
    assert [turn.prompt_len for turn in turns] == [1300, 1200, 600]
    assert [turn.output_len for turn in turns] == [100, 100, 3]
    first, second, third = (turn.prompt()["prompt"].split() for turn in turns)
    assert (len(first), len(second), len(third)) == (1299, 1199, 599)
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024 : len(first)]


async def test_scale_shortens_blocks_and_the_rest(trace: Path) -> None:
    loaded = await load_blocks(trace, WordCounter(beside=1), scale=1 / 16, max_output=5)
    turns = turns_of(loaded)
    # 2 blocks of 32 and 276 / 16 tokens; 2 blocks and 176 / 16; one block and 88 / 16.
    assert [turn.prompt_len for turn in turns] == [81, 75, 38]
    assert [turn.output_len for turn in turns] == [5, 5, 1]
    first, second, _ = (turn.prompt()["prompt"].split() for turn in turns)
    assert first[:64] == second[:64]


async def test_chats_have_the_length_with_the_template(trace: Path) -> None:
    loaded = await load_blocks(trace, WordCounter(beside=9), as_chat=True, limit=2)
    assert loaded.route == CHAT
    body = turns_of(loaded)[0].prompt()
    assert len(body["messages"][0]["content"].split()) == 1300 - 9


async def test_prompts_that_are_too_long_are_left_out_and_counted(trace: Path) -> None:
    loaded = await load_blocks(trace, WordCounter(), max_input=1200)
    assert (loaded.num_requests, loaded.num_skipped) == (2, 1)
    assert [turn.prompt_len for turn in turns_of(loaded)] == [1200, 600]


async def test_a_tokenizer_that_joins_words_is_refused(trace: Path) -> None:
    class Joins(WordCounter):
        async def count(self, prompt: str) -> int:
            return await super().count(prompt) - (len(prompt.split()) > 500)

    with pytest.raises(ValueError, match="should have 1300 tokens, its text has 1299"):
        await load_blocks(trace, Joins())


async def test_turns_of_a_session_follow_each_other(tmp_path: Path) -> None:
    rows = [
        {**row(0, 512, [1]), "session_id": "a"},
        {**row(0, 512, [2]), "session_id": "b"},
        {**row(0, 1024, [1, 3]), "session_id": "a", "delay": 2000},
        {**row(0, 3000, [1, 3, 4, 5, 6, 7]), "session_id": "a", "delay": 0},
    ]
    loaded = await load_blocks(write(tmp_path / "t.jsonl", rows), WordCounter(), max_input=2000)
    assert [[t.prompt_len for t in s.turns] for s in loaded.sessions] == [[512, 1024], [512]]
    assert loaded.sessions[0].turns[1].delay == 2.0


async def test_an_exported_trace_is_the_one_that_is_played(trace: Path, tmp_path: Path) -> None:
    options = {"scale": 1 / 16, "max_output": 5, "max_input": 80}
    loaded = await load_blocks(trace, WordCounter(beside=1), **options)
    write_blocks(loaded, tmp_path / "scaled.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "scaled.jsonl").read_text().splitlines()]
    assert [(r["timestamp"], r["input_length"], r["output_length"]) for r in rows] == [
        (500, 75, 5),
        (3000, 38, 1),
    ]
    # Blocks are of 32 tokens now, and the rest is one of its own.
    first, second = (r["hash_ids"] for r in rows)
    assert (len(first), len(second), len({*first, *second})) == (3, 2, 5)
    again = await load_blocks(tmp_path / "scaled.jsonl", WordCounter(beside=1), unit=32)
    assert [t.prompt_len for t in turns_of(again)] == [75, 38]


CALL = {"function": {"name": "find", "arguments": "{}"}}
MESSAGES = [
    {"role": "system", "content": "Help."},
    {"role": "user", "content": "Find it."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "found"},
    {"role": "assistant", "content": "There it is."},
]


@pytest.mark.parametrize("has_tools", [True, False])
def test_recorded_conversations_become_sessions(tmp_path: Path, has_tools: bool) -> None:
    path = write(tmp_path / "talk.jsonl", [{"messages": MESSAGES}, {"messages": MESSAGES[:3]}])
    if has_tools:
        (tmp_path / "airline_tools.json").write_text('[{"name": "find"}]')
    loaded = load_recorded(path, output=9, delay=1.5)
    assert [[t.delay for t in s.turns] for s in loaded.sessions] == [[0.0, 1.5], [0.0]]
    turns = turns_of(loaded)
    assert {turn.output_len for turn in turns} == {9}
    assert [turn.index for turn in turns] == [0, 1, 2]
    bodies = [turn.prompt()["messages"] for turn in turns]
    assert [len(messages) for messages in bodies] == [2, 4, 2]
    assert bodies[1][:2] == bodies[0]
    assert ("find" in bodies[0][0]["content"]) is has_tools


def test_limits_of_recorded_conversations_count_requests_and_turns(tmp_path: Path) -> None:
    path = write(tmp_path / "talk.jsonl", [{"messages": MESSAGES}] * 3)
    assert load_recorded(path, limit=5).num_requests == 5
    assert load_recorded(path, turns=1).num_requests == 3
    assert [len(s.turns) for s in load_recorded(path, limit=3).sessions] == [2, 1]


@pytest.mark.parametrize("text", ["", "{}", "[1]", "nothing\n"])
def test_a_file_that_is_neither_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(ValueError, match="neither hash_ids nor messages"):
        is_mooncake(path)
