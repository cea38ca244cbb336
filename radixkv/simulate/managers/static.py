"""Static reservation: a slot of the longest length for each request of a batch."""

from __future__ import annotations

from radixkv.simulate.managers.base import Allocation, MemoryManager
from radixkv.simulate.traffic import Request

__all__ = ["StaticReservation"]


class StaticReservation(MemoryManager):
    """Reserves `max_len` slots per answer, for a batch that runs until its last answer is done.

    Nobody joins a batch that has started, and nobody's memory is given back before its end.
    Source: FasterTransformer, with batches as large as the memory allows, as PagedAttention
    (arXiv:2309.06180, section 6.1) compares with it.
    """

    name = "static"

    def __init__(self, total: int, max_len: int) -> None:
        super().__init__(total)
        self.max_len = max_len
        self._taken = 0
        self._left = 0  # slots of the batch whose requests are done
        self._is_sealed = False

    def seal(self) -> None:
        """Close the batch."""
        self._is_sealed = True

    def _allocate(self, request: Request, generated: int) -> Allocation | None:
        n = request.num_samples
        if self._is_sealed or request.final_len > self.max_len:
            return None
        if (self._taken + n) * self.max_len > self.total:
            return None
        self._taken += n
        return Allocation(
            request,
            limit=self.max_len,
            slots=float(n * self.max_len),
            stored=n * request.prompt_len,
            needed=float(n * request.final_len),
        )

    def _extend(self, allocation: Allocation) -> bool:
        return False

    def _free(self, allocation: Allocation, generated: int) -> None:
        slots = allocation.request.num_samples * self.max_len
        self._left += slots
        self.slots += slots
        if self.num_held == 0:
            self.slots -= self._left
            self._left = self._taken = 0
            self._is_sealed = False
