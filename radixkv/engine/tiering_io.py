"""Reads and writes of the disk tier, in a thread of their own."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from radixkv.cache.tiers_disk import DiskTier

__all__ = ["DiskWorker", "Fetch"]

log = logging.getLogger(__name__)

Wanted = list[tuple[bytes, bytes]]
"""(key, tokens) of each block."""


@dataclass(slots=True)
class Fetch:
    """Blocks being read; `contents` has those that could be, and is complete once `done` is set.

    Attributes:
        seconds: how long the reading took.
    """

    wanted: Wanted
    contents: dict[bytes, bytes] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)
    cancelled: bool = False
    seconds: float = 0.0


class DiskWorker:
    """Owns the thread that uses a `DiskTier`, and the queue in front of it.

    Reads go before writes, since requests wait for them. The queue of writes is bounded; a write
    that finds it full is dropped and counted, so that a slow disk costs hits and not memory.
    """

    def __init__(self, disk: DiskTier, max_queued: int) -> None:
        self.disk = disk
        self.max_queued = max_queued
        self.num_dropped = 0
        self._fetches: deque[Fetch] = deque()
        self._writes: deque[tuple[bytes, bytes, bytes]] = deque()
        self._busy = False
        self._stopping = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._main, name="radixkv-disk", daemon=True)
        self._thread.start()

    def write(self, key: bytes, tokens: bytes, content: bytes) -> bool:
        """Queue a block to be written; False if it was dropped. Never blocks."""
        with self._changed:
            if self._stopping or len(self._writes) >= self.max_queued:
                self.num_dropped += 1
                return False
            self._writes.append((key, tokens, content))
            self._changed.notify_all()
            return True

    def fetch(self, wanted: Wanted) -> Fetch:
        """Begin to read blocks, up to the first that can't be read. Never blocks."""
        fetch = Fetch(wanted)
        with self._changed:
            if self._stopping:
                fetch.done.set()
            else:
                self._fetches.append(fetch)
                self._changed.notify_all()
        return fetch

    def discard_writes(self) -> None:
        """Forget the writes that have not begun."""
        with self._changed:
            self._writes.clear()

    def drain(self) -> None:
        """Wait until everything queued is done."""
        with self._changed:
            while self._fetches or self._writes or self._busy:
                self._changed.wait()

    def close(self) -> None:
        """Finish what is queued and end the thread; the tier is the caller's again. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _main(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                while not (self._fetches or self._writes or self._stopping):
                    self._changed.wait()
                if not (self._fetches or self._writes):
                    return
                self._busy = True
                fetch = self._fetches.popleft() if self._fetches else None
                job = self._writes.popleft() if fetch is None else None
            try:
                if fetch is not None:
                    self._read(fetch)
                elif job is not None:
                    self.disk.write(*job)
            except Exception:  # a block less is no reason to end the thread
                log.exception("the disk cache's thread met an error")
            finally:
                if fetch is not None:
                    fetch.done.set()

    def _read(self, fetch: Fetch) -> None:
        begin = time.perf_counter()
        for key, tokens in fetch.wanted:
            content = None if fetch.cancelled else self.disk.read(key, tokens)
            if content is None:
                break
            fetch.contents[key] = content
        fetch.seconds = time.perf_counter() - begin
