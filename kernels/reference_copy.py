"""Writes and copies of blocks in plain torch: the oracles of `write_kv` and `copy_blocks`."""

from __future__ import annotations

import torch

__all__ = ["copy_blocks", "gather_blocks", "quantise", "scatter_blocks", "write_kv"]


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Store each token's K and V in its slot, token by token; see `write_kv.write_kv`."""
    for rows, pool, scale in ((key, k_pool, k_scale), (value, v_pool, v_scale)):
        for row, slot in zip(rows, slot_mapping.tolist(), strict=True):
            if slot >= 0:
                block_id, offset = divmod(slot, pool.shape[1])
                pool[block_id, offset] = row if scale is None else quantise(row, scale, pool.dtype)


def quantise(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `x / scale` rounded to the nearest value of `dtype` and saturated.

    Args:
        x: `[num_kv_heads, head_dim]`, any float dtype.
        scale: `[num_kv_heads]` or `[num_kv_heads, head_dim]` float32.
        dtype: int8 or float8_e4m3fn.
    """
    scaled = x.float() / (scale[:, None] if scale.ndim == 1 else scale)
    if dtype == torch.int8:
        return scaled.round().clamp(-128, 127).to(dtype)
    return scaled.clamp(-448, 448).to(dtype)


def copy_blocks(data: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy block to block, pair by pair; a negative source is skipped."""
    for source, target in pairs.tolist():
        if source >= 0:
            data[:, :, target] = data[:, :, source]


def gather_blocks(data: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """Return `[n, bytes_per_block]` uint8, a row for each block."""
    rows = [data[:, :, block_id].contiguous().view(-1) for block_id in block_ids.tolist()]
    return torch.stack(rows).view(torch.uint8)


def scatter_blocks(data: torch.Tensor, block_ids: torch.Tensor, contents: torch.Tensor) -> None:
    """Write rows of `gather_blocks` back, block by block."""
    for block_id, row in zip(block_ids.tolist(), contents, strict=True):
        data[:, :, block_id] = row.clone().view(data.dtype).view(data[:, :, block_id].shape)
