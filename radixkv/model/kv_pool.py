"""The tensors that hold K and V of every block. See docs/kv_layout.md for the layout."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["KVPool", "kv_bytes_per_block"]


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
    ) -> None:
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = torch.device(device)
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
        self._by_block = self.data.permute(2, 0, 1, 3, 4, 5)
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

        No destination may appear twice or be a source of the same call.
        """
        if not pairs:
            return
        src = torch.tensor([s for s, _ in pairs], dtype=torch.int64, device=self.device)
        dst = torch.tensor([d for _, d in pairs], dtype=torch.int64, device=self.device)
        self.data.index_copy_(2, dst, self.data.index_select(2, src))

    def gather_blocks(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Return a copy of whole blocks, all layers, in one call.

        Returns:
            `[n, bytes_per_block]` uint8 in host memory; a row is `[2, num_layers, block_size,
            num_kv_heads, head_dim]` of the pool's dtype.
        """
        if self._bytes is not None:
            rows = np.empty((len(block_ids), self._bytes.shape[0], self._bytes.shape[2]), np.uint8)
            for row, block_id in zip(rows, block_ids, strict=True):
                row[:] = self._bytes[:, block_id]
            return torch.from_numpy(rows.reshape(len(block_ids), -1))
        ids = torch.tensor(block_ids, dtype=torch.int64, device=self.device)
        blocks = self._by_block.index_select(0, ids)
        return blocks.flatten(1).view(torch.uint8).cpu()

    def scatter_blocks(self, block_ids: Sequence[int], contents: torch.Tensor) -> None:
        """Write back what `gather_blocks` returned, into the same or other blocks, in one call.

        Args:
            block_ids: no block twice.
            contents: `[n, bytes_per_block]` uint8, contiguous, in host memory.
        """
        if self._bytes is not None:
            rows = contents.numpy().reshape(-1, self._bytes.shape[0], self._bytes.shape[2])
            for row, block_id in zip(rows, block_ids, strict=True):
                self._bytes[:, block_id] = row
            return
        ids = torch.tensor(block_ids, dtype=torch.int64, device=self.device)
        blocks = contents.view(self.dtype).view(len(block_ids), *self._by_block.shape[1:])
        self._by_block.index_copy_(0, ids, blocks.to(self.device))
