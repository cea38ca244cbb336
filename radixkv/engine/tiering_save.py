"""Writing the whole cache to disk, when the server ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from itertools import islice

from radixkv.cache.tiers_disk import DiskTier
from radixkv.model.progress import ProgressTask, progress

__all__ = ["CacheSaver"]

log = logging.getLogger(__name__)

BATCH_BLOCKS = 64
SHOW_AFTER_S = 2.0  # whoever waits longer wants to see what for

Gather = Callable[[Sequence[int]], list[bytes] | None]


class CacheSaver:
    """Writes blocks to disk for a limited time, and shows how far it has come."""

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._begin = 0.0
        self._stopped = threading.Event()

    def begin(self) -> None:
        """Start the time that `save` has."""
        self._begin = self._clock()

    def stop(self) -> None:
        """Make `save` end after the blocks it is writing. Safe from any thread."""
        self._stopped.set()

    def save(
        self,
        blocks: Iterable[tuple[bytes, bytes, int]],
        num_blocks: int,
        disk: DiskTier,
        gather: Gather,
    ) -> int:
        """Write blocks until all are on disk, time is up, or `stop` was called.

        Args:
            blocks: (key, label, block id), the most valuable first.
            num_blocks: how many they are, about; for the progress bar.
            disk: written to; its order of use is that of `blocks` afterwards.
            gather: returns the content of blocks by their ids, or None if it can't be had.

        Returns:
            Blocks that are on disk now.
        """
        done: list[bytes] = []
        total = min(num_blocks, disk.capacity)
        remaining = islice(blocks, disk.capacity)
        bar: ProgressTask | None = None
        with ExitStack() as stack:
            while part := list(islice(remaining, BATCH_BLOCKS)):
                elapsed = self._clock() - self._begin
                if self._stopped.is_set() or elapsed >= self._limit_s:
                    why = "it was told to stop" if self._stopped.is_set() else "time is up"
                    log.warning(
                        "%d of %d cached blocks were written to disk: %s", len(done), total, why
                    )
                    break
                if bar is None and elapsed >= SHOW_AFTER_S:
                    bar = stack.enter_context(progress("writing the cache to disk", total))
                done += _write(part, disk, gather)
                if bar is not None:
                    bar.update(len(done))
        for key in reversed(done):
            disk.touch(key)
        return len(done)


def _write(part: list[tuple[bytes, bytes, int]], disk: DiskTier, gather: Gather) -> list[bytes]:
    """Write the blocks that aren't on disk yet; return the keys of those that are now."""
    missing = [item for item in part if not disk.touch(item[0])]
    contents = gather([block_id for _, _, block_id in missing])
    if contents is None:
        lost = {key for key, _, _ in missing}
        return [key for key, _, _ in part if key not in lost]
    failed = set()
    for (key, label, _), content in zip(missing, contents, strict=True):
        if not disk.write(key, label, content):
            failed.add(key)
    return [key for key, _, _ in part if key not in failed]
