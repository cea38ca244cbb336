"""Small host arrays that go to a device together, in one copy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Field", "PackedBuffer"]

Field = tuple[tuple[int, ...], type[np.signedinteger[Any]]]
"""Shape and dtype, np.int32 or np.int64."""

# Pointers that stay multiples of this keep the kernels' specialisation, and so one compiled kernel.
_ALIGNMENT = 16
_MIN_SIZE = 4096


class PackedBuffer:
    """Owns a host buffer, pinned for a GPU, and its counterpart on the device.

    A step carves its arrays out of both, fills the host's, and uploads them all at once. Equal
    fields lie at equal addresses as long as the buffer doesn't grow; one with a fixed capacity
    never does, so that a CUDA graph can read it.

    Attributes:
        device: where `upload` copies to; on a CPU the counterpart is memory of its own, too.
        num_uploads: copies made so far.
    """

    def __init__(self, device: torch.device, *, capacity: int | None = None) -> None:
        """Make a buffer.

        Args:
            device: where the arrays are wanted.
            capacity: bytes that it is fixed to; None lets it grow.
        """
        self.device = device
        self.num_uploads = 0
        self._is_fixed = capacity is not None
        self._used = 0
        self._copied: torch.cuda.Event | None = None
        self._allocate(_MIN_SIZE if capacity is None else capacity)

    @staticmethod
    def size_of(fields: Mapping[str, Field]) -> int:
        """Return the bytes that `fields` take."""
        return sum(_padded(shape, dtype) for shape, dtype in fields.values())

    def carve(
        self, fields: Mapping[str, Field]
    ) -> tuple[dict[str, npt.NDArray[Any]], dict[str, torch.Tensor]]:
        """Lay arrays out, one after the other; their contents are what was there before.

        Waits until the last upload has been read from the host's memory, which is about to be
        overwritten.

        Returns:
            By name the arrays on the host, to be filled, and on the device, valid after `upload`.
            Both until the next `carve`.

        Raises:
            ValueError: they don't fit into a fixed capacity.
        """
        self._used = self.size_of(fields)
        if self._copied is not None:
            self._copied.synchronize()
        if self._used > len(self._host):
            if self._is_fixed:
                raise ValueError(
                    f"the arrays must fit into {len(self._host)} bytes, got {self._used}"
                )
            self._allocate(2 * self._used)
        on_host: dict[str, npt.NDArray[Any]] = {}
        on_device: dict[str, torch.Tensor] = {}
        start = 0
        memory = self._host.numpy()
        for name, (shape, dtype) in fields.items():
            end = start + math.prod(shape) * np.dtype(dtype).itemsize
            on_host[name] = memory[start:end].view(dtype).reshape(shape)
            torch_dtype = torch.int64 if dtype is np.int64 else torch.int32
            on_device[name] = self._device[start:end].view(torch_dtype).view(shape)
            start += _padded(shape, dtype)
        return on_host, on_device

    @torch.inference_mode()
    def upload(self) -> None:
        """Copy what was carved to the device, in the order of the current stream."""
        self.num_uploads += 1
        self._device[: self._used].copy_(self._host[: self._used], non_blocking=True)
        if self.device.type == "cuda":
            self._copied = self._copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def _allocate(self, size: int) -> None:
        is_gpu = self.device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=is_gpu)
        self._device = torch.zeros(size, dtype=torch.uint8, device=self.device)


def _padded(shape: tuple[int, ...], dtype: type[np.signedinteger[Any]]) -> int:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return -(-size // _ALIGNMENT) * _ALIGNMENT
