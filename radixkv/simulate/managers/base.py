"""What every memory manager does: give a request memory, let it grow, take it back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from radixkv.simulate.traffic import Request

__all__ = ["WATERMARK", "Allocation", "MemoryManager", "Usage"]

WATERMARK = 0.01
"""Share of the memory that a new request must leave free, as in vLLM, so that the running ones can
grow a while before one must be preempted. For managers that give memory out bit by bit."""


@dataclass(slots=True, eq=False)
class Allocation:
    """What a request holds; slots and tokens are of all its samples.

    Attributes:
        limit: tokens a sample may store before it must grow.
        slots: memory held by this request alone, in tokens.
        stored: tokens of the prompt in those slots.
        needed: slots that will hold a token before the next growth or the end.
        rounding: slots that the allocator added to what was asked.
        num_cached: prompt tokens found in the cache.
    """

    request: Request
    limit: int
    slots: float
    stored: int
    needed: float
    rounding: float = 0.0
    num_cached: int = 0


class Usage(NamedTuple):
    """What the memory is used for at a moment, in tokens; the parts sum to all of it.

    Attributes:
        used: holds the state of a token of a running request, shared ones counted once.
        cached: holds a token that no running request uses; can be evicted at any time.
        reserved: will hold a token of the request that holds it.
        internal: held by a request that will never use it.
        external: lost by the allocator: what it rounds up by, and what is free but of no use to
            the request that waits for memory.
        free: the rest.
    """

    used: float
    cached: float
    reserved: float
    internal: float
    external: float
    free: float


class MemoryManager(ABC):
    """Owns `total` slots, each for the KV of one token, and the sums over what is held.

    Attributes:
        name: on the command line and in reports.
        reuses: whether a prompt may find what earlier ones left.
    """

    name: str
    reuses = False

    def __init__(self, total: int) -> None:
        self.total = total
        self.num_held = 0
        self.slots = 0.0
        self.stored = 0
        self.needed = 0.0
        self.rounding = 0.0
        self.num_moved = 0  # tokens copied to make room, ever

    @property
    def cached(self) -> float:
        """Slots whose content may be reused or evicted."""
        return 0.0

    @property
    def shared(self) -> float:
        """Slots that running requests read but none holds alone; all hold a token."""
        return 0.0

    def admit(self, request: Request, generated: int = 0) -> Allocation | None:
        """Give memory to a request, or return None if it must wait.

        Args:
            request: the request.
            generated: tokens each sample has stored already, of one that was preempted.
        """
        allocation = self._allocate(request, generated)
        if allocation is not None:
            self.num_held += 1
            self._count(allocation, 1)
        return allocation

    def grow(self, allocation: Allocation) -> bool:
        """Raise the limit by at least one token; return False, changing nothing, if it can't."""
        self._count(allocation, -1)
        done = self._extend(allocation)
        self._count(allocation, 1)
        return done

    def computed(self, allocation: Allocation) -> None:  # noqa: B027 - most have nothing to do
        """Note that the KV of the whole prompt is there; others may find it from now on."""

    def release(self, allocation: Allocation, generated: int = 0) -> None:
        """Take everything back.

        Args:
            allocation: whose.
            generated: tokens that each sample had stored, of one that has ended; what reuses
                keeps them.
        """
        self.num_held -= 1
        self._count(allocation, -1)
        self._free(allocation, generated)

    def seal(self) -> None:  # noqa: B027 - most have nothing to do
        """Note that a step begins with what has been admitted."""

    def usage(self, generated: float, *, is_blocked: bool) -> Usage:
        """Split the memory.

        Args:
            generated: tokens that the running requests have stored behind their prompts.
            is_blocked: whether a request waits for memory.
        """
        free = self.total - self.slots - self.shared - self.cached
        private = self.stored + generated
        return Usage(
            used=self.shared + private,
            cached=self.cached,
            reserved=self.needed - private,
            internal=self.slots - self.rounding - self.needed,
            external=self.rounding + (free if is_blocked else 0.0),
            free=0.0 if is_blocked else free,
        )

    @abstractmethod
    def _allocate(self, request: Request, generated: int) -> Allocation | None: ...

    @abstractmethod
    def _extend(self, allocation: Allocation) -> bool: ...

    @abstractmethod
    def _free(self, allocation: Allocation, generated: int) -> None: ...

    def _count(self, allocation: Allocation, sign: int) -> None:
        self.slots += sign * allocation.slots
        self.stored += sign * allocation.stored
        self.needed += sign * allocation.needed
        self.rounding += sign * allocation.rounding
