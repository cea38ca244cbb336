from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import FakeRunner, Harness

from radixkv.engine.batch import ForwardBatch
from radixkv.engine.runner import LaunchedStep


class PendingStep(LaunchedStep):
    """A step that looks as if a device were computing it."""

    @property
    def is_pending(self) -> bool:
        return True

    def result(self) -> torch.Tensor:
        return self._logits


class LaunchingFake(FakeRunner):
    """A fake model that returns from `launch` before its step counts as done."""

    def launch(self, batch: ForwardBatch) -> LaunchedStep:
        return PendingStep(self.execute(batch))


def make(num_blocks: int = 64, **options: Any) -> Harness:
    harness = Harness(num_blocks, **options)
    harness.engine.runner = harness.runner = LaunchingFake(num_blocks, 4)
    return harness


def test_slot_of_the_next_token_is_reserved_while_the_device_computes() -> None:
    harness = make()
    harness.add("a", range(40, 46), temperature=0.0, max_tokens=8)
    harness.step()
    blocks = []
    for _ in range(4):
        harness.step()
        branch = harness.engine.requests["a"].live[0]
        blocks.append((len(branch.sequence), branch.sequence.num_blocks))
    # Blocks hold four tokens; the step that computed the last slot of one took the next already.
    assert blocks == [(8, 2), (9, 3), (10, 3), (11, 3)]


def test_nothing_is_reserved_behind_the_last_token() -> None:
    harness = make()
    harness.add("a", range(40, 46), temperature=0.0, max_tokens=3)
    harness.step()
    harness.step()
    assert harness.engine.requests["a"].live[0].sequence.num_blocks == 2


@pytest.mark.parametrize("num_blocks", [12, 24, 64])
@pytest.mark.parametrize("params", [{}, {"n": 3, "temperature": 0.9}, {"temperature": 0.7}])
def test_answers_are_those_of_a_device_that_is_waited_for(
    num_blocks: int, params: dict[str, Any]
) -> None:
    answers = []
    for harness in (Harness(num_blocks), make(num_blocks)):
        for i in range(3):
            options = {"temperature": 0.0, "max_tokens": 6, "seed": i} | params
            harness.add(f"r{i}", range(40, 50 + i), **options)
        harness.run()
        answers.append([[a.token_ids for a in c] for c in harness.choices.values()])
        assert harness.cache.num_referenced_blocks == 0
    assert answers[0] == answers[1]
