"""A growable int32 array, for token ids and block tables that are appended to and viewed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["Int32Array", "IntVector", "as_int32"]

Int32Array = npt.NDArray[np.int32]


def as_int32(values: Sequence[int] | npt.NDArray[np.integer] | Iterable[int]) -> Int32Array:
    """Return `values` as a contiguous `[n]` int32 array.

    Raises:
        ValueError: the values are not a flat list of integers that fit in 32 bits.
    """
    if not isinstance(values, np.ndarray):
        values = np.array(values if hasattr(values, "__len__") else list(values))
    if values.size == 0:
        return np.empty(0, dtype=np.int32)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ValueError(f"token ids must be a flat list of integers, got {values.dtype}")
    if values.dtype == np.int32:
        return np.ascontiguousarray(values)
    if int(values.max()) > 2**31 - 1 or int(values.min()) < -(2**31):
        raise ValueError("token ids must fit in 32 bits")
    return values.astype(np.int32)


class IntVector:
    """Owns `[len]` int32 in a buffer that doubles, so that appending is O(1) amortised."""

    __slots__ = ("_buffer", "_len")

    def __init__(self, values: Sequence[int] | npt.NDArray[np.integer] = ()) -> None:
        self._buffer: Int32Array = as_int32(values).copy()
        self._len = len(self._buffer)

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int) -> int:
        if not -self._len <= index < self._len:
            raise IndexError(f"index {index} out of range for length {self._len}")
        return int(self._buffer[index if index >= 0 else self._len + index])

    def __setitem__(self, index: int, value: int) -> None:
        if not 0 <= index < self._len:
            raise IndexError(f"index {index} out of range for length {self._len}")
        self._buffer[index] = value

    @property
    def view(self) -> Int32Array:
        """`[len]` int32, a view that is stale after the next append."""
        return self._buffer[: self._len]

    def extend(self, values: Sequence[int] | Int32Array) -> None:
        """Append `values`. Cost: O(len(values)) amortised."""
        needed = self._len + len(values)
        if needed > len(self._buffer):
            grown = np.empty(max(needed, 2 * len(self._buffer), 16), dtype=np.int32)
            grown[: self._len] = self.view
            self._buffer = grown
        self._buffer[self._len : needed] = values
        self._len = needed

    def append(self, value: int) -> None:
        """Append one value. Cost: O(1) amortised."""
        if self._len == len(self._buffer):
            self.extend((value,))
            return
        self._buffer[self._len] = value
        self._len += 1

    def truncate(self, length: int) -> None:
        """Drop everything from `length` on."""
        if not 0 <= length <= self._len:
            raise IndexError(f"length must be in 0..{self._len}, got {length}")
        self._len = length

    def to_bytes(self, start: int = 0, stop: int | None = None) -> bytes:
        """Return elements `start` to `stop` as little-endian int32 bytes."""
        return self.view[start:stop].tobytes()
