from __future__ import annotations

import math
from dataclasses import replace

import pytest
from sim_helpers import BLOCK, PlainTime, manager, request

from radixkv.simulate.arrivals import Arrivals
from radixkv.simulate.simulation import SchedulerOptions, Simulation
from radixkv.simulate.traffic import Request


def turn(delay: float, after: int | None = None) -> Request:
    return replace(request(delay, 4, 2), after=after)


def test_requests_come_at_their_times() -> None:
    arrivals = Arrivals([turn(0.0), turn(1.5), turn(1.5)])
    assert (arrivals.next, arrivals.pop(1.0)) == (0.0, [(0.0, 0)])
    assert (arrivals.next, arrivals.pop(2.0)) == (1.5, [(1.5, 1), (1.5, 2)])
    assert (arrivals.next, arrivals.num_left) == (math.inf, 0)


def test_a_turn_comes_after_the_one_before_it_has_ended() -> None:
    arrivals = Arrivals([turn(0.0), turn(2.0, after=0)])
    arrivals.pop(0.0)
    assert arrivals.next == math.inf
    arrivals.end(0, 5.0)
    assert (arrivals.next, arrivals.num_left) == (7.0, 1)
    assert arrivals.pop(7.0) == [(7.0, 1)]


def test_no_more_sessions_are_open_than_may_be() -> None:
    arrivals = Arrivals([turn(0.0), turn(0.0), turn(1.0), turn(2.0, after=0)], max_sessions=1)
    assert arrivals.pop(9.0) == [(0.0, 0)]
    arrivals.end(0, 3.0)  # its second turn keeps the session open
    assert arrivals.pop(9.0) == [(5.0, 3)]
    arrivals.end(3, 6.0)
    assert arrivals.pop(9.0) == [(6.0, 1)]
    arrivals.end(1, 6.5)
    assert arrivals.pop(9.0) == [(6.5, 2)]


def closed_loop(max_sessions: int | None) -> tuple[list[float], list[float]]:
    """Three sessions of two turns; a step takes a second."""
    requests = [turn(0.0), turn(0.0), turn(0.0)]
    requests += [turn(10.0, after=n) for n in range(3)]
    options = SchedulerOptions(max_sessions=max_sessions)
    simulation = Simulation(requests, manager("paged", 256), PlainTime(read=0.0), options)
    outcome = simulation.run()
    assert outcome.finished == 6
    return simulation.recorder.arrival.tolist(), simulation.recorder.finish.tolist()


def test_turns_of_a_simulation_wait_for_the_answers_before_them() -> None:
    arrivals, ends = closed_loop(None)
    assert (arrivals[:3], ends[:3]) == ([0.0] * 3, [2.0] * 3)
    assert (arrivals[3:], ends[3:]) == ([12.0] * 3, [14.0] * 3)


def test_sessions_of_a_simulation_wait_for_those_that_are_open() -> None:
    arrivals, ends = closed_loop(1)
    assert arrivals == [0.0, 14.0, 28.0, 12.0, 26.0, 40.0]
    assert ends[5] == pytest.approx(42.0)


def test_what_follows_a_request_that_never_fits_still_comes() -> None:
    requests = [request(0.0, 100, 2), turn(1.0, after=0)]
    outcome = Simulation(requests, manager("paged", 16 * BLOCK), PlainTime()).run()
    assert (outcome.rejected, outcome.finished) == (1, 1)
