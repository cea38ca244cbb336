"""Chat completions with a `session_id`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from server_fakes import STOP, FakeEngine, read_events, until
from session_helpers import CHAT, FIELDS, SESSIONS, Served, cached_of, text_of

SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = await Served.start()
    yield served
    await served.stop()


@pytest.fixture
async def faked() -> AsyncIterator[Served]:
    served = await Served.start(engine=FakeEngine())
    yield served
    await served.stop()


def reply(answer: Any) -> Any:
    return {"role": "assistant", "content": text_of(answer)}


async def test_new_messages_alone_and_whole_history_give_the_same_turns(served: Served) -> None:
    short, whole, past = [], [], [SYSTEM]
    for turn in range(4):
        text = f"question {turn}"
        messages = [SYSTEM, text] if turn == 0 else [text]
        short.append(await served.chat("short", *messages))
        past.append({"role": "user", "content": text})
        whole.append(await served.chat("whole", *past))
        past.append(reply(whole[-1]))
    assert list(map(text_of, short)) == list(map(text_of, whole))
    for answers in (short, whole):
        turns = [(a["session"]["turn"], a["session"]["num_tokens"]) for a in answers]
        assert turns == [(i + 1, a["usage"]["total_tokens"]) for i, a in enumerate(answers)]
        for before, after in pairwise(answers):
            assert cached_of(after) >= before["usage"]["total_tokens"] - 1
    session = await served.get(f"{SESSIONS}/whole")
    assert (session["system"], session["messages"]) == ("Be brief.", past[1:])


async def test_a_session_is_one_whether_posted_to_or_chatted_with(served: Served) -> None:
    url = await served.open("one", system="Be brief.")
    name = url.rpartition("/")[2]
    answer = await served.chat(name, "two")
    assert answer["session"]["turn"] == 2
    assert (await served.say(url, "three"))["session"]["turn"] == 3
    history = [SYSTEM, *(await served.get(url))["messages"]]
    assert (await served.chat(name, *history, "four"))["session"]["turn"] == 4
    assert (await served.say(f"{SESSIONS}/{name}", "five"))["session"]["turn"] == 5


@pytest.mark.parametrize("stream", [False, True])
async def test_streamed_turn_is_committed_as_a_whole_one(served: Served, stream: bool) -> None:
    body = {**FIELDS, "session_id": "a", "stream": stream}
    body["messages"] = [{"role": "user", "content": "q"}]
    async with served.client.post(CHAT, json=body) as response:
        last = (await read_events(response))[-2] if stream else await response.json()
    assert last["session"]["turn"] == 1
    assert (await served.get(f"{SESSIONS}/a"))["num_tokens"] == last["session"]["num_tokens"]


async def test_first_turn_may_bring_a_history_whose_answers_are_exact(served: Served) -> None:
    stateless = {**FIELDS, "messages": [{"role": "user", "content": "a question"}]}
    first = await served.post(CHAT, stateless)
    history = [*stateless["messages"], reply(first)]
    answer = await served.chat("moved", *history, "and now?")
    assert cached_of(answer) == first["usage"]["total_tokens"] - 1
    session = await served.get(f"{SESSIONS}/moved")
    assert (session["num_turns"], session["num_messages"]) == (1, 4)


async def test_history_that_differs_is_a_409_and_changes_nothing(faked: Served) -> None:
    answer = await faked.chat("a", "one")
    edited = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "edited"}]
    refused = await faked.chat("a", *edited, "two", status=409)
    assert refused["error"]["code"] == "session_conflict"
    assert refused["error"]["param"] == "messages[1]"
    assert "edited" not in refused["error"]["message"]
    behind = await faked.chat("a", "one", reply(answer), status=400)
    assert behind["error"]["code"] == "nothing_new"
    assert (await faked.chat("a", "two"))["session"]["turn"] == 2


async def test_unknown_name_makes_a_session_but_an_unknown_id_of_the_servers_does_not(
    faked: Served,
) -> None:
    assert (await faked.chat("chat-42.b", "one"))["session"]["id"] == "chat-42.b"
    gone = await faked.chat(f"sess_{'0' * 32}", "one", status=404)
    assert gone["error"]["code"] == "session_not_found"
    for name in ("", "a/b", "ü", "x" * 129, "-a", "a b"):
        refused = await faked.chat(name, "one", status=400)
        assert refused["error"]["param"] == "session_id"
    assert (await faked.get("/admin/sessions"))["total"] == 1


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"n": 2}, 400, "n"),
        ({"add_generation_prompt": False}, 400, "add_generation_prompt"),
        ({"continue_final_message": True, "add_generation_prompt": False}, 400, None),
        ({"tools": [TOOL]}, 409, "tools"),
        ({"cache_salt": "other"}, 409, "cache_salt"),
        ({"temperature": 9}, 400, "temperature"),
        ({"session_id": 5}, 400, "session_id"),
    ],
)
async def test_fields_that_a_session_can_not_follow_are_refused(
    faked: Served, fields: dict[str, Any], status: int, param: str | None
) -> None:
    await faked.chat("a", "one", cache_salt="mine")
    body = {**FIELDS, "messages": [{"role": "user", "content": "x"}], "session_id": "a", **fields}
    refused = await faked.post(CHAT, body, status)
    assert param is None or refused["error"]["param"] == param
    assert (await faked.chat("a", "two", cache_salt="mine"))["session"]["turn"] == 2


async def test_tools_of_the_first_turn_stay_and_may_be_sent_again(faked: Served) -> None:
    await faked.chat("a", "one", tools=[TOOL])
    assert (await faked.get(f"{SESSIONS}/a"))["tools"] == [TOOL]
    assert (await faked.chat("a", "two", tools=[TOOL]))["session"]["turn"] == 2
    assert (await faked.chat("a", "three"))["session"]["turn"] == 3


async def test_first_turn_that_fails_leaves_no_session(faked: Served) -> None:
    faked.engine.fail_at = 1
    await faked.chat("a", "one", status=500)
    await faked.chat("b", "x" * 40_000, status=400)
    assert (await faked.get("/admin/sessions"))["total"] == 0
    faked.engine.fail_at = None
    assert (await faked.chat("a", "one"))["session"]["turn"] == 1


async def test_second_turn_at_once_is_a_409_also_for_a_session_just_begun(faked: Served) -> None:
    faked.engine.gate.clear()
    first = asyncio.create_task(faked.chat("a", "one"))
    await until(lambda: faked.engine.waiting)
    assert (await faked.chat("a", "two", status=409))["error"]["code"] == "session_busy"
    faked.engine.gate.set()
    assert (await first)["session"]["turn"] == 1


async def test_equal_names_of_two_tenants_are_two_sessions(tmp_path: Path) -> None:
    keys = {name: f"sk-{name}-0123456789" for name in ("alice", "bob")}
    file = tmp_path / "keys.toml"
    file.write_text("".join(f'[keys.{name}]\nkey = "{key}"\n' for name, key in keys.items()))
    file.chmod(0o600)
    served = await Served.start(engine=FakeEngine(), api_keys=file)
    texts = {}
    for name, key in keys.items():
        served.client.session.headers["Authorization"] = f"Bearer {key}"
        assert (await served.chat("a", f"I am {name}"))["session"]["turn"] == 1
        texts[name] = (await served.get(f"{SESSIONS}/a"))["messages"][0]["content"]
        assert len((await served.get(SESSIONS))["data"]) == 1
    assert texts == {"alice": "I am alice", "bob": "I am bob"}
    await served.delete(f"{SESSIONS}/a")
    served.client.session.headers["Authorization"] = f"Bearer {keys['alice']}"
    assert (await served.chat("a", "again"))["session"]["turn"] == 2
    await served.stop()


async def test_stop_string_and_end_token_continue_as_in_the_session_route(faked: Served) -> None:
    faked.engine.script = [*b"yes", STOP]
    answer = await faked.chat("a", "one", max_tokens=20, ignore_eos=False)
    assert text_of(answer) == "yes"
    await faked.chat("a", "one", reply(answer), "two", max_tokens=1)
    text = faked.engine.tokenizer.decode(
        faked.engine.submitted[1].prompt, skip_special_tokens=False
    )
    assert "assistant\nyes<|im_end|>\n<|im_start|>user\ntwo<|im_end|>" in text
