"""What `/admin/requests` tells of requests, and what the log of them keeps."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
from server_fakes import FakeEngine, read_events, until

from radixkv.request import RequestTimings
from radixkv.server.admin import cache_report
from radixkv.server.generation import Answer
from radixkv.server.request_log import RequestLog, RequestRecord

FIELDS = {
    "id", "api", "model", "namespace", "tenant", "session_id", "state", "finish_reason",
    "arrived_at", "prompt_tokens", "cached_tokens", "output_tokens", "queue_s", "ttft_s", "itl_s",
    "total_s", "preemptions",
}  # fmt: skip
MARKER = "xyzzy plugh"
BODY = {"prompt": MARKER * 8, "max_tokens": 4, "ignore_eos": True, "temperature": 0}


class Stream:
    def __init__(self, timings: RequestTimings | None = None) -> None:
        self.timings = timings or RequestTimings()


def record(name: str, **fields: Any) -> RequestRecord:
    return RequestRecord(
        id=name, engine_id=name, request_id="r", api="chat", model="m", namespace="default",
        tenant="", session_id=None, prompt_tokens=4, **fields,
    )  # fmt: skip


async def listed(client: Any, **query: Any) -> Any:
    response = await client.get("/admin/requests", params=query)
    assert response.status == 200, await response.text()
    return await response.json()


async def ask(client: Any, url: str = "/v1/completions", **body: Any) -> Any:
    response = await client.post(url, json=body or BODY)
    assert response.status == 200, await response.text()
    return await response.json()


def test_log_keeps_the_latest_requests_and_sessions_only() -> None:
    log = RequestLog(capacity=10, max_sessions=3)
    for i in [*range(50), 47, 50]:
        entry = record(f"r{i}")
        entry.session_id = f"s{i}"
        answer = Answer(finish_reason="stop", num_prompt_tokens=4, num_cached_tokens=1)
        log.begin(entry, Stream(), [answer])
        log.end(entry)
    latest = [50, 47, *range(49, 41, -1)]
    assert [r.id for r in log.recent()] == [f"r{i}" for i in latest]
    assert list(log.sessions) == ["s49", "s47", "s50"]
    assert log.sessions["s47"].turns == 2
    assert len(log) == 10
    assert list(log.live({})) == []


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        (("stop", "stop"), ("finished", "stop")),
        (("length", "stop"), ("finished", "length")),
        (("stop", None), ("aborted", "abort")),
        (("abort", "abort"), ("aborted", "abort")),
        (("stop", "timeout"), ("failed", "timeout")),
        (("error", None), ("failed", "error")),
    ],
)
def test_state_at_the_end_is_that_of_the_worst_answer(reasons: Any, expected: Any) -> None:
    log = RequestLog()
    entry = record("a", n=2)
    log.begin(entry, Stream(), [Answer(finish_reason=reason) for reason in reasons])
    log.end(entry)
    assert (entry.state, entry.finish_reason) == expected


def test_times_are_differences_of_what_the_engine_measured() -> None:
    log = RequestLog()
    entry = record("a")
    answer = Answer(finish_reason="stop", num_prompt_tokens=4, num_completion_tokens=5)
    timings = RequestTimings(num_preemptions=2, inter_token=[0.25, 0.75])
    log.begin(entry, Stream(timings), [answer])
    start = entry.arrival
    timings.first_scheduled, timings.first_token, timings.last_token = (
        start + 1, start + 3, start + 5,
    )  # fmt: skip
    log.end(entry)
    view = entry.view(now=start + 100)
    assert view["queue_s"] == pytest.approx(1)
    assert view["ttft_s"] == pytest.approx(3)
    assert view["itl_s"] == pytest.approx(0.5)
    assert view["preemptions"] == 2
    assert 0 <= view["total_s"] < 100


async def test_finished_requests_have_the_counts_of_their_answers(serve: Any) -> None:
    client, _ = await serve()
    before = time.time()
    answers = [await ask(client) for _ in range(2)]
    report = await listed(client)
    assert report["live"] == []
    for entry, answer in zip(report["recent"], answers[::-1], strict=True):
        assert entry.keys() == FIELDS
        usage = answer["usage"]
        assert entry["id"] == answer["id"]
        assert entry["prompt_tokens"] == usage["prompt_tokens"]
        assert entry["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert entry["output_tokens"] == usage["completion_tokens"] == 4
        assert (entry["state"], entry["finish_reason"]) == ("finished", "length")
        assert (entry["api"], entry["model"]) == ("completions", "real")
        assert (entry["namespace"], entry["tenant"], entry["session_id"]) == ("default", "", None)
        assert before - 1 <= entry["arrived_at"] <= time.time() + 1
        assert 0 <= entry["queue_s"] <= entry["ttft_s"] <= entry["total_s"]
        assert entry["itl_s"] >= 0
    assert report["recent"][0]["cached_tokens"] > 0
    assert MARKER not in str(report)


async def test_one_request_is_found_by_its_names_and_links_to_its_explanation(serve: Any) -> None:
    client, _ = await serve()
    response = await client.post("/v1/completions", json=BODY, headers={"X-Request-ID": "job/1"})
    answer = await response.json()
    for name in (answer["id"], "job/1"):
        found = await (await client.get(f"/admin/requests/{name}")).json()
        assert (found["id"], found["request_id"]) == (answer["id"], "job/1")
        assert found.keys() >= FIELDS
        linked = await (await client.get(found["explain"])).json()
        assert linked["object"] == "cache.explanation"
        assert linked["request"] == answer["id"].removeprefix("cmpl-")
    missing = await client.get("/admin/requests/cmpl-nobody")
    assert missing.status == 404
    assert (await missing.json())["error"]["code"] == "not_found"


async def test_each_prompt_of_a_completion_is_a_request_of_its_own(serve: Any) -> None:
    client, _ = await serve()
    answer = await ask(client, **{**BODY, "prompt": ["a" * 20, "b" * 30], "n": 2})
    entries = (await listed(client))["recent"]
    assert [e["prompt_tokens"] for e in entries] == [30, 20]
    assert [e["output_tokens"] for e in entries] == [8, 8]
    assert [e["id"] for e in entries] == [f"{answer['id']}-1", f"{answer['id']}-0"]
    second = await (await client.get(f"/admin/requests/{answer['id']}", params={"index": 1})).json()
    assert second["id"] == entries[0]["id"]


async def test_every_api_is_named_and_turns_have_their_session(serve: Any) -> None:
    client, _ = await serve()
    messages = [{"role": "user", "content": "hello"}]
    session = (await (await client.post("/v1/sessions")).json())["id"]
    limit = {"max_tokens": 2, "temperature": 0}
    await ask(client, "/v1/chat/completions", messages=messages, **limit)
    await ask(client, "/v1/responses", input="hello", max_output_tokens=16)
    await ask(client, "/v1/messages", messages=messages, **limit)
    await ask(client, f"/v1/sessions/{session}/messages", content="hello", **limit)
    await ask(client, f"/v1/sessions/{session}/messages", content="again", **limit)
    entries = (await listed(client))["recent"]
    assert [e["api"] for e in entries] == ["session"] * 2 + ["messages", "responses", "chat"]
    assert [e["session_id"] for e in entries[:3]] == [session, session, None]
    for entry in entries:
        found = await client.get(f"/admin/requests/{entry['id']}")
        assert (await found.json())["id"] == entry["id"]
    report = await (await client.get("/admin/cache")).json()
    turns = entries[:2]
    assert report["session_usage"] == {
        session: {
            "requests": 2,
            "looked_up": sum(e["prompt_tokens"] for e in turns),
            "hit": sum(e["cached_tokens"] for e in turns),
            "hit_rate": sum(e["cached_tokens"] for e in turns)
            / sum(e["prompt_tokens"] for e in turns),
            "generated": sum(e["output_tokens"] for e in turns),
        }
    }
    assert report["models"]["real"]["looked_up"] == report["tokens"]["looked_up"]
    assert set(report["windows"]) == {"1m", "5m", "1h", "all"}
    assert report["kv"]["wasted_slots"] == report["kv"]["wasted_bytes"] == 0


def test_waste_is_the_slots_of_held_blocks_without_a_token() -> None:
    stats = dataclasses.replace(
        FakeEngine().stats(),
        kv_tokens_referenced=50,
        kv_tokens_stored=40,
        kv_slots_allocated=64,
    )
    assert cache_report(stats)["kv"] == {
        "pool_usage": 0.4, "referenced_usage": 0.1, "tokens_stored": 40, "slots_allocated": 64,
        "utilisation": 0.625, "wasted_slots": 24, "wasted_bytes": 24 * 64, "shared_tokens": 10,
    }  # fmt: skip


async def test_live_requests_are_shown_as_the_engine_has_them(
    client: Any, engine: FakeEngine
) -> None:
    engine.gate.clear()
    engine.step_s = 0.01
    body = {**BODY, "max_tokens": 1000, "stream": True}
    async with client.post("/v1/completions", json=body):
        await until(lambda: engine.waiting)
        (entry,) = (await listed(client))["live"]
        assert (entry["state"], entry["ttft_s"], entry["cached_tokens"]) == ("waiting", None, None)
        assert entry["queue_s"] == entry["total_s"] >= 0
        assert (await listed(client, state="decode"))["live"] == []
        engine.gate.set()
        await until(lambda: engine.running and engine.running[0].out)
        (entry,) = (await listed(client, state="decode"))["live"]
        assert entry["output_tokens"] > 0
        one = await (await client.get(f"/admin/requests/{entry['id']}")).json()
        assert one["state"] == "decode"


async def test_a_client_that_leaves_aborts_its_request(client: Any, engine: FakeEngine) -> None:
    engine.gate.clear()
    response = await client.post("/v1/completions", json={**BODY, "stream": True})
    await until(lambda: engine.waiting)
    response.close()
    await until(lambda: engine.finished["abort"])
    report = await listed(client)
    assert report["live"] == []
    (entry,) = report["recent"]
    assert (entry["state"], entry["finish_reason"]) == ("aborted", "abort")
    assert entry["queue_s"] == entry["total_s"]


async def test_what_an_aborted_request_had_is_the_engines(serve: Any) -> None:
    client, served = await serve()
    await ask(client)
    body = {**BODY, "max_tokens": 3000, "stream": True}
    response = await client.post("/v1/completions", json=body)
    for _ in range(12):
        await response.content.readline()
    (live,) = (await listed(client))["live"]
    assert (live["state"], live["finish_reason"]) == ("decode", None)
    assert live["cached_tokens"] > 0
    response.close()
    await until(lambda: served.engine.finished["abort"])
    entry = (await listed(client, state="aborted"))["recent"][0]
    assert 0 <= entry["queue_s"] <= entry["ttft_s"] <= entry["total_s"]
    assert entry["itl_s"] > 0
    assert entry["output_tokens"] > 0
    await served.check_integrity()


async def test_a_request_that_fails_in_the_engine_is_failed(
    client: Any, engine: FakeEngine
) -> None:
    engine.fail_at = 2
    response = await client.post("/v1/completions", json={**BODY, "stream": True})
    await read_events(response)
    (entry,) = (await listed(client, state="failed"))["recent"]
    assert (entry["finish_reason"], entry["output_tokens"]) == ("error", 2)


async def test_refused_requests_are_not_listed(client: Any) -> None:
    await client.post("/v1/completions", json={"prompt": ""})
    await client.post("/v1/completions", json={"prompt": [5] * 9000})
    report = await listed(client)
    assert (report["live"], report["recent"]) == ([], [])


async def test_limit_and_state_choose_and_are_checked(client: Any) -> None:
    for _ in range(3):
        await ask(client)
    latest = (await listed(client))["recent"]
    assert (await listed(client, limit=2))["recent"] == latest[:2]
    assert (await listed(client, state="aborted"))["recent"] == []
    for query in ({"limit": "0"}, {"limit": "x"}, {"limit": "1001"}, {"state": "lost"}):
        response = await client.get("/admin/requests", params=query)
        assert response.status == 400
        assert (await response.json())["error"]["param"] == next(iter(query))


async def test_a_failure_of_the_log_fails_no_request(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(RequestRecord, "note_end", broken)
    await ask(client)
    assert len((await listed(client))["recent"]) == 1
