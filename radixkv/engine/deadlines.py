"""Until when requests may take."""

from __future__ import annotations

from collections.abc import Iterator

from sortedcontainers import SortedDict

from radixkv.engine.request import EngineRequest

__all__ = ["Deadlines"]


class Deadlines:
    """Owns the deadlines of the requests that have one."""

    def __init__(self, default_s: float | None = None) -> None:
        """Make it empty.

        Args:
            default_s: seconds from arrival that any request may take; None is no limit.
        """
        self.default_s = default_s
        self._requests: SortedDict = SortedDict()  # (seconds of the clock, order) -> request

    def __len__(self) -> int:
        return len(self._requests)

    def limit_of(self, request: EngineRequest) -> float | None:
        """Return the seconds that a request may take: its own limit or the default, the shorter."""
        limits = [s for s in (request.params.timeout_s, self.default_s) if s is not None]
        return min(limits, default=None)

    def add(self, request: EngineRequest) -> None:
        """Watch a request, if it has a limit. Cost: O(log n)."""
        if (limit := self.limit_of(request)) is not None:
            self._requests[request.timings.arrival + limit, request.order] = request

    def discard(self, request: EngineRequest) -> None:
        """Watch a request no more. Idempotent. Cost: O(log n)."""
        if (limit := self.limit_of(request)) is not None:
            self._requests.pop((request.timings.arrival + limit, request.order), None)

    def expired(self, now: float) -> Iterator[EngineRequest]:
        """Take out and yield the requests whose time is over, earliest deadline first."""
        while self._requests and self._requests.keys()[0][0] <= now:
            yield self._requests.popitem(0)[1]
