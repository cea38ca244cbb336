"""The queue of requests that don't run yet, or not any more, in the order of a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sortedcontainers import SortedDict, SortedList

from radixkv.engine.fairness import ServiceCounters
from radixkv.request import Namespace

__all__ = ["POLICIES", "WaitingQueue"]

POLICIES = ("fcfs", "priority", "cache-aware")
# Lookups of cached lengths a step: of the best candidates, and of others in turn.
MAX_HEAD_LOOKUPS = 8
MAX_TURN_LOOKUPS = 8

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Entry(Generic[T]):
    request: T
    order: int
    level: int
    namespace: Namespace
    arrival: float
    resumed: bool
    num_cached: int = 0
    version: int = -1  # of the cache, when `num_cached` was looked up
    aside: bool = False


@dataclass(slots=True)
class _NamespaceQueue(Generic[T]):
    """One namespace's requests of a level, by age and by (-cached tokens, age)."""

    key: tuple[float, int]  # its place among the namespaces
    by_age: SortedDict = field(default_factory=SortedDict)
    by_cached: SortedDict = field(default_factory=SortedDict)


class _Level(Generic[T]):
    """The requests of equal priority."""

    def __init__(self) -> None:
        self.resumed: SortedDict = SortedDict()  # order -> entry
        self.queues: dict[Namespace, _NamespaceQueue[T]] = {}
        self.by_service: SortedList = SortedList()  # (counter, age of the queue, namespace)

    def __bool__(self) -> bool:
        return bool(self.resumed or self.queues)


class WaitingQueue(Generic[T]):
    """Owns the waiting requests and says which is next.

    What decides, in this order: the priority, lower first (policy "priority" only); a preempted
    request before new ones; the namespace that was served least; then age, or with "cache-aware"
    the longest cached prefix, unless the oldest has waited `max_skip_s` already.

    A request can be put aside: it is no candidate then, but still waits.
    """

    def __init__(
        self,
        policy: str = "fcfs",
        *,
        max_skip_s: float = 10.0,
        num_cached: Callable[[T], int] | None = None,
        version: Callable[[], int] | None = None,
    ) -> None:
        """Make an empty queue.

        Args:
            policy: one of `POLICIES`.
            max_skip_s: with "cache-aware", how long others may go before the oldest.
            num_cached: looks up how many tokens of a request are cached; for "cache-aware".
            version: a number that changes whenever such a lookup may find something else.

        Raises:
            ValueError: there is no such policy, or it lacks its lookup.
        """
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
        if policy == "cache-aware" and (num_cached is None or version is None):
            raise ValueError("policy cache-aware needs num_cached and version")
        self.policy = policy
        self.max_skip_s = max_skip_s
        self.counters = ServiceCounters()
        self._num_cached = num_cached if policy == "cache-aware" else None
        self._version = version
        self._entries: SortedDict = SortedDict()  # order -> entry, those put aside too
        self._levels: SortedDict = SortedDict()  # level -> _Level
        self._num_joined = 0
        self._turn = -1  # the last order whose cached length was looked up in turn

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        """Yield all that wait, oldest first."""
        return (entry.request for entry in self._entries.values())

    def __contains__(self, order: int) -> bool:
        return order in self._entries

    @property
    def oldest_arrival(self) -> float | None:
        """When the one that waits longest arrived; None if nobody waits."""
        return self._entries.peekitem(0)[1].arrival if self._entries else None

    def add(
        self,
        request: T,
        order: int,
        *,
        arrival: float = 0.0,
        priority: int = 0,
        namespace: Namespace = (),
        resumed: bool = False,
    ) -> None:
        """Queue a request.

        Args:
            request: what `peek` returns.
            order: its number; lower is older.
            arrival: seconds.
            priority: lower goes first, with policy "priority".
            namespace: who is charged for it.
            resumed: it ran before and goes before new ones.

        Cost: O(log n), and a lookup with "cache-aware".
        """
        level = priority if self.policy == "priority" else 0
        entry = _Entry(request, order, level, namespace, arrival, resumed)
        self._entries[order] = entry
        self.counters.join(entry.namespace)
        if self._num_cached is not None:
            self._look_up(entry)
        self._insert(entry)

    def remove(self, order: int) -> bool:
        """Take a request out; False if it isn't here. Cost: O(log n)."""
        entry = self._entries.pop(order, None)
        if entry is None:
            return False
        if not entry.aside:
            self._take(entry)
        self.counters.leave(entry.namespace)
        return True

    def put_aside(self, order: int) -> None:
        """Make a waiting request no candidate until it is recalled. Cost: O(log n)."""
        entry = self._entries[order]
        if not entry.aside:
            self._take(entry)
            entry.aside = True

    def recall(self, order: int) -> None:
        """Make a request a candidate again; nothing happens if it has left. Cost: O(log n)."""
        entry = self._entries.get(order)
        if entry is not None and entry.aside:
            entry.aside = False
            self._insert(entry)

    def peek(self, now: float) -> T | None:
        """Return the request that is next; None if there is no candidate.

        Cost: O(log n), and with "cache-aware" a few lookups if the cache has changed.
        """
        if not self._levels:
            return None
        level: _Level[T] = self._levels.peekitem(0)[1]
        entry: _Entry[T]
        if level.resumed:
            entry = level.resumed.peekitem(0)[1]
            return entry.request
        queue = level.queues[level.by_service[0][-1]]
        entry = queue.by_age.peekitem(0)[1]
        if self._num_cached is None or now - entry.arrival >= self.max_skip_s:
            return entry.request
        for _ in range(MAX_HEAD_LOOKUPS):
            entry = queue.by_cached.peekitem(0)[1]
            if not self._refresh(entry):
                break
        return queue.by_cached.peekitem(0)[1].request  # type: ignore[no-any-return]

    def refresh(self) -> None:
        """Look up some cached lengths that may have changed, in turn; call it once a step.

        Cost: a bounded number of lookups; none but with "cache-aware".
        """
        if self._num_cached is None:
            return
        for _ in range(min(MAX_TURN_LOOKUPS, len(self._entries))):
            index = self._entries.bisect_right(self._turn) % len(self._entries)
            entry = self._entries.peekitem(index)[1]
            self._turn = entry.order
            self._refresh(entry)

    def charge(self, namespace: Namespace, prompt_tokens: int = 0, generated: int = 0) -> None:
        """Count tokens that were computed for a namespace. Cost: O(levels * log namespaces)."""
        self.counters.charge(namespace, prompt_tokens, generated)
        self._reposition(namespace)

    def _refresh(self, entry: _Entry[T]) -> bool:
        """Look up what is cached of a request, if that may have changed; True if it has."""
        assert self._version is not None
        if entry.version == self._version():
            return False
        if entry.aside or entry.resumed:
            self._look_up(entry)
            return False
        queue = self._levels[entry.level].queues[entry.namespace]
        del queue.by_cached[-entry.num_cached, entry.order]
        before = entry.num_cached
        self._look_up(entry)
        queue.by_cached[-entry.num_cached, entry.order] = entry
        return entry.num_cached != before

    def _look_up(self, entry: _Entry[T]) -> None:
        assert self._num_cached is not None
        assert self._version is not None
        entry.num_cached = self._num_cached(entry.request)
        entry.version = self._version()

    def _insert(self, entry: _Entry[T]) -> None:
        level = self._levels.get(entry.level)
        if level is None:
            level = self._levels[entry.level] = _Level()
        if entry.resumed:
            level.resumed[entry.order] = entry
            return
        queue = level.queues.get(entry.namespace)
        if queue is None:
            self._num_joined += 1
            key = (self.counters.get(entry.namespace), self._num_joined)
            queue = level.queues[entry.namespace] = _NamespaceQueue(key)
            level.by_service.add((*key, entry.namespace))
        queue.by_age[entry.order] = entry
        if self._num_cached is not None:
            queue.by_cached[-entry.num_cached, entry.order] = entry

    def _take(self, entry: _Entry[T]) -> None:
        level = self._levels[entry.level]
        if entry.resumed:
            del level.resumed[entry.order]
        else:
            queue = level.queues[entry.namespace]
            del queue.by_age[entry.order]
            if self._num_cached is not None:
                del queue.by_cached[-entry.num_cached, entry.order]
            if not queue.by_age:
                del level.queues[entry.namespace]
                level.by_service.remove((*queue.key, entry.namespace))
        if not level:
            del self._levels[entry.level]

    def _reposition(self, namespace: Namespace) -> None:
        counter = self.counters.get(namespace)
        for level in self._levels.values():
            queue = level.queues.get(namespace)
            if queue is not None and queue.key[0] != counter:
                level.by_service.remove((*queue.key, namespace))
                queue.key = (counter, queue.key[1])
                level.by_service.add((*queue.key, namespace))
