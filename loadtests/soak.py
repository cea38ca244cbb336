"""Drives a server with everything that clients do, for minutes or hours, and checks all it said.

Eight clients mix chats, completions, sessions, forks, beams, grammars, tools, all APIs, whole and
streamed, with clients that hang up, bad requests, timeouts, pins and flushes, at a KV pool of a
twentieth of what they ask about. At the end nothing may have leaked, the cache must add up, and
every answer must be the one that its prompt gets alone, on a server without prefix caching.

    python -m loadtests.soak --minutes 30                      # plain, tiers and swap, 10 each
    python -m loadtests.soak --minutes 2 --tiny --variant tiers --restarts 3
    python -m loadtests.soak --minutes 5 --url http://127.0.0.1:8000 --pid 4711
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live

from loadtests.soak_replay import TIE
from loadtests.soak_report import Findings, Outcome, outcome_table
from loadtests.soak_run import Show, SoakSettings, replay, soak
from loadtests.soak_server import VARIANTS, GivenServer, SoakServer, own_command, write_tiny_model
from loadtests.soak_traffic import Traffic
from radixkv.config import parse_bytes

__all__ = ["main"]

# From here on everything that a variant is meant to stress must have happened.
LONG_S = 60.0
MINUTE_S = 60.0


def main() -> None:
    """Run soaks and exit with 1 if one of them failed."""
    args = _arguments()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="radixkv-soak-") as temporary:
        directory = Path(args.log_dir or temporary)
        directory.mkdir(parents=True, exist_ok=True)
        with Live(console=console, transient=True, refresh_per_second=2) as live:
            show = live.update if console.is_terminal else _now_and_then(console)
            outcomes = asyncio.run(_run(args, directory, show))
    console.print(outcome_table(outcomes))
    for outcome in outcomes:
        figures = outcome.figures
        different = [f"{d['scenario']}: {d['what']} differs" for d in figures["different"]]
        for message in figures["failures"] + different + figures["log_errors"]:
            console.print(f"{outcome.variant}: {message}", style="red", markup=False)
    variants = [outcome.as_json() for outcome in outcomes]
    passed = not any(outcome.problems for outcome in outcomes)
    report = {"arguments": vars(args), "passed": passed, "variants": variants}
    if args.report:
        Path(args.report).write_text(json.dumps(report, indent=1), encoding="utf-8")
    for variant in variants:
        del variant["readings"]
    print(json.dumps(report))
    sys.exit(0 if passed else 1)


async def _run(args: argparse.Namespace, directory: Path, show: Show) -> list[Outcome]:
    variants = [args.variant] if args.variant != "all" else list(VARIANTS)
    if args.url:
        variants = ["given"]
    settings = SoakSettings(
        seconds=60 * args.minutes / len(variants),
        scenarios=args.scenarios,
        seed=args.seed,
        clients=args.clients,
        working_set=args.working_set,
        is_exact=args.dtype == "float32",
        restarts=args.restarts,
        max_growth=args.max_growth,
    )
    tie = TIE[args.dtype]
    outcomes = []
    for variant in variants:
        if args.url:
            given = GivenServer(args.url)
            traffic, findings = await soak(variant, given, settings, pid=args.pid, show=show)
            repeat_at: Any = contextlib.nullcontext(given)
        else:
            traffic, findings = await _soak_own(args, variant, settings, directory, show)
            repeat_at = _server(args, None, directory)
        async with repeat_at as server:
            repeated = await replay(
                traffic,
                server.url,
                tie=tie,
                flush=bool(args.url),
                share=args.compare,
                show=lambda text, v=variant: show(Group(f"{v}: {text}")),  # type: ignore[misc]
            )
        findings.verdicts = repeated.verdicts
        is_long = settings.seconds >= LONG_S
        outcomes.append(
            Outcome.of(variant, traffic, findings, max_growth=settings.max_growth, is_long=is_long)
        )
    return outcomes


async def _soak_own(
    args: argparse.Namespace, variant: str, settings: SoakSettings, directory: Path, show: Show
) -> tuple[Traffic, Findings]:
    server = _server(args, variant, directory)
    async with server:
        traffic, findings = await soak(variant, server, settings, pid=server.pid, show=show)
    findings.log_errors = server.logged_errors()
    findings.ended_in_order = server.ended_in_order
    return traffic, findings


def _server(args: argparse.Namespace, variant: str | None, directory: Path) -> SoakServer:
    model = write_tiny_model(directory / "tiny") if args.tiny else args.model
    memory = args.kv_cache_memory or ("8MiB" if args.tiny else "96MiB")
    command = own_command(
        variant,
        pool_bytes=parse_bytes(memory),
        directory=directory,
        model=model,
        is_dummy=args.tiny,
        dtype=args.dtype,
        options=[
            text
            for name, value in (args.option if variant else ())
            for text in (f"--{name.removeprefix('--')}", value)
        ],
    )
    return SoakServer(command, directory / f"{variant or 'alone'}.log")


def _now_and_then(console: Console) -> Show:
    """Return what prints a view once a minute, where none can be kept up to date."""
    last = time.monotonic()

    def show(view: Group) -> None:
        nonlocal last
        if time.monotonic() - last >= MINUTE_S:
            last = time.monotonic()
            console.print(view)

    return show


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=3.0, help="of traffic, all variants together")
    add("--variant", choices=[*VARIANTS, "all"], default="all")
    add("--seed", type=int, default=0, help="decides what each client does, in which order")
    add("--clients", type=int, default=8)
    add("--scenarios", type=int, help="of each client at most, for runs that are quite the same")
    add("--restarts", type=int, default=0, help="kill -9 and start again so often, in each variant")
    add("--kv-cache-memory", help="the KV pool; default: 96MiB, with --tiny 8MiB")
    add("--working-set", type=float, default=20.0, help="tokens asked about, in pools")
    add(
        "--dtype",
        choices=list(TIE),
        default="float32",
        help="in bfloat16 only greedy answers of\none choice are compared, and ties may flip",
    )
    add("--model", help="as for radixkv serve")
    add("--tiny", action="store_true", help="a tiny model with random weights, for many requests")
    add(
        "--option",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="one more option of radixkv serve",
    )
    add(
        "--url",
        help="a server that runs already, with nobody else at it: its cache is\n"
        "flushed; RADIXKV_API_KEY is its key",
    )
    add("--pid", type=int, help="its process, to watch its memory, threads and files")
    add(
        "--compare",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="part of the scenarios that are repeated alone; all take about as long\n"
        "as the traffic",
    )
    add(
        "--max-growth",
        type=float,
        default=2.0,
        help="MiB a minute that memory may grow by, in\nthe second half",
    )
    add("--report", help="a file for the whole report as JSON")
    add("--log-dir", help="a directory for the servers' logs and files; default: a temporary one")
    args = parser.parse_args()
    if args.url and args.restarts:
        parser.error("--restarts needs a server that the soak starts itself")
    return args


if __name__ == "__main__":
    main()
