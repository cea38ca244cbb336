"""The tensors that hold K and V of every block. See docs/kv_layout.md for the layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from radixkv.model.triton_kernels import Kernels

__all__ = ["QUANTISED_DTYPES", "KVPool", "kv_bytes_per_block"]

QUANTISED_DTYPES = (torch.int8, torch.float8_e4m3fn)
"""Of a pool whose numbers stand for `number * scale`."""


def kv_bytes_per_block(
    num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Return the bytes that one block takes: K and V, all layers."""
    return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize


class KVPool:
    """Owns `[2, num_layers, num_blocks, block_size, num_kv_heads, head_dim]` of K and V.

    Which block holds what is the cache's business; the pool only stores and copies.

    Attributes:
        k, v: per layer, a view `[num_blocks, block_size, num_kv_heads, head_dim]`.
        k_slots, v_slots: per layer, the same memory as `[num_blocks * block_size, num_kv_heads,
            head_dim]`, indexed by slot (`block_id * block_size + offset`).
        k_scales, v_scales: per layer, float32 `[num_kv_heads, head_dim]`, what a stored number is
            multiplied by; None unless the dtype is one of `QUANTISED_DTYPES`.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        """Allocate a pool of zeros.

        Args:
            num_layers, num_blocks, block_size, num_kv_heads, head_dim: its shape.
            dtype: the model's, or one of `QUANTISED_DTYPES`.
            device: where K and V lie.
            k_scale, v_scale: float32 `[num_layers, num_kv_heads, head_dim]`, needed with a
                quantised dtype and meant for no other.
            kernels: copy blocks; None is what the device has, none on a CPU.

        Raises:
            ValueError: the scales don't fit the dtype or the shape.
            ConfigError: the device is a GPU and its kernels can't be imported.
        """
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = torch.device(device)
        self.k_scales = self._scales("k_scale", k_scale)
        self.v_scales = self._scales("v_scale", v_scale)
        if kernels is None and self.device.type != "cpu":
            from radixkv.model.triton_kernels import load_kernels

            kernels = load_kernels(self.device)
        self._kernels = kernels
        shape = (2, num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        self._bytes: npt.NDArray[np.uint8] | None = None  # on a CPU, [2 * layers, blocks, bytes]
        # Zeros, so that a slot never written can't hold a NaN.
        if self.device.type == "cpu":
            # numpy's zeros are the operating system's lazy zero pages, which cost nothing until
            # a block is used; torch writes every page.
            nbytes = math.prod(shape) * dtype.itemsize
            flat = torch.from_numpy(np.zeros(nbytes, dtype=np.uint8))
            self.data = flat.view(dtype).view(shape)
            # A few KiB for each layer of a block: threads would cost more than they gain.
            self._bytes = flat.numpy().reshape(2 * num_layers, num_blocks, -1)
        else:
            self.data = torch.zeros(shape, dtype=dtype, device=self.device)
        self.k = list(self.data[0].unbind(0))
        self.v = list(self.data[1].unbind(0))
        self.k_slots = [k.view(num_blocks * block_size, num_kv_heads, head_dim) for k in self.k]
        self.v_slots = [v.view(num_blocks * block_size, num_kv_heads, head_dim) for v in self.v]

    @property
    def nbytes(self) -> int:
        """Bytes of the pool."""
        return self.data.nbytes

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, all layers, for (source, destination) pairs, in one call.

        On a GPU the copies are enqueued, and what is enqueued later finds them made. No
        destination may appear twice or be a source of the same call.
        """
        if not pairs:
            return
        ids = self._upload(pairs)
        if self._kernels is not None:
            self._kernels.copy_blocks(self.data, ids)
            return
        # torch copies numbers of 8 bits by index as integers only.
        data = self.data.view(torch.uint8) if self.dtype.itemsize == 1 else self.data
        data.index_copy_(2, ids[:, 1], data.index_select(2, ids[:, 0]))

    def move_slots(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy the K and V of single tokens, all layers, for (source, destination) slots.

        All sources are read before anything is written; no destination may appear twice.
        """
        if not moves:
            return
        source, target = torch.tensor(moves, dtype=torch.int64, device=self.device).unbind(1)
        slots = self.data.flatten(2, 3)
        slots.index_copy_(2, target, slots.index_select(2, source))

    def gather_blocks(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Return a copy of whole blocks, all layers, in one call.

        Returns:
            `[n, bytes_per_block]` uint8 in host memory; a row is `[2, num_layers, block_size,
            num_kv_heads, head_dim]` of the pool's dtype.
        """
        if self._kernels is not None:
            blocks = self._kernels.gather_blocks(self.data, self._upload(block_ids))
            return self._download(blocks)
        assert self._bytes is not None
        rows = np.empty((len(block_ids), self._bytes.shape[0], self._bytes.shape[2]), np.uint8)
        for row, block_id in zip(rows, block_ids, strict=True):
            row[:] = self._bytes[:, block_id]
        return torch.from_numpy(rows.reshape(len(block_ids), -1))

    def scatter_blocks(self, block_ids: Sequence[int], contents: torch.Tensor) -> None:
        """Write back what `gather_blocks` returned, into the same or other blocks, in one call.

        Args:
            block_ids: no block twice.
            contents: `[n, bytes_per_block]` uint8, contiguous, in host memory.
        """
        if self._kernels is not None:
            if self.device.type == "cuda":
                # The caller may overwrite its own at once; a pinned copy is kept until it is read.
                staged = torch.empty(contents.shape, dtype=torch.uint8, pin_memory=True)
                contents = staged.copy_(contents).to(self.device, non_blocking=True)
            self._kernels.scatter_blocks(self.data, self._upload(block_ids), contents)
            return
        assert self._bytes is not None
        rows = contents.numpy().reshape(-1, self._bytes.shape[0], self._bytes.shape[2])
        for row, block_id in zip(rows, block_ids, strict=True):
            self._bytes[:, block_id] = row

    def _upload(self, ids: Sequence[int] | Sequence[tuple[int, int]]) -> torch.Tensor:
        on_host = torch.tensor(ids, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        # torch keeps pinned memory from being reused before the copy has been made.
        return on_host.to(self.device, non_blocking=True)

    def _download(self, blocks: torch.Tensor) -> torch.Tensor:
        if self.device.type != "cuda":
            return blocks.cpu()
        on_host = torch.empty(blocks.shape, dtype=blocks.dtype, pin_memory=True)
        on_host.copy_(blocks, non_blocking=True)
        # The caller reads it with no stream in between.
        torch.cuda.current_stream(self.device).synchronize()
        return on_host

    def _scales(self, name: str, scale: torch.Tensor | None) -> list[torch.Tensor] | None:
        if (scale is not None) != (self.dtype in QUANTISED_DTYPES):
            wanted = "needed" if scale is None else "not meant"
            raise ValueError(f"{name} is {wanted} for a pool of {self.dtype}")
        if scale is None:
            return None
        shape = (self.num_layers, self.num_kv_heads, self.head_dim)
        if scale.shape != shape or scale.dtype != torch.float32:
            raise ValueError(
                f"{name} must be float32 {list(shape)}, got {scale.dtype} {list(scale.shape)}"
            )
        return list(scale.to(self.device).contiguous().unbind(0))
