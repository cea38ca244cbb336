"""When requests come: at their own time, or after the turn before them has ended."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence

from radixkv.simulate.traffic import Request

__all__ = ["Arrivals"]


class Arrivals:
    """Owns which requests are still to come.

    A session is a request and all that follow it, turn by turn. Where clients are few, only so many
    sessions are open at once; the next one opens when one has ended.

    Attributes:
        next: when the next request comes, as far as is known; infinite if none is known.
        num_left: requests that have not come yet.
    """

    def __init__(self, requests: Sequence[Request], max_sessions: int | None = None) -> None:
        self._requests = requests
        self._followers = {r.after: i for i, r in enumerate(requests) if r.after is not None}
        self._closed = deque(i for i, r in enumerate(requests) if r.after is None)
        self._due: list[tuple[float, int]] = []
        self._room = math.inf if max_sessions is None else max_sessions
        self.num_left = len(requests)
        self._open(0.0)

    @property
    def next(self) -> float:
        """See the class."""
        return self._due[0][0] if self._due else math.inf

    def pop(self, now: float) -> list[tuple[float, int]]:
        """Return when those that have come by now did, and which they are; in order."""
        due = []
        while self._due and self._due[0][0] <= now:
            due.append(heapq.heappop(self._due))
        self.num_left -= len(due)
        return due

    def end(self, index: int, now: float) -> None:
        """Note that a request has ended: its client goes on."""
        follower = self._followers.get(index)
        if follower is not None:
            heapq.heappush(self._due, (now + self._requests[follower].arrival, follower))
            return
        self._room += 1
        self._open(now)

    def _open(self, now: float) -> None:
        while self._closed and self._room > 0:
            self._room -= 1
            index = self._closed.popleft()
            heapq.heappush(self._due, (max(self._requests[index].arrival, now), index))
