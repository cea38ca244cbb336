"""A buddy allocator over slots."""

from __future__ import annotations

__all__ = ["Buddy"]


class Buddy:
    """Owns regions of a power of two slots; a free region and its free buddy become one.

    A total that is no power of two is split into descending powers of two, each aligned to its
    own size, so that buddies are still found by flipping one bit of the start.
    Source: Knowlton, A fast storage allocator, CACM 1965.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.num_free = total
        self._free: list[set[int]] = [set() for _ in range(max(total, 1).bit_length())]
        start = 0
        for order in reversed(range(len(self._free))):
            if total & (1 << order):
                self._free[order].add(start)
                start += 1 << order

    def allocate(self, size: int) -> tuple[int, int] | None:
        """Return (start, slots) of a region of at least `size`, or None if no region is free."""
        wanted = max(size - 1, 0).bit_length()
        order = wanted
        while order < len(self._free) and not self._free[order]:
            order += 1
        if order >= len(self._free):
            return None
        start = min(self._free[order])
        self._free[order].discard(start)
        while order > wanted:
            order -= 1
            self._free[order].add(start + (1 << order))
        self.num_free -= 1 << wanted
        return start, 1 << wanted

    def release(self, start: int, slots: int) -> None:
        """Give a region back."""
        self.num_free += slots
        order = slots.bit_length() - 1
        while order + 1 < len(self._free) and (start ^ (1 << order)) in self._free[order]:
            self._free[order].discard(start ^ (1 << order))
            start &= ~(1 << order)
            order += 1
        self._free[order].add(start)

    def free_regions(self) -> list[tuple[int, int]]:
        """Return (start, slots) of every free region, in order."""
        return sorted((s, 1 << order) for order, starts in enumerate(self._free) for s in starts)
