"""Dynamic contiguous growth: a region that is extended in steps, or moved where it can't be."""

from __future__ import annotations

from bisect import bisect_left, insort

from radixkv.simulate.managers.base import WATERMARK, Allocation, MemoryManager
from radixkv.simulate.traffic import Request

__all__ = ["ContiguousGrowth", "Extents"]

Region = tuple[int, int]


class ContiguousGrowth(MemoryManager):
    """Keeps each answer in one region that grows by `step` slots.

    It grows in place if the slots behind it are free; otherwise the smallest free region that is
    long enough takes it, and its KV is copied, for which both must exist at once.
    Source: the growing caches of local runtimes; 256 is the step of MLX's `KVCache`
    (mlx-lm, `models/cache.py`).
    """

    name = "contiguous"

    def __init__(self, total: int, step: int = 256) -> None:
        super().__init__(total)
        self.step = step
        self.extents = Extents(total)
        self._regions: dict[Allocation, list[Region]] = {}

    def _allocate(self, request: Request, generated: int) -> Allocation | None:
        stored = request.prompt_len + generated
        length = -(-stored // self.step) * self.step
        spare = WATERMARK * self.total if self.num_held else 0
        if request.num_samples * length + spare > self.extents.num_free:
            return None
        regions: list[Region] = []
        for _ in range(request.num_samples):
            start = self.extents.allocate(length)
            if start is None:
                for region in regions:
                    self.extents.release(*region)
                return None
            regions.append((start, length))
        n = request.num_samples
        allocation = Allocation(request, 0, 0.0, n * request.prompt_len, 0.0)
        self._regions[allocation] = regions
        self._resize(allocation, length)
        return allocation

    def _extend(self, allocation: Allocation) -> bool:
        regions = self._regions[allocation]
        # All samples or none: what was done already is undone by going back to these.
        grown: list[Region] = []
        old: list[Region] = []
        moved = 0
        for start, length in regions:
            if self.extents.extend(start, length, self.step):
                grown.append((start, length + self.step))
                continue
            target = self.extents.allocate(length + self.step)
            if target is None:
                self._undo(regions, grown)
                return False
            grown.append((target, length + self.step))
            old.append((start, length))
            moved += allocation.limit
        for region in old:
            self.extents.release(*region)
        self.num_moved += moved
        self._regions[allocation] = grown
        self._resize(allocation, allocation.limit + self.step)
        return True

    def _undo(self, regions: list[Region], grown: list[Region]) -> None:
        # `grown` covers the first of the regions only.
        for (start, length), (new_start, new_length) in zip(regions, grown, strict=False):
            if new_start == start:
                self.extents.release(start + length, self.step)
            else:
                self.extents.release(new_start, new_length)

    def _free(self, allocation: Allocation, generated: int) -> None:
        for region in self._regions.pop(allocation):
            self.extents.release(*region)

    def _resize(self, allocation: Allocation, length: int) -> None:
        n = allocation.request.num_samples
        allocation.limit = length
        allocation.slots = float(n * length)
        allocation.needed = float(n * min(length, allocation.request.final_len))


class Extents:
    """Owns the free extents of a range of slots; no two of them touch. Best fit."""

    def __init__(self, total: int) -> None:
        self.num_free = total
        self._starts: list[int] = [0] if total else []
        self._lengths: dict[int, int] = {0: total} if total else {}

    def allocate(self, length: int) -> int | None:
        """Take the start of the smallest extent that is long enough; None if there is none."""
        fits = [(size, start) for start, size in self._lengths.items() if size >= length]
        if not fits:
            return None
        size, start = min(fits)
        self._drop(start)
        if size > length:
            self._add(start + length, size - length)
        self.num_free -= length
        return start

    def extend(self, start: int, length: int, more: int) -> bool:
        """Take the `more` slots behind a region if they are free."""
        size = self._lengths.get(start + length, 0)
        if size < more:
            return False
        self._drop(start + length)
        if size > more:
            self._add(start + length + more, size - more)
        self.num_free -= more
        return True

    def release(self, start: int, length: int) -> None:
        """Give slots back, merging with their neighbours."""
        self.num_free += length
        size = self._lengths.get(start + length)
        if size is not None:
            self._drop(start + length)
            length += size
        index = bisect_left(self._starts, start)
        if index:
            before = self._starts[index - 1]
            if before + self._lengths[before] == start:
                length += self._lengths[before]
                self._drop(before)
                start = before
        self._add(start, length)

    def free_extents(self) -> list[Region]:
        """Return (start, slots) of every extent, in order."""
        return [(start, self._lengths[start]) for start in self._starts]

    def _add(self, start: int, length: int) -> None:
        insort(self._starts, start)
        self._lengths[start] = length

    def _drop(self, start: int) -> None:
        del self._lengths[start]
        del self._starts[bisect_left(self._starts, start)]
