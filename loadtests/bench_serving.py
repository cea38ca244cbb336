"""Drives OpenAI-compatible servers with agent traffic and compares what they give.

    python -m loadtests.bench_serving http://127.0.0.1:8000 [OTHER_URL]
    python -m loadtests.bench_serving --peer vllm --peer-python VENV/bin/python --model DIR

The first form drives servers that run already; the second starts them: RadixKV (with --own-flags),
unless a URL is given, and a peer. A server that was started here is paused while the other one is
measured, and stopped at the end. Servers take turns, ABBA...; each has its cache emptied before
each run, if it has a route for that, and every prompt begins with the round's own mark, so that
nothing is left over from another round either way. All answers are greedy and of fixed length.

Workloads (--workload):

    airline   24 recorded conversations of a tool-calling agent, 8 at a time, 6 turns, 32 tokens
              out; recorded history, so every server gets the same prompts (needs RADIXKV_DATA)
    sessions  32 sessions of 3 turns on one system prompt of 1,000 words, all at once, 32 tokens
              out; the server's own answers are its history
    single    one prompt of 1,000 words, 64 tokens out
    unshared  32 different prompts of 500 words, all at once, 32 tokens out

Figures: ttft, to the first token; itl, mean time a token after the first, one value per request;
gap, between chunks that carried tokens. One JSON line per run; then a table per workload with the
medians, their ratio, and the target for the ratio of the first server to the second; the last line
is everything as JSON. The exit status is 1 if a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import Progress

from loadtests.serving_report import compare, comparison_table, figures
from loadtests.serving_run import Endpoint, connect, play, reset_cache, warm_up
from loadtests.serving_servers import KINDS, ManagedServer, ServerCommand, server_command
from loadtests.serving_workloads import WORKLOADS, Workload, make_workload

__all__ = ["main"]

Runs = dict[str, list[dict[str, Any]]]
"""Results of a workload's rounds by the server's name."""


@dataclass(slots=True)
class Contestant:
    """A server in the benchmark; `managed` if it was started here."""

    name: str
    url: str
    model: str | None = None
    managed: ManagedServer | None = None
    endpoint: Endpoint | None = None

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Let it run for a while; one that wasn't started here always does."""
        return contextlib.nullcontext() if self.managed is None else self.managed.running()


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if len(args.url) > 2 or (len(args.url) == 2 and args.peer):
        parser.error("two servers at most: URLs and --peer together")
    if not args.url and not args.peer and args.own_flags is None:
        parser.error("give a URL, --peer, or --own-flags (which may be empty)")
    names = WORKLOADS if args.workload == "all" else (args.workload,)
    try:
        workloads = [make_workload(name, tiny=args.tiny) for name in names]
        commands = _commands(args)
    except FileNotFoundError as error:
        parser.error(f"{error.filename} is missing: RADIXKV_DATA names the folder of recordings")
    except ValueError as error:
        parser.error(str(error))
    # A process that is told to end must not leave the servers it has started.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    console = Console(stderr=True)
    try:
        results = asyncio.run(_benchmark(args, workloads, commands, console))
    except (aiohttp.ClientError, RuntimeError) as error:
        console.print(f"[red]{type(error).__name__}[/red]: {error}", highlight=False)
        return 1
    summary: dict[str, Any] = {"machine": _machine(), "arguments": vars(args), "workloads": {}}
    for workload in workloads:
        runs = results[workload.name]
        Console().print(comparison_table(workload, runs))
        targets = []
        if len(runs) == 2:
            targets = [compare(runs, target) for target in workload.targets]
        summary["workloads"][workload.name] = {"targets": targets, "runs": runs}
    print(json.dumps(summary, default=str))
    failed = any(run["errors"] for runs in results.values() for rs in runs.values() for run in rs)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("url", nargs="*", help="one or two servers that run already")
    add("--workload", choices=(*WORKLOADS, "all"), default="airline")
    add("--rounds", type=int, default=3)
    add("--tiny", action="store_true", help="a few short requests, to try the script")
    add("--model", metavar="DIR", help="model of the servers started here")
    add("--own-flags", help="options of the `radixkv serve` that is started without a URL")
    add("--peer", choices=KINDS, help="start a second server")
    add("--peer-python", help="its interpreter, in the environment it is installed in")
    add("--peer-flags", default="", help="more of its options")
    add("--peer-env", action="append", default=[], metavar="NAME=VALUE", help="repeatable")
    add("--start-timeout", type=float, default=900.0, help="seconds a server may take to start")
    add("--logs", type=Path, help="folder for the servers' output; default: a temporary one")
    return parser


def _commands(args: argparse.Namespace) -> list[ServerCommand]:
    """Return what is to be started."""
    commands = []
    if not args.url:
        commands.append(server_command("radixkv", model=args.model, flags=args.own_flags or ""))
    if args.peer:
        environ = dict(pair.split("=", 1) for pair in args.peer_env)
        commands.append(
            server_command(
                args.peer,
                model=args.model,
                python=args.peer_python,
                flags=args.peer_flags,
                environ=environ,
            )
        )
    return commands


async def _benchmark(
    args: argparse.Namespace,
    workloads: list[Workload],
    commands: list[ServerCommand],
    console: Console,
) -> dict[str, Runs]:
    logs = args.logs or Path(tempfile.mkdtemp(prefix="bench-serving-"))
    logs.mkdir(parents=True, exist_ok=True)
    contestants = [Contestant(url, url.rstrip("/")) for url in args.url]
    async with AsyncExitStack() as stack:
        for command in commands:
            name = command.name
            if any(contestant.name == name for contestant in contestants):
                name = f"{name} 2"
            server = ManagedServer(command, logs / f"{name}.log", starting_s=args.start_timeout)
            with console.status(f"starting {name}; its output is in {server.log}"):
                await stack.enter_async_context(server)
            server.pause()
            contestants.append(Contestant(name, command.url, command.model, server))
            console.print(f"{name} started in {server.start_s:.0f} s", highlight=False)
        session = await stack.enter_async_context(_session())
        for contestant in contestants:
            async with contestant.turn():
                contestant.endpoint = await connect(session, contestant.url, contestant.model)
        results: dict[str, Runs] = {}
        for workload in workloads:
            results[workload.name] = await _rounds(workload, contestants, args.rounds, console)
    return results


async def _rounds(
    workload: Workload, contestants: list[Contestant], rounds: int, console: Console
) -> Runs:
    """Play a workload against all servers in turn, and print each result."""
    mark = secrets.token_hex(4)
    runs: Runs = {contestant.name: [] for contestant in contestants}
    for number in range(rounds):
        order = contestants if number % 2 == 0 else contestants[::-1]
        for contestant in order:
            async with contestant.turn():
                title = f"{workload.name} {number + 1}/{rounds} {contestant.name}"
                result = await _run(workload, contestant, f"[{mark}-{number}]", title, console)
            result = {
                "workload": workload.name,
                "round": number,
                "server": contestant.name,
                **result,
            }
            runs[contestant.name].append(result)
            print(json.dumps(result), flush=True)
    return runs


async def _run(
    workload: Workload, contestant: Contestant, salt: str, title: str, console: Console
) -> dict[str, Any]:
    endpoint = contestant.endpoint
    assert endpoint is not None
    # Connections of its own: one that was open while the server was paused may be dead.
    async with _session() as session:
        await warm_up(session, endpoint, workload, salt=f"[warm-up {salt}]")
        reset = await reset_cache(session, endpoint.url)
        with Progress(console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task(title, total=workload.num_requests)
            samples, wall_s = await play(
                session, endpoint, workload, salt=salt, on_answer=lambda: progress.advance(task)
            )
    return {
        "url": endpoint.url,
        "model": endpoint.model,
        "reset": reset,
        **figures(samples, wall_s),
    }


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
    )


def _machine() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "commit": commit.stdout.strip() or None,
    }


if __name__ == "__main__":
    sys.exit(main())
