"""The metrics page and the engine's report over the real engine, against docs/metrics.md."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from metrics_helpers import BODY, full_engine
from prometheus_client.parser import text_string_to_metric_families
from server_fakes import FakeEngine

from radixkv.engine import EngineStats, HistogramData
from radixkv.server.admin_engine import engine_report

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")


@pytest.fixture
async def client(make_client: Any, tmp_path: Any) -> Any:
    """A server with all that has metrics: tiers, swap, speculation and events."""
    return await make_client(full_engine(tmp_path))


async def ask(client: Any, **body: Any) -> Any:
    response = await client.post("/v1/completions", json={**BODY, **body})
    assert response.status == 200, await response.text()
    return await response.json()


async def families(client: Any) -> dict[str, Any]:
    text = await (await client.get("/metrics")).text()
    return {family.name: family for family in text_string_to_metric_families(text)}


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    """Metric name as on the page -> (type, labels beside model_name), from the tables."""
    rows = re.findall(r"^\| `([a-z]+:\w+)` \| (\w+) \| ([^|]*)\|", PAGE, re.MULTILINE)
    found = {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert len(found) == len(rows), "a metric is documented twice"
    return found


async def test_every_metric_is_documented_and_every_documented_one_is_there(client: Any) -> None:
    for prompt in ([5] * 65, [6] * 65, [7] * 65):
        await ask(client, prompt=prompt)
    page = {}
    for family in (await families(client)).values():
        if family.name.endswith("_created"):
            continue  # prometheus_client's own companion of its counters
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels}
        page[name] = family.type, labels - {"model_name", "le"}
    wanted = documented()
    assert page.keys() == wanted.keys()
    for name, (kind, labels) in page.items():
        # A family without a sample can't show its labels.
        assert kind == wanted[name][0], name
        assert labels in (wanted[name][1], set()), name
    empty = {name for name, (_, labels) in wanted.items() if labels and not page[name][1]}
    assert empty <= {n for n in wanted if n.startswith("radixkv:quota_")}


async def test_engine_latencies_are_on_the_page(client: Any) -> None:
    await ask(client, prompt=[5] * 65)
    found = await families(client)
    for name, count in {
        "time_to_first_token_seconds": 1,
        "inter_token_latency_seconds": 11,
        "request_queue_time_seconds": 1,
        "request_prefill_time_seconds": 1,
        "request_decode_time_seconds": 1,
        "e2e_request_latency_seconds": 1,
    }.items():
        samples = {s.name: s.value for s in found[f"radixkv:{name}"].samples}
        assert samples[f"radixkv:{name}_count"] == count, name
    buckets = [s for s in found["radixkv:step_model_time_seconds"].samples if "le" in s.labels]
    values = [s.value for s in buckets]
    (steps,) = (s.value for s in found["radixkv:steps"].samples if s.name.endswith("_total"))
    assert values == sorted(values)
    assert (buckets[-1].labels["le"], values[-1]) == ("+Inf", steps)


async def test_prompt_tokens_by_source_are_those_looked_up(client: Any) -> None:
    for _ in range(2):
        await ask(client, prompt=[[token] * 65 for token in range(5)])
    report = await (await client.get("/admin/engine")).json()
    sources = report["prompt_tokens"]
    looked_up = sources.pop("looked_up")
    assert sum(sources.values()) == looked_up == 650
    assert sources["device"] + sources["host"] + sources["disk"] > 0
    found = await families(client)
    samples = found["radixkv:prompt_tokens_by_source"].samples
    page = {s.labels["source"]: s.value for s in samples if s.name.endswith("_total")}
    assert page == {name: sources[name] for name in sources if name != "pending"}


async def test_engine_report_divides_the_time_of_the_steps(client: Any) -> None:
    await ask(client, prompt=[5] * 60)
    report = await (await client.get("/admin/engine")).json()
    steps = report["steps"]
    assert steps["time_s"] == pytest.approx(steps["model_time_s"] + steps["host_time_s"])
    assert 0 < steps["model_time_s"] < steps["time_s"]
    assert steps["tokens"]["prefill"] == 60
    assert report["histograms"]["step_host_time_seconds"]["count"] == steps["count"]
    assert report["kv"]["utilisation"] is None


def stats_with(**changes: Any) -> EngineStats:
    return dataclasses.replace(FakeEngine().stats(), **changes)


def test_sources_name_every_way_that_a_prompt_token_can_go() -> None:
    stats = stats_with(
        tokens_hit_by_tier={"device": 1, "host": 2, "disk": 4},
        tokens_computed=8,
        prompt_tokens_found_late=16,
        prompt_tokens_dropped=32,
        prompt_tokens_pending=64,
        tokens_looked_up=127,
    )
    sources = engine_report(stats)["prompt_tokens"]
    assert sources.pop("looked_up") == sum(sources.values()) == 127
    assert sorted(sources.values()) == [2**i for i in range(7)]


def test_quantiles_lie_in_their_buckets() -> None:
    data = HistogramData((1.0, 2.0, 4.0), (0, 10, 80, 10), 300.0)
    report = engine_report(stats_with(histograms={"x": data}))
    assert report["histograms"]["x"] == {
        "count": 100, "mean": 3.0, "p50": 3.0, "p90": 4.0, "p99": 4.0,
    }  # fmt: skip
