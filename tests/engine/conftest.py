from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import Harness
from tiering_helpers import BLOCK, MakeHarness, open_disk, tiers_of


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    """Rows of 512 logits gain nothing from threads, and lose a lot on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeHarness]:
    """Makes harnesses with tiers; a disk tier is closed at the end, if the test did not."""
    made: list[Harness] = []

    def build(
        num_blocks: int = 8, host_blocks: int = 0, disk_blocks: int = 0, **options: Any
    ) -> Harness:
        disk = open_disk(tmp_path, disk_blocks) if disk_blocks else None
        made.append(Harness(num_blocks, BLOCK, host_blocks=host_blocks, disk=disk, **options))
        return made[-1]

    yield build
    for harness in made:
        tiers_of(harness).close(save=False)
