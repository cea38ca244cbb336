"""Hold `radixkv simulate` against a running server: hit rate and throughput.

    RADIXKV_DATA=... python -m loadtests.bench_simulated
    RADIXKV_DATA=... python -m loadtests.bench_simulated --conversations 6 --turns 3 --memory 200MB

1. A server of the default model is started with a small pool, so that hits depend on eviction.
2. Other conversations of the airline agent are played: the server learns what steps take.
3. `radixkv simulate --calibrate` foretells the replay that comes: sessions turn after turn, so many
   open at once, a pause of --delay seconds between an answer and the next turn.
4. The cache is emptied, the replay is played, and both are compared.

The simulator gets the prompts' blocks (from /tokenize), the lengths of the answers and the pauses,
nothing of the run itself. The last line is everything as JSON; the exit status is 1 if the hit rate
is off by more than a point or the throughput by more than 20 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from loadtests.airline import data_dir
from loadtests.replay_report import summarize
from loadtests.replay_run import Answer, play_trace
from loadtests.replay_traces import Session, Trace, load_recorded
from loadtests.serving_run import Endpoint, connect, reset_cache
from loadtests.serving_servers import ManagedServer, server_command

__all__ = ["main"]

HIT_POINTS = 1.0
THROUGHPUT_SHARE = 0.2
UNUSED = 60  # the first conversation of those that calibrate; the replay has earlier ones


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    args = _parser().parse_args(arguments)
    console = Console(stderr=True)
    try:
        result = asyncio.run(_benchmark(args, console))
    except (aiohttp.ClientError, OSError, RuntimeError) as error:
        console.print(f"[red]{type(error).__name__}[/red]: {error}", highlight=False)
        return 2
    Console().print(_table(result))
    print(json.dumps(result))
    return 0 if result["hit_rate_met"] and result["throughput_met"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--conversations", type=int, default=24)
    add("--turns", type=int, default=6)
    add("--output-length", type=int, default=32)
    add("--sessions", type=int, default=12, help="open at once")
    add("--delay", type=float, default=4.0, help="seconds from an answer to the next turn")
    add("--memory", default="260MB", help="for KV; bounds what stays cached")
    add("--model", default="smollm2-135m", help="as `radixkv simulate` knows it")
    add("--server-model", metavar="DIR", help="of the server; default: the default model")
    add("--serve-flags", default="", help="more options of `radixkv serve`")
    add("--calibration", type=int, default=8, help="conversations that are played before")
    add("--keep", type=Path, help="keep trace and log in this folder")
    return parser


async def _benchmark(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    folder = args.keep or Path(tempfile.mkdtemp(prefix="bench-simulated-"))
    folder.mkdir(parents=True, exist_ok=True)
    recorded = load_recorded(
        data_dir() / "airline_agent.jsonl",
        turns=args.turns,
        output=args.output_length,
        delay=args.delay,
    )
    measured = replace(recorded, sessions=recorded.sessions[: args.conversations])
    others = recorded.sessions[UNUSED : UNUSED + args.calibration]
    flags = f"--kv-cache-memory {args.memory} {args.serve_flags}"
    command = server_command("radixkv", model=args.server_model, flags=flags)
    server = ManagedServer(command, folder / "server.log")
    async with AsyncExitStack() as stack:
        with console.status("starting the server"):
            await stack.enter_async_context(server)
        http = await stack.enter_async_context(
            aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
            )
        )
        endpoint = await connect(http, command.url)
        trace = folder / "trace.jsonl"
        size = (await _report(http, endpoint))["block_size"]
        with console.status("counting tokens"):
            await _write_trace(http, endpoint, measured, size, trace)
        await _play(http, endpoint, replace(recorded, sessions=others), args, console)
        await _flush(http, endpoint)
        before = await _report(http, endpoint)
        with console.status("simulating"):
            foretold = await _simulate(args, endpoint.url, trace, before, folder)
        answers, duration = await _play(http, endpoint, measured, args, console)
        after = await _report(http, endpoint)
    return _compare(foretold, answers, duration, before, after)


async def _play(
    http: aiohttp.ClientSession,
    endpoint: Endpoint,
    trace: Trace,
    args: argparse.Namespace,
    console: Console,
) -> tuple[list[Answer], float]:
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(trace.name, total=trace.num_requests)
        return await play_trace(
            http,
            endpoint,
            trace,
            concurrency=args.sessions,
            on_answer=lambda _: progress.advance(task),
        )


async def _write_trace(
    http: aiohttp.ClientSession, endpoint: Endpoint, trace: Trace, size: int, path: Path
) -> None:
    """Write the replay in Mooncake's form, an id for every `size` tokens of a prompt."""
    ids: dict[tuple[int, tuple[int, ...]], int] = {}
    with path.open("w", encoding="utf-8") as lines:
        for session in trace.sessions:
            for row in await _rows(http, endpoint, session, size, ids):
                lines.write(json.dumps(row) + "\n")


async def _rows(
    http: aiohttp.ClientSession,
    endpoint: Endpoint,
    session: Session,
    size: int,
    ids: dict[tuple[int, tuple[int, ...]], int],
) -> list[dict[str, Any]]:
    rows = []
    for number, turn in enumerate(session.turns):
        body = {"model": endpoint.model, **turn.prompt()}
        async with http.post(f"{endpoint.url}/tokenize", json=body) as response:
            tokens = (await response.json())["tokens"]
        blocks: list[int] = []
        for start in range(0, len(tokens) - size + 1, size):
            # A block is named together with all before it.
            key = (blocks[-1] if blocks else -1, tuple(tokens[start : start + size]))
            blocks.append(ids.setdefault(key, len(ids)))
        row = {
            "session_id": session.name,
            "input_length": len(tokens),
            "output_length": turn.output_len,
            "hash_ids": blocks,
        }
        when = {"delay": round(1e3 * turn.delay)} if number else {"timestamp": 0}
        rows.append({**row, **when})
    return rows


async def _simulate(
    args: argparse.Namespace, url: str, trace: Path, server: dict[str, Any], folder: Path
) -> dict[str, Any]:
    report = folder / "simulated.json"
    words = ["simulate", str(trace), "--model", args.model, "--calibrate", url]
    words += ["--trace-block", str(server["block_size"]), "--manager", "radix"]
    words += ["--memory", str(server["blocks"]["total"]["bytes"])]
    words += ["--sessions", str(args.sessions), "--json", str(report), "--processes", "1"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from radixkv.cli import main; main()", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"radixkv simulate failed: {output.decode(errors='replace')}")
    (run,) = json.loads(report.read_text(encoding="utf-8"))["runs"]
    return dict(run)


async def _flush(http: aiohttp.ClientSession, endpoint: Endpoint) -> None:
    if await reset_cache(http, endpoint.url) == "none":
        raise RuntimeError("the server's cache can't be emptied")


async def _report(http: aiohttp.ClientSession, endpoint: Endpoint) -> dict[str, Any]:
    async with http.get(f"{endpoint.url}/admin/cache") as response:
        return dict(await response.json())


def _compare(
    foretold: dict[str, Any],
    answers: list[Answer],
    duration: float,
    before: dict[str, Any],
    after: dict[str, Any],
) -> dict[str, Any]:
    live = summarize(answers, duration)
    if live["failed"]:
        raise RuntimeError(f"{live['failed']} requests failed: {live['errors']}")
    # The server's own count says the same as the sum over the answers.
    counted = {
        name: after["tokens"][name] - before["tokens"][name] for name in ("hit", "looked_up")
    }
    if counted["hit"] != live["total_cached_tokens"]:
        raise RuntimeError(f"the server counts {counted}, its answers {live}")
    hit_rate, rate = live["cached_share"], live["output_throughput"]
    points = 100 * (foretold["hit_rate"] - hit_rate)
    ratio = foretold["output_rate"] / rate
    return {
        "requests": live["completed"],
        "hit_rate": {"measured": hit_rate, "simulated": round(foretold["hit_rate"], 5)},
        "hit_rate_points": round(points, 3),
        "hit_rate_met": abs(points) <= HIT_POINTS,
        "output_rate": {"measured": rate, "simulated": round(foretold["output_rate"], 3)},
        "throughput_ratio": round(ratio, 4),
        "throughput_met": abs(ratio - 1) <= THROUGHPUT_SHARE,
        "ttft_p50_s": {
            "measured": round(live["median_ttft_ms"] / 1e3, 3),
            "simulated": round(foretold["ttft_s"][0], 3),
        },
        "seconds": {"measured": live["duration"], "simulated": round(foretold["seconds"], 2)},
        "preemptions": {
            "measured": after["preemptions"] - before["preemptions"],
            "simulated": foretold["preemptions"],
        },
        "evicted_blocks": after["evicted_blocks"] - before["evicted_blocks"],
        "step_cost_s": before["scheduling"]["step_cost_s"],
    }


def _table(result: dict[str, Any]) -> Table:
    table = Table("", "measured", "simulated", "off by", "allowed", "")
    marks = {True: "[green]met[/green]", False: "[red]MISSED[/red]"}
    hit, rate = result["hit_rate"], result["output_rate"]
    table.add_row(
        *("hit rate", f"{100 * hit['measured']:.2f} %", f"{100 * hit['simulated']:.2f} %"),
        *(f"{result['hit_rate_points']:+.2f} points", f"{HIT_POINTS:g} point"),
        marks[result["hit_rate_met"]],
    )
    table.add_row(
        *("output tokens/s", f"{rate['measured']:.1f}", f"{rate['simulated']:.1f}"),
        *(f"{100 * (result['throughput_ratio'] - 1):+.1f} %", f"{100 * THROUGHPUT_SHARE:g} %"),
        marks[result["throughput_met"]],
    )
    for name in ("ttft_p50_s", "seconds", "preemptions"):
        values = result[name]
        table.add_row(name, str(values["measured"]), str(values["simulated"]), "", "", "")
    return table


if __name__ == "__main__":
    sys.exit(main())
