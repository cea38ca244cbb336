"""Other people's attention on the same sequences, to compare the kernels with.

torch's own attention reads contiguous copies of K and V, which spares it the block tables.
FlexAttention, FlashInfer and FlashAttention take part where they can be imported and run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from loadtests.kernel_batches import Batch

__all__ = ["FLEX_PAGE", "decode_peers", "prefill_peers"]

Call = Callable[[], torch.Tensor]

# Keys that FlexAttention masks as one block, so the smallest page that costs it nothing.
FLEX_PAGE = 128


def decode_peers(
    query: torch.Tensor, batch: Batch, scale: float, *, with_flex: bool
) -> dict[str, Callable[[], Call]]:
    """Return, by name, functions that prepare a peer and return its call.

    Every call returns `[num_seqs, num_heads, head_dim]`, or that with dimensions of size 1.

    Args:
        query: `[num_seqs, num_heads, head_dim]`, one token of each sequence.
        batch: sequences of one length.
        scale: factor of the scores.
        with_flex: whether FlexAttention takes part; its compiler takes its time for every shape.
    """
    peers: dict[str, Callable[[], Call]] = {"sdpa": lambda: _sdpa_decode(query, batch, scale)}
    if with_flex and int(batch.seq_lens[0]) % FLEX_PAGE == 0:
        peers["flex"] = lambda: _flex_decode(query, batch, scale)
    if query.is_cuda and _has("flashinfer"):
        peers["flashinfer"] = lambda: _flashinfer_decode(query, batch, scale)
    if query.is_cuda and _has("flash_attn"):
        peers["flash_attn"] = lambda: _flash_attn(query[:, None], batch, scale)
    return peers


def prefill_peers(query: torch.Tensor, batch: Batch, scale: float) -> dict[str, Callable[[], Call]]:
    """Return peers for causal attention of each sequence's last tokens.

    Every call returns `[num_seqs, num_new, num_heads, head_dim]`.

    Args:
        query: `[num_seqs, num_new, num_heads, head_dim]`.
        batch: sequences of one length, the new tokens included.
        scale: factor of the scores.
    """
    peers: dict[str, Callable[[], Call]] = {"sdpa": lambda: _sdpa_prefill(query, batch, scale)}
    if query.is_cuda and _has("flash_attn"):
        peers["flash_attn"] = lambda: _flash_attn(query, batch, scale)
    return peers


def _sdpa_decode(query: torch.Tensor, batch: Batch, scale: float) -> Call:
    k, v = batch.contiguous()
    # The query heads of a KV head as rows: otherwise K and V would be read once for each.
    rows = query.view(query.shape[0], k.shape[1], -1, query.shape[2])

    def call() -> torch.Tensor:
        out = functional.scaled_dot_product_attention(rows, k, v, scale=scale)
        return out.flatten(1, 2)

    return call


def _sdpa_prefill(query: torch.Tensor, batch: Batch, scale: float) -> Call:
    k, v = batch.contiguous()
    group_size = query.shape[2] // k.shape[1]
    # Ahead of the measurement: not every backend of torch knows grouped heads.
    k, v = (x.repeat_interleave(group_size, dim=1) for x in (k, v))
    rows = query.transpose(1, 2)
    num_new, seq_len = query.shape[1], k.shape[2]
    options: dict[str, Any] = {"is_causal": True}
    if num_new != seq_len:
        options = {"attn_mask": causal_lower_right(num_new, seq_len)}

    def call() -> torch.Tensor:
        out: torch.Tensor = functional.scaled_dot_product_attention(
            rows, k, v, scale=scale, **options
        )
        return out.transpose(1, 2)

    return call


def _flex_decode(query: torch.Tensor, batch: Batch, scale: float) -> Call:
    """Attend to pages in random order: all K and V are one sequence, of which each sees its own."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    num_seqs, seq_len = query.shape[0], int(batch.seq_lens[0])
    num_pages = seq_len // FLEX_PAGE
    device = query.device
    pages = torch.randperm(num_seqs * num_pages, device=device).view(num_seqs, num_pages)
    pools = []
    for contiguous in batch.contiguous():
        heads, dim = contiguous.shape[1], contiguous.shape[3]
        pool = torch.empty((heads, pages.numel(), FLEX_PAGE, dim), dtype=query.dtype, device=device)
        for own, rows in zip(pages, contiguous, strict=True):
            pool[:, own] = rows.unflatten(1, (num_pages, FLEX_PAGE))
        pools.append(pool.flatten(1, 2)[None])
    owner = torch.empty(pages.numel(), dtype=torch.int64, device=device)
    owner[pages.flatten()] = torch.arange(num_seqs, device=device).repeat_interleave(num_pages)

    def sees(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return owner[key // FLEX_PAGE] == b

    none = torch.zeros((num_seqs, 1, 1), dtype=torch.int32, device=device)
    table = pages.sort(dim=1).values.to(torch.int32)
    padded = torch.zeros((num_seqs, pages.numel()), dtype=torch.int32, device=device)
    padded[:, :num_pages] = table
    mask = BlockMask.from_kv_blocks(
        none,
        torch.zeros_like(padded)[:, None, None],
        none + num_pages,
        padded[:, None, None],
        BLOCK_SIZE=(FLEX_PAGE, FLEX_PAGE),
        mask_mod=sees,
        seq_lengths=(1, pages.numel() * FLEX_PAGE),
    )
    attend: Any = torch.compile(flex_attention, dynamic=False) if query.is_cuda else flex_attention
    rows = query[:, :, None]

    def call() -> torch.Tensor:
        out: torch.Tensor = attend(
            rows, pools[0], pools[1], block_mask=mask, scale=scale, enable_gqa=True
        )
        return out[:, :, 0]

    return call


def _flashinfer_decode(query: torch.Tensor, batch: Batch, scale: float) -> Call:
    flashinfer = importlib.import_module("flashinfer")
    num_seqs, num_heads, head_dim = query.shape
    seq_len, size = int(batch.seq_lens[0]), batch.block_size
    num_blocks = -(-seq_len // size)
    device = query.device
    workspace = torch.empty(256 * 1024**2, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(
        torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * num_blocks,
        batch.block_tables[:, :num_blocks].contiguous().flatten(),
        torch.full((num_seqs,), (seq_len - 1) % size + 1, dtype=torch.int32, device=device),
        num_heads,
        batch.k_pool.shape[2],
        head_dim,
        size,
        q_data_type=query.dtype,
        kv_data_type=batch.k_pool.dtype,
        sm_scale=scale,
    )

    def call() -> torch.Tensor:
        out: torch.Tensor = wrapper.run(query, (batch.k_pool, batch.v_pool))
        return out

    return call


def _flash_attn(query: torch.Tensor, batch: Batch, scale: float) -> Call:
    flash_attn = importlib.import_module("flash_attn")
    k, v = (x.transpose(1, 2).contiguous() for x in batch.contiguous())

    def call() -> torch.Tensor:
        out: torch.Tensor = flash_attn.flash_attn_with_kvcache(
            query, k, v, cache_seqlens=batch.seq_lens, softmax_scale=scale, causal=True
        )
        return out

    return call


def _has(module: str) -> bool:
    try:
        importlib.import_module(module)
    except Exception:
        # Built for another torch or CUDA, they fail in ways of their own.
        return False
    return True
