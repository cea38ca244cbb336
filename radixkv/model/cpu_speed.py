"""Which arithmetic is fast on this CPU: measured once, since no feature flag tells."""

from __future__ import annotations

import time
from functools import lru_cache

import torch
from torch.nn import functional

__all__ = ["float32_is_faster"]

_ROWS, _COLUMNS, _ROUNDS = 128, 512, 7
# What a float32 product must gain, since it needs its operands converted.
_GAIN = 1.25


@lru_cache(maxsize=1)
def float32_is_faster() -> bool:
    """Return whether products of many rows are faster in float32 than in bfloat16.

    They are on CPUs without matrix units (AMX): there a bfloat16 product runs at best at the
    rate of a float32 one, and at a tenth of it where the CPU has no bfloat16 at all.

    Cost: some 20 ms, once in a process.
    """
    weight = torch.ones(_COLUMNS, _COLUMNS)
    x = torch.ones(_ROWS, _COLUMNS)
    operands = [(x, weight), (x.bfloat16(), weight.bfloat16())]
    best = [float("inf"), float("inf")]
    with torch.inference_mode():
        for round_ in range(_ROUNDS + 1):
            for i, (left, right) in enumerate(operands):
                begin = time.perf_counter()
                functional.linear(left, right)
                if round_:  # the first one initialises
                    best[i] = min(best[i], time.perf_counter() - begin)
    return best[0] * _GAIN < best[1]
