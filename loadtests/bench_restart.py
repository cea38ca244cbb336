"""Stops a server with a warm system prompt, starts it again, and times its first request.

Three servers in turn, so that all meet the same machine: one without a disk cache, whose first
request is cold; one that is warmed up and stopped with SIGTERM; and the same one again.

    python -m loadtests.bench_restart --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from loadtests.openai_client import Sample, stream_chat

STARTING_S = 120.0
RULE = "Rule {}: a booking of class {} may be changed up to {} hours before it begins. "


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rules", type=int, default=178, help="178 rules are about 4,000 tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--option", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"))
    args = parser.parse_args()
    results = [asyncio.run(_round(args)) for _ in range(args.rounds)]
    table = Table("first request", "prompt tokens", "cached_tokens", "TTFT s", "stop s", "start s")
    for name in ("cold", "warm-up", "restarted"):
        runs = [result[name] for result in results]
        table.add_row(
            name,
            str(runs[-1][0].prompt_tokens),
            str(min(sample.cached_tokens for sample, _, _ in runs)),
            f"{statistics.median(sample.ttft for sample, _, _ in runs):.3f}",
            f"{statistics.median(stop for _, stop, _ in runs):.2f}",
            f"{statistics.median(start for _, _, start in runs):.2f}",
        )
    Console().print(table)
    ratios = [r["cold"][0].ttft / r["restarted"][0].ttft for r in results]
    print(f"cold / restarted: {', '.join(f'{ratio:.1f}' for ratio in ratios)} (wanted: 3 or more)")


async def _round(args: argparse.Namespace) -> dict[str, tuple[Sample, float, float]]:
    system = "".join(RULE.format(i, i % 7, i % 48) for i in range(args.rules))
    extra = [text for name, value in args.option for text in (f"--{name}", value)]
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        disk = ["--disk-cache", directory]
        for name, options in (("cold", []), ("warm-up", disk), ("restarted", disk)):
            async with _server([*options, *extra]) as server:
                sample = await _ask(server["url"], system, f"How late may I change class {name}?")
            results[name] = (sample, server["stop"], server["start"])
    return results


async def _ask(url: str, system: str, question: str) -> Sample:
    body = {
        "model": "",
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": question},
        ],
        "max_tokens": 8,
        "temperature": 0,
    }
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
        async with session.get(f"{url}/v1/models") as response:
            body["model"] = (await response.json())["data"][0]["id"]
        sample = await stream_chat(session, url, body)
    if sample.error:
        sys.exit(sample.error)
    return sample


@contextlib.asynccontextmanager
async def _server(options: list[str]) -> AsyncIterator[dict[str, Any]]:
    """Run a server; its `url`, and the seconds that its `start` and its `stop` took."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    begin = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from radixkv.cli import main; main()",
        "serve", "--port", str(port), *options,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    server: dict[str, Any] = {"url": f"http://127.0.0.1:{port}"}
    try:
        await _until_healthy(server["url"], process)
        server["start"] = time.perf_counter() - begin
        yield server
    finally:
        begin = time.perf_counter()
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            await process.wait()
        server["stop"] = time.perf_counter() - begin


async def _until_healthy(url: str, process: asyncio.subprocess.Process) -> None:
    deadline = time.perf_counter() + STARTING_S
    async with aiohttp.ClientSession() as session:
        while time.perf_counter() < deadline and process.returncode is None:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.1)
    sys.exit(f"the server did not start (exit code {process.returncode})")


if __name__ == "__main__":
    main()
