"""From the options of the command line to the cells of a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from radixkv.cache import POLICIES
from radixkv.config import parse_bytes
from radixkv.errors import ConfigError
from radixkv.simulate.calibration import calibrate
from radixkv.simulate.hardware import GPUS
from radixkv.simulate.managers import MANAGERS
from radixkv.simulate.models import ModelShape, load_model
from radixkv.simulate.scenario import Scenario
from radixkv.simulate.simulation import SchedulerOptions
from radixkv.simulate.traffic import DATASETS, Synthetic, Trace, Traffic, load_trace

__all__ = ["Plan", "make_plan", "size_of"]

NUM_MEMORIES = 8
SMALLEST = 1 / 16
"""The smallest memory of a comparison, as a share of what the GPUs have left."""
USABLE = 0.9
"""Share of the GPUs' memory for weights and KV; activations and the driver need the rest."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to simulate; by memory, then rate, then manager."""

    trace: str
    traffic: Traffic
    scenarios: list[Scenario]
    sustain: bool
    latency_limit: float

    def describe(self, cell: Scenario) -> dict[str, Any]:
        """Return a cell's settings as plain types."""
        return {
            "model": cell.model.name,
            "kv_bytes_per_token": cell.model.kv_bytes,
            "gpu": None if cell.measured is not None else cell.gpu.name,
            "num_gpus": cell.num_gpus,
            "kv_memory": int(cell.kv_memory),
            "manager": cell.manager,
            "rate": cell.rate,
            "block_size": cell.block_size,
            "max_len": cell.manager_options.max_len,
        }


def make_plan(options: Mapping[str, Any]) -> Plan:
    """Return what the options of `radixkv simulate`, by their names, ask for.

    Raises:
        ConfigError: an option can't be used; the message names it.
    """
    model = load_model(options["model"])
    if options["kv_item_bytes"] is not None:
        model = replace(model, kv_item_bytes=options["kv_item_bytes"])
    gpu = GPUS.get(options["gpu"].lower())
    if gpu is None:
        raise ConfigError(f"--gpu must be one of {', '.join(GPUS)}, got {options['gpu']!r}")
    if options["policy"] not in POLICIES:
        names = ", ".join(POLICIES)
        raise ConfigError(f"--policy must be one of {names}, got {options['policy']!r}")
    measured = None
    block_size = options["block_size"]
    limits = SchedulerOptions()
    left = USABLE * gpu.memory * options["gpus"] - model.weight_bytes
    if options["calibrate"] is not None:
        server = calibrate(options["calibrate"], options["api_key"])
        if server.bytes_per_token != model.kv_bytes:
            raise ConfigError(
                f"--calibrate: the server's KV takes {server.bytes_per_token} bytes a token, that "
                f"of --model {model.name} {model.kv_bytes}; they must be the same model"
            )
        measured, left = server.step_time, float(server.kv_bytes)
        limits = SchedulerOptions(
            server.max_batch_tokens or limits.max_batch_tokens, server.max_seqs or limits.max_seqs
        )
        block_size = block_size or server.block_size
    traffic, longest, unit = _traffic(options)
    # What a trace doesn't say is not worth the time to simulate, unless it is asked for.
    block_size = block_size or unit
    base = Scenario(
        manager=MANAGERS[0],
        model=model,
        gpu=gpu,
        kv_memory=left,
        num_gpus=options["gpus"],
        max_len=options["max_len"] or longest,
        block_size=block_size,
        page_bytes=size_of("--page", options["page"]),
        policy=options["policy"],
        scheduler=SchedulerOptions(
            max_batch_tokens=options["batch_tokens"] or limits.max_batch_tokens,
            max_seqs=options["max_seqs"] or limits.max_seqs,
            swap=options["swap"],
            max_sessions=options["sessions"],
        ),
        measured=measured,
    )
    if options["samples"] > base.scheduler.max_seqs:
        raise ConfigError(f"--samples must be at most --max-seqs, got {options['samples']}")
    scenarios = [
        replace(base, kv_memory=memory, rate=rate, manager=manager)
        for memory in _memories(options["memory"], left, model)
        for rate in options["rate"] or [None]
        for manager in _managers(options["manager"])
    ]
    smallest = min(scenarios, key=lambda scenario: scenario.total)
    if smallest.total < block_size:
        raise ConfigError(
            f"--memory: {smallest.kv_memory:.0f} bytes hold {smallest.total} tokens of "
            f"{model.kv_bytes} bytes, not one block of {block_size}"
        )
    # Refuses a block size that doesn't suit the trace before any process is started.
    traffic.requests(None, block_size)
    return Plan(options["trace"], traffic, scenarios, options["sustain"], options["latency_limit"])


def size_of(option: str, text: str) -> int:
    """Return the bytes that an option's text means.

    Raises:
        ConfigError: it means none, or no byte.
    """
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    if size < 1:
        raise ConfigError(f"{option} must be at least one byte, got {text!r}")
    return size


def _traffic(options: Mapping[str, Any]) -> tuple[Traffic, int | None, int]:
    """Return the traffic, its longest request if that is known, and the tokens of a key."""
    name = options["trace"]
    if name in DATASETS and not Path(name).exists():
        rates = options["rate"] or [1.0]
        synthetic = Synthetic(
            DATASETS[name],
            rate=rates[0],
            duration=options["duration"],
            seed=options["seed"],
            shared_prefix=options["shared_prefix"],
            num_samples=options["samples"],
        )
        return synthetic, DATASETS[name].maximum + options["shared_prefix"], 16
    unit = options["trace_block"]
    requests = load_trace(Path(name), unit, options["limit"])
    return Trace(requests, unit), max(request.final_len for request in requests), unit


def _memories(given: list[str] | None, left: float, model: ModelShape) -> list[float]:
    if given:
        return [float(size_of("--memory", text)) for text in given]
    if left < model.kv_bytes:
        raise ConfigError(
            f"the weights of {model.name} ({model.weight_bytes / 1e9:.1f} GB) leave no memory for "
            "KV; give more --gpus, or --memory"
        )
    steps = NUM_MEMORIES - 1
    return [left * SMALLEST ** (1 - step / steps) for step in range(NUM_MEMORIES)]


def _managers(given: list[str] | None) -> list[str]:
    for name in given or []:
        if name not in MANAGERS:
            raise ConfigError(f"--manager must be one of {', '.join(MANAGERS)}, got {name!r}")
    return [name for name in MANAGERS if not given or name in given]
