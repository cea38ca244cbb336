"""Copy whole blocks, all layers, K and V: within the pool, out of it, and into it."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from radixkv.kernels.checks import KV_DTYPES, check_tensor

__all__ = ["copy_blocks", "gather_blocks", "scatter_blocks"]

# Words of 32 bits that a program copies: 8 KiB, two 128-bit loads and stores a thread.
_TILE_WORDS = 2048
_NUM_WARPS = 8


def copy_blocks(data: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy blocks onto blocks, all layers, K and V, in one launch; modifies `data`.

    These are the copy-on-write copies of a step. No destination may appear twice or be a source of
    another pair: the pairs are copied in no particular order.

    Args:
        data: `[2, num_layers, num_blocks, block_size, num_kv_heads, head_dim]`, any dtype of a
            pool; each block contiguous, any strides of blocks, layers, and K and V.
        pairs: `[n, 2]` int64 (source, destination) block ids on the same device, unchecked; a pair
            whose source is negative is skipped, so that a graph can be captured with spare room.

    Raises:
        ValueError: a shape, dtype, device or stride is not as above, or the bytes of a block of one
            layer aren't a multiple of 4.

    Cost:
        One launch, each byte read and written once in 128-bit words, no synchronisation.
    """
    words = _words(data)
    check_tensor("pairs", pairs, shape=(None, 2), dtypes=(torch.int64,), device=data.device)
    _launch(words, words, pairs[:, 0], pairs[:, 1])


def gather_blocks(
    data: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a contiguous copy of whole blocks, all layers, K and V, in one launch.

    Args:
        data: as in `copy_blocks`.
        block_ids: `[n]` int64 on the same device; unchecked. A negative one leaves its row as is.
        out: `[n, bytes_per_block]` uint8 to write to, contiguous, on the same device.

    Returns:
        `out`, or a new tensor; row i is block i as `[2, num_layers, block_size, num_kv_heads,
        head_dim]` of the pool's dtype, the layout of `KVPool.gather_blocks`.

    Raises:
        ValueError: as `copy_blocks`.
    """
    words = _words(data)
    check_tensor("block_ids", block_ids, shape=(None,), dtypes=(torch.int64,), device=data.device)
    if out is None:
        out = torch.empty(
            (block_ids.shape[0], _row_bytes(data)), dtype=torch.uint8, device=data.device
        )
    _launch(words, _rows("out", out, data, block_ids), block_ids, None)
    return out


def scatter_blocks(data: torch.Tensor, block_ids: torch.Tensor, contents: torch.Tensor) -> None:
    """Write back what `gather_blocks` returned, into the same or other blocks; modifies `data`.

    Args:
        data: as in `copy_blocks`.
        block_ids: `[n]` int64 on the same device, none twice; unchecked. A negative one is skipped.
        contents: `[n, bytes_per_block]` uint8, contiguous, on the same device.

    Raises:
        ValueError: as `copy_blocks`.
    """
    words = _words(data)
    check_tensor("block_ids", block_ids, shape=(None,), dtypes=(torch.int64,), device=data.device)
    _launch(_rows("contents", contents, data, block_ids), words, None, block_ids)


def _launch(
    source: torch.Tensor,
    target: torch.Tensor,
    source_ids: torch.Tensor | None,
    target_ids: torch.Tensor | None,
) -> None:
    """Copy item i, block `source_ids[i]` of `source` to block `target_ids[i]` of `target`.

    Both tensors are `[2, num_layers, blocks, words]` int32 with contiguous words. Without ids,
    item i is block i.
    """
    ids = source_ids if source_ids is not None else target_ids
    assert ids is not None
    _, num_layers, _, num_words = source.shape
    if len(ids) == 0 or num_words == 0:
        return
    num_tiles = triton.cdiv(num_words, _TILE_WORDS)
    _copy_kernel[(len(ids) * num_tiles, 2 * num_layers)](
        source,
        target,
        source_ids,
        target_ids,
        ids.stride(0),
        *source.stride()[:3],
        *target.stride()[:3],
        num_words,
        num_tiles,
        num_layers,
        TILE_WORDS=_TILE_WORDS,
        num_warps=_NUM_WARPS,
    )


@triton.jit
def _copy_kernel(
    source_ptr,
    target_ptr,
    source_ids_ptr,
    target_ids_ptr,
    ids_stride,
    source_kv_stride,
    source_layer_stride,
    source_block_stride,
    target_kv_stride,
    target_layer_stride,
    target_block_stride,
    num_words,
    num_tiles,
    num_layers,
    TILE_WORDS: tl.constexpr,
):
    item = (tl.program_id(0) // num_tiles).to(tl.int64)
    tile = tl.program_id(0) % num_tiles
    kv = (tl.program_id(1) // num_layers).to(tl.int64)
    layer = (tl.program_id(1) % num_layers).to(tl.int64)
    source_id = item
    target_id = item
    if source_ids_ptr is not None:
        source_id = tl.load(source_ids_ptr + item * ids_stride)
    if target_ids_ptr is not None:
        target_id = tl.load(target_ids_ptr + item * ids_stride)
    # A negative id on either side marks padding.
    if (source_id >= 0) & (target_id >= 0):
        word = tile * TILE_WORDS + tl.arange(0, TILE_WORDS)
        mask = word < num_words
        source_ptr += (
            kv * source_kv_stride + layer * source_layer_stride + source_id * source_block_stride
        )
        target_ptr += (
            kv * target_kv_stride + layer * target_layer_stride + target_id * target_block_stride
        )
        tl.store(target_ptr + word, tl.load(source_ptr + word, mask=mask), mask=mask)


def _words(data: torch.Tensor) -> torch.Tensor:
    """Return `data` as `[2, num_layers, num_blocks, words]` int32, the same memory."""
    check_tensor("data", data, shape=(2, *(None,) * 5), dtypes=KV_DTYPES)
    if not data[0, 0, 0].is_contiguous():
        raise ValueError(f"data's blocks must be contiguous, got strides {data.stride()}")
    num_bytes = _block_bytes(data)
    if num_bytes % 4:
        raise ValueError(f"a layer's block of data must be a multiple of 4 bytes, got {num_bytes}")
    shape = (*data.shape[:3], num_bytes // data.itemsize)
    flat = data.as_strided(shape, (*data.stride()[:3], 1))
    try:
        return flat.view(torch.int32)
    except RuntimeError as error:
        raise ValueError(
            f"data's strides must be multiples of 4 bytes, got {data.stride()} of {data.dtype}"
        ) from error


def _rows(
    name: str, rows: torch.Tensor, data: torch.Tensor, block_ids: torch.Tensor
) -> torch.Tensor:
    """Return `[n, bytes_per_block]` rows as `[2, num_layers, n, words]` int32, the same memory."""
    check_tensor(
        name,
        rows,
        shape=(block_ids.shape[0], _row_bytes(data)),
        dtypes=(torch.uint8,),
        device=data.device,
    )
    if not rows.is_contiguous() or rows.storage_offset() % 4:
        raise ValueError(f"{name} must be contiguous and aligned to 4 bytes")
    num_words = _block_bytes(data) // 4
    words = rows.view(torch.int32).view(len(block_ids), 2, data.shape[1], num_words)
    return words.permute(1, 2, 0, 3)


def _row_bytes(data: torch.Tensor) -> int:
    return 2 * data.shape[1] * _block_bytes(data)


def _block_bytes(data: torch.Tensor) -> int:
    """Return the bytes of one layer's K, or V, of a block."""
    return math.prod(data.shape[3:]) * data.itemsize
