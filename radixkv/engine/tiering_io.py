"""Reads and writes of the disk tier, in a thread of their own."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
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
        num_read: blocks read from disk.
        seconds: how long the reading took.
    """

    wanted: Wanted
    contents: dict[bytes, bytes] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)
    cancelled: bool = False
    num_read: int = 0
    seconds: float = 0.0


class DiskWorker:
    """Owns the thread that uses a `DiskTier`, and the queue in front of it.

    Reads go before writes, since requests wait for them. The queue of writes is bounded; a write
    that finds it full is dropped and counted, so that a slow disk costs hits and not memory. What
    waits in it can be had all the time, by `queued`, until it can be had from the disk.
    """

    def __init__(self, disk: DiskTier, max_queued: int) -> None:
        self.disk = disk
        self.max_queued = max_queued
        self.num_dropped = 0
        self._fetches: deque[Fetch] = deque()
        # In the order of arrival; the first is being written if `_writing` is its key.
        self._writes: dict[bytes, tuple[bytes, bytes]] = {}  # key -> (tokens, content)
        self._writing: bytes | None = None
        self._unwanted = False  # what is being written is to be forgotten
        self._busy = False
        self._stopping = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._main, name="radixkv-disk", daemon=True)
        self._thread.start()

    def write(self, key: bytes, tokens: bytes, content: bytes) -> bool:
        """Queue a block to be written; False if it was dropped. Never blocks."""
        with self._changed:
            if key == self._writing:
                self._unwanted = False
                return True
            if self._stopping or len(self._writes) >= self.max_queued:
                self.num_dropped += 1
                return False
            self._writes[key] = (tokens, content)
            self._changed.notify_all()
            return True

    @property
    def num_queued(self) -> int:
        """Blocks that wait to be written, and the one that is being written."""
        return len(self._writes)

    def queued(self, key: bytes, tokens: bytes) -> bytes | None:
        """Return the content of a block that isn't on the disk yet, if its tokens are these."""
        with self._changed:
            entry = self._writes.get(key)
            if entry is None or entry[0] != tokens or (key == self._writing and self._unwanted):
                return None
            return entry[1]

    def touch(self, key: bytes) -> bool:
        """Make a block the most recently used; return whether it is here, or about to be."""
        with self._changed:
            if key in self._writes and not (key == self._writing and self._unwanted):
                return True
        return self.disk.touch(key)

    def fetch(self, wanted: Wanted, known: dict[bytes, bytes]) -> Fetch:
        """Begin to read blocks, up to the first that can't be read. Never blocks.

        Args:
            wanted: blocks on the disk.
            known: content of others that go with them, by key, which may leave the queue meanwhile.
        """
        fetch = Fetch(wanted, known)
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
            for key in [key for key in self._writes if key != self._writing]:
                del self._writes[key]

    def clear(self) -> None:
        """Forget every block, on the disk and on the way there."""
        self._discard_queued(lambda _: True)
        self.disk.clear()

    def discard(self, matches: Callable[[bytes], bool]) -> None:
        """Forget the blocks whose tokens match, on the disk and on the way there."""
        self._discard_queued(matches)
        self.disk.discard(matches)

    def _discard_queued(self, matches: Callable[[bytes], bool]) -> None:
        with self._changed:
            for key, (tokens, _) in list(self._writes.items()):
                if not matches(tokens):
                    continue
                if key == self._writing:
                    self._unwanted = True
                else:
                    del self._writes[key]

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
                if fetch is None:
                    key, (tokens, content) = next(iter(self._writes.items()))
                    self._writing, self._unwanted = key, False
            try:
                if fetch is not None:
                    self._read(fetch)
                else:
                    self.disk.write(key, tokens, content)
            except Exception:  # a block less is no reason to end the thread
                log.exception("the disk cache's thread met an error")
            finally:
                if fetch is not None:
                    fetch.done.set()
                else:
                    self._end_write()

    def _end_write(self) -> None:
        """Take the block that was written out of the queue; it is on the disk now, if it can be."""
        with self._changed:
            assert self._writing is not None
            tokens, _ = self._writes.pop(self._writing)
            unwanted, self._writing, self._unwanted = self._unwanted, None, False
        if unwanted:
            self.disk.discard(lambda own: own == tokens)

    def _read(self, fetch: Fetch) -> None:
        begin = time.perf_counter()
        for key, tokens in fetch.wanted:
            content = None if fetch.cancelled else self.disk.read(key, tokens)
            if content is None:
                break
            fetch.contents[key] = content
            fetch.num_read += 1
        fetch.seconds = time.perf_counter() - begin
