"""docs/grafana.json: a dashboard that Grafana takes, of metrics that there are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from metrics_helpers import BODY, full_engine
from prometheus_client.parser import text_string_to_metric_families

DASHBOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "docs" / "grafana.json").read_text(encoding="utf-8")
)
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
METRIC = re.compile(r"\b(?:radixkv|vllm):\w+")
SELECTOR = re.compile(r"((?:radixkv|vllm):\w+)\{([^}]*)\}")
GROUPING = re.compile(r"\bby \(([^)]*)\)")
VARIABLES = {"$datasource", "$model", "$__rate_interval"}
# Of the requirement; each is what a panel is there for.
WANTED = {
    "hit rate": "vllm:prefix_cache_hits_total",
    "tokens by source": "radixkv:prompt_tokens_by_source_total",
    "first token, cold and warm": "radixkv:time_to_first_token_by_cache_seconds_bucket",
    "between tokens": "radixkv:inter_token_latency_seconds_bucket",
    "queue": "radixkv:request_queue_time_seconds_bucket",
    "running": "vllm:num_requests_running",
    "occupancy": "radixkv:blocks",
    "evictions": "radixkv:evicted_blocks_total",
    "preemptions": "radixkv:preemptions_total",
    "step overhead": "radixkv:step_host_time_seconds_sum",
    "tiers": "radixkv:tier_blocks",
    "tenants": "radixkv:namespace_queue_seconds_total",
}


@pytest.fixture
async def page(make_client: Any, tmp_path: Any) -> dict[str, set[str]]:
    """Labels by the name of each series of a page; empty of families without a sample."""
    client = await make_client(full_engine(tmp_path))
    for prompt in ([5] * 65, [6] * 65, [5] * 65):
        await (await client.post("/v1/completions", json={**BODY, "prompt": prompt})).read()
    text = await (await client.get("/metrics")).text()
    endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for ending in endings.get(family.type, ("",)):
            found[family.name + ending] = set()
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def parts(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Yield (metric, labels that it must have) of every part of an expression."""
    for metric, selector in SELECTOR.findall(expression):
        yield metric, set(re.findall(r"(\w+)\s*=~?", selector))
    for groups in GROUPING.findall(expression):
        labels = {label.strip() for label in groups.split(",")}
        for metric in METRIC.findall(expression):
            yield metric, labels


async def test_every_expression_is_of_metrics_and_labels_that_there_are(
    page: dict[str, set[str]],
) -> None:
    for expression in EXPRESSIONS:
        metrics = METRIC.findall(expression)
        assert metrics, expression
        assert set(metrics) <= page.keys(), expression
        for metric, labels in parts(expression):
            # The page of a server without quotas has no sample of them.
            assert labels <= page[metric] or metric.startswith("radixkv:quota_"), expression


@pytest.mark.parametrize("what", WANTED)
def test_panels_show_what_a_server_is_watched_for(what: str) -> None:
    assert any(WANTED[what] in METRIC.findall(expression) for expression in EXPRESSIONS)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_are_well_formed(expression: str) -> None:
    for opening, closing in ("()", "[]", "{}"):
        assert expression.count(opening) == expression.count(closing)
    assert set(re.findall(r"\$\w+", expression)) <= VARIABLES
    for metric in METRIC.findall(expression):
        counted = metric.endswith(("_total", "_bucket", "_sum", "_count"))
        # Of a counter only the rate says anything, and of anything else none can be taken.
        assert (f"rate({metric}" in expression) is counted, metric
    if "histogram_quantile" in expression:
        assert re.search(r"histogram_quantile\(0\.\d+, sum by \(le[,)]", expression)


def test_legends_name_labels_that_the_expression_keeps() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            kept = {
                label.strip()
                for groups in GROUPING.findall(target["expr"])
                for label in groups.split(",")
            }
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept, panel["title"]


def test_dashboard_has_the_form_that_grafana_imports() -> None:
    assert DASHBOARD["schemaVersion"] >= 36
    assert DASHBOARD["id"] is None
    assert (DASHBOARD["title"], DASHBOARD["uid"]) == ("RadixKV", "radixkv")
    variables = {v["name"]: v for v in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in PANELS:
        source = {"type": "prometheus", "uid": "${datasource}"}
        assert panel["datasource"] == source
        assert panel["type"] in ("timeseries", "stat")
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0
        assert all(target["datasource"] == source for target in panel["targets"])


def test_panels_lie_side_by_side() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert 0 <= at["x"] <= at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
