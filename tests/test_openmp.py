from __future__ import annotations

import os

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
    before: dict[str, str], after: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    set_wait_policy()
    found = {
        name: os.environ[name]
        for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
        if name in os.environ
    }
    assert found == after
