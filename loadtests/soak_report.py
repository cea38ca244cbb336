"""The judgement of a soak, its table, and its report."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from loadtests.serving_report import percentile
from loadtests.soak_replay import Verdicts
from loadtests.soak_traffic import Traffic
from loadtests.soak_watch import Reading, Watch, growth

__all__ = ["Findings", "Outcome", "live_view", "outcome_table"]

# A pool of threads starts one when all of its others are busy, and keeps it.
MORE_THREADS = 2
MORE_FILES = 2
MAX_SHOWN = 20


@dataclass(slots=True)
class Findings:
    """What was measured of one variant, beside the traffic itself.

    Attributes:
        start, end: at rest, after warming up and after the traffic with an empty cache.
        check: what `/admin/check` said at the end.
        report: `/admin/cache` at the end of the traffic.
        engine: `/admin/engine` at the end of the traffic.
        log_errors: error lines of the server's log.
        restarts: how often it was killed.
        verdicts: of the comparisons; None if nothing was repeated.
    """

    start: Reading
    end: Reading
    watch: Watch
    check: dict[str, Any]
    report: dict[str, Any]
    engine: dict[str, Any]
    log_errors: list[str]
    restarts: int = 0
    ended_in_order: bool | None = None
    verdicts: Verdicts | None = None


@dataclass(slots=True)
class Outcome:
    """What is said about one variant.

    Attributes:
        problems: empty if it passed.
    """

    variant: str
    problems: list[str]
    figures: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        variant: str,
        traffic: Traffic,
        findings: Findings,
        *,
        max_growth: float,
        is_long: bool,
    ) -> Outcome:
        """Judge a variant.

        Args:
            max_growth: MiB a minute by which memory may grow, if the run was long.
            is_long: it ran long enough that everything it is meant to stress must have happened.
        """
        problems = [f"{traffic.num_failures} failures"] if traffic.num_failures else []
        problems += _leaks(findings, max_growth if is_long else None)
        if not findings.check.get("ok"):
            problems.append(f"/admin/check: {findings.check}")
        if findings.log_errors:
            problems.append(f"{len(findings.log_errors)} errors in the log")
        if findings.ended_in_order is False:
            problems.append("it did not end when it was told to")
        verdicts = findings.verdicts
        if verdicts is not None:
            if verdicts.counts["different"]:
                problems.append(f"{verdicts.counts['different']} answers differ from those alone")
            if not verdicts.counts["equal"]:
                problems.append("no answer was compared")
        if is_long:
            problems += _untested(variant, findings)
        return cls(variant, problems, _figures(traffic, findings))

    def as_json(self) -> dict[str, Any]:
        """Return everything that was found."""
        return {"variant": self.variant, "problems": self.problems, **self.figures}


def live_view(variant: str, left_s: float, phase: str, traffic: Traffic, watch: Watch) -> Group:
    """Return what is shown while a soak runs."""
    table = Table("scenario", "done", "whole answers", "p50 s", "p99 s", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for kind, count in sorted(traffic.done.items()):
        seconds = traffic.seconds.get(kind, [])
        quantiles = [f"{percentile(seconds, p):.2f}" if seconds else "" for p in (50, 99)]
        table.add_row(kind, str(count), str(len(seconds) or ""), *quantiles)
    last = watch.readings[-1] if watch.readings else None
    lines = [f"[bold]{variant}[/bold]: {phase}, {max(left_s, 0):.0f} s left"]
    if last is not None:
        blocks = ", ".join(f"{count} {state}" for state, count in last.blocks.items())
        lines.append(
            f"blocks: {blocks}; running {last.running}, waiting {last.waiting}; "
            f"RSS {_shown(last.rss_mib)} MiB, {last.threads} threads, {last.files} files, "
            f"{last.tasks} tasks"
        )
    failures = [Text(message, style="red") for message in traffic.failures[-3:]]
    return Group(*(Text.from_markup(line) for line in lines), *failures, table)


def outcome_table(outcomes: Sequence[Outcome]) -> Table:
    """Return the table of a whole soak."""
    table = Table("", *(outcome.variant for outcome in outcomes))
    rows: dict[str, Callable[[Outcome], str]] = {
        "result": lambda o: "[red]failed[/red]" if o.problems else "[green]passed[/green]",
        "scenarios": lambda o: str(sum(o.figures["scenarios"].values())),
        "answers": lambda o: str(sum(o.figures["statuses"].values())),
        "compared": lambda o: str(o.figures["exactness"] or "not"),
        "evicted blocks": lambda o: str(o.figures["pressure"]["evicted_blocks"]),
        "preemptions": lambda o: str(o.figures["pressure"]["preemptions"]),
        "hit by tier": lambda o: str(o.figures["pressure"]["hit_by_tier"]),
        "growth MiB/min": lambda o: _shown(o.figures["growth_mib_per_minute"]),
        "threads": lambda o: _change(o, "threads"),
        "files": lambda o: _change(o, "files"),
        "tasks": lambda o: _change(o, "tasks"),
        "problems": lambda o: "\n".join(o.problems) or "none",
    }
    for name, cell in rows.items():
        table.add_row(name, *(cell(outcome) for outcome in outcomes))
    return table


def _leaks(findings: Findings, max_growth: float | None) -> list[str]:
    start, end, problems = findings.start, findings.end, []
    for name, more in (("threads", MORE_THREADS), ("files", MORE_FILES), ("tasks", 0)):
        before, after = getattr(start, name), getattr(end, name)
        if before is not None and after > before + more:
            problems.append(f"{after} {name} at the end, {before} at the start")
    blocks = end.blocks
    if blocks["referenced"] or blocks["free"] != blocks["total"]:
        problems.append(f"blocks are not free at the end: {blocks}")
    slope = growth(findings.watch.readings)
    if max_growth is not None and slope is not None and slope > max_growth:
        problems.append(f"memory grew by {slope:.2f} MiB a minute")
    return problems


def _untested(variant: str, findings: Findings) -> list[str]:
    """Return what should have happened, and didn't: a soak that stresses nothing proves nothing."""
    report = findings.report
    missing = [] if report["evicted_blocks"] else ["nothing was evicted"]
    modes = findings.engine["preemptions"]
    if variant == "swap" and not modes.get("swap"):
        missing.append("nothing was swapped out")
    if variant == "tiers":
        tiers = report["tokens"]["hit_by_tier"]
        missing += [f"no hit in {tier}" for tier in ("host", "disk") if not tiers.get(tier)]
    return missing


def _figures(traffic: Traffic, findings: Findings) -> dict[str, Any]:
    report, verdicts = findings.report, findings.verdicts
    return {
        "scenarios": dict(sorted(traffic.done.items())),
        "statuses": {str(k): v for k, v in sorted(traffic.statuses.items())},
        "seconds": {
            kind: {"p50": percentile(s, 50), "p99": percentile(s, 99), "max": max(s)}
            for kind, s in sorted(traffic.seconds.items())
            if s
        },
        "failures": traffic.failures[:MAX_SHOWN],
        "num_failures": traffic.num_failures,
        "cut_by_restart": traffic.cut_by_restart,
        "restarts": findings.restarts,
        "log_errors": findings.log_errors[:MAX_SHOWN],
        "exactness": None if verdicts is None else dict(verdicts.counts),
        "ties": [] if verdicts is None else sorted(verdicts.ties, reverse=True)[:MAX_SHOWN],
        "different": [] if verdicts is None else verdicts.different[:MAX_SHOWN],
        "pressure": {
            "evicted_blocks": report["evicted_blocks"],
            "copied_blocks": report["copied_blocks"],
            "preemptions": findings.engine["preemptions"],
            "swap_bytes": findings.engine["swap_bytes"],
            "hit_by_tier": report["tokens"]["hit_by_tier"],
            "looked_up": report["tokens"]["looked_up"],
            "pins": report["pins"],
            "tiers": report["tiers"],
        },
        "growth_mib_per_minute": growth(findings.watch.readings),
        "rss_mib": _median_rss(findings.watch.readings),
        "start": asdict(findings.start),
        "end": asdict(findings.end),
        "check": findings.check,
        "readings": findings.watch.as_json(),
    }


def _median_rss(readings: Sequence[Reading]) -> float | None:
    values = [reading.rss_mib for reading in readings if reading.rss_mib is not None]
    return statistics.median(values) if values else None


def _change(outcome: Outcome, name: str) -> str:
    return f"{outcome.figures['start'][name]} → {outcome.figures['end'][name]}"


def _shown(value: float | None) -> str:
    return "?" if value is None else f"{value:.1f}"
