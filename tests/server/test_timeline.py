"""What is kept of the last hour, and how it is told."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest
from server_fakes import FakeEngine, until

from radixkv.engine import EngineStats
from radixkv.server.request_log import RequestRecord
from radixkv.server.state import STATE
from radixkv.server.timeline import COLUMNS, Timeline

PROMPT = {"prompt": [5] * 65, "max_tokens": 4}


class Source:
    """Counters and a clock that tests set."""

    def __init__(self) -> None:
        self.stats: EngineStats = FakeEngine().stats()
        self.now = 1000.0

    def change(self, **fields: Any) -> None:
        self.stats = replace(self.stats, **fields)

    def timeline(self, samples: int = 8) -> Timeline:
        return Timeline(lambda: self.stats, interval_s=1, span_s=samples, clock=lambda: self.now)


def record(finished: float | None, ttft: float | None, **fields: Any) -> RequestRecord:
    fields = {"api": "chat", "prompt_tokens": 100, "cached_tokens": 0, **fields}
    return RequestRecord(
        id=f"r{finished}",
        engine_id="e",
        request_id="x",
        model="m",
        namespace="default",
        tenant="",
        session_id=None,
        finished=finished,
        first_token=ttft,
        **fields,
    )


def test_counts_are_those_since_the_sample_before() -> None:
    source = Source()
    source.change(tokens_hit=500, requests_finished={"stop": 3, "error": 1})
    timeline = source.timeline()
    timeline.sample()
    source.change(tokens_hit=620, requests_finished={"stop": 4, "error": 2, "timeout": 1})
    timeline.sample()
    columns = timeline.columns()
    assert columns["hit"] == [0, 120]  # what was before the first sample is nobody's
    assert columns["finished"] == [0, 3]
    assert columns["failed"] == [0, 2]


def test_blocks_of_all_states_are_the_pool() -> None:
    source = Source()
    source.change(blocks_free=50, blocks_cached=20, blocks_referenced=30, pins={"blocks": 12})
    timeline = source.timeline()
    timeline.sample()
    columns = timeline.columns()
    names = ("free_blocks", "evictable_blocks", "held_blocks", "pinned_blocks")
    assert [columns[name] for name in names] == [[50], [20], [18], [12]]


def test_the_oldest_samples_give_way_and_memory_stays() -> None:
    source = Source()
    timeline = source.timeline(samples=4)
    for _ in range(11):
        source.now += 1
        timeline.sample()
    columns = timeline.columns()
    assert columns.keys() == set(COLUMNS)
    assert columns["time"] == [1008, 1009, 1010, 1011]
    assert timeline.num_samples == 11
    assert timeline.columns(first=9)["time"] == [1010, 1011]
    assert timeline.columns(first=2)["time"] == columns["time"]
    assert timeline.columns(first=99)["time"] == []


def test_first_tokens_are_told_apart_by_what_was_cached() -> None:
    timeline = Source().timeline()
    timeline.sample(
        [
            record(5.0, 0.3, cached_tokens=50),
            record(4.0, 0.1, cached_tokens=99),
            record(3.0, 4.0, cached_tokens=49),
            record(2.0, 2.0, cached_tokens=None),
            record(1.0, 3.0),
        ]
    )
    columns = timeline.columns()
    assert (columns["warm"], columns["cold"]) == ([2], [3])
    assert columns["ttft_warm_s"] == [pytest.approx(0.2)]
    assert columns["ttft_cold_s"] == [3.0]


def test_a_request_is_counted_once_whatever_is_listed_again() -> None:
    timeline = Source().timeline()
    old = [record(2.0, 1.0), record(1.0, 1.0)]
    timeline.sample(old)
    timeline.sample([record(3.0, 9.0), record(None, 1.0), *old])
    timeline.sample([record(3.0, 9.0), *old])
    columns = timeline.columns()
    assert columns["cold"] == [2, 1, 0]
    assert columns["ttft_cold_s"][1] == 9.0
    assert math.isnan(columns["ttft_cold_s"][2])


def test_requests_without_a_first_token_and_warmed_prompts_do_not_count() -> None:
    timeline = Source().timeline()
    timeline.sample([record(2.0, None), record(1.0, 0.5, api="warm")])
    assert timeline.columns()["cold"] == [0]


async def test_samples_go_on_after_one_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    source = Source()
    timeline = source.timeline()
    timeline.interval_s = 0.001
    good = source.stats
    source.stats = None  # type: ignore[assignment]
    task = asyncio.create_task(timeline.run(list))
    await until(lambda: "a sample of the timeline failed" in caplog.text)
    await asyncio.sleep(0.01)
    source.stats = good
    await until(lambda: timeline.num_samples > 1)
    task.cancel()
    assert caplog.text.count("a sample of the timeline failed") == 1


async def test_report_has_only_what_the_reader_lacks(make_client: Any) -> None:
    client = await make_client()
    timeline = client.app[STATE].timeline
    await until(lambda: timeline.num_samples)
    await client.post("/v1/completions", json=PROMPT)
    timeline.sample(client.app[STATE].requests.recent())

    async def report(query: str = "") -> Any:
        response = await client.get(f"/admin/timeline{query}")
        assert response.status == 200
        return await response.json()

    whole = await report()
    assert whole["samples"]["looked_up"] == [0, 65]
    assert whole["samples"]["kv_utilisation"] == [None, None]
    assert whole["samples"]["cold"] == [0, 1]
    assert whole["next"] == 2
    rest = await report(f"?first=1&run={whole['run']}")
    assert rest["samples"]["looked_up"] == [65]
    assert (await report("?first=2&run=another"))["samples"] == whole["samples"]


@pytest.mark.parametrize("first", ["-1", "x", "1.5", "9" * 40, "²"])
async def test_bad_first_is_refused(client: Any, first: str) -> None:
    response = await client.get("/admin/timeline", params={"first": first})
    assert response.status == 400
    assert (await response.json())["error"]["param"] == "first"


async def test_two_runs_have_different_names(make_client: Any) -> None:
    names = set()
    for _ in range(2):
        client = await make_client()
        names.add((await (await client.get("/admin/timeline")).json())["run"])
    assert len(names) == 2


async def test_sampling_ends_with_the_application(make_client: Any) -> None:
    client = await make_client()
    timeline = client.app[STATE].timeline
    await until(lambda: timeline.num_samples)
    await client.close()
    names = {getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()}
    assert "Timeline.run" not in names
