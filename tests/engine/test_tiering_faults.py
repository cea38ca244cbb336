"""Failing copies, a failing disk, damaged files, and restarts."""

import errno
import os
from pathlib import Path
from typing import Any, cast

import pytest
from fakes import CharTokenizer, Harness, prompt_of
from tiering_helpers import (
    BLOCK,
    CONTENT,
    OPTIONS,
    MakeHarness,
    ask,
    by_tier,
    fill,
    open_disk,
    worker_of,
)

from radixkv.cache import tiers_disk
from radixkv.engine.async_engine import AsyncEngine
from radixkv.engine.tiering_labels import LABEL_BYTES
from radixkv.request import SamplingParams


def test_failing_copy_out_leaves_no_entry(make: MakeHarness) -> None:
    harness = make(host_blocks=32)
    prompt = prompt_of(21)
    ask(harness, prompt)
    harness.runner.failing_transfers = 1
    fill(harness, 1)
    assert harness.engine.stats().tiers["offload_errors"] > 0
    fill(harness, 2)
    # Lost blocks at the end; what could be kept before them may hit.
    assert ask(harness, prompt) < 20
    assert harness.engine.stats().tiers["load_errors"] == 0


def test_failing_copy_in_is_computed_instead(make: MakeHarness) -> None:
    harness = make(host_blocks=32)
    prompt = prompt_of(21)
    ask(harness, prompt)
    fill(harness, 1, 2)
    harness.engine.tiers.flush()  # type: ignore[union-attr]

    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    scatter, harness.runner.scatter_blocks = harness.runner.scatter_blocks, fail  # type: ignore[method-assign, assignment]
    assert ask(harness, prompt) == 0
    assert harness.engine.stats().tiers["load_errors"] == 1
    harness.runner.scatter_blocks = scatter  # type: ignore[method-assign]
    fill(harness, 3, 4)
    assert ask(harness, prompt) == 20


def test_full_disk_is_a_miss(make: MakeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = make(disk_blocks=64)
    prompt = prompt_of(21)
    ask(harness, prompt)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tiers_disk.os, "pwrite", full)
        fill(harness, 1, 2)
        worker_of(harness).drain()
    assert harness.engine.stats().tiers["disk"]["write_errors"] > 0
    assert ask(harness, prompt) == 0


def test_failing_read_is_computed_instead(
    make: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make(disk_blocks=64)
    prompt = prompt_of(21)
    ask(harness, prompt)
    fill(harness, 1, 2)
    worker_of(harness).drain()
    read, count = os.pread, 0

    def third_fails(*arguments: Any) -> bytes:
        nonlocal count
        count += 1
        if count == 3:
            raise OSError(errno.EIO, "Input/output error")
        return read(*arguments)

    monkeypatch.setattr(tiers_disk.os, "pread", third_fails)
    assert ask(harness, prompt) == 8
    assert harness.engine.stats().tiers["disk"]["read_errors"] == 1


def test_restarted_server_is_warm(make: MakeHarness) -> None:
    """What was in the pool and what was in host memory are both on disk."""
    prompts = [prompt_of(21), prompt_of(17, seed=1)]
    first = make(num_blocks=8, host_blocks=8, disk_blocks=64)
    for prompt in prompts:
        ask(first, prompt, ("tenant",))
    first.engine.close()
    second = make(num_blocks=16, host_blocks=8, disk_blocks=64)
    assert second.engine.stats().tiers["disk"]["blocks_restored"] > 8
    assert [ask(second, prompt, ("tenant",)) for prompt in prompts] == [20, 16]
    assert ask(second, prompts[0]) == 0
    assert by_tier(second)["disk"] == 36


async def test_async_engine_saves_the_cache_when_it_is_stopped(make: MakeHarness) -> None:
    first, prompt = make(num_blocks=16, disk_blocks=64), prompt_of(21)
    engine = AsyncEngine(first.engine, cast(Any, CharTokenizer()), model_name="fake")
    await engine.start()
    outputs = [o async for o in engine.submit(prompt, SamplingParams(**OPTIONS))]
    assert engine.stats().tiers["disk"]["blocks"] == 0
    await engine.shutdown()
    assert outputs[-1].num_cached_tokens == 0
    second = make(num_blocks=16, disk_blocks=64)
    assert ask(second, prompt) == 20


def test_small_disk_keeps_the_most_recently_used(make: MakeHarness) -> None:
    old, new = prompt_of(21), prompt_of(21, seed=1)
    first = make(num_blocks=32, disk_blocks=5)
    ask(first, old)
    ask(first, new)
    first.engine.close()
    second = make(num_blocks=32, disk_blocks=5)
    assert ask(second, new) == 20
    assert ask(second, old) == 0


def test_order_of_use_survives_a_restart(make: MakeHarness, tmp_path: Path) -> None:
    old, new = prompt_of(21), prompt_of(21, seed=1)
    first = make(num_blocks=32, disk_blocks=10)
    ask(first, old)
    ask(first, new)
    first.engine.close()
    disk = open_disk(tmp_path, blocks=10)
    for number in range(5):
        assert disk.write(bytes([number]) * 32, bytes(4 * BLOCK + LABEL_BYTES), bytes(CONTENT))
    disk.close()
    second = make(num_blocks=32, disk_blocks=10)
    assert ask(second, new) == 20
    assert ask(second, old) == 0


def test_failed_engine_saves_nothing(make: MakeHarness) -> None:
    first = make(num_blocks=32, disk_blocks=64)
    ask(first, prompt_of(21))
    first.engine.close(save=False)
    assert ask(make(num_blocks=32, disk_blocks=64), prompt_of(21)) == 0


@pytest.mark.parametrize("damage", ["flip", "truncate", "zero"])
def test_damaged_disk_never_changes_an_answer(
    make: MakeHarness, tmp_path: Path, damage: str
) -> None:
    first = make(num_blocks=32, disk_blocks=64)
    prompt = prompt_of(41)
    ask(first, prompt)
    first.engine.close()
    (file,) = tmp_path.glob("*.blocks")
    data = bytearray(file.read_bytes())
    start = 2 * CONTENT  # of the third block
    if damage == "flip":
        data[start + 5] ^= 1
    elif damage == "zero":
        data[start : start + CONTENT] = bytes(CONTENT)
    else:
        del data[start + 3 :]
    file.write_bytes(data)
    second = make(num_blocks=32, disk_blocks=64)
    assert ask(second, prompt) == 8
    disk = second.engine.stats().tiers["disk"]
    assert disk["blocks_torn"] >= 1


def test_other_block_size_or_model_finds_nothing(tmp_path: Path) -> None:
    prompt = prompt_of(41)
    harness = Harness(32, BLOCK, disk=open_disk(tmp_path))
    ask(harness, prompt)
    harness.engine.close()
    for block_size, seed in ((8, 0), (BLOCK, 1)):
        disk = open_disk(tmp_path, block_size=block_size, seed=seed)
        other = Harness(32, block_size, disk=disk)
        assert disk.stats.files_foreign >= 1
        assert ask(other, prompt) == 0
        other.engine.close(save=False)
