"""The highest request rate that a setup sustains."""

from __future__ import annotations

from dataclasses import replace

from radixkv.simulate.outcome import Outcome
from radixkv.simulate.scenario import Scenario, run_scenario
from radixkv.simulate.traffic import Traffic

__all__ = ["LATENCY_LIMIT_S", "sustainable_rate"]

LATENCY_LIMIT_S = 0.2
"""Seconds per answer token, from arrival to end, that a rate may cost in the mean: five tokens a
second, about as fast as people read."""

OVERLOAD = 1000.0  # requests a second: all are there at once
ROUNDS = 6


def sustainable_rate(
    scenario: Scenario, traffic: Traffic, *, latency_limit_s: float = LATENCY_LIMIT_S
) -> float:
    """Return the highest rate, in requests a second, that keeps the mean latency per token.

    An overloaded run tells the throughput; the rate is searched for at and below it, to about 1 %.
    0 if the limit is not met even at a tenth of it, or some request can never be served.
    """

    def run(rate: float) -> Outcome:
        return run_scenario(replace(scenario, rate=rate), traffic)

    flooded = run(OVERLOAD)
    if flooded.rejected or not flooded.finished:
        return 0.0

    def is_kept(rate: float) -> bool:
        return run(rate).latency_s[0] <= latency_limit_s

    high = 1.2 * flooded.request_rate
    if is_kept(high):
        # The whole traffic is too little for a queue to grow.
        return high
    low = high / 2
    while not is_kept(low):
        high, low = low, low / 2
        if low < 0.1 * flooded.request_rate:
            return 0.0
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        if is_kept(middle):
            low = middle
        else:
            high = middle
    return low
