"""Start a server, let agents loose on it, and end with a report: one command.

    python -m loadtests.run --users 50 --time 2m --slo ttft_p95=10s --slo error_rate=1%
    python -m loadtests.run --users 20 --time 5m --shape spike --url http://127.0.0.1:8000
    python -m loadtests.run --users 8 --time 1m --serve-flags "--kv-cache-memory 200MB" --mix tools

Without --url it starts `radixkv serve` on a free port and stops it at the end. Options it doesn't
know go to Locust: those of agents (`--think 5 --max-tokens 64 --turns 6`), and Locust's own
(`--processes 2`). Agents, figures and shapes are described in docs/load.md.

The exit status is 0 if all service levels are met, 1 if one is missed (without --slo: if a request
failed), 2 if the test could not be run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from rich.console import Console

from loadtests.agents import KINDS, parse_mix
from loadtests.agents_shapes import SHAPES
from loadtests.serving_servers import ManagedServer, server_command
from loadtests.slo import Slo

__all__ = ["locust_arguments", "main"]

ROOT = Path(__file__).parent.parent
UNUSABLE = 2


def main(arguments: list[str] | None = None) -> int:
    """Run the load test; return the exit status."""
    parser = _parser()
    args, more = parser.parse_known_args(arguments)
    try:
        for text in args.slo:
            Slo.parse(text)
        if args.mix:
            parse_mix(args.mix)
    except ValueError as error:
        parser.error(str(error))
    # A process that is told to end must not leave the server it has started.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    console = Console(stderr=True)
    try:
        return asyncio.run(_run(args, more, console))
    except KeyboardInterrupt:
        return UNUSABLE
    except RuntimeError as error:
        console.print(f"[red]error[/red]: {error}", highlight=False)
        return UNUSABLE


def locust_arguments(args: argparse.Namespace, more: Sequence[str], url: str) -> list[str]:
    """Return Locust's command line for a server at `url`."""
    command = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadtests" / "locustfile.py")]
    command += ["--host", url, "--load-shape", args.shape, "--users", str(args.users)]
    command += ["--run-time", args.time, "--spawn-rate", str(args.rate or args.users)]
    command += ["--autostart"] if args.web else ["--headless", "--only-summary"]
    if not args.web:
        command += ["--html", str(args.report)]
    if args.mix:
        command += ["--mix", args.mix]
    if args.figures:
        command += ["--figures", str(args.figures)]
    for text in args.slo:
        command += ["--slo", text]
    return [*command, *more]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
        prog="python -m loadtests.run",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--users", type=int, default=10, help="agents at most")
    add("--time", default="1m", help="such as 90s, 5m or 1h30m")
    add("--rate", type=float, help="agents that come a second; default: all at once")
    add("--shape", choices=SHAPES, default="steady", help="agents over time")
    kinds = "\n".join(f"  {name}: {kind.summary}" for name, kind in KINDS.items())
    add("--mix", help=f"kinds by weight, such as chat=3,tools=1; default: all\n{kinds}")
    add("--slo", action="append", default=[], help="such as ttft_p95=2s; repeatable")
    add("--report", type=Path, default=Path("load.html"), help="HTML; default: load.html")
    add("--figures", type=Path, help="write all figures there, as JSON")
    add("--web", action="store_true", help="Locust's web page on port 8089, and no HTML report")
    add("--url", help="of a server that runs already, any that speaks OpenAI's API")
    add("--server-model", metavar="DIR", help="model of the server started here")
    add("--serve-flags", default="", help="more options of `radixkv serve`")
    add("--port", type=int, help="of the server started here; default: a free one")
    add("--start-timeout", type=float, default=300.0, help="seconds it may take to start")
    return parser


async def _run(args: argparse.Namespace, more: list[str], console: Console) -> int:
    if args.url:
        url = args.url.rstrip("/").removesuffix("/v1")
        await _check(url)
        return await _locust(locust_arguments(args, more, url))
    log = Path(tempfile.mkdtemp(prefix="load-")) / "server.log"
    command = server_command(
        "radixkv", model=args.server_model, flags=args.serve_flags, port=args.port
    )
    server = ManagedServer(command, log, starting_s=args.start_timeout)
    async with contextlib.AsyncExitStack() as stack:
        with console.status(f"starting the server; its output is in {log}"):
            await stack.enter_async_context(server)
        console.print(f"server started in {server.start_s:.0f} s: {command.url}", highlight=False)
        status = await _locust(locust_arguments(args, more, command.url))
    if not server.ended_in_order:
        console.print(f"[red]the server had to be killed[/red]; see {log}", highlight=False)
        return status or UNUSABLE
    return status


async def _check(url: str) -> None:
    """Make sure that a server answers, before users fail one by one."""
    key = os.environ.get("RADIXKV_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limit = aiohttp.ClientTimeout(total=30)
    try:
        async with (
            aiohttp.ClientSession(timeout=limit, headers=headers) as session,
            session.get(f"{url}/v1/models") as response,
        ):
            if response.status != 200:
                raise RuntimeError(f"{url}/v1/models answers {response.status}")
    except (aiohttp.ClientError, TimeoutError) as error:
        raise RuntimeError(f"{url} can't be reached: {error}") from None


async def _locust(command: list[str]) -> int:
    """Run Locust to its end and return its exit status."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = await asyncio.create_subprocess_exec(*command, env={**os.environ, "PYTHONPATH": path})
    try:
        return await process.wait()
    except asyncio.CancelledError:
        # Ctrl-C reaches it as well; a SIGTERM to this process doesn't.
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        await process.wait()
        raise


if __name__ == "__main__":
    sys.exit(main())
