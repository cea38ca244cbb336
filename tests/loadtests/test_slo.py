from __future__ import annotations

import pytest
from rich.console import Console

from loadtests.slo import Slo, Verdict, check_slos, slo_table


@pytest.mark.parametrize(
    ("text", "figure", "limit", "kind"),
    [
        ("ttft_p95=2s", "ttft_p95", 2.0, None),
        ("itl_p50=100ms", "itl_p50", 0.1, None),
        ("e2e_p99.9 = 30", "e2e_p99.9", 30.0, None),
        ("error_rate=1%", "error_rate", 0.01, None),
        ("cached_share=.5", "cached_share", 0.5, None),
        ("tools:gap_p99=1.5s", "gap_p99", 1.5, "tools"),
    ],
)
def test_parse_reads_figures_units_and_kinds(
    text: str, figure: str, limit: float, kind: str | None
) -> None:
    slo = Slo.parse(text)
    assert (slo.figure, slo.kind, slo.text) == (figure, kind, text)
    assert slo.limit == pytest.approx(limit)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttft_p95", "must be FIGURE=LIMIT"),
        ("ttft_p95=fast", "must be FIGURE=LIMIT"),
        ("ttft_p95=-1", "must be FIGURE=LIMIT"),
        (":ttft_p95=1", "must be FIGURE=LIMIT"),
        ("ttft_p100=1", "--slo knows"),
        ("ttft=1", "--slo knows"),
        ("happiness=1", "--slo knows"),
        ("ttft_p95=5%", "has no unit '%'"),
        ("cached_share=5s", "has no unit 's'"),
        ("output_rate=50%x", "must be FIGURE=LIMIT"),
    ],
)
def test_parse_refuses_what_is_no_bound(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Slo.parse(text)


@pytest.mark.parametrize(
    ("text", "value", "met"),
    [
        ("ttft_p95=2s", 2.0, True),
        ("ttft_p95=2s", 2.01, False),
        ("error_rate=0", 0.0, True),
        ("error_rate=0.01", 0.02, False),
        ("cached_share=0.5", 0.5, True),
        ("cached_share=0.5", 0.49, False),
        ("output_rate=30", 29.0, False),
        ("request_rate=1", 1.5, True),
    ],
)
def test_bounds_of_times_and_errors_are_ceilings_all_others_floors(
    text: str, value: float, met: bool
) -> None:
    assert Slo.parse(text).is_met(value) is met


@pytest.mark.parametrize("text", ["ttft_p95=2s", "cached_share=0"])
def test_what_was_not_measured_is_missed(text: str) -> None:
    assert not Slo.parse(text).is_met(None)


def test_check_asks_for_the_figure_of_the_kind() -> None:
    values = {(None, "ttft_p50"): 1.0, ("chat", "ttft_p50"): 3.0}
    slos = [Slo.parse("ttft_p50=2"), Slo.parse("chat:ttft_p50=2"), Slo.parse("x:ttft_p50=2")]
    verdicts = check_slos(slos, lambda kind, figure: values.get((kind, figure)))
    assert [v.value for v in verdicts] == [1.0, 3.0, None]
    assert [v.is_met for v in verdicts] == [True, False, False]


def test_table_shows_units_and_what_failed() -> None:
    verdicts = [
        Verdict(Slo.parse("ttft_p95=2s"), 0.25),
        Verdict(Slo.parse("chat:cached_share=0.5"), 0.123),
        Verdict(Slo.parse("output_rate=5"), None),
    ]
    console = Console(width=100, record=True, file=None, quiet=False)
    with console.capture() as shown:
        console.print(slo_table(verdicts))
    rows = [" ".join(line.replace("│", " ").split()) for line in shown.get().splitlines()]
    assert "all ttft_p95 <= 2.00 s 250 ms pass" in rows
    assert "chat cached_share >= 50.00 % 12.30 % FAIL" in rows
    assert "all output_rate >= 5.00 /s not measured FAIL" in rows
