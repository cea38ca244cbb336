from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_fakes import FakeEngine, until

PROMPT = {"prompt": [5] * 65, "max_tokens": 4}


async def scrape(client: Any) -> dict[tuple[str, str], float]:
    response = await client.get("/metrics")
    assert response.status == 200
    assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    samples = {}
    for family in text_string_to_metric_families(await response.text()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            samples[sample.name, ",".join(f"{k}={v}" for k, v in sorted(labels.items()))] = (
                sample.value
            )
    return samples


async def test_metrics_have_the_names_of_other_servers(client: Any) -> None:
    for _ in range(2):
        await client.post("/v1/completions", json=PROMPT)
    await client.post("/v1/completions", json={"prompt": ""})
    samples = await scrape(client)
    wanted = {
        ("vllm:num_requests_running", ""): 0,
        ("vllm:num_requests_waiting", ""): 0,
        ("vllm:kv_cache_usage_perc", ""): 0.1,
        ("vllm:prefix_cache_queries_total", ""): 130,
        ("vllm:prefix_cache_hits_total", ""): 64,
        ("vllm:prompt_tokens_total", ""): 130,
        ("vllm:generation_tokens_total", ""): 8,
        ("vllm:num_preemptions_total", ""): 0,
        ("vllm:request_success_total", "finished_reason=length"): 2,
        ("vllm:time_to_first_token_seconds_count", ""): 2,
        ("vllm:e2e_request_latency_seconds_count", ""): 2,
        ("radixkv:prefill_tokens_total", ""): 66,
        ("radixkv:blocks", "state=cached"): 30,
        ("radixkv:http_requests_total", "route=/v1/completions,status=400"): 1,
    }
    assert {name: samples[name] for name in wanted} == wanted
    assert ("vllm:inter_token_latency_seconds_count", "") in samples


async def test_metric_labels_are_bounded_whatever_clients_ask(client: Any) -> None:
    def labels(samples: Any) -> set[str]:
        return {labels for name, labels in samples if name == "radixkv:http_requests_total"}

    for i in range(20):
        await client.get(f"/nothing/{i}")
        await client.get(f"/v1/models/m{i}")
        await client.get(f"/v1/sessions/s{i}")
    assert labels(await scrape(client)) == {
        "route=unknown,status=404",
        "route=/v1/models/{model},status=404",
        "route=/v1/sessions/{session_id},status=404",
    }


async def test_metrics_failure_never_fails_a_request(make_client: Any) -> None:
    engine = FakeEngine()
    submit = engine.submit

    def broken_timings(*args: Any, **kwargs: Any) -> Any:
        stream = submit(*args, **kwargs)
        stream.timings.inter_token = ["not a number"]  # type: ignore[list-item]
        return stream

    engine.submit = broken_timings  # type: ignore[method-assign]
    client = await make_client(engine)
    assert (await client.post("/v1/completions", json=PROMPT)).status == 200
    assert (await scrape(client))["radixkv:metrics_failures_total", ""] == 1


async def test_cache_page_has_exact_counters_and_named_windows(client: Any) -> None:
    before = await (await client.get("/admin/cache")).json()
    sums = 0
    for _ in range(10):
        answer = await (await client.post("/v1/completions", json=PROMPT)).json()
        sums += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    after = await (await client.get("/admin/cache")).json()
    assert after["tokens"]["hit"] - before["tokens"]["hit"] == sums == 9 * 64
    assert after["tokens"]["looked_up"] - before["tokens"]["looked_up"] == 650
    assert after["tokens"]["computed"] - before["tokens"]["computed"] == 650 - sums
    assert set(after["hit_rate"]) == {"1m", "5m", "all"}
    assert after["hit_rate"]["all"] == pytest.approx(sums / 650)
    assert before["hit_rate"]["all"] is None
    assert after["blocks"]["cached"] == {"blocks": 30, "bytes": 30 * 1024}
    assert after["blocks"]["total"]["blocks"] == 100
    assert (after["evicted_blocks"], after["copied_blocks"], after["preemptions"]) == (3, 2, 0)
    assert after["namespaces"]


@pytest.mark.parametrize("url", ["/admin/cache/flush", "/flush_cache"])
async def test_flush_empties_an_idle_cache_and_refuses_a_busy_one(
    client: Any, engine: FakeEngine, url: str
) -> None:
    await client.post("/v1/completions", json=PROMPT)
    assert await (await client.post(url)).json() == {"success": True, "freed_blocks": 1}
    answer = await (await client.post("/v1/completions", json=PROMPT)).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    engine.gate.clear()
    async with client.post("/v1/completions", json={**PROMPT, "stream": True}):
        await until(lambda: engine.waiting)
        busy = await client.post(url)
        assert busy.status == 409
        assert "10 blocks" in (await busy.json())["error"]["message"]
        engine.gate.set()


async def test_check_reports_corruption(client: Any, engine: FakeEngine) -> None:
    assert await (await client.get("/admin/check")).json() == {"ok": True}
    engine.corrupt = True
    response = await client.get("/admin/check")
    body = await response.json()
    assert response.status == 500
    assert body["ok"] is False
    assert body["error"]["message"] == "block 7 is in two nodes"


async def test_health_separates_loop_step_and_death(client: Any, engine: FakeEngine) -> None:
    async def health() -> tuple[int, str, str]:
        response = await client.get("/health")
        body = await response.json()
        assert body["loop"] == "alive"
        return response.status, body["status"], body["engine"]["state"]

    assert await health() == (200, "ok", "idle")
    engine.gate.clear()
    async with client.post("/v1/completions", json={**PROMPT, "stream": True}):
        await until(lambda: engine.waiting)
        engine.seconds_in_step = 5.0
        assert await health() == (200, "ok", "stepping")
        engine.seconds_in_step = 31.0
        assert await health() == (200, "stuck", "stuck")
        engine.gate.set()
    engine.dead = True
    assert await health() == (503, "dead", "dead")
    refused = await client.post("/v1/completions", json=PROMPT)
    assert refused.status == 503
    assert "Retry-After" in refused.headers


async def test_models_are_listed_and_found_by_name(make_client: Any) -> None:
    client = await make_client(served_model_name="org/model-1")
    listed = await (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [m["id"] for m in listed["data"]] == ["org/model-1"]
    assert listed["data"][0]["max_model_len"] == 4096
    assert await (await client.get("/v1/models/org/model-1")).json() == listed["data"][0]
    missing = await client.get("/v1/models/other")
    assert missing.status == 404
    assert (await missing.json())["error"]["code"] == "model_not_found"
