"""What the cache did, in tokens and blocks: monotonic counters and sliding windows."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from radixkv.request import Namespace

__all__ = ["CacheStats", "NamespaceStats", "Window"]

MAX_NAMESPACES = 1000
WINDOWS_S = {"1m": 60, "5m": 300, "1h": 3600}
MAX_BUCKETS = 300


@dataclass(slots=True)
class NamespaceStats:
    """One namespace's share of the lookups."""

    requests: int = 0
    tokens_looked_up: int = 0
    tokens_hit: int = 0


class Window:
    """Sums over the last `seconds`, in steps of a `MAX_BUCKETS`-th of it or a second."""

    def __init__(self, seconds: int) -> None:
        self.seconds = seconds
        self._step = max(1, seconds // MAX_BUCKETS)
        self.looked_up = 0
        self.hit = 0
        self._buckets: deque[list[int]] = deque()  # [its beginning, looked_up, hit]

    def add(self, now: float, looked_up: int, hit: int) -> None:
        """Record a lookup at time `now`."""
        self.expire(now)
        begin = int(now) // self._step * self._step
        if not self._buckets or self._buckets[-1][0] != begin:
            self._buckets.append([begin, 0, 0])
        self._buckets[-1][1] += looked_up
        self._buckets[-1][2] += hit
        self.looked_up += looked_up
        self.hit += hit

    def expire(self, now: float) -> None:
        """Forget what is older than the window."""
        while self._buckets and self._buckets[0][0] <= now - self.seconds:
            _, looked_up, hit = self._buckets.popleft()
            self.looked_up -= looked_up
            self.hit -= hit


class CacheStats:
    """Owns the cache's counters. Counters never decrease.

    A lookup is counted once per admitted request, whatever the scheduler retried before and
    whatever preemption made it look up again; those go to `tokens_rehit`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.requests = 0
        self.tokens_looked_up = 0
        self.tokens_hit = 0
        self.tokens_rehit = 0
        self.blocks_evicted = 0
        self.blocks_copied = 0
        self.windows = {name: Window(seconds) for name, seconds in WINDOWS_S.items()}
        self.namespaces: OrderedDict[Namespace, NamespaceStats] = OrderedDict()

    def record_lookup(self, namespace: Namespace, num_tokens: int, num_hit: int) -> None:
        """Count the first lookup of an admitted request."""
        now = self._clock()
        self.requests += 1
        self.tokens_looked_up += num_tokens
        self.tokens_hit += num_hit
        for window in self.windows.values():
            window.add(now, num_tokens, num_hit)
        entry = self.namespaces.get(namespace)
        if entry is None:
            entry = self.namespaces[namespace] = NamespaceStats()
            if len(self.namespaces) > MAX_NAMESPACES:
                # Least recently active; its past stays in the totals.
                self.namespaces.popitem(last=False)
        self.namespaces.move_to_end(namespace)
        entry.requests += 1
        entry.tokens_looked_up += num_tokens
        entry.tokens_hit += num_hit

    def window(self, name: str) -> tuple[int, int]:
        """Return (tokens looked up, tokens hit) in one of the windows."""
        window = self.windows[name]
        window.expire(self._clock())
        return window.looked_up, window.hit
