"""Random operations on the cache, step by step against a brute-force model, for every policy.

RADIXKV_STRESS=n runs n times as many examples, other ones every time; without it the examples are
always the same.
"""

from __future__ import annotations

import os

import pytest
from cache_machine import CacheMachine
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from radixkv.cache import POLICIES

EXAMPLES = 40
STRESS = int(os.environ.get("RADIXKV_STRESS", "0"))


@pytest.mark.timeout(120 + 60 * STRESS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_step_agrees_with_the_model(policy: str) -> None:
    machine = type(f"{policy.title()}Machine", (CacheMachine,), {"policy": policy})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES * max(STRESS, 1),
            stateful_step_count=50,
            derandomize=not STRESS,
            database=None,
            deadline=None,
            print_blob=bool(STRESS),
            suppress_health_check=list(HealthCheck),
        ),
    )
