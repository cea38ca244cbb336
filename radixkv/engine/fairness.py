"""Who was served how much: virtual token counters of the namespaces."""

from __future__ import annotations

from collections import OrderedDict

from sortedcontainers import SortedList

from radixkv.request import Namespace

__all__ = ["ServiceCounters"]

OUTPUT_WEIGHT = 2.0  # a generated token costs about as much as two of a prompt, as in the paper
MAX_IDLE = 1000


class ServiceCounters:
    """Owns one counter per namespace: its computed prompt tokens, and its generated ones weighted.

    A namespace that begins to wait is lifted to the least served of those that wait already, so
    that nobody saves up service while away, and nobody pays for having been served alone.

    Source: VTC, Sheng et al. 2024, arXiv:2401.00588, algorithm 2.
    """

    def __init__(self, output_weight: float = OUTPUT_WEIGHT) -> None:
        self.output_weight = output_weight
        self._counters: OrderedDict[Namespace, float] = OrderedDict()
        self._waiting: dict[Namespace, int] = {}  # requests
        self._sorted: SortedList = SortedList()  # the counters of those that wait
        self._last_left: Namespace = ()

    def __len__(self) -> int:
        return len(self._counters)

    def get(self, namespace: Namespace) -> float:
        """Return a namespace's counter, in weighted tokens."""
        return self._counters.get(namespace, 0.0)

    def join(self, namespace: Namespace) -> None:
        """Note one more waiting request. Cost: O(log namespaces)."""
        count = self._waiting.get(namespace, 0)
        self._waiting[namespace] = count + 1
        if count:
            return
        least = self._sorted[0] if self._sorted else self.get(self._last_left)
        self._counters[namespace] = max(self.get(namespace), least)
        self._counters.move_to_end(namespace)
        self._sorted.add(self._counters[namespace])
        self._forget()

    def leave(self, namespace: Namespace) -> None:
        """Note one waiting request less. Cost: O(log namespaces)."""
        self._waiting[namespace] -= 1
        if not self._waiting[namespace]:
            del self._waiting[namespace]
            self._sorted.remove(self._counters[namespace])
            self._last_left = namespace
            self._forget()

    def charge(self, namespace: Namespace, prompt_tokens: int = 0, generated: int = 0) -> None:
        """Count what a namespace is served. Cost: O(log namespaces)."""
        before = self.get(namespace)
        after = before + prompt_tokens + self.output_weight * generated
        self._counters[namespace] = after
        if namespace in self._waiting:
            self._sorted.remove(before)
            self._sorted.add(after)
        self._forget()

    def _forget(self) -> None:
        """Keep the counters of those that don't wait few; the longest idle go first."""
        while len(self._counters) > len(self._waiting) + MAX_IDLE:
            namespace = next(iter(self._counters))
            if namespace in self._waiting:
                self._counters.move_to_end(namespace)
            else:
                del self._counters[namespace]
