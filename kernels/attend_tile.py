"""One tile of queries against a range of keys in the paged pool: the parts of the prefill kernels.

All of it is inlined into `paged_prefill` and `tree_verify`, which differ only in which keys a row
may see. Softmax runs in base 2: `factor` holds log2(e), the scale of the scores and K's scale.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["attend_keys", "load_query", "store_tile"]

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
# An e4m3 number whose bits are shifted into a float16 is 2^-8 of itself.
_FP8_BITS_FACTOR: tl.constexpr = tl.constexpr(256.0)


@triton.jit
def load_query(
    pointers,
    mask,
    scale,
    k_scale,
    k_scale_stride,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    FP8_BITS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return a tile of queries, K's scale multiplied in, and the factor of its scores.

    Of K's scales the largest goes into the factor, in float32, so that what is multiplied into a
    float16 query can't overflow. The dtype of the tile is the one of the products: K, V and the
    weights of the softmax are converted to it.
    """
    dim = tl.arange(0, PAD_DIM)
    query = tl.load(pointers, mask=mask, other=0.0)
    factor = scale * _LOG2E
    if k_scale is not None:
        channel = tl.load(k_scale + dim * k_scale_stride, mask=dim < HEAD_DIM, other=0.0)
        largest = tl.max(channel, 0)
        largest = tl.where(largest > 0.0, largest, 1.0)
        query = (query.to(tl.float32) * (channel / largest)[None, :]).to(query.dtype)
        factor *= largest
    if FP8_BITS:
        factor *= _FP8_BITS_FACTOR
    if UPCAST:
        query = query.to(tl.float32)
    return query, factor


@triton.jit
def attend_keys(
    query,
    acc,
    row_max,
    row_sum,
    start,
    key_end,
    visible,
    factor,
    table,
    k_base,
    v_base,
    k_stride_block,
    k_stride_slot,
    v_stride_block,
    v_stride_slot,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FP8_BITS: tl.constexpr,
):
    """Add keys `[start, start + TILE_N)` to the running softmax of a tile and return it.

    `start` is a multiple of TILE_N and below `key_end`. `visible` says which row sees which key,
    `[TILE_M, TILE_N]`; None promises that all do and that all keys lie below `key_end`.
    """
    offset = tl.arange(0, TILE_N)
    dim = tl.arange(0, PAD_DIM)
    key = start + offset
    in_range = key < key_end
    # A tile that lies in one block needs one entry of the table.
    if BLOCK_SIZE % TILE_N == 0:
        block = tl.load(table + start // BLOCK_SIZE)
    elif visible is None:
        block = tl.load(table + key // BLOCK_SIZE)
    else:
        block = tl.load(table + key // BLOCK_SIZE, mask=in_range, other=0)
    block = block.to(tl.int64)
    k_row = block * k_stride_block + key % BLOCK_SIZE * k_stride_slot
    v_row = block * v_stride_block + key % BLOCK_SIZE * v_stride_slot
    # Zeros where there is no key, not only a mask on the scores: 0 * NaN is NaN.
    mask = None
    if visible is not None:
        mask = in_range[:, None] & (dim < HEAD_DIM)[None, :]
    elif HEAD_DIM != PAD_DIM:
        mask = (dim < HEAD_DIM)[None, :]
    k = _load_rows(k_base + k_row[:, None] + dim[None, :], mask, query.dtype, FP8_BITS)

    scores = tl.dot(query, tl.trans(k), input_precision="ieee")
    if SOFTCAP is not None:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), in base 2; where the exponential is cut off, it is 1.
        grown = tl.exp2(tl.minimum(scores * (factor * (2.0 / SOFTCAP)), 64.0))
        scores = (SOFTCAP * _LOG2E) * (1.0 - 2.0 / (grown + 1.0))
        factor = 1.0
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
    base = new_max
    if visible is not None:
        # A row that has seen nothing yet; minus infinity from itself is NaN.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * factor - base[:, None])
    decay = tl.exp2(row_max - base)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    v = _load_rows(v_base + v_row[:, None] + dim[None, :], mask, query.dtype, FP8_BITS)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, new_max, row_sum


@triton.jit
def store_tile(
    out_pointers,
    out_mask,
    lse_pointers,
    lse_mask,
    acc,
    row_max,
    row_sum,
    v_scale,
    v_scale_stride,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    FP8_BITS: tl.constexpr,
):
    """Divide by the sum, apply V's scale and store; a row that saw nothing gets zeros."""
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    if FP8_BITS:
        acc *= _FP8_BITS_FACTOR
    if v_scale is not None:
        dim = tl.arange(0, PAD_DIM)
        channel = tl.load(v_scale + dim * v_scale_stride, mask=dim < HEAD_DIM, other=0.0)
        acc *= channel[None, :]
    tl.store(out_pointers, acc.to(out_pointers.dtype.element_ty), mask=out_mask)
    if lse_pointers is not None:
        # row_max is minus infinity where row_sum is 0.
        total = tl.where(row_sum == 0.0, 1.0, row_sum)
        tl.store(lse_pointers, (row_max + tl.log2(total)) * _LN2, mask=lse_mask)


@triton.jit
def _load_rows(pointers, mask, dtype: tl.constexpr, FP8_BITS: tl.constexpr):
    """Load K or V and convert to the query's dtype; exact for int8 and e4m3."""
    values = tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0.0)
    if FP8_BITS:
        # Bits of e4m3 on a chip that has no instruction for it: sign, then exponent and mantissa.
        bits = values.to(tl.int16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        values = bits.to(tl.float16, bitcast=True)
    return values.to(dtype)
