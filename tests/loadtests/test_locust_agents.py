from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from loadtests.agents import KINDS, AgentOptions, Call, parse_mix, recordings
from loadtests.agents_shapes import SHAPES, users_at
from loadtests.openai_client import Sample

OPTIONS = AgentOptions(
    think_s=2.0, tool_s=0.5, max_tokens=7, turns=3, branches=3, samples=5, system_words=20
)


class FakeClient:
    """Answers with numbers; remembers what it was asked."""

    def __init__(
        self,
        *,
        has_sessions: bool = True,
        fails_at: int | None = None,
        context: int | None = None,
    ) -> None:
        self.context = context
        self.asked: list[tuple[str, list[Call]]] = []
        self.posted: list[str] = []
        self.deleted: list[str] = []
        self.pauses: list[float] = []
        self._has_sessions = has_sessions
        self._fails_at = fails_at
        self._count = 0

    def ask(self, kind: str, calls: Sequence[Call]) -> list[Sample]:
        # As they were: histories grow.
        self.asked.append((kind, [Call(json.loads(json.dumps(c.body)), c.route) for c in calls]))
        samples = []
        for _ in calls:
            error = "500: no" if self._count == self._fails_at else None
            samples.append(Sample(text=f"answer {self._count}", error=error))
            self._count += 1
        return samples

    def post(self, route: str, body: dict[str, Any]) -> dict[str, Any] | None:
        self.posted.append(route)
        return {"id": "s1"} if self._has_sessions else None

    def delete(self, route: str) -> None:
        self.deleted.append(route)

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)


def live(kind: str, client: FakeClient, seed: int = 0) -> list[list[dict[str, Any]]]:
    """Return the message lists of the calls, in order."""
    KINDS[kind].live(client, OPTIONS, random.Random(seed))
    return [call.body.get("messages", []) for _, calls in client.asked for call in calls]


def test_chat_sends_the_history_with_the_answers_and_thinks_in_between() -> None:
    client = FakeClient()
    first, second, third = live("chat", client)
    assert [m["role"] for m in first] == ["system", "user"]
    assert second[:2] == first
    assert second[2] == {"role": "assistant", "content": "answer 0"}
    assert third[: len(second)] == second
    assert len(client.pauses) == 2
    assert all(0 < p <= 5 * OPTIONS.think_s for p in client.pauses)
    assert {c.body["max_tokens"] for _, calls in client.asked for c in calls} == {7}


@pytest.mark.parametrize("kind", ["chat", "forks", "samplers"])
def test_agents_of_a_kind_share_the_system_prompt_and_ask_their_own(kind: str) -> None:
    one, two = live(kind, FakeClient(), 1)[0], live(kind, FakeClient(), 2)[0]
    assert one[0] == two[0]
    assert len(one[0]["content"].split()) == OPTIONS.system_words
    assert one[1] != two[1]


def test_session_sends_only_new_messages_and_is_deleted() -> None:
    client = FakeClient()
    live("sessions", client)
    assert client.posted == ["/v1/sessions"]
    assert [call.route for _, calls in client.asked for call in calls] == [
        "/v1/sessions/s1/messages"
    ] * 3
    assert all("messages" not in c.body for _, calls in client.asked for c in calls)
    assert {kind for kind, _ in client.asked} == {"sessions"}
    assert client.deleted == ["/v1/sessions/s1"]


def test_session_chats_where_there_are_none() -> None:
    client = FakeClient(has_sessions=False)
    assert len(live("sessions", client)[2]) == 6
    assert {kind for kind, _ in client.asked} == {"chat"}
    assert client.deleted == []


def test_forks_go_on_from_one_plan_at_once() -> None:
    client = FakeClient()
    live("forks", client)
    sizes = [len(calls) for _, calls in client.asked]
    assert sizes == [1, 3, 3]
    branches = [call.body["messages"] for call in client.asked[1][1]]
    plan = client.asked[0][1][0].body["messages"]
    shared = [*plan, {"role": "assistant", "content": "answer 0"}]
    assert all(branch[:3] == shared for branch in branches)
    assert len({branch[3]["content"] for branch in branches}) == 3
    # Each goes on with its own answer.
    later = [call.body["messages"] for call in client.asked[2][1]]
    assert [messages[4]["content"] for messages in later] == ["answer 1", "answer 2", "answer 3"]


def test_samplers_draw_several_answers_from_one_prompt() -> None:
    client = FakeClient()
    live("samplers", client)
    ((_, (call,)),) = client.asked
    assert (call.body["n"], call.body["temperature"]) == (5, 1.0)


def test_documents_are_few_and_each_is_asked_several_times() -> None:
    texts = []
    for seed in range(30):
        messages = live("documents", FakeClient(), seed)
        assert len({m[0]["content"] for m in messages}) == 1
        assert len({m[1]["content"] for m in messages}) == len(messages) == 3
        texts.append(messages[0][0]["content"])
    assert 2 < len(set(texts)) <= OPTIONS.documents
    assert {len(text.split()) for text in texts} == {OPTIONS.document_words}


@pytest.mark.parametrize("kind", ["chat", "sessions", "forks", "documents"])
def test_a_failure_ends_the_task(kind: str) -> None:
    client = FakeClient(fails_at=0)
    live(kind, client)
    assert len(client.asked) == 1
    assert client.deleted == (["/v1/sessions/s1"] if kind == "sessions" else [])


MESSAGES = [
    {"role": "system", "content": "Help."},
    {"role": "user", "content": "Find it."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "find", "arguments": '{"id": 1}'}}],
    },
    {"role": "tool", "content": "found"},
    {"role": "assistant", "content": "There it is."},
    {"role": "user", "content": "Thanks." + " " * 60},
    {"role": "assistant", "content": "Bye."},
]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    (tmp_path / "airline_tools.json").write_text("[]")
    (tmp_path / "airline_agent.jsonl").write_text(json.dumps({"id": 1, "messages": MESSAGES}))
    monkeypatch.setenv("RADIXKV_DATA", str(tmp_path))
    recordings.cache_clear()
    yield
    recordings.cache_clear()


@pytest.mark.usefixtures("recorded")
def test_tools_replay_a_recording_and_wait_less_for_tools() -> None:
    tool_pauses, person_pauses = [], []
    for seed in range(60):
        client = FakeClient()
        lists = live("tools", client, seed)
        assert [len(m) for m in lists] == [2, 4, 6]
        assert json.loads(lists[1][2]["content"])["name"] == "find"
        tool_pauses.append(client.pauses[0])
        person_pauses.append(client.pauses[1])
    assert max(tool_pauses) <= 5 * OPTIONS.tool_s
    assert sum(person_pauses) > 2 * sum(tool_pauses)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(("context", "turns"), [(None, 3), (60, 3), (46, 2), (7, 1)])
def test_tools_end_a_recording_that_outgrows_the_context(context: int | None, turns: int) -> None:
    # The answers tell of prompts of no tokens, so only what comes next counts.
    client = FakeClient(context=context)
    assert len(live("tools", client)) == turns


@pytest.mark.parametrize(
    ("shape", "users"),
    [
        ("steady", [100, 100, 100, 100]),
        ("ramp", [10, 50, 90, 100]),
        ("spike", [20, 100, 20, 20]),
        ("soak", [1, 100, 100, 100]),
    ],
)
def test_shapes_have_their_users_over_time(shape: str, users: list[int]) -> None:
    moments = (0.0, 49.0, 89.0, 100.0)
    assert [users_at(shape, t, 100.0, 100) for t in moments] == users


def test_every_shape_has_somebody_and_never_more_than_all() -> None:
    for shape in SHAPES:
        for step in range(120):
            assert 1 <= users_at(shape, step, 100.0, 3) <= 3
    with pytest.raises(ValueError, match="shape must be one of"):
        users_at("cube", 0, 1, 1)


def test_parse_mix_reads_weights() -> None:
    assert parse_mix("chat=3, tools ,forks=0") == {"chat": 3, "tools": 1}


@pytest.mark.parametrize("text", ["", "poets", "chat=many", "chat=-1", "chat=0"])
def test_parse_mix_refuses_what_is_no_mix(text: str) -> None:
    with pytest.raises(ValueError, match="--mix"):
        parse_mix(text)
