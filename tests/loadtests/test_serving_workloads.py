from __future__ import annotations

from pathlib import Path

import pytest

from loadtests.airline import data_dir
from loadtests.serving_workloads import Target, Workload, make_workload


def shape(workload: Workload) -> tuple[int, int, int, int]:
    return (
        len(workload.dialogues),
        workload.num_requests,
        workload.concurrency,
        workload.max_tokens,
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [("sessions", (32, 96, 32, 32)), ("single", (1, 1, 1, 64)), ("unshared", (32, 32, 32, 32))],
)
def test_synthetic_workloads_have_their_sizes_and_are_the_same_at_every_call(
    name: str, expected: tuple[int, int, int, int]
) -> None:
    workload = make_workload(name)
    assert shape(workload) == expected
    assert workload == make_workload(name)


def test_sessions_share_the_system_prompt_and_nothing_else() -> None:
    dialogues = make_workload("sessions").dialogues
    (system,) = {d.turns[0][0]["content"] for d in dialogues}
    assert len(system.split()) == 1000
    said = [
        m["content"] for d in dialogues for turn in d.turns for m in turn if m["role"] == "user"
    ]
    assert len(set(said)) == len(said) == 96
    assert all(d.keeps_answers for d in dialogues)


def test_unshared_prompts_differ_from_the_start() -> None:
    dialogues = make_workload("unshared").dialogues
    prompts = [d.turns[0][0]["content"].split() for d in dialogues]
    assert {len(words) for words in prompts} == {500}
    assert len({tuple(words[:3]) for words in prompts}) == 32


def test_airline_turns_add_what_the_recording_adds() -> None:
    if not (data_dir() / "airline_agent.jsonl").exists():
        pytest.skip(f"no recordings in {data_dir()} (RADIXKV_DATA)")
    workload = make_workload("airline")
    assert shape(workload) == (24, 143, 8, 32)
    for dialogue in workload.dialogues:
        roles = [m["role"] for turn in dialogue.turns for m in turn]
        assert roles[0] == "system"
        assert all(turn[-1]["role"] == "user" for turn in dialogue.turns)
        assert all(turn[0]["role"] == "assistant" for turn in dialogue.turns[1:])
        assert not dialogue.keeps_answers


def test_airline_without_recordings_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RADIXKV_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="airline_tools"):
        make_workload("airline")


@pytest.mark.parametrize(
    ("target", "met", "unmet", "text"),
    [
        (Target("x", at_least=2.5), 2.5, 2.49, ">= 2.5"),
        (Target("x", at_most=1 / 3), 0.33, 0.34, "<= 0.333"),
        (Target("x", at_most=0.4, when="int8"), 0.4, 0.5, "<= 0.4 (int8)"),
    ],
)
def test_targets_know_their_side(target: Target, met: float, unmet: float, text: str) -> None:
    assert target.is_met(met)
    assert not target.is_met(unmet)
    assert str(target) == text
