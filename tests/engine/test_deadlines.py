from __future__ import annotations

from typing import Any

import pytest
from fakes import Harness, prompt_of

GREEDY: dict[str, Any] = {"temperature": 0.0}


@pytest.mark.parametrize("state", ["waiting", "running"])
def test_request_past_its_time_ends_and_holds_nothing(state: str) -> None:
    now = [0.0]
    harness = Harness(64, 4, max_num_seqs=1, clock=lambda: now[0])
    if state == "waiting":
        harness.add("first", prompt_of(5), max_tokens=50, ignore_eos=True, **GREEDY)
        harness.step()
    harness.add("late", prompt_of(6), max_tokens=50, timeout_s=2.0, ignore_eos=True, **GREEDY)
    for now[0] in (0.0, 1.99):
        harness.step()
    assert ("late" in [r.request_id for r in harness.scheduler.running.values()]) == (
        state == "running"
    )
    now[0] = 2.0
    harness.step()
    assert harness.answers["late"].last.finish_reason == "timeout"
    assert harness.answers["late"].last.error == "The answer was not complete within 2 s"
    assert harness.engine.finished["timeout"] == 1
    harness.run()


def test_shorter_of_the_two_limits_counts_and_the_ended_are_forgotten() -> None:
    now = [0.0]
    harness = Harness(64, 4, request_timeout_s=3.0, clock=lambda: now[0])
    harness.add("own", prompt_of(5), max_tokens=50, timeout_s=1.0, ignore_eos=True)
    harness.add("default", prompt_of(6), max_tokens=50, timeout_s=9.0, ignore_eos=True)
    harness.add("quick", prompt_of(7), max_tokens=1)
    ends: dict[str, float] = {}
    while harness.engine.has_work:
        for output in harness.step():
            if output.output.finish_reason == "timeout":
                ends[output.request_id] = now[0]
        now[0] += 0.5
    assert ends == {"own": 1.0, "default": 3.0}
    assert len(harness.engine.deadlines) == 0
