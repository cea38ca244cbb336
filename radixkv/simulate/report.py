"""Outcomes as a table for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.box import SIMPLE
from rich.table import Table

from radixkv.config import format_bytes
from radixkv.simulate.outcome import Outcome
from radixkv.simulate.scenario import Scenario

__all__ = ["outcome_table"]


def outcome_table(
    scenarios: Sequence[Scenario],
    outcomes: Sequence[Outcome],
    sustained: Sequence[float] = (),
) -> Table:
    """Return a row per cell.

    Memory shares are those while a request waits for memory, if any did: with memory to spare
    nothing is wasted that anybody misses.
    """
    table = Table(box=SIMPLE, pad_edge=False)
    for name in ("memory", "rate", "manager"):
        table.add_column(name, no_wrap=True)
    numbers = [
        "hit rate", "used", "cached", "reserved", "internal", "external", "batch",
        "TTFT p50 s", "p95", "s/token", "tokens/s", "requests/s", "preempted", "rejected",
    ]  # fmt: skip
    for name in numbers + (["sustains req/s"] if sustained else []):
        table.add_column(name, justify="right", no_wrap=True)
    last = None
    for index, (scenario, outcome) in enumerate(zip(scenarios, outcomes, strict=True)):
        group = (scenario.kv_memory, scenario.rate)
        usage = outcome.full_usage or outcome.usage
        row = [
            format_bytes(int(scenario.kv_memory)) if group != last else "",
            ("" if scenario.rate is None else f"{scenario.rate:g}") if group != last else "",
            scenario.manager,
            _share(outcome.hit_rate),
            *(_share(part) for part in usage[:5]),
            f"{outcome.mean_batch:.1f}",
            *(_number(value) for value in (*outcome.ttft_s, outcome.latency_s[0])),
            f"{outcome.output_rate:,.0f}",
            f"{outcome.request_rate:.3g}",
            f"{outcome.preemptions:,}",
            f"{outcome.rejected:,}",
        ]
        if sustained:
            row.append(f"{sustained[index]:.3g}" if sustained[index] else "-")
        if last is not None and group != last:
            table.add_section()
        table.add_row(*row)
        last = group
    return table


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}"
