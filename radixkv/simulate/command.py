"""`radixkv simulate` and `radixkv kv-size`."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from radixkv.errors import ConfigError, RadixKVError

if TYPE_CHECKING:
    from rich.console import Console

    from radixkv.simulate.planning import Plan

__all__ = ["add_commands"]


def add_commands(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(simulate)
    app.command(name="kv-size")(kv_size)


def simulate(
    trace: Annotated[
        str,
        typer.Argument(
            help="A trace in Mooncake's form, or sharegpt, alpaca, translation: drawn requests."
        ),
    ] = "",
    model: Annotated[
        str, typer.Option(help="A preset, or a directory with config.json.")
    ] = "llama-3-8b",
    gpu: Annotated[str, typer.Option(help="a100-40gb, a100-80gb, h100 or h200.")] = "h100",
    gpus: Annotated[int, typer.Option(min=1, max=64, help="GPUs that share the model.")] = 1,
    memory: Annotated[
        list[str] | None,
        typer.Option(
            help="Memory for KV, such as 12GiB; repeatable. Default: eight sizes up to "
            "what the GPUs have left."
        ),
    ] = None,
    manager: Annotated[
        list[str] | None, typer.Option(help="Only this memory manager; repeatable.")
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(min=1e-6, help="Requests a second; repeatable. A trace is stretched to it."),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per block. Default: a trace's, else 16."),
    ] = None,
    trace_block: Annotated[
        int, typer.Option(min=1, help="Tokens that one id of the trace stands for.")
    ] = 512,
    max_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The longest request, which reservations are made for. Default: "
            "a trace's longest, else the model's.",
        ),
    ] = None,
    page: Annotated[str, typer.Option(help="Bytes of a page of vAttention.")] = "2MiB",
    policy: Annotated[str, typer.Option(help="Eviction policy of the radix tree.")] = "lru",
    kv_item_bytes: Annotated[
        int | None, typer.Option(min=1, max=8, help="Bytes of a number of K or V: 1 for int8.")
    ] = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens that a step computes at most. Default: 8192, or --calibrate's."
        ),
    ] = None,
    max_seqs: Annotated[
        int | None,
        typer.Option(min=1, help="Answers at once at most. Default: 256, or --calibrate's."),
    ] = None,
    sessions: Annotated[
        int | None,
        typer.Option(
            min=1, help="Sessions of the trace that clients have open at once. Default: all."
        ),
    ] = None,
    swap: Annotated[
        bool, typer.Option(help="Swap preempted requests to the host instead of recomputing them.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only so many requests of the trace.")
    ] = None,
    duration: Annotated[float, typer.Option(min=1, help="Seconds of drawn requests.")] = 1800.0,
    shared_prefix: Annotated[
        int, typer.Option(min=0, help="Tokens that drawn prompts begin with.")
    ] = 0,
    samples: Annotated[int, typer.Option(min=1, max=64, help="Answers per drawn prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of drawn requests.")] = 0,
    sustain: Annotated[
        bool, typer.Option(help="Also search for the rate each manager sustains.")
    ] = False,
    latency_limit: Annotated[
        float, typer.Option(min=1e-3, help="Mean seconds per answer token that --sustain allows.")
    ] = 0.2,
    hits_only: Annotated[
        bool, typer.Option(help="Only hit rates: prompts one by one, without time or answers.")
    ] = False,
    calibrate: Annotated[
        str | None, typer.Option(help="URL of a running server to take step times from.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="RADIXKV_API_KEY", help="That server's key.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write everything there.")
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Write plots into this folder.")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Default: one per core.")] = None,
    paper: Annotated[
        bool, typer.Option(help="Compare with the figures of the PagedAttention paper instead.")
    ] = False,
) -> None:
    """Simulate traffic against KV memory: hit rate, waste, batch, latency, rate; needs no model."""
    options = dict(locals())
    from rich.console import Console

    from radixkv.simulate.planning import make_plan

    console = Console()
    count = processes or os.cpu_count() or 1
    try:
        if paper:
            _compare_with_paper(console, seed, count, json_file)
            return
        if not trace:
            raise ConfigError("TRACE is missing: a file, sharegpt, alpaca or translation")
        plan = make_plan(options)
        if hits_only:
            _show_hits(console, plan, json_file)
        else:
            _show_outcomes(console, plan, count, json_file, plots)
    except RadixKVError as error:
        _fail(error)


def kv_size(
    model: Annotated[str, typer.Argument(help="A preset, or a directory with config.json.")],
    memory: Annotated[str | None, typer.Option(help="Also say what fits into this.")] = None,
) -> None:
    """Say how many bytes of KV a token of a model takes."""
    from radixkv.config import format_bytes
    from radixkv.simulate.models import load_model
    from radixkv.simulate.planning import size_of

    try:
        shape = load_model(model)
        fits = None if memory is None else size_of("--memory", memory) // shape.kv_bytes
    except RadixKVError as error:
        _fail(error)
    per_token = shape.kv_bytes
    typer.echo(
        f"{shape.name}: {per_token:,} bytes a token ({format_bytes(per_token)}) = 2 x "
        f"{shape.num_layers} layers x {shape.num_kv_heads} KV heads x {shape.head_dim} x "
        f"{shape.kv_item_bytes} bytes"
    )
    if shape.num_kv_heads != shape.num_heads:
        typer.echo(
            f"without grouped-query attention ({shape.num_heads} KV heads): "
            f"{shape.ungrouped_kv_bytes:,} bytes a token"
        )
    if fits is not None:
        typer.echo(f"{memory} holds {fits:,} tokens")


def _show_outcomes(
    console: Console, plan: Plan, processes: int, json_file: Path | None, plots: Path | None
) -> None:
    from rich.measure import Measurement

    from radixkv.simulate.parallel import map_parallel
    from radixkv.simulate.plots import require_matplotlib, write_plots
    from radixkv.simulate.report import outcome_table
    from radixkv.simulate.scenario import run_scenario
    from radixkv.simulate.sustained import sustainable_rate

    if plots is not None:
        require_matplotlib()
    cells = plan.scenarios
    total = len(cells) * (1 + plan.sustain)
    with _progress() as progress:
        task = progress.add_task("simulating", total=total)
        outcomes = map_parallel(
            run_scenario,
            cells,
            plan.traffic,
            num_processes=processes,
            on_done=lambda done: progress.update(task, completed=done),
        )
        sustained: list[float] = []
        if plan.sustain:
            sustained = map_parallel(
                partial(sustainable_rate, latency_limit_s=plan.latency_limit),
                cells,
                plan.traffic,
                num_processes=processes,
                on_done=lambda done: progress.update(task, completed=len(cells) + done),
            )
    table = outcome_table(cells, outcomes, sustained)
    # Columns that are cut help nobody; a pipe has no width anyway.
    wide = console.options.update(max_width=1000)
    console.width = max(console.width, Measurement.get(console, wide, table).maximum)
    console.print(table)
    if json_file is not None:
        rows = [
            {**plan.describe(cell), **outcome.to_dict()}
            for cell, outcome in zip(cells, outcomes, strict=True)
        ]
        for row, value in zip(rows, sustained, strict=False):
            row["sustainable_rate"] = value
        _write_json(json_file, {"traffic": plan.trace, "runs": rows})
    if plots is not None:
        for path in write_plots(plots, cells, outcomes):
            console.print(f"wrote {path}", highlight=False, soft_wrap=True)


def _show_hits(console: Console, plan: Plan, json_file: Path | None) -> None:
    from rich.table import Table

    from radixkv.config import format_bytes
    from radixkv.simulate.replay import replay_hits

    rows = []
    table = Table("memory", "blocks", "manager", "hit rate", pad_edge=False)
    with _progress() as progress:
        for cell in progress.track(plan.scenarios, description="replaying"):
            requests = plan.traffic.requests(None, cell.block_size)
            blocks = cell.total // cell.block_size
            rate = replay_hits(cell.manager, requests, blocks, cell.manager_options)
            rows.append({**plan.describe(cell), "num_blocks": blocks, "hit_rate": rate})
            size = format_bytes(int(cell.kv_memory))
            table.add_row(size, f"{blocks:,}", cell.manager, f"{100 * rate:.2f} %")
    console.print(table)
    if json_file is not None:
        _write_json(json_file, {"traffic": plan.trace, "hits": rows})


def _compare_with_paper(
    console: Console, seed: int, processes: int, json_file: Path | None
) -> None:
    from rich.table import Table

    from radixkv.simulate.paper import check_paper

    with _progress() as progress:
        task = progress.add_task("simulating", total=None)
        checks = check_paper(
            seed=seed,
            num_processes=processes,
            on_done=lambda done, total: progress.update(task, completed=done, total=total),
        )
    table = Table("what", "published", "simulated", pad_edge=False)
    for check in checks:
        table.add_row(check.what, check.published, check.simulated)
    console.print(table)
    if json_file is not None:
        rows = [
            {"what": c.what, "published": c.published, "simulated": c.simulated} for c in checks
        ]
        _write_json(json_file, {"seed": seed, "checks": rows})


def _progress() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def _write_json(path: Path, report: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path} can't be written: {error.strerror}") from None


def _fail(error: object) -> NoReturn:
    print(f"radixkv: error: {error}", file=sys.stderr)
    raise typer.Exit(2)
