"""The servers that a soak drives: their options, and one that is killed and started again."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from loadtests.serving_servers import ManagedServer, ServerCommand, server_command

__all__ = ["VARIANTS", "GivenServer", "SoakServer", "own_command", "write_tiny_model"]

COMMON = ("--threads", "1", "--max-num-seqs", "16", "--drain-timeout", "5")
VARIANTS: dict[str, tuple[str, ...]] = {
    "plain": ("--scheduling-policy", "priority"),
    "tiers": (
        "--host-cache-memory", "{pool}", "--disk-cache", "{dir}/disk", "--disk-cache-size",
        "{pool4}", "--tier-policy", "always", "--scheduling-policy", "cache-aware",
        "--eviction-policy", "session",
    ),
    "swap": ("--preemption-mode", "swap", "--swap-space", "{pool}", "--speculative-tokens", "4"),
}  # fmt: skip
"""Options of each variant; `{pool}` is the size of the pool, `{pool4}` four times as much."""

# Decoder of a model that takes a millisecond a step, over bytes.
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": 256,
    "eos_token_id": 256,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
ERROR_LINE = re.compile(r"\b(ERROR|CRITICAL)\b|^Traceback ")


def own_command(
    variant: str | None,
    *,
    pool_bytes: int,
    directory: Path,
    model: str | None,
    is_dummy: bool,
    dtype: str,
    options: Sequence[str] = (),
) -> ServerCommand:
    """Return the command of a server to drive, or of one to repeat at, on a free port.

    Args:
        variant: of `VARIANTS`; None is the one to repeat at, without prefix caching, and with
            memory for whatever the others can run.
        pool_bytes: size of the KV pool.
        directory: for its files.
        is_dummy: random weights.
        options: more of them, as on the command line.
    """
    command = server_command("radixkv", model=model)
    listen = command.arguments[command.arguments.index("serve") :]
    if variant is None:
        own: tuple[str, ...] = (
            *("--prefix-caching", "false", "--threads", "1", "--max-num-seqs", "4"),
            *("--kv-cache-memory", "{pool4}"),
        )
    else:
        own = (*COMMON, "--kv-cache-memory", str(pool_bytes), *VARIANTS[variant])
    own = tuple(text.format(pool=pool_bytes, pool4=4 * pool_bytes, dir=directory) for text in own)
    return dataclasses.replace(
        command,
        arguments=(
            *(sys.executable, "-m", "loadtests.soak_process", *listen, "--dtype", dtype),
            *(("--load-format", "dummy") if is_dummy else ()),
            *own,
            *options,
        ),
        environ={
            **command.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
        },
    )


def write_tiny_model(directory: Path) -> str:
    """Write the config.json of a tiny model with random weights; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    return str(directory)


class _Life(ManagedServer):
    """A server from a start to its end."""

    @property
    def pid(self) -> int:
        """Its process, which is started."""
        assert self._process is not None
        return self._process.pid

    async def kill(self) -> None:
        """End it as a power cut would."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()


class SoakServer:
    """A server of the soak's own, as an async context manager.

    Attributes:
        life: how often it was started.
        is_up: it is neither down nor about to be.
        log: all that it wrote, in all of its lives.
        ended_in_order: it ended when it was told to.
    """

    def __init__(self, command: ServerCommand, log: Path) -> None:
        self.url = command.url
        self.life = 0
        self.is_up = False
        self.log = log
        self.ended_in_order = False
        self._command = command
        self._current: _Life | None = None

    @property
    def pid(self) -> int | None:
        """Its process, while there is one."""
        return None if self._current is None else self._current.pid

    async def __aenter__(self) -> SoakServer:
        await self._start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.is_up = False
        if self._current is not None:
            await self._current.__aexit__(kind, error, traceback)
            self.ended_in_order = self._current.ended_in_order

    async def kill_and_restart(self) -> None:
        """Kill it in the middle of what it does, and start it anew."""
        assert self._current is not None
        self.is_up = False
        await self._current.kill()
        await self._start()

    def logged_errors(self) -> list[str]:
        """Return the lines of its log that tell of errors."""
        return [
            line.strip()
            for path in sorted(self.log.parent.glob(f"{self.log.name}.*"))
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
            if ERROR_LINE.search(line)
        ]

    async def _start(self) -> None:
        life = _Life(self._command, Path(f"{self.log}.{self.life}"))
        await life.__aenter__()
        self._current = life
        self.life += 1
        self.is_up = True


class GivenServer:
    """A server that somebody else runs."""

    life = 1
    is_up = True

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
