"""Service levels: what a load test must reach, and whether it did."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

__all__ = ["AT_LEAST", "AT_MOST", "SPREADS", "Slo", "Verdict", "check_slos", "slo_table"]

SPREADS = ("ttft", "itl", "gap", "e2e")
"""Times of which percentiles are taken: `ttft_p95`, and so on."""
AT_MOST = ("error_rate",)
AT_LEAST = ("cached_share", "output_rate", "request_rate")

Lookup = Callable[[str | None, str], float | None]
"""Gives a figure of a kind of user, or of all; None if it wasn't measured."""

FIGURE = re.compile(rf"(?:{'|'.join(SPREADS)})_p(\d{{1,2}}(?:\.\d+)?)")
LIMIT = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(ms|s|%|)")
EXAMPLE = "such as ttft_p95=2s, itl_p50=100ms, error_rate=1%, cached_share=0.5, tools:ttft_p95=3s"


@dataclass(frozen=True, slots=True)
class Slo:
    """A bound for one figure.

    Attributes:
        figure: `ttft_p95` and the like in seconds, a share, or a rate a second.
        limit: in the same unit.
        kind: of the users it is about; None is all.
        text: as it was given.
    """

    figure: str
    limit: float
    kind: str | None = None
    text: str = ""

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Read `[KIND:]FIGURE=LIMIT`; times are seconds unless they end in ms.

        Raises:
            ValueError: it is none.
        """
        name, separator, bound = text.partition("=")
        kind, colon, figure = name.strip().rpartition(":")
        limit = LIMIT.fullmatch(bound.strip())
        if not separator or limit is None or (colon and not kind):
            raise ValueError(f"--slo must be FIGURE=LIMIT, {EXAMPLE}; got {text!r}")
        value, unit = float(limit[1]), limit[2]
        is_time = FIGURE.fullmatch(figure) is not None
        if not is_time and figure not in AT_MOST + AT_LEAST:
            known = ", ".join(f"{name}_pNN" for name in SPREADS)
            raise ValueError(
                f"--slo knows {known}, {', '.join(AT_MOST + AT_LEAST)}; got {figure!r} in {text!r}"
            )
        allowed = ("s", "ms", "") if is_time else ("%", "")
        if unit not in allowed:
            raise ValueError(f"--slo {figure} has no unit {unit!r}: {text!r}")
        return cls(figure, value * {"ms": 1e-3, "%": 1e-2}.get(unit, 1.0), kind or None, text)

    @property
    def is_floor(self) -> bool:
        """Whether more is better."""
        return self.figure in AT_LEAST

    def is_met(self, value: float | None) -> bool:
        """Whether a figure keeps the bound; one that was not measured doesn't."""
        if value is None:
            return False
        return value >= self.limit if self.is_floor else value <= self.limit

    def shown(self, value: float | None) -> str:
        """Format a figure in its unit."""
        if value is None:
            return "not measured"
        if FIGURE.fullmatch(self.figure):
            return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.0f} ms"
        if self.figure in ("error_rate", "cached_share"):
            return f"{100 * value:.2f} %"
        return f"{value:.2f} /s"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A bound and what was measured."""

    slo: Slo
    value: float | None

    @property
    def is_met(self) -> bool:
        """Whether the bound is kept."""
        return self.slo.is_met(self.value)

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Users, figure, bound, and what was measured, as text."""
        slo = self.slo
        bound = f"{'>=' if slo.is_floor else '<='} {slo.shown(slo.limit)}"
        return slo.kind or "all", slo.figure, bound, slo.shown(self.value)


def check_slos(slos: Sequence[Slo], lookup: Lookup) -> list[Verdict]:
    """Compare every bound with its figure."""
    return [Verdict(slo, lookup(slo.kind, slo.figure)) for slo in slos]


def slo_table(verdicts: Sequence[Verdict]) -> Table:
    """Show what was kept."""
    table = Table("users", "figure", "bound", "measured", "", title="service levels")
    for verdict in verdicts:
        mark = "[green]pass[/green]" if verdict.is_met else "[red]FAIL[/red]"
        table.add_row(*verdict.cells, mark)
    return table
