"""Causal attention of ragged chunks of new tokens over the paged pool, in one launch.

A program takes one tile: up to `tile_rows` consecutive tokens of one sequence, times the query
heads of one KV head, packed into the rows of one matrix (row `t * group_size + g`), so that a
short chunk, even a single token, feeds a tensor core with every head that reads the same keys.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from radixkv.kernels.attend_tile import attend_keys, load_query, store_tile
from radixkv.kernels.checks import FLOAT_DTYPES, check_tensor
from radixkv.kernels.decode_plan import BLOCK_SIZES, HEAD_DIMS, has_fp8_loads
from radixkv.kernels.tile_plan import (
    PrefillConfig,
    choose_tile_rows,
    device_target,
    plan_tiles,
    prefill_config,
)

__all__ = [
    "PrefillConfig",
    "choose_tile_rows",
    "launch_arguments",
    "paged_prefill",
    "paged_prefill_kernel",
    "plan_tiles",
    "prefill_config",
]

_QUANTISED = (torch.int8, torch.float8_e4m3fn)


def paged_prefill(
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    *,
    tiles: torch.Tensor,
    tile_rows: int,
    window: int | None = None,
    softcap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return causal attention of each sequence's last tokens over all its tokens.

    The new tokens' K and V must be in the pool already. The token at position p sees positions
    0 to p, or the last `window` of them. Nothing here waits for the device, and the grid depends
    on shapes only, so the call can be captured in a CUDA graph.

    Args:
        query: `[num_tokens, num_heads, head_dim]` float16, bfloat16 or float32; sequence i owns
            rows `query_start_loc[i]` to `query_start_loc[i + 1]`. Any strides, the last 1.
        k_pool: `[num_blocks, block_size, num_kv_heads, head_dim]`, any strides, the last 1; of the
            query's dtype, or int8 or float8_e4m3fn with scales.
        v_pool: as `k_pool`.
        block_tables: `[num_seqs, max_blocks]` int32; entries past `ceil(seq_len / block_size)`
            aren't read.
        seq_lens: `[num_seqs]` int32, the new tokens included.
        query_start_loc: `[num_seqs + 1]` int32.
        scale: positive factor of the scores.
        tiles: `[num_tiles, 2]` int32, the result of `plan_tiles` on the query's device. Rows that
            no tile covers are left unwritten.
        tile_rows: what `tiles` was planned with.
        window: tokens a token sees, itself included.
        softcap: scores become `softcap * tanh(score / softcap)`.
        k_scale: positive float32 `[num_kv_heads]` or `[num_kv_heads, head_dim]`, for a quantised
            pool: K is stored times scale.
        v_scale: likewise for V.
        out: where to write the output; allocated if None.
        lse: `[num_tokens, num_heads]` float32; filled with the natural log of the sum of the
            exponentials of each row's scores.

    Returns:
        `out`, shape and dtype of the query.

    Raises:
        ValueError: a shape, dtype, device or option isn't as above.

    Source:
        FlashAttention-2 (Dao, 2023); PagedAttention (Kwon et al., 2023).
    """
    out = torch.empty_like(query) if out is None else out
    args, constants = launch_arguments(
        query, k_pool, v_pool, block_tables, seq_lens, query_start_loc, scale, tiles, tile_rows,
        window, softcap, k_scale, v_scale, out, lse,
    )  # fmt: skip
    grid = (tiles.shape[0] * k_pool.shape[2],)
    if grid[0]:
        paged_prefill_kernel[grid](*args, **constants)
    return out


def launch_arguments(
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    tiles: torch.Tensor,
    tile_rows: int,
    window: int | None,
    softcap: float | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    has_mask: bool = False,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Check the arguments that both prefill kernels take; return positional and constant ones.

    Raises:
        ValueError: see `paged_prefill`.
    """
    check_tensor(
        "query", query, shape=(None, None, None), dtypes=FLOAT_DTYPES, has_unit_stride=True
    )
    num_tokens, num_heads, head_dim = query.shape
    device = query.device
    pool_dtypes = (query.dtype, *_QUANTISED)
    check_tensor(
        "k_pool", k_pool, shape=(None, None, None, head_dim), dtypes=pool_dtypes, device=device,
        has_unit_stride=True,
    )  # fmt: skip
    check_tensor(
        "v_pool", v_pool, shape=k_pool.shape, dtypes=(k_pool.dtype,), device=device,
        has_unit_stride=True,
    )  # fmt: skip
    num_kv_heads, block_size = k_pool.shape[2], k_pool.shape[1]
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim must be one of {HEAD_DIMS}, got {head_dim}")
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size must be one of {BLOCK_SIZES}, got {block_size}")
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads must be a multiple of num_kv_heads ({num_kv_heads}), got {num_heads}"
        )
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        # Offsets within a block are 32-bit in the kernels, only those of blocks are 64-bit.
        if pool.stride(1) * block_size >= 2**31:
            raise ValueError(f"{name}'s slots must be near each other, got strides {pool.stride()}")
    integers: dict[str, Any] = {"dtypes": (torch.int32,), "device": device, "has_unit_stride": True}
    num_seqs = seq_lens.shape[0] if seq_lens.ndim else 0
    check_tensor("seq_lens", seq_lens, shape=(num_seqs,), **integers)
    check_tensor("block_tables", block_tables, shape=(num_seqs, None), **integers)
    check_tensor("query_start_loc", query_start_loc, shape=(num_seqs + 1,), **integers)
    check_tensor("tiles", tiles, shape=(None, 2), **integers)
    check_tensor(
        "out", out, shape=query.shape, dtypes=(query.dtype,), device=device, has_unit_stride=True
    )
    if lse is not None:
        check_tensor(
            "lse", lse, shape=(num_tokens, num_heads), dtypes=(torch.float32,), device=device,
            has_unit_stride=True,
        )  # fmt: skip
    for name, value in (
        ("scale", scale),
        ("softcap", softcap),
        ("window", window),
        ("tile_rows", tile_rows),
    ):
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
    k_scales = _scale_arguments("k_scale", k_scale, k_pool)
    v_scales = _scale_arguments("v_scale", v_scale, v_pool)

    group_size = num_heads // num_kv_heads
    most_rows = choose_tile_rows(1 << 30, group_size, head_dim, query.dtype)
    if tile_rows > most_rows:
        raise ValueError(f"tile_rows must be at most {most_rows}, got {tile_rows}")
    target = device_target(device)
    config = prefill_config(
        head_dim, block_size, query.dtype, k_pool.dtype, tile_rows * group_size, target,
        has_mask=has_mask,
    )  # fmt: skip
    has_fp8_bits = k_pool.dtype == torch.float8_e4m3fn and not has_fp8_loads(target)
    if has_fp8_bits:
        k_pool, v_pool = k_pool.view(torch.uint8), v_pool.view(torch.uint8)
    args = (
        out, lse, query, k_pool, v_pool, *k_scales, *v_scales, block_tables, seq_lens,
        query_start_loc, tiles, scale, num_kv_heads, *out.stride()[:2],
        lse.stride(0) if lse is not None else 0, *query.stride()[:2], *k_pool.stride()[:3],
        *v_pool.stride()[:3], block_tables.stride(0),
    )  # fmt: skip
    constants = {
        "TILE_ROWS": tile_rows,
        "GROUP_SIZE": group_size,
        "HEAD_DIM": head_dim,
        "PAD_DIM": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": block_size,
        "TILE_M": config.tile_m,
        "TILE_N": config.tile_n,
        "WINDOW": window,
        "SOFTCAP": softcap,
        "FP8_BITS": has_fp8_bits,
        # The interpreter has no bfloat16 products.
        "UPCAST": triton.knobs.runtime.interpret and query.dtype == torch.bfloat16,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    return args, constants


@triton.jit
def paged_prefill_kernel(
    out, lse, query, k_pool, v_pool,
    k_scale, k_scale_head, k_scale_dim, v_scale, v_scale_head, v_scale_dim,
    block_tables, seq_lens, query_start_loc, tiles, scale, num_kv_heads,
    out_token, out_head, lse_token, query_token, query_head,
    k_block, k_slot, k_head, v_block, v_slot, v_head, table_seq,
    TILE_ROWS: tl.constexpr, GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, FP8_BITS: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute one tile of one KV head; the strides are named after what a step moves over."""
    tile = tl.program_id(0) // num_kv_heads
    kv_head = tl.program_id(0) % num_kv_heads
    seq = tl.load(tiles + tile * 2)
    if seq < 0:
        return
    first_row = tl.load(tiles + tile * 2 + 1)
    query_start = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - query_start
    seq_len = tl.load(seq_lens + seq)
    num_rows = tl.minimum(query_len - first_row, TILE_ROWS)

    row = tl.arange(0, TILE_M)
    dim = tl.arange(0, PAD_DIM)
    token = (query_start + first_row + row // GROUP_SIZE).to(tl.int64)
    head = kv_head * GROUP_SIZE + row % GROUP_SIZE
    is_row = row < num_rows * GROUP_SIZE
    mask = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    if k_scale is not None:
        k_scale += kv_head * k_scale_head
    q_pointers = query + token[:, None] * query_token + head[:, None] * query_head + dim[None, :]
    q, factor = load_query(
        q_pointers, mask, scale, k_scale, k_scale_dim, HEAD_DIM, PAD_DIM, FP8_BITS, UPCAST
    )

    first_pos = seq_len - query_len + first_row
    last_pos = first_pos + num_rows - 1
    pos = first_pos + row // GROUP_SIZE
    # All rows see all of [full_start, full_end); at its sides, some rows see some keys.
    full_end = (first_pos + 1) // TILE_N * TILE_N
    start = 0
    full_start = 0
    if WINDOW is not None:
        start = tl.maximum(first_pos - WINDOW + 1, 0) // TILE_N * TILE_N
        full_start = tl.cdiv(tl.maximum(last_pos - WINDOW + 1, 0), TILE_N) * TILE_N
        full_start = tl.minimum(full_start, full_end)
    table = block_tables + seq.to(tl.int64) * table_seq
    k_base = k_pool + kv_head.to(tl.int64) * k_head
    v_base = v_pool + kv_head.to(tl.int64) * v_head
    acc = tl.zeros([TILE_M, PAD_DIM], dtype=tl.float32)
    row_max = tl.full([TILE_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([TILE_M], dtype=tl.float32)
    for key_start in tl.range(full_start, full_end, TILE_N):
        acc, row_max, row_sum = attend_keys(
            q, acc, row_max, row_sum, key_start, full_end, None, factor, table, k_base, v_base,
            k_block, k_slot, v_block, v_slot,
            HEAD_DIM, PAD_DIM, BLOCK_SIZE, TILE_N, SOFTCAP, FP8_BITS,
        )  # fmt: skip
    num_left = (full_start - start) // TILE_N
    num_right = tl.cdiv(last_pos + 1 - full_end, TILE_N)
    for i in tl.range(0, num_left + num_right):
        key_start = tl.where(i < num_left, start + i * TILE_N, full_end + (i - num_left) * TILE_N)
        key = key_start + tl.arange(0, TILE_N)
        visible = key[None, :] <= pos[:, None]
        if WINDOW is not None:
            visible = visible & (key[None, :] > pos[:, None] - WINDOW)
        acc, row_max, row_sum = attend_keys(
            q, acc, row_max, row_sum, key_start, last_pos + 1, visible, factor, table, k_base,
            v_base, k_block, k_slot, v_block, v_slot,
            HEAD_DIM, PAD_DIM, BLOCK_SIZE, TILE_N, SOFTCAP, FP8_BITS,
        )  # fmt: skip

    if v_scale is not None:
        v_scale += kv_head * v_scale_head
    out_pointers = out + token[:, None] * out_token + head[:, None] * out_head + dim[None, :]
    lse_pointers = None
    if lse is not None:
        lse_pointers = lse + token * lse_token + head
    store_tile(
        out_pointers, mask, lse_pointers, is_row, acc, row_max, row_sum, v_scale, v_scale_dim,
        HEAD_DIM, PAD_DIM, FP8_BITS,
    )  # fmt: skip


def _scale_arguments(
    name: str, scale: torch.Tensor | None, pool: torch.Tensor
) -> tuple[torch.Tensor | None, int, int]:
    """Return the scale with the strides of head and channel, checked against the pool."""
    num_kv_heads, head_dim = pool.shape[2:]
    if (scale is None) == (pool.dtype in _QUANTISED):
        needed = "is needed for" if scale is None else "must be None for"
        raise ValueError(f"{name} {needed} a pool of {pool.dtype}")
    if scale is None:
        return None, 0, 0
    shape = (num_kv_heads, head_dim) if scale.ndim == 2 else (num_kv_heads,)
    check_tensor(name, scale, shape=shape, dtypes=(torch.float32,), device=pool.device)
    return scale, scale.stride(0), scale.stride(1) if scale.ndim == 2 else 0
