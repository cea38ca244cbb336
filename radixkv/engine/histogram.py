"""Counts of values by size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Histogram", "HistogramData"]


@dataclass(frozen=True, slots=True)
class HistogramData:
    """What a histogram counted until one moment.

    Attributes:
        bounds: upper bounds of the buckets, ascending; the last bucket has none.
        counts: values in each bucket, one more than bounds.
        total: sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """Values counted."""
        return sum(self.counts)


class Histogram:
    """Counts values by buckets whose upper bounds belong to them, as Prometheus has it.

    >>> histogram = Histogram((1.0, 2.0))
    >>> histogram.add(1.0), histogram.add_all([1.5, 9.0])
    (None, None)
    >>> histogram.data()
    HistogramData(bounds=(1.0, 2.0), counts=(1, 1, 1), total=11.5)
    """

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """Make an empty histogram; `bounds` ascend."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """Count a value. Cost: O(log buckets)."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def add_all(self, values: Sequence[float]) -> None:
        """Count many values in one go."""
        if not len(values):
            return
        found = np.searchsorted(self._bounds, values, side="left")
        counts = np.bincount(found, minlength=len(self._counts)).tolist()
        self._counts = [old + new for old, new in zip(self._counts, counts, strict=True)]
        self._total += float(np.sum(values))

    def data(self) -> HistogramData:
        """Return what was counted so far."""
        return HistogramData(self._bounds, tuple(self._counts), self._total)
