"""What the tests of the simulator share."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from radixkv.simulate.managers import ManagerOptions, MemoryManager, make_manager
from radixkv.simulate.step_time import StepTime
from radixkv.simulate.traffic import Request

BLOCK = 4


@dataclass(frozen=True)
class PlainTime(StepTime):
    """A second per step, and a thousandth per token that is read."""

    step: float = 1.0
    read: float = 0.001

    def seconds(self, tokens: int, attended: float, context: float, samples: int) -> float:
        return self.step + self.read * context

    def swap_seconds(self, tokens: float) -> float:
        return 0.01 * tokens

    def move_seconds(self, tokens: float) -> float:
        return 0.0


def request(
    arrival: float, prompt: int, output: int, keys: list[int] | None = None, samples: int = 1
) -> Request:
    if keys is None:
        keys = [int(10_000 * arrival) * 100 + n for n in range(prompt // BLOCK)]
    return Request(arrival, prompt, output, np.array(keys, np.int32), samples)


def manager(name: str, total: int, *, max_len: int = 64, page: float = 4.0) -> MemoryManager:
    return make_manager(name, total, ManagerOptions(max_len, BLOCK, page))


def random_requests(seed: int, count: int = 60, samples: int = 1) -> list[Request]:
    """Return requests that share prefixes and fit into 64 tokens."""
    rng = random.Random(seed)
    fresh = 1000
    arrival = 0.0
    requests = []
    for _ in range(count):
        arrival += rng.choice((0.0, 0.3, 2.0, 6.0))
        prompt = rng.randint(1, 40)
        shared = min(rng.choice((0, 2, 5)), prompt // BLOCK)
        keys = list(range(shared))
        while len(keys) < prompt // BLOCK:
            keys.append(fresh)
            fresh += 1
        output = rng.randint(1, 64 - prompt)
        requests.append(request(arrival, prompt, output, keys, samples))
    return requests
