"""What to bring back for a request, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LoadPlan", "PlannedBlock", "TransferCosts"]

# Assumed until something was measured, bytes/s.
FIRST_RATES = {"host": 2e9, "disk": 5e8}
LOAD_OVERHEAD_S = 2e-4
MIN_MEASURED_TOKENS = 32  # a step with fewer says little about the speed of prefill


@dataclass(frozen=True, slots=True)
class PlannedBlock:
    """A block found in a tier; `content` is set if it has been read from disk."""

    key: bytes
    tokens: bytes
    tier: str
    content: bytes | None = None

    @property
    def is_unread(self) -> bool:
        """Whether the block is on disk only."""
        return self.tier == "disk" and self.content is None


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The blocks to bring back for a request, which continue block `first` of its prompt."""

    first: int
    blocks: list[PlannedBlock]


class TransferCosts:
    """Owns what was measured of transfers and of prefill, and decides by it.

    Attributes:
        rates: bytes/s from host memory to the pool, and from disk to host memory.
        prefill_rate: tokens/s; None before the first measurement.
    """

    def __init__(self, block_size: int, content_bytes: int) -> None:
        self.rates = dict(FIRST_RATES)
        self.prefill_rate: float | None = None
        self._block_size = block_size
        self._content_bytes = content_bytes

    def record_transfer(self, tier: str, num_bytes: int, seconds: float) -> None:
        """Learn the speed of a tier."""
        if num_bytes and seconds > 0:
            self.rates[tier] = _mean(self.rates[tier], num_bytes / seconds)

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """Learn the speed of prefill from a step."""
        if num_tokens >= MIN_MEASURED_TOKENS and seconds > 0:
            rate = num_tokens / seconds
            before = self.prefill_rate
            self.prefill_rate = rate if before is None else _mean(before, rate)

    def num_worth_loading(self, blocks: list[PlannedBlock]) -> int:
        """Return how many of the blocks it saves most time to bring back."""
        if self.prefill_rate is None:
            return len(blocks)
        compute_s = self._block_size / self.prefill_rate
        best, saved, most = 0, -LOAD_OVERHEAD_S, 0.0
        for count, block in enumerate(blocks, start=1):
            load_s = self._content_bytes / self.rates["host"]
            if block.is_unread:
                load_s += self._content_bytes / self.rates["disk"]
            saved += compute_s - load_s
            if saved > most:
                best, most = count, saved
        return best


def _mean(old: float, new: float) -> float:
    return (old + new) / 2
