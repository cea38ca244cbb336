"""What arrives: recorded traces, and synthetic requests of published length distributions."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from radixkv.errors import ConfigError

__all__ = [
    "DATASETS",
    "Lengths",
    "Request",
    "Synthetic",
    "Trace",
    "Traffic",
    "at_rate",
    "load_trace",
    "refine",
]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request.

    Attributes:
        arrival: seconds since the beginning or, with `after`, since that request has ended.
        prompt_len, output_len: tokens; of each sample, if there are several.
        keys: `[prompt_len // unit]` int32: what the whole units of the prompt hold, each with all
            before it. Equal keys are equal prefixes.
        num_samples: answers drawn in parallel from the one prompt.
        after: index of the session's turn before this one, in the list of all requests.
    """

    arrival: float
    prompt_len: int
    output_len: int
    keys: npt.NDArray[np.int32]
    num_samples: int = 1
    after: int | None = None

    @property
    def final_len(self) -> int:
        """Tokens of prompt and answer."""
        return self.prompt_len + self.output_len


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean tokens of prompts and answers, and the most that a request may have in all.

    Prompt and answer are independent and geometric (the distribution of largest entropy for a
    mean), cut off where their sum passes the maximum; the means are those after the cut.
    """

    prompt: float
    output: float
    maximum: int = 2048


DATASETS = {
    "sharegpt": Lengths(161.0, 338.0),
    "alpaca": Lengths(19.0, 58.0),
    "translation": Lengths(40.0, 40.0),
}
"""ShareGPT and Alpaca as PagedAttention states them (arXiv:2309.06180, figure 11). It gives no
lengths for its translation task (WMT16 English to German); 40 tokens each way is an assumption."""


def load_trace(path: Path, unit: int = 512, limit: int | None = None) -> list[Request]:
    """Read a trace in Mooncake's form, one JSON object a line.

    Fields: `timestamp` (ms; default 0), `input_length`, `output_length`, and `hash_ids`, one for
    every `unit` tokens of the prompt, each naming its block with all before it. Rows with the same
    `session_id` are turns of a session: one with a `delay` (ms) comes so long after the one before
    it has ended.

    Args:
        path: the file.
        unit: tokens an id stands for.
        limit: read no more requests.

    Raises:
        ConfigError: the file can't be read, or a line isn't of that form.
    """
    reader = _TraceReader(unit)
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(reader.requests) == limit:
                    break
                if line.strip():
                    reader.read(line, f"{path}:{number}")
    except OSError as error:
        raise ConfigError(f"trace {path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"trace {path} is not text") from None
    if not reader.requests:
        raise ConfigError(f"trace {path} has no requests")
    return _in_order(reader.requests)


class Traffic(ABC):
    """Says which requests arrive at a given rate."""

    @abstractmethod
    def requests(self, rate: float | None, block_size: int) -> list[Request]:
        """Return the requests in order of arrival.

        Args:
            rate: requests a second in the mean; None is the traffic's own.
            block_size: tokens per key.
        """


@dataclass(frozen=True)
class Trace(Traffic):
    """Recorded requests; another rate stretches or squeezes the arrivals.

    Attributes:
        recorded: in order of arrival, the first at 0.
        unit: tokens per key.
    """

    recorded: Sequence[Request]
    unit: int = 512

    def requests(self, rate: float | None, block_size: int) -> list[Request]:
        """Return the requests, see `Traffic.requests`.

        Raises:
            ConfigError: the block size doesn't divide the unit.
        """
        requests = refine(self.recorded, self.unit, block_size)
        return requests if rate is None else at_rate(requests, rate)


@dataclass(frozen=True)
class Synthetic(Traffic):
    """Poisson arrivals with drawn lengths; equal seeds give equal requests.

    Attributes:
        lengths: of prompts (without the shared prefix) and answers.
        rate: requests a second, where none is asked for.
        duration: seconds in which they arrive.
        max_requests: fewer seconds if they would be more.
        shared_prefix: tokens that all prompts begin with.
        num_samples: answers per prompt.
    """

    lengths: Lengths
    rate: float = 1.0
    duration: float = 1800.0
    seed: int = 0
    shared_prefix: int = 0
    num_samples: int = 1
    max_requests: int = 20_000

    def requests(self, rate: float | None, block_size: int) -> list[Request]:
        """Draw the requests, see `Traffic.requests`; the lengths don't depend on the rate."""
        rate = self.rate if rate is None else rate
        gaps_rng, length_rng = (np.random.default_rng((self.seed, n)) for n in range(2))
        wanted = min(rate * self.duration, self.max_requests)
        count = max(1, min(int(gaps_rng.poisson(wanted)), self.max_requests))
        arrivals = np.cumsum(gaps_rng.exponential(1 / rate, count))
        drawn = _draw(self.lengths, count, length_rng)
        requests = []
        common = self.shared_prefix // block_size
        fresh = common
        for arrival, (prompt, output) in zip(arrivals.tolist(), drawn.tolist(), strict=True):
            total = self.shared_prefix + prompt
            keys = np.arange(total // block_size, dtype=np.int32)
            keys[common:] += fresh - common
            fresh += len(keys) - common
            requests.append(Request(arrival, total, output, keys, self.num_samples))
        return requests


def at_rate(requests: Sequence[Request], rate: float) -> list[Request]:
    """Stretch or squeeze the arrivals to a mean rate, requests a second.

    Raises:
        ConfigError: some come after others, at whatever rate these end.
    """
    if any(request.after is not None for request in requests):
        raise ConfigError("--rate is for requests with arrivals; the trace has sessions")
    span = requests[-1].arrival or 1.0
    factor = len(requests) / span / rate
    return [replace(request, arrival=request.arrival * factor) for request in requests]


def refine(requests: Sequence[Request], unit: int, block_size: int) -> list[Request]:
    """Cut keys of `unit` tokens into keys of `block_size` tokens.

    Raises:
        ConfigError: the block size doesn't divide the unit.
    """
    if unit % block_size:
        raise ConfigError(f"the block size must divide {unit}, the tokens of a key: {block_size}")
    parts = unit // block_size
    if parts == 1:
        return list(requests)
    offsets = np.arange(parts, dtype=np.int32)
    # What is left of the last unit has no key, so it is never shared: no more is known of it.
    return [replace(r, keys=(r.keys[:, None] * parts + offsets).reshape(-1)) for r in requests]


def _in_order(requests: Sequence[Request]) -> list[Request]:
    """Sort by arrival, from 0 on; a session's turns are sorted in with its first one."""
    starts = [0.0] * len(requests)
    for row, request in enumerate(requests):
        starts[row] = request.arrival if request.after is None else starts[request.after]
    rows = sorted(range(len(requests)), key=lambda row: starts[row])
    index = {row: place for place, row in enumerate(rows)}
    first = starts[rows[0]]
    ordered = []
    for row in rows:
        request = requests[row]
        if request.after is None:
            ordered.append(replace(request, arrival=request.arrival - first))
        else:
            ordered.append(replace(request, after=index[request.after]))
    return ordered


class _TraceReader:
    """Owns what the lines of a trace have in common: names of blocks, and sessions."""

    def __init__(self, unit: int) -> None:
        self.requests: list[Request] = []
        self._unit = unit
        self._names: dict[Any, int] = {}
        self._last: dict[Any, int] = {}  # row of each session's last turn

    def read(self, line: str, where: str) -> None:
        """Add a line's request.

        Raises:
            ConfigError: it isn't one.
        """
        names, unit = self._names, self._unit
        try:
            row = json.loads(line)
            session, delay = row.get("session_id"), row.get("delay")
            after = None if delay is None else self._last.get(session)
            arrival = float(row.get("timestamp", 0) if after is None else delay) / 1000
            prompt, output = int(row["input_length"]), int(row["output_length"])
            # Ids may be hashes of any width, or text.
            ids = [names.setdefault(name, len(names)) for name in row["hash_ids"]]
            if session is not None:
                self._last[session] = len(self.requests)
        except (ValueError, TypeError, KeyError, OverflowError, AttributeError) as error:
            raise ConfigError(f"{where}: not a request of a Mooncake trace ({error!r})") from None
        if prompt < 1 or output < 0 or len(ids) < prompt // unit:
            raise ConfigError(
                f"{where}: {prompt} tokens of input need at least {prompt // unit} ids of {unit} "
                f"tokens, got {len(ids)} (and {output} tokens of output)"
            )
        if not math.isfinite(arrival):
            raise ConfigError(f"{where}: a time must be a number, got {arrival}")
        keys = np.array(ids[: prompt // unit], np.int32)
        self.requests.append(Request(arrival, prompt, max(output, 1), keys, after=after))


def _draw(lengths: Lengths, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return `[count, 2]` lengths, one pair at a time so that a prefix of the draws is stable."""
    prompt_stop, output_stop = _stop_probabilities(lengths)
    pairs = np.empty((0, 2), dtype=np.int64)
    while len(pairs) < count:
        uniform = rng.random((4096, 2))
        stops = np.log1p([-prompt_stop, -output_stop])
        drawn = np.ceil(np.log1p(-uniform) / stops).astype(np.int64)
        drawn = np.maximum(drawn, 1)
        pairs = np.concatenate([pairs, drawn[drawn.sum(axis=1) <= lengths.maximum]])
    return pairs[:count]


@cache
def _stop_probabilities(lengths: Lengths) -> tuple[float, float]:
    """Return the geometric parameters whose means after the cut are the ones asked for."""
    n = np.arange(1, lengths.maximum, dtype=np.float64)
    wanted = np.array([lengths.prompt, lengths.output], dtype=np.float64)
    means = wanted.copy()
    for _ in range(100):
        first, second = (np.power(1 - 1 / m, n - 1) / m for m in means)
        # What of the second fits beside the first: sums over the pairs with n1 + n2 <= maximum.
        mass = np.cumsum(second)[::-1]
        moment = np.cumsum(second * n)[::-1]
        got = np.array([(first * n) @ mass, first @ moment]) / (first @ mass)
        means *= wanted / got
    return 1 / float(means[0]), 1 / float(means[1])
