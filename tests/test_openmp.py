from __future__ import annotations

import pytest

from radixkv.openmp import SPIN_COUNT, set_wait_policy


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"GOMP_SPINCOUNT": str(SPIN_COUNT)}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, {"OMP_WAIT_POLICY": "PASSIVE"}),
    ],
)
def test_environment_goes_before_the_spin_count(
    before: dict[str, str], after: dict[str, str]
) -> None:
    set_wait_policy(before)
    assert before == after
