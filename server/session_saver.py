"""Writes changed sessions down on a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixkv.server.session_db import Key, SessionDb
    from radixkv.server.session_state import SessionRecord

__all__ = ["SessionSaver"]

logger = logging.getLogger(__name__)

WAIT_S = 2.0
CLOSE_S = 10.0
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 30.0


class SessionSaver:
    """Owns a `SessionDb` and the thread that writes to it.

    Of each session only the latest state waits to be written, so a disk that fails costs no more
    memory than the sessions themselves; all that wait go in one transaction. A failure is logged
    and tried again. Nobody waits for the disk longer than `wait_s`, and the event loop never does.

    Attributes:
        num_saved: states written.
        num_failures: transactions that failed.
    """

    def __init__(
        self, db: SessionDb, *, wait_s: float = WAIT_S, retry_s: float = FIRST_RETRY_S
    ) -> None:
        """Take over a database; `start` begins to write.

        Args:
            db: loaded, and nobody else's from now on.
            wait_s: how long `saved` waits at most.
            retry_s: seconds after which a failed write is tried again; doubled each time it fails.
        """
        self.num_saved = 0
        self.num_failures = 0
        self._db = db
        self._wait_s = wait_s
        self._retry_s = retry_s
        self._changed = threading.Condition()
        self._pending: dict[Key, SessionRecord | None] = {}
        self._writing: dict[Key, SessionRecord | None] = {}
        self._number = 0  # of the latest `put`
        self._done = 0  # all up to this `put` are on the disk
        self._failing = False
        self._unwritable: set[Key] = set()
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def num_pending(self) -> int:
        """Sessions whose latest state is not on the disk."""
        with self._changed:
            return len(self._pending.keys() | self._writing.keys() | self._unwritable)

    def start(self) -> None:
        """Start the thread; futures belong to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._main, name="radixkv-sessions", daemon=True)
        self._thread.start()

    def put(self, key: Key, record: SessionRecord | None) -> None:
        """Have a session's state written; None deletes it. Never blocks."""
        with self._changed:
            self._number += 1
            self._pending[key] = record
            self._changed.notify_all()

    async def saved(self, key: Key) -> bool:
        """Wait until the states put so far are on the disk; return whether `key`'s is.

        False after `wait_s`, or as soon as a write fails; it is tried again all the same.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._changed:
            number = self._number
            if self._done < number and not self._failing:
                self._waiting.append((number, future))
            else:
                future.set_result(None)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(future, self._wait_s)
        with self._changed:
            return self._done >= number and key not in self._unwritable

    async def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write what is left, for at most `timeout_s`, and close the file. Idempotent."""
        if self._thread is None:
            self._db.close()
            return
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        await asyncio.to_thread(self._thread.join, timeout_s)
        if self._thread.is_alive() or self.num_pending:
            logger.error("the latest state of %d sessions is not on the disk", self.num_pending)

    def _main(self) -> None:
        retry_s = self._retry_s
        try:
            while self._wait_for_work():
                last = self._stopping
                if self._write():
                    retry_s = self._retry_s
                    continue
                if last:
                    return
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping, retry_s)
                retry_s = min(2 * retry_s, LONGEST_RETRY_S)
        finally:
            self._db.close()

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._stopping)
            return bool(self._pending)

    def _write(self) -> bool:
        """Write all that waits; return whether that succeeded."""
        with self._changed:
            batch, number = self._pending, self._number
            self._pending, self._writing = {}, batch
        try:
            unwritable = self._db.write(batch)
        except Exception as error:  # whatever it is, the sessions are still in memory
            logger.warning(
                "--session-db: %d sessions can't be written, and will be tried again: %s",
                len(batch),
                error,
            )
            with self._changed:
                self.num_failures += 1
                self._failing = True
                # What was put meanwhile is newer.
                self._pending, self._writing = {**batch, **self._pending}, {}
                self._wake(self._number)
            return False
        for key in unwritable:
            logger.error("--session-db: session %s can't be written as JSON", key[1])
        with self._changed:
            self._failing = False
            self._writing = {}
            self.num_saved += len(batch) - len(unwritable)
            self._unwritable = (self._unwritable - batch.keys()) | set(unwritable)
            self._done = number
            self._wake(number)
        return True

    def _wake(self, number: int) -> None:
        """End the waiting for all up to a `put`."""
        woken = [future for wanted, future in self._waiting if wanted <= number]
        self._waiting = [item for item in self._waiting if item[0] > number]
        if woken and self._loop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # it was closed this moment
                self._loop.call_soon_threadsafe(_finish, woken)


def _finish(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
