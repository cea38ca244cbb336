"""Starts, pauses and stops the servers that a benchmark compares."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import aiohttp

__all__ = ["KINDS", "ManagedServer", "ServerCommand", "server_command"]

KINDS = ("radixkv", "vllm", "transformers")
STOPPING_S = 30.0


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How to start a server.

    Attributes:
        name: shown in tables.
        arguments: the command line.
        model: what the server calls its model; None asks the server.
        environ: added to this process's environment.
    """

    name: str
    arguments: tuple[str, ...]
    url: str
    model: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict)


def server_command(
    kind: str,
    *,
    model: str | None = None,
    python: str | None = None,
    flags: str = "",
    environ: Mapping[str, str] | None = None,
    port: int | None = None,
) -> ServerCommand:
    """Return the command of a server on this machine.

    Args:
        kind: one of `KINDS`.
        model: its directory; None is RadixKV's default model, which others don't know.
        python: of the environment that it is installed in; None is this one.
        flags: more options, as in a shell.
        environ: of the server, beside what it needs.
        port: to listen on; None picks one that is free.

    Raises:
        ValueError: the kind is unknown, or needs a model.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if model is None and kind != "radixkv":
        raise ValueError(f"{kind} needs --model, a directory")
    port = _free_port() if port is None else port
    python = python or sys.executable
    listen = ("--host", "127.0.0.1", "--port", str(port))
    needed: dict[str, str] = {"HF_HUB_OFFLINE": "1"}
    # The scripts lie beside the interpreter, which may be a link: it must not be followed.
    scripts = Path(python).parent
    if kind == "radixkv":
        start = (python, "-c", "from radixkv.cli import main; main()", "serve")
        arguments = (*start, *(("--model", model) if model else ()), *listen)
    elif kind == "vllm":
        options = ("--dtype", "bfloat16", "--enable-prefix-caching")
        arguments = (
            *(str(scripts / "vllm"), "serve", str(model), *options),
            *("--enable-prompt-tokens-details", *listen),
        )
        # In its development mode it has a route that empties the cache.
        needed |= {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_SERVER_DEV_MODE": "1"}
        needed |= {"VLLM_NO_USAGE_STATS": "1"}
    else:
        start = (str(scripts / "transformers"), "serve", str(model), "--continuous-batching")
        arguments = (*start, "--dtype", "bfloat16", *listen)
    return ServerCommand(
        kind,
        (*arguments, *shlex.split(flags)),
        f"http://127.0.0.1:{port}",
        model if kind == "transformers" else None,
        {**needed, **(environ or {})},
    )


class ManagedServer:
    """Owns the processes of a server from its start to its end, as an async context manager.

    They are a process group of their own, so that all of them can be paused (a paused server takes
    no processor time, while some that are idle do) and none is left behind.

    Attributes:
        log: the file that the server's output goes to.
        start_s: seconds until it was healthy.
        ended_in_order: whether it ended when it was told to, before it was killed.
    """

    def __init__(self, command: ServerCommand, log: Path, *, starting_s: float = 900.0) -> None:
        self.command = command
        self.log = log
        self.start_s = 0.0
        self.ended_in_order = False
        self._starting_s = starting_s
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> ManagedServer:
        """Start it and wait until it is healthy.

        Raises:
            RuntimeError: it ended, or did not become healthy in time; the message has its last
                lines.
        """
        begin = time.perf_counter()
        with self.log.open("wb") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self.command.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self.command.environ},
                start_new_session=True,
            )
        try:
            await self._until_healthy(self._process, begin + self._starting_s)
        except BaseException:
            await self._stop()
            raise
        self.start_s = time.perf_counter() - begin
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop it: SIGTERM, and SIGKILL for what is left of it."""
        await self._stop()

    @property
    def pid(self) -> int:
        """Of the process that was started; 0 before that."""
        return 0 if self._process is None else self._process.pid

    def pause(self) -> None:
        """Take the processor away from it."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Resume it for the time of a run."""
        self.resume()
        try:
            yield
        finally:
            self.pause()

    async def _until_healthy(self, process: asyncio.subprocess.Process, deadline: float) -> None:
        timeout = aiohttp.ClientTimeout(total=10)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while time.perf_counter() < deadline and process.returncode is None:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(f"{self.command.url}/health") as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.2)
        lines = self.log.read_text(errors="replace").splitlines()[-15:]
        how = "is not healthy" if process.returncode is None else f"ended ({process.returncode})"
        raise RuntimeError(f"{self.command.name} {how}; see {self.log}:\n" + "\n".join(lines))

    async def _stop(self) -> None:
        process = self._process
        if process is None:
            return
        try:
            self.resume()
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), STOPPING_S)
                self.ended_in_order = True
        finally:
            # Its children too, which may have outlived it.
            self._signal(signal.SIGKILL)
            await process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
