"""Attention of a tree of drafted tokens over the paged pool: what speculative decoding verifies.

As `paged_prefill`, but the new tokens of a sequence are nodes of a tree, or any other set of which
each row sees some: a bitmask says which. The tokens before them are seen by all.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv.kernels.attend_tile import attend_keys, load_query, store_tile
from radixkv.kernels.checks import check_tensor
from radixkv.kernels.paged_prefill import launch_arguments

__all__ = ["pack_tree_mask", "tree_verify", "tree_verify_kernel"]


def tree_verify(
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    *,
    tree_mask: torch.Tensor,
    tiles: torch.Tensor,
    tile_rows: int,
    positions: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention of each sequence's last tokens over the ones before and those of a mask.

    Row i of a sequence sees its whole context, which is the tokens before the new ones, and the
    new tokens whose bits are set in row i of the mask: for a tree, its ancestors and itself.
    Siblings have slots of their own in the pool, so slots past the context are in the order of
    the rows, not of positions. A row that sees no token at all gets zeros.

    Args:
        query: as in `paged_prefill`, and so are all arguments not listed here.
        k_pool: of the new tokens, K is rotated for their depth in the tree, not for their slot.
        v_pool: as `k_pool`.
        block_tables: as in `paged_prefill`.
        seq_lens: as in `paged_prefill`; the new tokens are all nodes, however deep.
        query_start_loc: as in `paged_prefill`.
        scale: as in `paged_prefill`.
        tree_mask: `[num_tokens, num_words]` int32 or int64, last stride 1, of w = 32 or 64 bits:
            bit `j % w` of word `j // w` of a row says that it sees the sequence's j-th new token.
            `pack_tree_mask` makes it. Tokens past `num_words * w` are seen by nobody.
        tiles: as in `paged_prefill`.
        tile_rows: as in `paged_prefill`.
        positions: `[num_tokens]` int32, contiguous: context length plus depth in the tree, for
            the window only. If None, new tokens count as one after the other in slot order.
        window: a row at position p sees only tokens at positions from `p - window + 1`.
        softcap: as in `paged_prefill`.
        k_scale: as in `paged_prefill`.
        v_scale: as in `paged_prefill`.
        out: as in `paged_prefill`.
        lse: as in `paged_prefill`; minus infinity for a row that sees no token.

    Returns:
        `out`, shape and dtype of the query.

    Raises:
        ValueError: a shape, dtype, device or option isn't as above.

    Source:
        SpecInfer (Miao et al., 2023), tree attention.
    """
    out = torch.empty_like(query) if out is None else out
    args, constants = launch_arguments(
        query,
        k_pool,
        v_pool,
        block_tables,
        seq_lens,
        query_start_loc,
        scale,
        tiles,
        tile_rows,
        window,
        softcap,
        k_scale,
        v_scale,
        out,
        lse,
        has_mask=True,
    )
    num_tokens, device = query.shape[0], query.device
    check_tensor(
        "tree_mask",
        tree_mask,
        shape=(num_tokens, None),
        dtypes=(torch.int32, torch.int64),
        device=device,
        has_unit_stride=True,
    )
    if positions is not None:
        check_tensor(
            "positions",
            positions,
            shape=(num_tokens,),
            dtypes=(torch.int32,),
            device=device,
            has_unit_stride=True,
        )
    grid = (tiles.shape[0] * k_pool.shape[2],)
    if grid[0]:
        tree_verify_kernel[grid](
            *args, tree_mask, tree_mask.stride(0), tree_mask.shape[1], positions, **constants
        )
    return out


def pack_tree_mask(mask: torch.Tensor) -> torch.Tensor:
    """Return rows of booleans as words of 32 bits, the `tree_mask` of `tree_verify`.

    Args:
        mask: `[num_tokens, max_query_len]` bool; column j is the sequence's j-th new token.

    Returns:
        `[num_tokens, ceil(max_query_len / 32)]` int32 on the same device.
    """
    num_tokens, width = mask.shape
    num_words = -(-width // 32)
    bits = torch.zeros((num_tokens, num_words * 32), dtype=torch.int64, device=mask.device)
    bits[:, :width] = mask
    words = (bits.view(num_tokens, num_words, 32) << torch.arange(32, device=mask.device)).sum(-1)
    return torch.where(words < 1 << 31, words, words - (1 << 32)).to(torch.int32)


@triton.jit
def tree_verify_kernel(
    out, lse, query, k_pool, v_pool,
    k_scale, k_scale_head, k_scale_dim, v_scale, v_scale_head, v_scale_dim,
    block_tables, seq_lens, query_start_loc, tiles, scale, num_kv_heads,
    out_token, out_head, lse_token, query_token, query_head,
    k_block, k_slot, k_head, v_block, v_slot, v_head, table_seq,
    tree_mask, mask_token, num_words, positions,
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

    context_len = seq_len - query_len
    # All rows see all of [full_start, full_end); at its sides, some rows see some keys.
    full_end = context_len // TILE_N * TILE_N
    start = 0
    full_start = 0
    if WINDOW is not None:
        if positions is None:
            pos = context_len + first_row + row // GROUP_SIZE
        else:
            pos = tl.load(positions + token, mask=is_row, other=0)
        oldest = tl.where(is_row, tl.maximum(pos - WINDOW + 1, 0), full_end)
        start = tl.minimum(tl.min(oldest, 0), full_end) // TILE_N * TILE_N
        oldest = tl.where(is_row, oldest, 0)
        full_start = tl.minimum(tl.cdiv(tl.max(oldest, 0), TILE_N) * TILE_N, full_end)
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
    num_right = tl.cdiv(seq_len - full_end, TILE_N)
    WORD_BITS: tl.constexpr = tree_mask.dtype.element_ty.primitive_bitwidth
    for i in tl.range(0, num_left + num_right):
        key_start = tl.where(i < num_left, start + i * TILE_N, full_end + (i - num_left) * TILE_N)
        key = key_start + tl.arange(0, TILE_N)
        is_node = (key >= context_len) & (key < seq_len)
        node = tl.maximum(key - context_len, 0)
        # The few words that the tile's nodes may lie in, a column each, instead of one per element.
        first_word = tl.maximum(key_start - context_len, 0) // WORD_BITS
        word = tl.zeros([TILE_M, TILE_N], dtype=tree_mask.dtype.element_ty)
        for j in tl.static_range((TILE_N + WORD_BITS - 2) // WORD_BITS + 1):
            index = tl.full([TILE_M], first_word + j, dtype=tl.int32)
            column = tl.load(
                tree_mask + token * mask_token + index, mask=is_row & (index < num_words), other=0
            )
            word = tl.where((node // WORD_BITS == first_word + j)[None, :], column[:, None], word)
        bit = (word >> (node % WORD_BITS)[None, :]) & 1
        visible = ((bit != 0) & is_node[None, :]) | (key < context_len)[None, :]
        if WINDOW is not None:
            key_pos = key
            if positions is not None:
                node_pos = tl.load(positions + query_start + node, mask=is_node, other=0)
                key_pos = tl.where(is_node, node_pos, key)
            visible = visible & (key_pos[None, :] > pos[:, None] - WINDOW)
        acc, row_max, row_sum = attend_keys(
            q, acc, row_max, row_sum, key_start, seq_len, visible, factor, table, k_base,
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
