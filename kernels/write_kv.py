"""Write the new tokens' K and V of one layer into their slots of the pool, quantised on the way."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv.kernels.checks import FLOAT_DTYPES, KV_DTYPES, check_tensor

__all__ = ["write_kv", "write_tile_rows"]

_QUANTISED_DTYPES = (torch.int8, torch.float8_e4m3fn)

# A tile's elements of K, and of V: two 128-bit loads of bfloat16 for each of the 128 threads.
_TILE_ELEMENTS = 2048


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
    """Store each token's K and V in its slot; modifies the pools.

    The reshape from rows to blocks, the quantisation and both writes are one launch, which reads
    and writes every byte once. An integer or 8-bit float pool stores `x / scale`, rounded to the
    nearest (ties to even) and saturated: to [-128, 127] in int8, to [-448, 448] in float8_e4m3fn.

    Args:
        key: `[num_tokens, num_kv_heads, head_dim]` float16, bfloat16 or float32; any strides of
            tokens and heads, so that a slice of a fused projection will do.
        value: the same shape and dtype as `key`.
        k_pool: `[num_blocks, block_size, num_kv_heads, head_dim]`, any strides but the last; the
            dtype of `key`, or int8 or float8_e4m3fn with scales. `block_size` a power of two.
        v_pool: the same shape and dtype as `k_pool`.
        slot_mapping: `[num_tokens]` int64, `block_id * block_size + offset`, distinct and within
            the pool; -1 skips the token. Slots aren't checked: they're on the device.
        k_scale: `[num_kv_heads]` or `[num_kv_heads, head_dim]` float32, contiguous, positive; for
            a quantised pool only.
        v_scale: the same for V, of the same shape.

    Raises:
        ValueError: a shape, dtype, device or stride is not as above, or scales are missing for a
            quantised pool or given for another.

    Cost:
        One launch; `num_tokens * num_kv_heads * head_dim` elements of K and of V are read and
        written. No synchronisation, so that it can be captured in a CUDA graph.
    """
    num_tokens, num_kv_heads, head_dim = _check(key, value, k_pool, v_pool, slot_mapping)
    quantised = _check_scales(k_pool, k_scale, v_scale, (num_kv_heads, head_dim))
    if num_tokens == 0:
        return
    if k_pool.dtype == torch.float8_e4m3fn:
        # As bytes: sm_80 has no such type, and the kernel encodes it with integers anyway.
        k_pool, v_pool = k_pool.view(torch.uint8), v_pool.view(torch.uint8)
    padded_dim = triton.next_power_of_2(head_dim)
    tile_rows = write_tile_rows(head_dim)
    _write_kv_kernel[(triton.cdiv(num_tokens * num_kv_heads, tile_rows),)](
        key,
        value,
        k_pool,
        v_pool,
        slot_mapping,
        k_scale,
        v_scale,
        num_tokens * num_kv_heads,
        *key.stride()[:2],
        *value.stride()[:2],
        *k_pool.stride()[:3],
        *v_pool.stride()[:3],
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=k_pool.shape[1],
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        TILE_ROWS=tile_rows,
        QUANTISED=quantised,
        PER_CHANNEL=k_scale is not None and k_scale.ndim == 2,
        num_warps=4,
    )


def write_tile_rows(head_dim: int) -> int:
    """Return how many rows, each one head of one token, a program writes."""
    return int(max(1, _TILE_ELEMENTS // triton.next_power_of_2(head_dim)))


# One compiled kernel for every batch size, whether it's 1, a multiple of 16, or neither.
@triton.jit(do_not_specialize=["num_rows"])
def _write_kv_kernel(
    key_ptr,
    value_ptr,
    k_pool_ptr,
    v_pool_ptr,
    slot_ptr,
    k_scale_ptr,
    v_scale_ptr,
    num_rows,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    QUANTISED: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
):
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    token = (row // NUM_KV_HEADS).to(tl.int64)
    head = row % NUM_KV_HEADS
    dim = tl.arange(0, PADDED_DIM)
    slot = tl.load(slot_ptr + token, mask=row < num_rows, other=-1)
    mask = (slot >= 0)[:, None] & (dim < HEAD_DIM)[None, :]
    # Slots are int64, so that products with strides are: a pool may pass 2^31 elements.
    block_id = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE

    key_rows = key_ptr + token * key_token_stride + head * key_head_stride
    value_rows = value_ptr + token * value_token_stride + head * value_head_stride
    key = tl.load(key_rows[:, None] + dim[None, :], mask=mask, other=0.0)
    value = tl.load(value_rows[:, None] + dim[None, :], mask=mask, other=0.0)
    if QUANTISED:
        k_scale = _load_scale(k_scale_ptr, head, dim, mask, HEAD_DIM, PER_CHANNEL)
        v_scale = _load_scale(v_scale_ptr, head, dim, mask, HEAD_DIM, PER_CHANNEL)
        key = _quantise(tl.div_rn(key.to(tl.float32), k_scale), k_pool_ptr.dtype.element_ty)
        value = _quantise(tl.div_rn(value.to(tl.float32), v_scale), v_pool_ptr.dtype.element_ty)
    k_rows = k_pool_ptr + block_id * k_block_stride + offset * k_slot_stride + head * k_head_stride
    v_rows = v_pool_ptr + block_id * v_block_stride + offset * v_slot_stride + head * v_head_stride
    tl.store(k_rows[:, None] + dim[None, :], key, mask=mask)
    tl.store(v_rows[:, None] + dim[None, :], value, mask=mask)


@triton.jit
def _load_scale(scale_ptr, head, dim, mask, HEAD_DIM: tl.constexpr, PER_CHANNEL: tl.constexpr):
    """Return the scales of a tile, `[TILE_ROWS, PADDED_DIM]` float32, 1 where masked."""
    if PER_CHANNEL:
        scale = tl.load(scale_ptr + head[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=1.0)
    else:
        scale = tl.broadcast_to(tl.load(scale_ptr + head)[:, None], mask.shape)
    return scale


@triton.jit
def _quantise(x, dtype: tl.constexpr):
    """Return float32 `x` rounded to int8, or to the byte of a float8_e4m3fn if dtype is uint8."""
    if dtype == tl.int8:
        x = tl.minimum(tl.maximum(x, -128.0), 127.0)
        # Adding 1.5 * 2^23 leaves no bits for a fraction: the hardware rounds to even.
        code = (x + 12582912.0) - 12582912.0
    else:
        magnitude = tl.minimum(tl.abs(x), 448.0)
        bits = magnitude.to(tl.int32, bitcast=True)
        # Normal numbers: keep 3 of 23 bits of the mantissa, to even; the exponent's bias is 7, not
        # 127. A mantissa that rounds up to 8 carries into the exponent, as it should.
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6, multiples of 2^-9: the distance of two float32 at 2^14.
        subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) & 0xF
        code = tl.where(magnitude < 0.015625, subnormal, normal)
        sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
        code = tl.where(x == x, code, 0x7F) | sign
    return code.to(dtype)


def _check(
    key: torch.Tensor,
    value: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> tuple[int, int, int]:
    check_tensor("k_pool", k_pool, shape=(None,) * 4, dtypes=KV_DTYPES, has_unit_stride=True)
    block_size, num_kv_heads, head_dim = k_pool.shape[1:]
    device = k_pool.device
    if block_size & (block_size - 1) or block_size == 0:
        raise ValueError(f"k_pool's block_size must be a power of two, got {block_size}")
    check_tensor(
        "v_pool",
        v_pool,
        shape=k_pool.shape,
        dtypes=(k_pool.dtype,),
        device=device,
        has_unit_stride=True,
    )
    key_dtypes = FLOAT_DTYPES if k_pool.dtype in _QUANTISED_DTYPES else (k_pool.dtype,)
    check_tensor(
        "key",
        key,
        shape=(None, num_kv_heads, head_dim),
        dtypes=key_dtypes,
        device=device,
        has_unit_stride=True,
    )
    check_tensor(
        "value",
        value,
        shape=key.shape,
        dtypes=(key.dtype,),
        device=device,
        has_unit_stride=True,
    )
    check_tensor(
        "slot_mapping",
        slot_mapping,
        shape=(key.shape[0],),
        dtypes=(torch.int64,),
        device=device,
        has_unit_stride=True,
    )
    return key.shape[0], num_kv_heads, head_dim


def _check_scales(
    k_pool: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    shape: tuple[int, int],
) -> bool:
    quantised = k_pool.dtype in _QUANTISED_DTYPES
    scales = (("k_scale", k_scale), ("v_scale", v_scale))
    for name, scale in scales:
        if (scale is not None) != quantised:
            wanted = "needed" if quantised else "meant for int8 and float8_e4m3fn only"
            raise ValueError(f"{name} is {wanted}: the pool is {k_pool.dtype}")
        if scale is None:
            continue
        ndim = 1 if k_scale is not None and k_scale.ndim == 1 else 2
        check_tensor(name, scale, shape=shape[:ndim], dtypes=(torch.float32,), device=k_pool.device)
        if not scale.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {scale.stride()}")
    return quantised
