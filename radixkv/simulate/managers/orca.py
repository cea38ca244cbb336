"""Orca: one contiguous region per answer, reserved when it starts, from a buddy allocator."""

from __future__ import annotations

from abc import abstractmethod

from radixkv.simulate.managers.base import Allocation, MemoryManager
from radixkv.simulate.managers.buddy import Buddy
from radixkv.simulate.traffic import Request

__all__ = ["OrcaMax", "OrcaOracle", "OrcaPow2"]

Region = tuple[int, int]


class Orca(MemoryManager):
    """Reserves what it takes the answer's length to be; the variants differ in what they take.

    Source: PagedAttention (arXiv:2309.06180), section 6.1, which builds these three variants since
    Orca (OSDI 2022) isn't public, with a buddy allocator.
    """

    def __init__(self, total: int, max_len: int) -> None:
        super().__init__(total)
        self.max_len = max_len
        self.buddy = Buddy(total)
        self._regions: dict[Allocation, list[Region]] = {}

    @abstractmethod
    def reservation(self, request: Request) -> int:
        """Return the slots reserved for one answer and its prompt."""

    def _allocate(self, request: Request, generated: int) -> Allocation | None:
        if request.final_len > self.max_len:
            return None
        asked = self.reservation(request)
        regions: list[Region] = []
        for _ in range(request.num_samples):
            region = self.buddy.allocate(asked)
            if region is None:
                for taken in regions:
                    self.buddy.release(*taken)
                return None
            regions.append(region)
        slots = sum(length for _, length in regions)
        n = request.num_samples
        allocation = Allocation(
            request,
            limit=asked,
            slots=float(slots),
            stored=n * request.prompt_len,
            needed=float(n * request.final_len),
            rounding=float(slots - n * asked),
        )
        self._regions[allocation] = regions
        return allocation

    def _extend(self, allocation: Allocation) -> bool:
        return False

    def _free(self, allocation: Allocation, generated: int) -> None:
        for region in self._regions.pop(allocation):
            self.buddy.release(*region)


class OrcaOracle(Orca):
    """Knows the answer's length beforehand: no real system can do better with reservations."""

    name = "orca-oracle"

    def reservation(self, request: Request) -> int:
        """Return exactly what the request will need."""
        return request.final_len


class OrcaPow2(Orca):
    """Reserves the next power of two of the answer's length: at most twice too much."""

    name = "orca-pow2"

    def reservation(self, request: Request) -> int:
        """Return the prompt and the next power of two, at most `max_len`."""
        answer = 1 << max(request.output_len - 1, 0).bit_length()
        return min(request.prompt_len + answer, self.max_len)


class OrcaMax(Orca):
    """Reserves the longest length the model has."""

    name = "orca-max"

    def reservation(self, request: Request) -> int:
        """Return `max_len`."""
        return self.max_len
