"""The host tier: evicted blocks in this machine's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from radixkv.cache.tiers import Entry, SlotIndex

__all__ = ["HostTier"]

Row = npt.NDArray[np.uint8]


class HostTier:
    """Owns a piece of memory with a row for each block, and knows which row holds which block.

    A block is found by its key and its label, see `BlockLabel`. The least recently used one makes
    room. Not thread-safe: the engine's thread only.
    """

    def __init__(self, capacity: int, content_bytes: int) -> None:
        self._index = SlotIndex(capacity)
        # Zero pages of the operating system: memory is taken as blocks come.
        self._memory = np.zeros((capacity, content_bytes), dtype=np.uint8)
        self._on_change: Callable[[bool, bytes], None] | None = None

    def __len__(self) -> int:
        return len(self._index)

    @property
    def capacity(self) -> int:
        """Blocks that fit."""
        return self._index.capacity

    def follow(self, on_change: Callable[[bool, bytes], None]) -> None:
        """Report each block that is here, and then every change; see `DiskTier.follow`."""
        self._on_change = on_change
        for entry in self._index.items():
            on_change(True, entry.tokens)

    def find(self, key: bytes, label: bytes) -> Row | None:
        """Return a block's content, `[content_bytes]` uint8, valid until the next `keep`."""
        slot = self._index.find(key, label)
        return None if slot is None else self._memory[slot]

    def touch(self, key: bytes, label: bytes) -> bool:
        """Make a block the most recently used; return whether it is here."""
        self._index.touch(key)
        return self._index.find(key, label) is not None

    def demote(self, key: bytes) -> None:
        """Make a block the first to make room, if it is here."""
        self._index.demote(key)

    def keep(
        self, key: bytes, label: bytes, content: Row, pass_down: Callable[[Entry, Row], None]
    ) -> None:
        """Copy a block in.

        Args:
            key, label: not here yet.
            content: `[content_bytes]` uint8.
            pass_down: called with the block that makes room and its content, if one must.
        """
        slot, victim = self._index.take()
        row = self._memory[slot]
        if victim is not None:
            self._report(False, victim.tokens)
        try:
            if victim is not None:
                pass_down(victim, row)
            row[:] = content
        except Exception:
            self._index.give_back(slot)
            raise
        self._index.put(key, label, slot)
        self._report(True, label)

    def discard(self, matches: Callable[[bytes], bool]) -> None:
        """Forget the blocks whose label matches. Cost: O(blocks)."""
        for entry in [entry for entry in self._index.items() if matches(entry.tokens)]:
            self._index.drop(entry.key)
            self._report(False, entry.tokens)

    def items(self) -> Iterator[Entry]:
        """Yield every block, least recently used first; `row` has the content of its slot."""
        return self._index.items()

    def row(self, slot: int) -> Row:
        """Return the content of a slot, `[content_bytes]` uint8."""
        row: Row = self._memory[slot]
        return row

    def check_integrity(self) -> None:
        """Raise ValueError unless every row is in one place."""
        self._index.check_integrity()

    def _report(self, stored: bool, label: bytes) -> None:
        if self._on_change is not None:
            self._on_change(stored, label)
