from __future__ import annotations

import json
import random
import statistics

import pytest

from loadtests.locust_report import MAX_WINDOWS, add_section, figures, html_section, status_line
from loadtests.locust_stats import WINDOW_S, LoadStats, Spread
from loadtests.openai_client import Sample
from loadtests.slo import Slo, check_slos


def sample(
    ttft: float = 0.5, tokens: int = 5, step: float = 0.1, cached: int | None = 40
) -> Sample:
    arrivals = [ttft + step * n for n in range(tokens)]
    return Sample(
        arrivals=arrivals,
        latency=arrivals[-1],
        prompt_tokens=100,
        cached_tokens=cached or 0,
        tells_cached=cached is not None,
        completion_tokens=tokens,
        finish_reason="stop",
    )


def failed() -> Sample:
    return Sample(error="500: no", latency=0.2)


@pytest.mark.parametrize("percent", [1, 50, 95, 99])
def test_percentiles_of_a_spread_are_right_to_one_percent(percent: int) -> None:
    rng = random.Random(3)
    values = [rng.lognormvariate(-1, 1.5) for _ in range(5000)]
    spread = Spread()
    for value in values:
        spread.add(value)
    exact = statistics.quantiles(values, n=100)[percent - 1]
    # One percent of the buckets, and the neighbour in the order.
    assert spread.percentile(percent) == pytest.approx(exact, rel=0.03)
    assert len(spread.buckets) < 1000


def test_percentile_of_nothing_is_none_and_of_one_it_is_that() -> None:
    spread = Spread()
    assert spread.percentile(50) is None
    spread.add(2.0)
    assert spread.percentile(1) == spread.percentile(99) == pytest.approx(2.0, rel=0.01)


def test_figures_are_those_of_the_requests() -> None:
    stats = LoadStats()
    stats.record("chat", sample(ttft=1.0, tokens=11), end=102.0)
    stats.record("chat", sample(ttft=3.0, tokens=11), end=104.0)
    stats.record("chat", failed(), end=103.0)
    # The first began at 100, the last ended at 104.
    assert stats.seconds == pytest.approx(4.0)
    shown = figures(stats.total("chat"), stats.seconds)
    assert (shown["requests"], shown["errors"]) == (3, 1)
    assert shown["cached_share"] == pytest.approx(0.4)
    assert shown["output_rate"] == pytest.approx(22 / 4)
    assert shown["ttft_p50"] == pytest.approx(1.0, rel=0.01)
    assert shown["ttft_p95"] == pytest.approx(3.0, rel=0.01)
    assert shown["itl_p50"] == pytest.approx(0.1, rel=0.01)
    assert stats.figure(None, "error_rate") == pytest.approx(1 / 3)
    assert stats.figure(None, "request_rate") == pytest.approx(2 / 4)


def test_several_answers_at_once_share_the_time_between_tokens() -> None:
    stats = LoadStats()
    # 4 answers of 3 tokens each: a chunk for each token, in 11 gaps; an answer has 2.
    stats.record("samplers", sample(tokens=12, step=0.1), end=10.0, answers=4)
    assert stats.figure(None, "itl_p50") == pytest.approx(1.1 / 2, rel=0.01)
    assert stats.figure(None, "gap_p50") is None


def test_cached_share_is_of_the_answers_that_tell() -> None:
    stats = LoadStats()
    stats.record("chat", sample(cached=None), end=1.0)
    assert stats.figure(None, "cached_share") is None
    stats.record("chat", sample(cached=50), end=2.0)
    assert stats.figure(None, "cached_share") == pytest.approx(0.5)


def test_figures_of_nobody_are_not_measured() -> None:
    stats = LoadStats()
    names = ("ttft_p95", "error_rate", "cached_share", "output_rate")
    assert [stats.figure(None, name) for name in names] == [None] * 4
    stats.record("chat", sample(), end=5.0)
    assert stats.figure("tools", "ttft_p95") is None
    assert stats.figure("tools", "error_rate") is None


def test_what_workers_drain_adds_up_to_one_process() -> None:
    rng = random.Random(1)
    whole, master = LoadStats(), LoadStats()
    workers = [LoadStats(), LoadStats()]
    for n in range(60):
        one = failed() if n % 10 == 0 else sample(ttft=rng.uniform(0.1, 3))
        kind, end = rng.choice(("chat", "tools")), 100 + n
        for stats in (whole, workers[n % 2]):
            stats.record(kind, one, end=end)
    for worker in workers:
        master.merge(json.loads(json.dumps(worker.drain())))
        master.merge(worker.drain())  # nothing is left
    assert master.seconds == pytest.approx(whole.seconds)
    for kind in (None, "chat", "tools"):
        assert figures(master.total(kind), 1.0) == figures(whole.total(kind), 1.0)
    assert {w: t.requests for w, t in master.windows.items()} == {
        w: t.requests for w, t in whole.windows.items()
    }


def test_html_section_shows_levels_kinds_and_a_bounded_number_of_windows() -> None:
    stats = LoadStats()
    for n in range(5 * MAX_WINDOWS):
        stats.record("<chat>", sample(), end=1000.0 + n * WINDOW_S, users=n)
    verdicts = check_slos([Slo.parse("ttft_p95=2s"), Slo.parse("cached_share=0.9")], stats.figure)
    section = html_section(stats, verdicts)
    assert "<chat>" not in section
    assert "&lt;chat&gt;" in section
    assert section.count('<td class="pass">') == section.count('<td class="fail">') == 1
    over_time = section.split("<h3>Over time</h3>")[1]
    assert over_time.count("<tr>") == 1 + MAX_WINDOWS
    # Five windows a row, the last one with the most users.
    assert f"<td>{5 * MAX_WINDOWS - 1}</td>" in over_time


def test_section_goes_to_the_end_of_the_page() -> None:
    assert add_section("<body>a</body></html>", "S") == "<body>aS\n</body></html>"
    assert add_section("plain", "S") == "plainS"


def test_status_line_says_how_it_goes() -> None:
    stats = LoadStats()
    stats.record("chat", sample(), end=5.0)
    line = status_line(stats, 7)
    assert line.startswith("7 users, 1 answers, 0 errors, ")
    assert "40.0 % cached" in line


def test_clear_forgets_everything() -> None:
    stats = LoadStats()
    stats.record("chat", sample(), end=5.0)
    stats.clear()
    assert (stats.seconds, stats.kinds, stats.windows) == (0.0, {}, {})
