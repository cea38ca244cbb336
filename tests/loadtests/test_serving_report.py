from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from loadtests.openai_client import Sample
from loadtests.serving_report import compare, comparison_table, figures, percentile
from loadtests.serving_workloads import Target, Workload

TARGET = Target("output_tokens_per_s", at_least=2.0)


def sample(first: float, *more: float, tokens: int, **fields: Any) -> Sample:
    return Sample([first, *more], prompt_tokens=10, completion_tokens=tokens, **fields)


def run(rate: float, *, failed: bool = False) -> dict[str, Any]:
    result = figures([sample(1.0, 2.0, tokens=4)], 1.0)
    return {**result, "output_tokens_per_s": rate, "errors": {"oh": 1} if failed else {}}


def test_figures_tell_time_per_token_from_gaps_between_chunks() -> None:
    result = figures([sample(1.0, 1.2, tokens=3), sample(2.0, 2.5, 3.0, tokens=3)], 4.0)
    assert result["itl_p50_ms"] == pytest.approx(300)  # of 100 and 500
    assert result["gap_p50_ms"] == pytest.approx(500)  # of 200, 500 and 500
    assert result["ttft_p50_s"] == 1.5
    assert (result["output_tokens"], result["output_tokens_per_s"]) == (6, 1.5)
    assert (result["requests_per_s"], result["tokens_per_chunk"]) == (0.5, 1.2)


def test_figures_leave_out_what_failed() -> None:
    bad = sample(9.0, 99.0, tokens=100, error="oh")
    result = figures([sample(1.0, 2.0, tokens=2), bad, bad], 2.0)
    assert (result["requests"], result["errors"]) == (3, {"oh": 2})
    assert (result["output_tokens"], result["ttft_p99_s"]) == (2, 1.0)


def test_hit_rate_is_unknown_if_the_server_does_not_tell() -> None:
    told = sample(1.0, tokens=1, cached_tokens=4, tells_cached=True)
    assert figures([told], 1.0)["hit_rate"] == 0.4
    assert figures([sample(1.0, tokens=1)], 1.0)["hit_rate"] is None
    missed = sample(1.0, tokens=1, cached_tokens=0, tells_cached=True)
    assert figures([missed], 1.0)["hit_rate"] == 0.0


def test_compare_gives_the_ratio_of_medians_and_the_range_of_rounds() -> None:
    result = compare({"a": [run(4), run(6), run(9)], "b": [run(2), run(2), run(9)]}, TARGET)
    assert result["ratio"] == 3.0
    assert result["rounds"] == [1.0, 3.0]
    assert result["met"] is True
    assert compare({"a": [run(3)], "b": [run(2)]}, TARGET)["met"] is False


def test_compare_judges_nothing_where_a_request_failed() -> None:
    assert compare({"a": [run(4, failed=True)], "b": [run(2)]}, TARGET)["met"] is None
    assert compare({"a": [run(4)], "b": [run(2, failed=True)]}, TARGET)["met"] is None


def test_comparison_table_shows_each_target_next_to_its_ratio() -> None:
    workload = Workload("test", (), 1, 1, (TARGET, Target("itl_p50_ms", at_most=0.4, when="int8")))
    out = Console(file=io.StringIO(), width=200)
    out.print(comparison_table(workload, {"ours": [run(6)], "theirs": [run(2)]}))
    assert isinstance(out.file, io.StringIO)
    lines = [[c.strip() for c in row.split("│")[1:-1]] for row in out.file.getvalue().splitlines()]
    rows = {cells[0]: cells[1:] for cells in lines if cells}
    assert rows["output_tokens_per_s"] == ["6", "2", "3.00", "3.00 to 3.00", ">= 2", "yes"]
    assert rows["itl_p50_ms"][2:] == ["1.00", "1.00 to 1.00", "<= 0.4 (int8)", "no"]
    assert rows["wall_s"][-2:] == ["", ""]


def test_percentile_of_few_values() -> None:
    assert percentile([], 50) is None
    assert percentile([2.0], 99) == 2.0
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0
    assert percentile([0.0, 10.0], 95) == 9.5
