"""Hundreds of faulty requests in the middle of healthy ones: `python -m loadtests.faulty`.

Starts a server (or takes `--url`), asks it some questions, then asks them again while every fault
of `faulty_requests` is sent to it, and checks that each was refused in the right form, that the
healthy answers are the same, and that nothing of the cache is held at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from loadtests.faulty_requests import ANY_FORM, JSON, Fault, Target, faults
from loadtests.raw_http import RawAnswer, exchange, head_of
from loadtests.serving_servers import ManagedServer, server_command

__all__ = ["FaultyRun", "judge", "run_faults"]

ERROR_FIELDS = {"message", "type", "param", "code"}
PROMPTS = ("A radix tree is", "In the beginning", "def add(a, b):", "The sky is blue because")
MAX_SHOWN = 20


@dataclass(slots=True)
class FaultyRun:
    """What came of a run.

    Attributes:
        answered: (kind of fault, status) of every answer.
        problems: what was not as it should be, each with the request it came from.
        healthy: answers given while the faults came.
        changed: those of them that differ from the ones given before.
        referenced: blocks that requests held when all was over.
        sound: whether the server's own count of its cache agreed.
    """

    answered: Counter[tuple[str, int]] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    healthy: int = 0
    changed: int = 0
    referenced: int = 0
    sound: bool = False

    @property
    def passed(self) -> bool:
        """Whether all was as it should be."""
        unharmed = self.healthy > 0 and not self.changed
        return not self.problems and unharmed and not self.referenced and self.sound


def judge(fault: Fault, answer: RawAnswer) -> str | None:
    """Return what is wrong with the answer to a fault, None if nothing is."""
    if answer.status != fault.status:
        return f"status {answer.status} instead of {fault.status}: {answer.body[:200]!r}"
    if not answer.headers.get("content-type", "").startswith("application/json"):
        return f"no JSON but {answer.headers.get('content-type')}"
    if answer.headers.get("x-content-type-options") != "nosniff":
        return "X-Content-Type-Options is missing"
    body = answer.json()
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or not error.get("message"):
        return f"no error object: {answer.body[:200]!r}"
    anthropic = body.get("type") == "error" and set(error) - {"details"} == {"type", "message"}
    if fault.path != ANY_FORM and anthropic is not fault.anthropic:
        return f"the form of another API: {answer.body[:200]!r}"
    if not anthropic and set(error) != ERROR_FIELDS:
        return f"fields {sorted(error)}"
    named = error["message"] if anthropic else str(error["param"])
    if fault.field and not (fault.field in named if anthropic else named.startswith(fault.field)):
        return f"names {error.get('param')!r}, not {fault.field!r}: {error['message'][:200]}"
    return None


async def run_faults(
    url: str,
    *,
    concurrency: int = 8,
    max_body_bytes: int = 16 * 1024**2,
    vocab_size: int = 10**8,
    compiles: bool = True,
    max_tokens: int = 8,
    every: int = 1,
) -> FaultyRun:
    """Send every fault to a server while it answers healthy requests.

    Args:
        url: of the server, which nobody else uses and which needs no key.
        concurrency: faults on the way at the same time.
        max_body_bytes: its limit.
        vocab_size: an id that is no token's.
        compiles: it compiles grammars.
        max_tokens: of a healthy answer.
        every: send every so-many-th fault only.

    Raises:
        RuntimeError: a healthy request failed before any fault was sent.
    """
    place = urlsplit(url)
    client = Client(str(place.hostname), int(place.port or 80))
    models = await client.get("/v1/models")
    session = await client.post("/v1/sessions", {})
    target = Target(
        session=session["id"],
        vocab_size=vocab_size,
        max_model_len=models["data"][0]["max_model_len"],
        max_body_bytes=max_body_bytes,
        compiles=compiles,
    )
    bodies = [{"prompt": p, "max_tokens": max_tokens, "temperature": 0} for p in PROMPTS]
    # Twice: what a prompt's first answer computed, its second one reads, as all later ones will.
    for _ in range(2):
        expected = [await client.complete(body) for body in bodies]
    run = FaultyRun()
    waiting = faults(target)[::-every]

    async def send_faults() -> None:
        while waiting:
            fault = waiting.pop()
            try:
                answer = await exchange(client.host, client.port, fault.request)
            except (OSError, EOFError, TimeoutError, ValueError) as error:
                run.problems.append(f"{_shown(fault)}: {error!r}")
                continue
            run.answered[fault.kind, answer.status] += 1
            if (problem := judge(fault, answer)) is not None:
                run.problems.append(f"{_shown(fault)}: {problem}")

    over = asyncio.Event()

    async def stay_healthy() -> None:
        while not (over.is_set() and run.healthy):
            for body, right in zip(bodies, expected, strict=True):
                # One at a time, so that the numerics are those of the answers before.
                run.changed += await client.complete(body) != right
                run.healthy += 1

    health = asyncio.create_task(stay_healthy())
    await asyncio.gather(*(send_faults() for _ in range(concurrency)))
    over.set()
    try:
        await health
    except (OSError, EOFError, TimeoutError, RuntimeError) as error:
        run.problems.append(f"a healthy request failed: {error!r}")
    await client.until_idle()
    run.sound = (await client.get("/admin/check"))["ok"]
    run.referenced = (await client.get("/admin/cache"))["blocks"]["referenced"]["blocks"]
    return run


class Client:
    """Asks a server what is right to ask."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port

    async def get(self, path: str) -> Any:
        """Return the JSON at a path."""
        return await self._ask(head_of("GET", path, ()))

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the JSON that a body is answered with."""
        data = json.dumps(body).encode()
        return await self._ask(head_of("POST", path, JSON, len(data)) + data)

    async def complete(self, body: dict[str, Any]) -> list[Any]:
        """Return the choices of a completion."""
        choices: list[Any] = (await self.post("/v1/completions", body))["choices"]
        return choices

    async def until_idle(self, timeout_s: float = 60.0) -> None:
        """Wait until nothing is being answered."""
        async with asyncio.timeout(timeout_s):
            while True:
                requests = (await self.get("/admin/cache"))["requests"]
                if not requests["running"] and not requests["waiting"]:
                    return
                await asyncio.sleep(0.02)

    async def _ask(self, request: bytes) -> Any:
        answer = await exchange(self.host, self.port, request)
        if answer.status != 200:
            raise RuntimeError(f"{request[:80]!r} was answered {answer.status}: {answer.body!r}")
        return answer.json()


def show(run: FaultyRun, console: Console) -> None:
    """Print a run as a table, and what was wrong."""
    table = Table("kind of fault", "requests", "answers", title="Faulty requests")
    for kind in sorted({kind for kind, _ in run.answered}):
        statuses = {s: n for (k, s), n in sorted(run.answered.items()) if k == kind}
        answers = ", ".join(f"{n} x {status}" for status, n in statuses.items())
        table.add_row(kind, str(sum(statuses.values())), answers)
    console.print(table)
    console.print(
        f"{run.answered.total()} faults answered, {len(run.problems)} not as they should be; "
        f"{run.healthy} healthy answers meanwhile, {run.changed} changed; "
        f"{run.referenced} blocks held at the end; "
        f"the cache is {'sound' if run.sound else 'BROKEN'}"
    )
    for problem in run.problems[:MAX_SHOWN]:
        console.print(f"- {problem}", markup=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 if all was as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="of a running server; default: start one")
    parser.add_argument("--port", type=int, help="of the server that is started")
    parser.add_argument("--flags", default="", help="more options of the server that is started")
    parser.add_argument("--concurrency", type=int, default=8)
    options = parser.parse_args(arguments)
    run = asyncio.run(_main(options))
    show(run, Console())
    print(
        json.dumps(
            {
                "faults": run.answered.total(),
                "problems": len(run.problems),
                "healthy": run.healthy,
                "changed": run.changed,
                "blocks_referenced": run.referenced,
                "sound": run.sound,
            }
        )
    )
    return 0 if run.passed else 1


async def _main(options: argparse.Namespace) -> FaultyRun:
    if options.url:
        return await run_faults(options.url, concurrency=options.concurrency)
    command = server_command("radixkv", flags=options.flags, port=options.port)
    with tempfile.TemporaryDirectory() as folder:
        async with ManagedServer(command, Path(folder) / "server.log"):
            return await run_faults(command.url, concurrency=options.concurrency)


def _shown(fault: Fault) -> str:
    head, _, body = fault.request.partition(b"\r\n\r\n")
    return f"[{fault.kind}] {head.splitlines()[0][:100]!r} {body[-120:]!r}"


if __name__ == "__main__":
    sys.exit(main())
