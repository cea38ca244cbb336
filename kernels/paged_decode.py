"""Attention of one new token per sequence over the paged pool, split along the keys.

A program takes the query heads that share a KV head as the rows of one matrix, and one of
`num_splits` equal ranges of the sequence's keys. Which range is worked out on the device from the
lengths, so that a captured graph stays right while sequences grow. The partial results are merged
by a second kernel; with one split the first writes the output itself.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv.kernels.attend_tile import attend_keys, load_query, store_tile
from radixkv.kernels.checks import check_tensor
from radixkv.kernels.decode_plan import (
    DecodeConfig,
    DecodeInputs,
    allocate_parts,
    check_decode,
    choose_num_splits,
    count_multiprocessors,
    decode_config,
    workspace_numel,
)
from radixkv.kernels.merge import merge_parts

__all__ = [
    "DecodeConfig",
    "choose_num_splits",
    "decode_config",
    "paged_attention_decode",
    "paged_decode",
    "paged_decode_kernel",
    "workspace_numel",
]


def paged_decode(
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    start_lens: torch.Tensor | None = None,
    num_splits: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return attention of each sequence's last token over all its tokens, its own included.

    Args:
        query: `[num_seqs, num_heads, head_dim]` float16, bfloat16 or float32; head_dim 64, 80,
            96, 128 or 256.
        k_pool: `[num_blocks, block_size, num_kv_heads, head_dim]`, any strides but the last; the
            dtype of `query`, or int8 or float8_e4m3fn with scales. block_size 8 to 256, a power
            of two.
        v_pool: the same shape and dtype as `k_pool`.
        block_tables: `[num_seqs, max_blocks]` int32; entries past the length aren't followed.
        seq_lens: `[num_seqs]` int32; 0 is a padding row, whose output is zeros.
        scale: factor of the scores.
        start_lens: `[num_seqs]` int32; keys before it are left out.
        num_splits: ranges of keys per sequence; None chooses by the width of `block_tables`.
        window: how many of the last keys are seen; None for all.
        softcap: bound c of the scores, `c * tanh(score / c)`.
        k_scale: `[num_kv_heads]` or `[num_kv_heads, head_dim]` float32, what stored K is
            multiplied by; for a quantised pool only.
        v_scale: the same for V.
        out: where to put the output, of the shape and dtype of `query`.
        workspace: float32 `[>= workspace_numel(num_splits, num_seqs, num_heads, head_dim)]` for
            the partial results; not used with one split.
        return_lse: whether the log-sum-exp is wanted too.

    Returns:
        The output, `[num_seqs, num_heads, head_dim]` in the dtype of `query`; with `return_lse`
        also the natural logarithm of the sum of the exponentials of the scores, `[num_seqs,
        num_heads]` float32, minus infinity where no key is seen.

    Raises:
        ValueError: an argument isn't as documented.

    Cost:
        K and V in `[start_len, seq_len)`, or the window of it, are read once: one launch, two with
        more than one split. No synchronisation, so that it can be captured in a CUDA graph.

    Source:
        Flash-Decoding (Dao et al., 2023).
    """
    inputs = check_decode(
        query, k_pool, v_pool, block_tables, seq_lens, scale,
        window=window, softcap=softcap, k_scale=k_scale, v_scale=v_scale, out=out,
    )  # fmt: skip
    if start_lens is not None:
        check_tensor("start_lens", start_lens, shape=seq_lens.shape, dtypes=(torch.int32,),
                     device=query.device, has_unit_stride=True)  # fmt: skip
    if num_splits is None:
        num_splits = default_num_splits(inputs, window, query.device)
    elif num_splits < 1:
        raise ValueError(f"num_splits must be at least 1, got {num_splits}")
    if out is None:
        out = torch.empty_like(query)
    lse = None
    if return_lse:
        shape = (inputs.num_seqs, inputs.num_heads)
        lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    if inputs.num_seqs:
        if num_splits == 1:
            part_out, part_lse = out[None], None if lse is None else lse[None]
        else:
            part_out, part_lse = allocate_parts(workspace, num_splits, inputs, query.device)
        launch_decode(
            query, inputs, block_tables, seq_lens, start_lens, k_scale, v_scale,
            part_out, part_lse, scale, window, softcap,
        )  # fmt: skip
        if num_splits > 1:
            assert part_lse is not None
            merge_parts(part_out, part_lse, out, lse)
    return out if lse is None else (out, lse)


def paged_attention_decode(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Return `paged_decode` for pools with the heads before the slots.

    Args:
        query: `[batch, heads, head_dim]`.
        key_pool: `[blocks, kv_heads, block_size, head_dim]`, the dtype of `query`.
        value_pool: the same shape and dtype as `key_pool`.
        block_tables: `[batch, max_blocks]` int32.
        seq_lens: `[batch]` int32, tokens in the pool, the query's own included.
        scale: factor of the scores.

    Returns:
        `[batch, heads, head_dim]` in the dtype of `query`.

    Raises:
        ValueError: an argument isn't as documented.
    """
    for name, pool in (("key_pool", key_pool), ("value_pool", value_pool)):
        check_tensor(name, pool, shape=(None, None, None, None), dtypes=(query.dtype,))
    out = paged_decode(
        query, key_pool.transpose(1, 2), value_pool.transpose(1, 2), block_tables, seq_lens, scale
    )
    assert isinstance(out, torch.Tensor)
    return out


def default_num_splits(inputs: DecodeInputs, window: int | None, device: torch.device) -> int:
    """Return `choose_num_splits` for the longest sequence that the block tables could hold."""
    max_len = inputs.max_seq_len if window is None else min(window, inputs.max_seq_len)
    return choose_num_splits(
        inputs.num_seqs, inputs.num_kv_heads, max_len, count_multiprocessors(device)
    )


def launch_decode(
    query: torch.Tensor,
    inputs: DecodeInputs,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    start_lens: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    part_out: torch.Tensor,
    part_lse: torch.Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    """Launch `paged_decode_kernel`; modifies `part_out` and `part_lse`.

    Args:
        query: as in `paged_decode`, and so are all that aren't named here.
        inputs: the checked arguments.
        part_out: `[num_splits, num_seqs, num_heads, head_dim]`, any float dtype.
        part_lse: `[num_splits, num_seqs, num_heads]` float32, contiguous in the last; or None.
    """
    config = decode_config(
        inputs.head_dim, inputs.block_size, query.dtype, inputs.k_pool.dtype,
        inputs.group_size, inputs.target,
    )  # fmt: skip
    head_tiles = triton.cdiv(inputs.group_size, config.tile_m)
    paged_decode_kernel[(inputs.num_kv_heads * head_tiles, inputs.num_seqs, part_out.shape[0])](
        query,
        inputs.k_pool,
        inputs.v_pool,
        block_tables,
        seq_lens,
        start_lens,
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
        *((0, 0) if part_lse is None else part_lse.stride()[:2]),
        scale,
        window,
        **inputs.constants(config, softcap),
    )


@triton.jit
def paged_decode_kernel(
    query,
    k_pool,
    v_pool,
    block_tables,
    seq_lens,
    start_lens,
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
    out_stride_split,
    out_stride_seq,
    out_stride_head,
    lse_stride_split,
    lse_stride_seq,
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
    """Attend to one range of keys of one sequence with the query heads of one KV head.

    Grid: (KV heads times tiles of query heads, sequences, splits). `start_lens`, scales, `lse` and
    `window` may be None.
    """
    HEAD_TILES: tl.constexpr = (GROUP_SIZE + TILE_M - 1) // TILE_M
    kv_head = tl.program_id(0) // HEAD_TILES
    seq = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2).to(tl.int64)
    seq_len = tl.load(seq_lens + seq)
    first_key = seq_len * 0
    if start_lens is not None:
        first_key = tl.load(start_lens + seq)
    if window is not None:
        first_key = tl.maximum(first_key, seq_len - window)
    # Tiles start where a tile can: they lie in one block, or start with one.
    ALIGN: tl.constexpr = TILE_N if TILE_N < BLOCK_SIZE else BLOCK_SIZE
    first_tile = first_key // ALIGN * ALIGN
    num_tiles = tl.cdiv(tl.maximum(seq_len - first_tile, 0), TILE_N)
    split_len = tl.cdiv(num_tiles, tl.num_programs(2)) * TILE_N
    split_start = first_tile + tl.program_id(2) * split_len
    split_end = tl.minimum(split_start + split_len, seq_len)

    row = tl.program_id(0) % HEAD_TILES * TILE_M + tl.arange(0, TILE_M)
    head = kv_head * GROUP_SIZE + row
    dim = tl.arange(0, PAD_DIM)
    row_mask = row < GROUP_SIZE
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
    table = block_tables + seq * table_stride_seq
    k_base = k_pool + kv_head.to(tl.int64) * k_stride_head
    v_base = v_pool + kv_head.to(tl.int64) * v_stride_head
    for start in tl.range(split_start, split_end, TILE_N):
        key = start + tl.arange(0, TILE_N)
        visible = ((key >= first_key) & (key < split_end))[None, :]
        acc, row_max, row_sum = attend_keys(
            tile, acc, row_max, row_sum, start, split_end, visible, factor, table,
            k_base, v_base, k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
            HEAD_DIM, PAD_DIM, BLOCK_SIZE, TILE_N, SOFTCAP, FP8_BITS,
        )  # fmt: skip

    out_rows = out + split * out_stride_split + seq * out_stride_seq + head * out_stride_head
    lse_rows = lse
    if lse is not None:
        lse_rows = lse + split * lse_stride_split + seq * lse_stride_seq + head
    store_tile(
        out_rows[:, None] + dim[None, :], mask, lse_rows, row_mask, acc, row_max, row_sum,
        v_scale_row, v_scale_stride_dim, HEAD_DIM, PAD_DIM, FP8_BITS,
    )  # fmt: skip
