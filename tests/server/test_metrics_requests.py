"""The histograms of requests, vLLM's and the one by what was cached, over the fake engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from server_fakes import FakeEngine, read_events, until

from radixkv.request import RequestTimings
from radixkv.server.generation import Answer
from radixkv.server.metrics import Metrics
from radixkv.server.metrics_requests import SIZES, TIMES, RequestHistograms

PROMPT = {"prompt": [5] * 65, "max_tokens": 4, "ignore_eos": True}
WHOLE = {*SIZES, *TIMES} - {
    "time_to_first_token_seconds", "inter_token_latency_seconds", "request_queue_time_seconds",
}  # fmt: skip


async def samples(client: Any) -> dict[str, float]:
    """Values of the page by name, with the label that tells samples apart, if there is one."""
    text = await (await client.get("/metrics")).text()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            found[" ".join([sample.name, *labels.values()])] = sample.value
    return found


def times(**changes: Any) -> RequestTimings:
    values = {
        "arrival": 10.0, "first_scheduled": 11.0, "first_token": 13.0, "last_token": 19.0,
        "finished": 20.0, "inter_token": [1.0, 2.0, 3.0],
    }  # fmt: skip
    return RequestTimings(**{**values, **changes})


def observed(timings: RequestTimings, *answers: Answer) -> dict[str, float]:
    registry = CollectorRegistry()
    RequestHistograms(registry, "m", 4096).observe(timings, answers)
    return {
        sample.name.removeprefix("vllm:"): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name.endswith(("_sum", "_count"))
    }


def test_each_time_is_between_two_moments_of_the_request() -> None:
    answers = [
        Answer(
            num_prompt_tokens=100, num_cached_tokens=30, num_completion_tokens=4,
            finish_reason="length",
        ),
        Answer(num_completion_tokens=2, finish_reason="stop"),
    ]  # fmt: skip
    found = observed(times(), *answers)
    expected = {
        "time_to_first_token_seconds": 3, "inter_token_latency_seconds": 6,
        "request_time_per_output_token_seconds": 2, "request_queue_time_seconds": 1,
        "request_prefill_time_seconds": 2, "request_decode_time_seconds": 6,
        "request_inference_time_seconds": 8, "e2e_request_latency_seconds": 10,
        "request_prompt_tokens": 100, "request_generation_tokens": 6,
        "request_max_num_generation_tokens": 4, "request_prefill_kv_computed_tokens": 70,
    }  # fmt: skip
    assert {name: found[f"{name}_sum"] for name in expected} == expected


def test_a_request_that_was_cut_off_counts_as_far_as_it_got() -> None:
    answer = Answer(num_prompt_tokens=100, num_completion_tokens=4, finish_reason="abort")
    found = observed(times(), answer)
    assert found["time_to_first_token_seconds_count"] == 1
    assert found["inter_token_latency_seconds_count"] == 3
    assert all(found[f"{name}_count"] == 0 for name in WHOLE)
    waited = observed(times(first_token=None, last_token=None), Answer())
    assert waited["request_queue_time_seconds_count"] == 1
    assert waited["time_to_first_token_seconds_count"] == 0


async def test_first_tokens_are_told_apart_by_half_of_the_prompt(client: Any) -> None:
    for prompt in ([5] * 64, [5] * 64, [5] * 32 + [6] * 32, [5] * 31 + [7] * 33):
        await (await client.post("/v1/completions", json={**PROMPT, "prompt": prompt})).read()
    found = await samples(client)
    name = "radixkv:time_to_first_token_by_cache_seconds_count"
    assert (found[f"{name} warm"], found[f"{name} cold"]) == (2, 2)


async def test_prompt_tokens_by_source_are_vllms(client: Any) -> None:
    for _ in range(2):
        await (await client.post("/v1/completions", json=PROMPT)).read()
    found = await samples(client)
    name = "vllm:prompt_tokens_by_source_total"
    sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
    assert [found[f"{name} {source}"] for source in sources] == [66, 64, 0]
    assert found["vllm:prompt_tokens_cached_total"] == 64
    assert found["vllm:prompt_tokens_total"] == 130
    assert found["vllm:cache_config_info 16 100"] == 1


async def test_what_comes_from_below_the_pool_is_a_transfer(
    make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    stats = dataclasses.replace(
        engine.stats(),
        tokens_looked_up=100,
        tokens_hit=60,
        tokens_hit_by_tier={"device": 30, "host": 20, "disk": 10},
    )
    monkeypatch.setattr(engine, "stats", lambda: stats)
    found = await samples(await make_client(engine))
    name = "vllm:prompt_tokens_by_source_total"
    sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
    assert [found[f"{name} {source}"] for source in sources] == [40, 30, 30]


async def test_a_client_that_left_is_in_no_histogram_of_the_whole(
    client: Any, engine: FakeEngine
) -> None:
    engine.step_s = 0.01
    body = {**PROMPT, "max_tokens": 1000, "stream": True}
    response = await client.post("/v1/completions", json=body)
    await response.content.readline()
    response.close()
    await until(lambda: engine.finished["abort"])
    found = await samples(client)
    assert found["vllm:time_to_first_token_seconds_count"] == 1
    assert found["vllm:e2e_request_latency_seconds_count"] == 0


async def test_a_stream_counts_like_a_whole_answer(client: Any) -> None:
    await read_events(await client.post("/v1/completions", json={**PROMPT, "stream": True}))
    found = await samples(client)
    assert all(found[f"vllm:{name}_count"] == 1 for name in WHOLE)


def test_names_of_vllms_dashboards_are_on_the_page_of_an_idle_server() -> None:
    page = Metrics(FakeEngine(), "m").render().decode()  # type: ignore[arg-type]
    for name in (*SIZES, *TIMES):
        assert f"# TYPE vllm:{name} histogram" in page
        assert f'vllm:{name}_count{{model_name="m"}} 0.0' in page
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f"# TYPE vllm:{name} gauge" in page
    for name in ("prompt_tokens", "generation_tokens", "prefix_cache_hits", "request_success"):
        assert f"# TYPE vllm:{name}_total counter" in page
