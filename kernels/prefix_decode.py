"""Decoding of sequences that share prefixes: a shared run of blocks is read once for all of them.

The queries of a group are one matrix, sequences times query heads of a KV head, multiplied with
the run's keys on tensor cores. Groups nest (a system prompt, then a conversation that forks); the
partial results of every level and of the private tails are merged by log-sum-exp.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv.kernels.attend_tile import attend_keys, load_query, store_tile
from radixkv.kernels.decode_groups import DecodeGroups
from radixkv.kernels.decode_plan import (
    allocate_parts,
    check_decode,
    choose_num_splits,
    count_multiprocessors,
    prefix_config,
)
from radixkv.kernels.merge import merge_parts
from radixkv.kernels.paged_decode import default_num_splits, launch_decode, paged_decode

__all__ = ["DecodeGroups", "prefix_config", "prefix_decode", "prefix_decode_kernel"]


def prefix_decode(
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    groups: DecodeGroups,
    scale: float,
    *,
    num_splits: int | None = None,
    num_prefix_splits: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return what `paged_decode` returns, reading every shared run once for its whole group.

    Args:
        query: as in `paged_decode`, and so are all that aren't named here.
        groups: which sequences share which blocks. A run is read through the table of the group's
            first sequence.
        num_splits: ranges of keys of each private tail; None chooses by the width of
            `block_tables`, too many if most of the tokens are shared.
        num_prefix_splits: ranges of keys of each shared run; None chooses the same way.
        workspace: float32 of at least `workspace_numel` elements for `num_levels *
            num_prefix_splits + num_splits` parts.

    Raises:
        ValueError: an argument isn't as documented.

    Cost:
        A run is read once for every 128 rows (64 if head_dim is 256) of its group: sequences
        times query heads of a KV head. Three launches and the filling of a small array; no
        synchronisation. Without groups it's `paged_decode`.

    Source:
        Cascade Inference (Ye et al., 2024); Hydragen (Juravsky et al., 2024).
    """
    if groups.num_groups == 0 or groups.num_levels == 0:
        return paged_decode(
            query, k_pool, v_pool, block_tables, seq_lens, scale, num_splits=num_splits,
            window=window, softcap=softcap, k_scale=k_scale, v_scale=v_scale, out=out,
            workspace=workspace, return_lse=return_lse,
        )  # fmt: skip
    inputs = check_decode(
        query, k_pool, v_pool, block_tables, seq_lens, scale,
        window=window, softcap=softcap, k_scale=k_scale, v_scale=v_scale, out=out,
    )  # fmt: skip
    groups.check(inputs.num_seqs, query.device)
    config = prefix_config(
        inputs.head_dim, inputs.block_size, query.dtype, inputs.k_pool.dtype,
        groups.max_group_rows, inputs.target,
    )  # fmt: skip
    row_tiles = triton.cdiv(groups.max_group_rows, config.tile_m)
    if num_splits is None:
        num_splits = default_num_splits(inputs, window, query.device)
    if num_prefix_splits is None:
        num_prefix_splits = choose_num_splits(
            groups.num_groups, inputs.num_kv_heads * row_tiles, inputs.max_seq_len,
            count_multiprocessors(query.device),
        )  # fmt: skip
    for name, number in (("num_splits", num_splits), ("num_prefix_splits", num_prefix_splits)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    if out is None:
        out = torch.empty_like(query)
    lse = None
    if return_lse:
        shape = (inputs.num_seqs, inputs.num_heads)
        lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    num_prefix_parts = groups.num_levels * num_prefix_splits
    part_out, part_lse = allocate_parts(
        workspace, num_prefix_parts + num_splits, inputs, query.device
    )
    # A sequence isn't in a group of every level.
    part_lse[:num_prefix_parts].fill_(float("-inf"))
    prefix_decode_kernel[(inputs.num_kv_heads * row_tiles, num_prefix_splits, groups.num_groups)](
        query,
        inputs.k_pool,
        inputs.v_pool,
        block_tables,
        seq_lens,
        groups.first_seq,
        groups.last_seq,
        groups.first_block,
        groups.last_block,
        groups.level,
        k_scale,
        v_scale,
        part_out,
        part_lse,
        *query.stride()[:2],
        *inputs.k_pool.stride()[:3],
        *inputs.v_pool.stride()[:3],
        block_tables.stride(0),
        *inputs.scale_strides,
        *part_out.stride()[:3],
        *part_lse.stride()[:2],
        row_tiles,
        scale,
        window,
        **inputs.constants(config, softcap),
    )
    launch_decode(
        query, inputs, block_tables, seq_lens, groups.start_lens, k_scale, v_scale,
        part_out[num_prefix_parts:], part_lse[num_prefix_parts:], scale, window, softcap,
    )  # fmt: skip
    merge_parts(part_out, part_lse, out, lse)
    return out if lse is None else (out, lse)


@triton.jit
def prefix_decode_kernel(
    query,
    k_pool,
    v_pool,
    block_tables,
    seq_lens,
    first_seqs,
    last_seqs,
    first_blocks,
    last_blocks,
    levels,
    k_scale,
    v_scale,
    out,
    lse,
    query_stride_seq,
    query_stride_head,
    k_stride_block,
    k_stride_slot,
    k_stride_head,
    v_stride_block,
    v_stride_slot,
    v_stride_head,
    table_stride_seq,
    k_scale_stride_head,
    k_scale_stride_dim,
    v_scale_stride_head,
    v_scale_stride_dim,
    out_stride_part,
    out_stride_seq,
    out_stride_head,
    lse_stride_part,
    lse_stride_seq,
    row_tiles,
    scale,
    window,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FP8_BITS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attend to one range of a group's shared keys with one tile of the group's rows.

    Grid: (KV heads times `row_tiles`, splits, groups); the tiles of a KV head are neighbours, so
    that all but the first find its keys in the L2 cache. Row `i * GROUP_SIZE + g` of a group is
    query head g of the KV head, of the group's i-th sequence. Scales and `window` may be None.
    """
    kv_head = tl.program_id(0) // row_tiles
    split = tl.program_id(1)
    group = tl.program_id(2)
    first_seq = tl.load(first_seqs + group)
    num_rows = (tl.load(last_seqs + group) - first_seq) * GROUP_SIZE
    first_row = tl.program_id(0) % row_tiles * TILE_M
    if first_row >= num_rows:
        return
    row = first_row + tl.arange(0, TILE_M)
    row_mask = row < num_rows
    seq = (first_seq + row // GROUP_SIZE).to(tl.int64)
    head = kv_head * GROUP_SIZE + row % GROUP_SIZE

    run_start = tl.load(first_blocks + group) * BLOCK_SIZE
    run_end = tl.load(last_blocks + group) * BLOCK_SIZE
    first_key = run_start
    if window is not None:
        seq_len = tl.load(seq_lens + seq, mask=row_mask, other=2147483647)
        row_start = seq_len - window
        # No row of the tile sees a key before this one.
        first_key = tl.maximum(run_start, tl.min(row_start, 0))
    ALIGN: tl.constexpr = TILE_N if TILE_N < BLOCK_SIZE else BLOCK_SIZE
    first_tile = first_key // ALIGN * ALIGN
    num_tiles = tl.cdiv(tl.maximum(run_end - first_tile, 0), TILE_N)
    split_len = tl.cdiv(num_tiles, tl.num_programs(1)) * TILE_N
    split_start = first_tile + split * split_len
    split_end = tl.minimum(split_start + split_len, run_end)
    if split_start >= split_end:
        return

    dim = tl.arange(0, PAD_DIM)
    mask = row_mask[:, None] & (dim < HEAD_DIM)[None, :]
    query_rows = query + seq * query_stride_seq + head * query_stride_head
    k_scale_row, v_scale_row = k_scale, v_scale
    if k_scale is not None:
        k_scale_row = k_scale + kv_head * k_scale_stride_head
        v_scale_row = v_scale + kv_head * v_scale_stride_head
    tile, factor = load_query(
        query_rows[:, None] + dim[None, :], mask, scale, k_scale_row, k_scale_stride_dim,
        HEAD_DIM, PAD_DIM, FP8_BITS, UPCAST,
    )  # fmt: skip
    acc = tl.zeros([TILE_M, PAD_DIM], tl.float32)
    row_max = tl.full([TILE_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_M], tl.float32)
    table = block_tables + first_seq.to(tl.int64) * table_stride_seq
    k_base = k_pool + kv_head.to(tl.int64) * k_stride_head
    v_base = v_pool + kv_head.to(tl.int64) * v_stride_head
    for start in tl.range(split_start, split_end, TILE_N):
        visible = None
        if window is not None:
            key = start + tl.arange(0, TILE_N)
            visible = (key[None, :] >= row_start[:, None]) & (key < split_end)[None, :]
        elif BLOCK_SIZE % TILE_N != 0:
            visible = (start + tl.arange(0, TILE_N) < split_end)[None, :]
        acc, row_max, row_sum = attend_keys(
            tile, acc, row_max, row_sum, start, split_end, visible, factor, table,
            k_base, v_base, k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
            HEAD_DIM, PAD_DIM, BLOCK_SIZE, TILE_N, SOFTCAP, FP8_BITS,
        )  # fmt: skip

    part = (tl.load(levels + group) * tl.num_programs(1) + split).to(tl.int64)
    out_rows = out + part * out_stride_part + seq * out_stride_seq + head * out_stride_head
    lse_rows = lse + part * lse_stride_part + seq * lse_stride_seq + head
    store_tile(
        out_rows[:, None] + dim[None, :], mask, lse_rows, row_mask, acc, row_max, row_sum,
        v_scale_row, v_scale_stride_dim, HEAD_DIM, PAD_DIM, FP8_BITS,
    )  # fmt: skip
