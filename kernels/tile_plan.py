"""How the query rows of a batch become tiles, and how a tile is launched: host side, no kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["PrefillConfig", "choose_tile_rows", "device_target", "plan_tiles", "prefill_config"]

# Chips whose matrix units work on 64 rows and more and read K and V from shared memory.
_WIDE_TARGETS = ("sm_90", "sm_100", "sm_103")


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Launch parameters of `paged_prefill` and `tree_verify`.

    Attributes:
        tile_m: rows of a tile (tokens times heads of a KV head), a power of two from 16.
        tile_n: keys read per iteration, a power of two from 16.
        num_warps: of 32 threads (64 on AMD).
        num_stages: iterations whose loads are under way at once.
    """

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int


def prefill_config(
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    num_rows: int,
    target: str,
    *,
    has_mask: bool = False,
) -> PrefillConfig:
    """Return the launch parameters for tiles of `num_rows` rows.

    Args:
        head_dim: of query, K and V.
        block_size: tokens in a block of the pool.
        dtype: of the query.
        kv_dtype: of the pool.
        num_rows: tokens of a tile times the query heads of a KV head; see `choose_tile_rows`.
        target: "sm_80", "sm_90", "gfx942", ...; see `device_target`.
        has_mask: whether a tile of a bitmask is held, too.
    """
    pad_dim = _power_of_two(head_dim)
    tile_m = max(16, _power_of_two(num_rows))
    if dtype == torch.float32:
        # No tensor cores: the products are sums in registers, so tiles are small.
        num_warps = 4 if pad_dim <= 128 else 8
        return PrefillConfig(tile_m, 32 if pad_dim <= 64 else 16, num_warps, num_stages=1)
    if target.startswith("gfx"):
        return PrefillConfig(tile_m, 64 if pad_dim <= 128 else 32, num_warps=4, num_stages=2)
    if target in _WIDE_TARGETS:
        num_warps = 8 if tile_m >= 128 else 4
        tile_n = 64 if pad_dim <= 128 else 32
        if has_mask and target != "sm_90" and tile_m * pad_dim == 128 * 128:
            tile_n = 32  # The mask's words would spill.
        return PrefillConfig(tile_m, tile_n, num_warps, num_stages=3)
    # Operands lie in registers: these are the tiles that fit without spilling.
    num_warps = 8 if tile_m >= 128 or pad_dim > 128 else 4
    return PrefillConfig(tile_m, 64 if pad_dim <= 64 else 32, num_warps, num_stages=3)


def choose_tile_rows(max_query_len: int, group_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return how many tokens a tile should hold: the `tile_rows` of `plan_tiles` and the kernels.

    Args:
        max_query_len: new tokens of the longest chunk of the batch.
        group_size: query heads per KV head.
        head_dim: of query, K and V.
        dtype: of the query.
    """
    limit = 128 if head_dim <= 128 else 64
    if dtype == torch.float32:
        limit = 32 if head_dim <= 128 else 16
    tile_m = min(limit, max(16, _power_of_two(max_query_len * group_size)))
    return max(1, tile_m // group_size)


def plan_tiles(
    query_lens: Sequence[int] | torch.Tensor,
    tile_rows: int,
    context_lens: Sequence[int] | torch.Tensor | None = None,
    *,
    num_tiles: int | None = None,
) -> torch.Tensor:
    """Return the work list of a batch: which tokens each tile takes.

    Tiles that read the most keys come first, so that none of them starts when the others have
    finished.

    Args:
        query_lens: new tokens of each sequence; 0 is allowed and gives no tile.
        tile_rows: tokens a tile takes, from `choose_tile_rows`; the kernel gets the same number.
        context_lens: tokens of each sequence before the new ones; only the order depends on it.
        num_tiles: pad the list to this length with tiles that do nothing (graph ladder).

    Returns:
        `[num_tiles, 2]` int32 on the host: index of the sequence, -1 for padding, and the first
        token of the tile, counted from the sequence's first new one.

    Raises:
        ValueError: `tile_rows` isn't positive, the lists differ in length, a length is negative,
            or `num_tiles` is too small.

    Cost: O(tiles log tiles).
    """
    lens = torch.as_tensor(query_lens, dtype=torch.int64, device="cpu")
    contexts = torch.as_tensor(
        torch.zeros_like(lens) if context_lens is None else context_lens,
        dtype=torch.int64,
        device="cpu",
    )
    if tile_rows < 1:
        raise ValueError(f"tile_rows must be positive, got {tile_rows}")
    if lens.ndim != 1 or lens.shape != contexts.shape:
        raise ValueError(
            f"query_lens and context_lens must be lists of one length, got shapes "
            f"{list(lens.shape)} and {list(contexts.shape)}"
        )
    if lens.numel() and min(int(lens.min()), int(contexts.min())) < 0:
        raise ValueError("query_lens and context_lens must not be negative")
    counts = (lens + tile_rows - 1) // tile_rows
    seqs = torch.repeat_interleave(torch.arange(len(lens)), counts)
    index = torch.arange(len(seqs)) - (counts.cumsum(0) - counts)[seqs]
    num_keys = contexts[seqs] + torch.minimum((index + 1) * tile_rows, lens[seqs])
    order = torch.argsort(num_keys, descending=True, stable=True)
    tiles = torch.stack([seqs, index * tile_rows], dim=1)[order].to(torch.int32)
    if num_tiles is None:
        return tiles
    if num_tiles < len(tiles):
        raise ValueError(f"num_tiles must be at least {len(tiles)}, got {num_tiles}")
    padding = torch.tensor([[-1, 0]], dtype=torch.int32).expand(num_tiles - len(tiles), 2)
    return torch.cat([tiles, padding])


def device_target(device: torch.device) -> str:
    """Return the `target` of `prefill_config` for a device; of a CPU, the interpreter's."""
    if device.type == "cpu":
        return "sm_80"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
