"""Connections that stall or vanish at random moments: `python -m loadtests.vanish`.

Opens connections by the hundred that break off before, in and after their requests: closed, reset,
half closed, or left open and never read again. Then it looks at what the server has left of them:
blocks, requests, file descriptors and memory, while those that stall are still open on this side.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtests.faulty import Client
from loadtests.raw_http import head_of
from loadtests.serving_servers import ManagedServer, server_command

__all__ = [
    "ENDINGS",
    "STAGES",
    "Footprint",
    "Vanishing",
    "footprint_of",
    "open_files",
    "until_gone",
    "vanish",
]

JSON = (("Content-Type", "application/json"),)
STAGES = ("connected", "in the head", "in the body", "in a chunk", "answered whole", "streamed",
          "streamed in bulk", "several at once")  # fmt: skip
ENDINGS = ("closed", "reset", "half closed", "stalled")
TINY_WINDOW = 2048
# Longest that a connection lives before it vanishes.
MAX_LIFE_S = 0.5
SETTLING_S = 300.0


@dataclass(frozen=True, slots=True)
class Vanishing:
    """How one connection breaks off.

    Attributes:
        stage: what was sent by then.
        ending: what becomes of the connection.
        life_s: time between the two.
        cut: how much of what is cut off is sent, 0 to 1.
    """

    stage: str
    ending: str
    life_s: float
    cut: float

    @classmethod
    def draw(cls, rng: random.Random, max_life_s: float = MAX_LIFE_S) -> Vanishing:
        """Return one of all kinds."""
        stage, ending = rng.choice(STAGES), rng.choice(ENDINGS)
        return cls(stage, ending, rng.uniform(0, max_life_s), rng.random())

    def request(self, max_tokens: int) -> bytes:
        """Return what is sent."""
        streamed = self.stage.startswith("streamed")
        body: dict[str, Any] = {"prompt": f"{self.cut} and then", "max_tokens": max_tokens}
        body |= {"ignore_eos": True, "stream": streamed}
        if self.stage == "streamed in bulk":
            body["logprobs"] = 20
        data = json.dumps(body).encode()
        whole = head_of("POST", "/v1/completions", JSON, len(data)) + data
        match self.stage:
            case "connected":
                return b""
            case "in the head":
                return whole[: int(self.cut * (len(whole) - len(data) - 3))]
            case "in the body":
                return whole[: len(whole) - 1 - int(self.cut * (len(data) - 2))]
            case "in a chunk":
                head = head_of("POST", "/v1/completions", (*JSON, ("Transfer-Encoding", "chunked")))
                return head + b"%x\r\n" % len(data) + data[: int(self.cut * len(data))]
            case "several at once":
                kept = whole.replace(b"Connection: close\r\n", b"")
                return kept * 3
        return whole


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a server holds."""

    rss_mib: float
    open_files: int
    blocks_referenced: int
    requests: int


async def vanish(
    host: str, port: int, how: Vanishing, max_tokens: int = 400
) -> socket.socket | None:
    """Open a connection and break it off; return the socket of one that stalls."""
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setblocking(False)
    if how.ending == "stalled":
        # Before the handshake, since a window can't shrink later.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, TINY_WINDOW)
    try:
        await loop.sock_connect(sock, (host, port))
        await loop.sock_sendall(sock, how.request(max_tokens))
        if how.stage == "streamed" and how.ending != "stalled":
            await loop.sock_recv(sock, 1 + int(how.cut * 4096))
        await asyncio.sleep(how.life_s)
        if how.ending == "stalled":
            return sock
        if how.ending == "half closed":
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            await asyncio.sleep(how.life_s)
        if how.ending == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError:
        pass  # the server may be the first to go
    sock.close()
    return None


async def footprint_of(pid: int, client: Client) -> Footprint:
    """Return what a server on this machine holds, with this one connection."""
    report = await client.get("/admin/cache")
    return Footprint(
        rss_mib=rss_mib(pid),
        open_files=open_files(pid),
        blocks_referenced=report["blocks"]["referenced"]["blocks"],
        requests=report["requests"]["running"] + report["requests"]["waiting"],
    )


def rss_mib(pid: int) -> float:
    """Return the memory that a process has in use."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    return round(int(line.split()[1]) / 1024, 1)


def open_files(pid: int) -> int:
    """Return how many file descriptors a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def until_gone(is_gone: Callable[[], Awaitable[bool]], timeout_s: float) -> bool:
    """Wait until `is_gone()` is true; return whether it became so."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while True:
                if await is_gone():
                    return True
                await asyncio.sleep(0.2)
    return False


@dataclass(slots=True)
class VanishRun:
    """What came of the rounds.

    Attributes:
        kinds: (stage, ending) of every connection.
        footprints: before the first round and after each.
        leaks: what had not come back in time.
    """

    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    footprints: list[Footprint] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    sound: bool = False


async def run_rounds(
    pid: int,
    client: Client,
    *,
    count: int,
    rounds: int,
    seed: int,
    max_tokens: int,
    settling_s: float,
) -> VanishRun:
    """Let `count` connections vanish, `rounds` times, and measure after each.

    Args:
        pid: of the server.
        client: asks it.
        count: of connections in a round, all at once.
        rounds: the first fills pools and caches; later ones should add nothing.
        seed: of the moments.
        max_tokens: of an answer; those nobody waits for end there, if not before.
        settling_s: what the server may take to notice those that stall.
    """
    run, rng = VanishRun(), random.Random(seed)
    await client.complete({"prompt": "warm", "max_tokens": 4})
    run.footprints.append(before := await footprint_of(pid, client))
    for number in range(rounds):
        plans = [Vanishing.draw(rng) for _ in range(count)]
        run.kinds.update((plan.stage, plan.ending) for plan in plans)
        jobs = [vanish(client.host, client.port, plan, max_tokens) for plan in plans]
        held = [sock for sock in await asyncio.gather(*jobs) if sock is not None]

        async def gone() -> bool:
            now = await footprint_of(pid, client)
            return not now.requests and now.open_files <= before.open_files

        if not await until_gone(gone, settling_s):
            run.leaks.append(f"round {number + 1}: {await footprint_of(pid, client)}")
        run.footprints.append(await footprint_of(pid, client))
        for sock in held:
            sock.close()
    run.sound = (await client.get("/admin/check"))["ok"]
    return run


def show(run: VanishRun, console: Console) -> None:
    """Print a run as tables."""
    kinds = Table("what was sent", *ENDINGS, title="Connections")
    for stage in STAGES:
        kinds.add_row(stage, *(str(run.kinds[stage, ending]) for ending in ENDINGS))
    console.print(kinds)
    table = Table("", "RSS MiB", "open files", "blocks held", "requests", title="The server")
    for number, footprint in enumerate(run.footprints):
        name = f"after round {number}" if number else "before"
        table.add_row(name, *map(str, asdict(footprint).values()))
    console.print(table)
    for leak in run.leaks:
        console.print(f"NOT BACK: {leak}", markup=False)
    console.print(f"The cache is {'sound' if run.sound else 'BROKEN'}.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 if everything came back."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=200, help="in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=100, help="of an answer")
    parser.add_argument("--port", type=int, help="of the server that is started")
    parser.add_argument("--flags", default="", help="more options of that server")
    parser.add_argument("--timeout", type=float, default=5.0, help="of its connections, in seconds")
    options = parser.parse_args(arguments)
    run = asyncio.run(_main(options))
    show(run, Console())
    print(
        json.dumps(
            {
                "connections": run.kinds.total(),
                "footprints": [asdict(footprint) for footprint in run.footprints],
                "leaks": run.leaks,
                "sound": run.sound,
            }
        )
    )
    return 0 if run.sound and not run.leaks else 1


async def _main(options: argparse.Namespace) -> VanishRun:
    timeouts = " ".join(
        f"--{name}-timeout {options.timeout}" for name in ("keepalive", "body", "stall")
    )
    # A pool that the first round fills, so that memory that is touched later is a leak's.
    flags = f"--kv-cache-memory 64MiB {timeouts} {options.flags}"
    command = server_command("radixkv", flags=flags, port=options.port)
    port = int(command.url.rpartition(":")[2])
    with tempfile.TemporaryDirectory() as folder:
        async with ManagedServer(command, Path(folder) / "server.log") as server:
            return await run_rounds(
                server.pid,
                Client("127.0.0.1", port),
                count=options.connections,
                rounds=options.rounds,
                seed=options.seed,
                max_tokens=options.max_tokens,
                settling_s=SETTLING_S,
            )


if __name__ == "__main__":
    sys.exit(main())
