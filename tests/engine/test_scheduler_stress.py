from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fakes import Harness, cold, prompt_of

from radixkv.engine.scheduler import SchedulingOptions

OPTIONS = [
    SchedulingOptions("priority", preemption_mode="swap"),
    SchedulingOptions("cache-aware", max_skip_s=0.5, itl_target_s=1e-9),
    SchedulingOptions("fcfs", itl_target_s=1e-9, preemption_mode="recompute"),
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: o.policy)
@pytest.mark.parametrize(("seed", "host_blocks"), [(0, 0), (4, 6), (5, 6)])
def test_stress_every_answer_equals_its_cold_one(
    options: SchedulingOptions, seed: int, host_blocks: int
) -> None:
    """A pool a third as large as what runs wants; the harness audits everything after each step."""
    rng = np.random.default_rng(seed)
    harness = Harness(
        22,
        4,
        scheduling=options,
        swap_blocks=20,
        host_blocks=host_blocks,
        max_num_seqs=8,
        max_num_batched_tokens=24,
    )
    base = prompt_of(16)
    asked: dict[str, tuple[list[int], dict[str, Any]]] = {}
    ended_early: set[str] = set()
    for i in range(50):
        own = prompt_of(int(rng.integers(1, 12)), seed=i)
        prompt = [*base[: int(rng.integers(0, 17))], *own]
        params: dict[str, Any] = {
            "max_tokens": int(rng.integers(1, 24)),
            "ignore_eos": True,
            "temperature": float(rng.choice([0.0, 0.8])),
            "seed": i,
            "priority": int(rng.integers(-1, 2)),
            "n": int(rng.choice([1, 1, 1, 2])),
        }
        asked[str(i)] = (prompt, params)
        harness.add(str(i), prompt, (str(rng.integers(0, 2)),), **params)
        for _ in range(int(rng.integers(0, 4))):
            harness.step()
        live = list(harness.engine.requests)
        if live and rng.random() < 0.1:
            name = str(rng.choice(live))
            harness.abort(name)
            ended_early.add(name)
        running = list(harness.scheduler.running.values())
        if running and rng.random() < 0.3:
            harness.scheduler.preempt(running[int(rng.integers(len(running)))])
    harness.run()
    assert harness.scheduler.num_preemptions > 5
    for name, (prompt, params) in asked.items():
        if name not in ended_early and params["n"] == 1:
            assert harness.answers[name].token_ids == cold(prompt, **params).token_ids
