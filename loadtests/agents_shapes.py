"""How many agents there are at which moment."""

from __future__ import annotations

import math

__all__ = ["SHAPES", "users_at"]

SHAPES = ("steady", "ramp", "spike", "soak")
STAGES = 10  # of a ramp
QUIET_SHARE = 0.2  # of the users outside a spike
SPIKE = (0.4, 0.6)  # of the time
WARM_UP = 0.05  # of a soak


def users_at(shape: str, elapsed: float, duration: float, users: int) -> int:
    """Return how many users there should be; at least one.

    Args:
        shape: `steady`: all at once. `ramp`: in ten equal steps up to all, so that one sees where
            it breaks. `spike`: a fifth of them, and all from 40 to 60 % of the time. `soak`: all
            but for the first twentieth of the time, in which they come one by one.
        elapsed: seconds since the beginning.
        duration: seconds in all.
        users: the most.

    Raises:
        ValueError: there is no such shape.
    """
    part = min(max(elapsed / duration, 0.0), 1.0)
    match shape:
        case "steady":
            share = 1.0
        case "ramp":
            share = min(math.floor(part * STAGES) + 1, STAGES) / STAGES
        case "spike":
            share = 1.0 if SPIKE[0] <= part < SPIKE[1] else QUIET_SHARE
        case "soak":
            share = min(part / WARM_UP, 1.0)
        case _:
            raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {shape!r}")
    return max(1, round(share * users))
