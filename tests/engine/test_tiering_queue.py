"""What waits to be written to disk, and what is written at the end."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from fakes import CharTokenizer, prompt_of
from tiering_helpers import (
    BLOCK,
    CONTENT,
    OPTIONS,
    MakeHarness,
    ask,
    by_tier,
    fill,
    open_disk,
    tiers_of,
    worker_of,
)

from radixkv.cache import tiers_disk
from radixkv.engine import AsyncEngine, tiering_save
from radixkv.engine.tiering_labels import LABEL_BYTES
from radixkv.engine.tiering_save import CacheSaver


@contextmanager
def stuck_writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let the disk's thread write nothing until the event is set, or the block ends."""
    gate, write = threading.Event(), os.pwrite

    def slow(*arguments: Any) -> int:
        assert threading.current_thread() is threading.main_thread() or gate.wait(30)
        return write(*arguments)

    monkeypatch.setattr(tiers_disk.os, "pwrite", slow)
    try:
        yield gate
    finally:
        gate.set()


def test_blocks_that_wait_to_be_written_are_hits(
    make: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make(disk_blocks=64)
    prompt = prompt_of(21)
    with stuck_writes(monkeypatch):
        ask(harness, prompt)
        fill(harness, 1)
        tiers = harness.engine.stats().tiers
        assert (tiers["disk"]["blocks_written"], tiers["disk"]["queued_blocks"] > 0) == (0, True)
        assert ask(harness, prompt) == 20
        assert by_tier(harness)["disk"] > 0
        assert ask(harness, prompt, ("other",)) == 0
    worker_of(harness).drain()
    assert harness.engine.stats().tiers["disk"]["queued_blocks"] == 0
    assert ask(harness, prompt) == 20


def test_a_block_that_waits_already_is_not_queued_again(
    make: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make(disk_blocks=64)
    with stuck_writes(monkeypatch):
        for _ in range(3):
            ask(harness, prompt_of(21))
            fill(harness, 1)
    worker_of(harness).drain()
    tiers = harness.engine.stats().tiers
    disk = tiers["disk"]
    assert tiers["blocks_offloaded"] == disk["blocks_written"] == disk["blocks"]
    assert disk["writes_dropped"] == 0


def test_a_block_written_while_those_before_it_are_read_is_a_hit(
    make: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make(disk_blocks=64)
    prompt = prompt_of(21)
    ask(harness, prompt[:12])
    fill(harness, 1)
    worker_of(harness).drain()
    ask(harness, prompt)
    with stuck_writes(monkeypatch) as gate:
        fill(harness, 2)
        harness.add("late", prompt, **OPTIONS)
        harness.step()
        assert not harness.scheduler.running, "it waits for the disk"
        gate.set()
        worker_of(harness).drain()
        harness.run()
    assert harness.answers["late"].last.num_cached_tokens == 20


@pytest.mark.parametrize("whole", [True, False])
def test_a_flush_forgets_what_is_being_written(
    make: MakeHarness, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    harness = make(disk_blocks=64)
    prompt, namespace = prompt_of(21), ("t",)
    ask(harness, prompt_of(21, seed=4))
    with stuck_writes(monkeypatch):
        ask(harness, prompt, namespace)
        fill(harness, 1)
        if whole:
            harness.cache.reset()
        else:
            harness.cache.reset_namespace(namespace)
            tiers_of(harness).drop_namespace(namespace)
        harness.cache.check_integrity()
        assert ask(harness, prompt, namespace) == 0
    harness.cache.reset_namespace(namespace)
    tiers_of(harness).drop_namespace(namespace)
    worker_of(harness).drain()
    assert ask(harness, prompt, namespace) == 0
    assert ask(harness, prompt_of(21, seed=4)) == (0 if whole else 20)


def test_a_block_under_way_when_its_namespace_is_flushed_never_appears(
    make: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make(disk_blocks=64)
    with stuck_writes(monkeypatch):
        ask(harness, prompt_of(26), ("t",))
        ask(harness, prompt_of(26, seed=1), ("t",))
        harness.cache.reset_namespace(("t",))
        tiers_of(harness).drop_namespace(("t",))
    worker = worker_of(harness)
    worker.drain()
    assert len(worker.disk) == 0
    tiers_of(harness).check_integrity()


def test_a_flushed_namespace_does_not_come_back_after_a_restart(make: MakeHarness) -> None:
    first = make(host_blocks=4, disk_blocks=64)
    for namespace in (("a",), ("b",)):
        ask(first, prompt_of(21), namespace)
    fill(first, 1, 2)
    worker_of(first).drain()
    first.cache.reset_namespace(("a",))
    tiers_of(first).drop_namespace(("a",))
    first.engine.close()
    second = make(num_blocks=32, host_blocks=4, disk_blocks=64)
    assert ask(second, prompt_of(21), ("a",)) == 0
    assert ask(second, prompt_of(21), ("b",)) == 20


def test_a_discarded_block_is_gone_from_the_disk_itself(tmp_path: Path) -> None:
    """A crash right after a flush must not bring the block back."""
    disk = open_disk(tmp_path / "disk")
    for number in (1, 2):
        label = bytes([number]) * (4 * BLOCK + LABEL_BYTES)
        assert disk.write(bytes([number]) * 32, label, bytes(CONTENT))
    disk.discard(lambda label: label[0] == 1)
    shutil.copytree(tmp_path / "disk", tmp_path / "crashed")
    disk.close()
    assert len(open_disk(tmp_path / "crashed")) == 1


class FakeDisk:
    """Counts what is written; each write takes a second of the clock."""

    capacity = 1000

    def __init__(self) -> None:
        self.now = 0.0
        self.keys: list[bytes] = []

    def touch(self, key: bytes) -> bool:
        return key in self.keys

    def write(self, key: bytes, label: bytes, content: bytes) -> bool:
        self.now += 1
        self.keys.append(key)
        return True


def save(saver: CacheSaver, disk: FakeDisk, count: int) -> int:
    blocks = [(bytes([i]), b"", i) for i in range(count)]
    saver.begin()
    return saver.save(blocks, count, disk, lambda ids: [b""] * len(ids))  # type: ignore[arg-type]


def test_saving_ends_when_its_time_is_up(caplog: pytest.LogCaptureFixture) -> None:
    disk = FakeDisk()
    with caplog.at_level(logging.WARNING):
        assert save(CacheSaver(100.0, lambda: disk.now), disk, 200) == 128
    assert "128 of 200 cached blocks were written to disk: time is up" in caplog.text
    assert save(CacheSaver(0.0, lambda: disk.now), FakeDisk(), 200) == 0


def test_saving_ends_when_it_is_told_to(caplog: pytest.LogCaptureFixture) -> None:
    disk = FakeDisk()
    saver = CacheSaver(1000.0, lambda: disk.now)
    write = disk.write

    def stop_at_70(*block: Any) -> bool:
        if len(disk.keys) == 70:
            saver.stop()
        return write(*block)

    disk.write = stop_at_70  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        assert save(saver, disk, 200) == 128
    assert "it was told to stop" in caplog.text


@pytest.mark.parametrize(("count", "shown"), [(60, []), (200, [128, 192, 200])])
def test_saving_shows_its_progress_once_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, count: int, shown: list[int]
) -> None:
    seen: list[int] = []

    class Bar:
        def update(self, completed: int) -> None:
            seen.append(completed)

    @contextmanager
    def progress(text: str, total: int) -> Iterator[Bar]:
        assert (text, total) == ("writing the cache to disk", count)
        yield Bar()

    monkeypatch.setattr(tiering_save, "progress", progress)
    disk = FakeDisk()
    assert save(CacheSaver(1000.0, lambda: disk.now), disk, count) == count
    assert seen == shown


async def test_an_async_engine_can_be_told_to_stop_saving(make: MakeHarness) -> None:
    first = make(num_blocks=32, disk_blocks=64)
    ask(first, prompt_of(21))
    engine = AsyncEngine(first.engine, cast(Any, CharTokenizer()), model_name="fake")
    await engine.start()
    engine.stop_saving()
    await engine.shutdown()
    assert ask(make(num_blocks=32, disk_blocks=64), prompt_of(21)) == 0
