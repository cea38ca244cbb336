"""What of the messages of a chat completion is new to its session."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.server.errors import ApiError
from radixkv.server.session_match import check_tools, new_messages
from radixkv.server.session_state import Session


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, *calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    called = [{"type": "function", "id": f"c{i}", "function": c} for i, c in enumerate(calls)]
    return {
        "role": "assistant",
        "content": text,
        **({"tool_calls": called} if calls else {}),
        **fields,
    }


SYSTEM = {"role": "system", "content": "S"}
CALL = {"name": "f", "arguments": {"a": 1, "b": 2}}


def session(*turns: list[dict[str, Any]], system: str | None = None) -> Session:
    made = Session("s", (), 0.0, system=system)
    for i, messages in enumerate(turns):
        made.commit_turn(messages, list(range(i * 4 + 2)), [1, 2], ended_by_token=False)
    return made


TWO = ([user("a"), answer("A")], [user("b"), answer("B")])
HISTORY = [message for turn in TWO for message in turn]


@pytest.mark.parametrize(
    ("given", "new"),
    [
        ([user("c")], 1),
        ([SYSTEM, user("c")], 1),
        ([user("a")], 1),
        ([user("c"), user("d")], 2),
        ([{"role": "tool", "content": "t"}], 1),
        ([*HISTORY, user("c")], 1),
        ([SYSTEM, *HISTORY, user("c"), user("d")], 2),
        ([user("a"), answer(" A\n"), user("b"), answer("B"), user("c")], 1),
    ],
)
def test_new_messages_of_a_session_with_history(given: list[Any], new: int) -> None:
    system, messages = new_messages(session(*TWO, system="S"), given)
    assert (system, messages) == ("S", given[-new:])


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([{"role": "system", "content": "T"}, user("c")], "messages[0]"),
        ([user("x"), answer("A"), user("b"), answer("B"), user("c")], "messages[0]"),
        ([user(" a"), answer("A"), user("c")], "messages[0]"),
        ([SYSTEM, user("a"), answer("A"), user("b"), answer("X"), user("c")], "messages[4]"),
        ([user("b"), answer("B"), user("c")], "messages[0]"),
        ([user("a"), answer("A")], "messages"),
        ([user("a"), answer("A"), user("b")], "messages"),
    ],
)
def test_contradiction_is_a_409_that_says_where(given: list[Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        new_messages(session(*TWO, system="S"), given)
    error = caught.value
    assert (error.status, error.code, error.param) == (409, "session_conflict", param)


def test_contradiction_names_the_turn_to_go_back_to() -> None:
    given = [user("a"), answer("A"), user("x"), answer("B"), user("c")]
    with pytest.raises(ApiError, match="roll the session back to turn 1,"):
        new_messages(session(*TWO), given)


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        (HISTORY, "messages", "nothing_new"),
        ([SYSTEM], "messages", "nothing_new"),
        ([*HISTORY, answer("C"), user("c")], "messages[4]", "invalid_value"),
        ([user("c"), SYSTEM], "messages[1]", "invalid_value"),
    ],
)
def test_nothing_new_and_wrong_roles_are_400s(given: list[Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        new_messages(session(*TWO, system="S"), given)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


def test_first_turn_takes_a_whole_conversation_and_its_system_prompt() -> None:
    given = [SYSTEM, user("a"), answer("A"), user("b")]
    assert new_messages(session(), given) == ("S", given[1:])
    assert new_messages(session(system="S"), given) == ("S", given[1:])
    assert new_messages(session(system="S"), given[1:]) == ("S", given[1:])
    with pytest.raises(ApiError, match="system prompt"):
        new_messages(session(system="T"), given)


def test_calls_are_compared_by_what_they_call() -> None:
    made = session([user("a"), answer("", CALL)])
    result = {"role": "tool", "content": "r"}
    again = answer("", {"name": "f", "arguments": {"b": 2, "a": 1}}, reasoning_content="hm")
    again["tool_calls"][0]["id"] = "other"
    assert new_messages(made, [user("a"), again, result])[1] == [result]
    with pytest.raises(ApiError, match="not message 1"):
        new_messages(made, [user("a"), answer("", {**CALL, "arguments": {}}), result])


def test_tools_are_set_once() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    fresh, used = session(), session(*TWO)
    assert check_tools(fresh, tools) == tools
    assert check_tools(used, None) is None
    with pytest.raises(ApiError) as caught:
        check_tools(used, tools)
    assert (caught.value.status, caught.value.param) == (409, "tools")
    used.tools = tools
    assert check_tools(used, None) == check_tools(used, [dict(tools[0])]) == tools
