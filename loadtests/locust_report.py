"""The figures of a load test: a table for the terminal, a section for Locust's HTML report."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from loadtests.locust_stats import WINDOW_S, LoadStats, Totals
from loadtests.slo import Verdict

__all__ = ["COLUMNS", "add_section", "figures", "figures_table", "html_section", "status_line"]

COLUMNS = (
    *("requests", "errors", "cached_share", "output_rate"),
    *("ttft_p50", "ttft_p95", "itl_p50", "itl_p95", "gap_p99", "e2e_p95"),
)
HEADERS = (
    *("requests", "errors", "cached", "tokens/s"),
    *("TTFT p50", "p95", "ITL p50", "p95", "gap p99", "e2e p95"),
)
MAX_WINDOWS = 30
STYLE = """<style>
.radixkv{font-family:Roboto,Helvetica,Arial,sans-serif}
.radixkv{max-width:1200px;margin:24px auto;padding:0 24px}
.radixkv table{border-collapse:collapse;margin:8px 0 24px}
.radixkv th,.radixkv td{padding:4px 12px;border-bottom:1px solid #8886;text-align:right}
.radixkv th:first-child,.radixkv td:first-child{text-align:left}
.radixkv .pass{color:#2e7d32}.radixkv .fail{color:#c62828;font-weight:bold}
</style>"""
NOTE = (
    "cached: prompt tokens reused / prompt tokens of answers that tell. TTFT: to the first token. "
    "ITL: time a token after the first, one value a request. gap: between two chunks of an answer."
)


def figures(totals: Totals, seconds: float) -> dict[str, Any]:
    """Return the figures of `COLUMNS`; times in seconds, None where nothing was measured."""
    return {
        name: getattr(totals, name)
        if name in ("requests", "errors")
        else totals.figure(name, seconds)
        for name in COLUMNS
    }


def figures_table(stats: LoadStats) -> Table:
    """Show the figures of each kind of user, and of all."""
    table = Table("users", *HEADERS, title="what agents saw")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in _kind_rows(stats):
        table.add_row(*row)
    return table


def status_line(stats: LoadStats, users: int) -> str:
    """Say in a line how it goes."""
    total = stats.total()
    shown = dict(zip(COLUMNS, _cells(total, stats.seconds), strict=True))
    return (
        f"{users} users, {shown['requests']} answers, {shown['errors']} errors, "
        f"{shown['output_rate']} tokens/s, {shown['cached_share']} cached, "
        f"TTFT p95 {shown['ttft_p95']}, ITL p50 {shown['itl_p50']}"
    )


def html_section(stats: LoadStats, verdicts: Sequence[Verdict]) -> str:
    """Return the part of the report that Locust doesn't have: an element of class `radixkv`."""
    parts = [STYLE, '<div class="radixkv">', "<h2>Agents</h2>"]
    if verdicts:
        rows = [(*v.cells, "pass" if v.is_met else "FAIL") for v in verdicts]
        parts += ["<h3>Service levels</h3>", _table(("users", "figure", "bound", "measured"), rows)]
    parts += ["<h3>By kind of user</h3>", _table(("users", *HEADERS), _kind_rows(stats))]
    parts += ["<h3>Over time</h3>", _table(("second", "users", *HEADERS), _window_rows(stats))]
    parts += [f"<p>{html.escape(NOTE)}</p>", "</div>"]
    return "\n".join(parts)


def add_section(report: str, section: str) -> str:
    """Put a section at the end of an HTML page."""
    body, tag, rest = report.rpartition("</body>")
    return f"{body}{section}\n{tag}{rest}" if tag else f"{report}{section}"


def _kind_rows(stats: LoadStats) -> list[tuple[str, ...]]:
    rows = [(kind, *_cells(totals, stats.seconds)) for kind, totals in sorted(stats.kinds.items())]
    return [*rows, ("all", *_cells(stats.total(), stats.seconds))]


def _window_rows(stats: LoadStats) -> list[tuple[str, ...]]:
    """Return at most `MAX_WINDOWS` rows, each of the same number of windows."""
    if not stats.windows:
        return []
    begin, end = min(stats.windows), max(stats.windows)
    width = -(-(end - begin + 1) // MAX_WINDOWS)
    rows = []
    for first in range(begin, end + 1, width):
        part = Totals()
        for window in range(first, first + width):
            if window in stats.windows:
                part.merge(stats.windows[window])
        users = max(stats.users.get(window, 0) for window in range(first, first + width))
        start = (first - begin) * WINDOW_S
        rows.append((str(start), str(users), *_cells(part, width * WINDOW_S)))
    return rows


def _cells(totals: Totals, seconds: float) -> list[str]:
    return [_shown(name, value) for name, value in figures(totals, seconds).items()]


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name in ("requests", "errors"):
        return str(value)
    if name == "cached_share":
        return f"{100 * value:.1f} %"
    if name == "output_rate":
        return f"{value:.1f}"
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.0f} ms"


def _table(headers: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in headers)
    lines = []
    for row in rows:
        cells = [f'<td class="{c.lower()}">' if c in ("pass", "FAIL") else "<td>" for c in row]
        texts = [html.escape(cell) for cell in row]
        lines.append("".join(f"{a}{b}</td>" for a, b in zip(cells, texts, strict=True)))
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    return f"<table><tr>{head}</tr>\n{body}</table>"
