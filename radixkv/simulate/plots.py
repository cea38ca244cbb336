"""Plots of outcomes; needs matplotlib (the extra `bench`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from radixkv.errors import ConfigError
from radixkv.simulate.outcome import Outcome
from radixkv.simulate.scenario import Scenario

__all__ = ["require_matplotlib", "write_plots"]

Cell = tuple[Scenario, Outcome]
GIB = 1024**3
COLUMNS = 3


def write_plots(
    folder: Path, scenarios: Sequence[Scenario], outcomes: Sequence[Outcome]
) -> list[Path]:
    """Write the plots that the cells allow; return their paths.

    Hit rate against memory needs several memories, latency against rate several rates; waste over
    time is drawn for each manager of the middle memory.

    Raises:
        ConfigError: matplotlib isn't installed, or the folder can't be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    cells = list(zip(scenarios, outcomes, strict=True))
    memories = sorted({scenario.kv_memory for scenario in scenarios})
    rates = sorted({scenario.rate for scenario in scenarios if scenario.rate is not None})
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if len(memories) > 1:
            figure = Figure(figsize=(7, 4.5), layout="constrained")
            _draw_lines(figure, cells, "memory")
            written.append(_save(figure, folder / "hit_rate.png"))
        if len(rates) > 1:
            figure = Figure(figsize=(7, 4.5), layout="constrained")
            _draw_lines(figure, cells, "rate")
            written.append(_save(figure, folder / "latency.png"))
        middle = memories[len(memories) // 2]
        shown = [
            cell
            for cell in cells
            if cell[0].kv_memory == middle and cell[0].rate in (None, *rates[-1:])
        ]
        figure = Figure(figsize=(12, 2.6 * -(-len(shown) // COLUMNS)), layout="constrained")
        _draw_waste(figure, shown)
        written.append(_save(figure, folder / "waste.png"))
    except OSError as error:
        raise ConfigError(f"--plots {folder} can't be written: {error.strerror}") from None
    return written


def require_matplotlib() -> None:
    """Raise ConfigError, with the remedy, if matplotlib isn't installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plots needs matplotlib: pip install 'radixkv[bench]'")


def _draw_lines(figure: Any, cells: Sequence[Cell], by: str) -> None:
    axes = figure.subplots()
    lines: dict[str, list[tuple[float, float]]] = {}
    fixed = max(scenario.kv_memory for scenario, _ in cells)
    for scenario, outcome in cells:
        points = lines.setdefault(scenario.manager, [])
        if by == "memory":
            points.append((scenario.kv_memory / GIB, outcome.hit_rate))
        elif scenario.kv_memory == fixed and scenario.rate is not None:
            points.append((scenario.rate, outcome.latency_s[0]))
    for name, points in lines.items():
        if points:
            xs, ys = zip(*sorted(points), strict=True)
            axes.plot(xs, ys, marker="o", markersize=3, label=name)
    if by == "memory":
        axes.set(xscale="log", xlabel="KV memory, GiB", ylabel="share of prompt tokens found")
    else:
        axes.set(yscale="log", xlabel="requests a second", ylabel="seconds per answer token")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _draw_waste(figure: Any, cells: Sequence[Cell]) -> None:
    grid = figure.subplots(-(-len(cells) // COLUMNS), COLUMNS, sharey=True, squeeze=False)
    names = ("used", "cached", "reserved", "internal", "external")
    for axes, (scenario, outcome) in zip(grid.flat, cells, strict=False):
        times = [point[0] for point in outcome.series]
        parts = [
            [getattr(point[1], name) / outcome.total for point in outcome.series] for name in names
        ]
        if times:
            axes.stackplot(times, parts, labels=names)
        axes.set(title=scenario.manager, ylim=(0, 1), xlabel="seconds")
    for axes in list(grid.flat)[len(cells) :]:
        axes.axis("off")
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=120)
    return path
