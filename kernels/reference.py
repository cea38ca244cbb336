"""Attention over a paged KV pool in plain torch: slow, obviously right, the oracle of the tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["merge_partials", "paged_attention", "paged_decode", "prefix_decode"]


def paged_attention(
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: Sequence[torch.Tensor],
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    *,
    start_lens: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return causal attention of each sequence's last tokens over all its tokens.

    The new tokens' K and V must be in the pool already. Query head h reads KV head
    `h // (num_heads // num_kv_heads)`.

    Args:
        query: `[num_tokens, num_heads, head_dim]`, any float dtype; sequence i owns rows
            `query_start_loc[i]` to `query_start_loc[i + 1]`.
        k_pool: `[num_blocks, block_size, num_kv_heads, head_dim]`, any dtype.
        v_pool: the same shape as `k_pool`.
        block_tables: per sequence, integer `[>= ceil(seq_len / block_size)]`; entries past the
            length aren't read. A `[num_seqs, max_blocks]` tensor will do.
        seq_lens: `[num_seqs]` integer, the new tokens included.
        query_start_loc: `[num_seqs + 1]` integer.
        scale: factor of the scores.
        start_lens: `[num_seqs]` integer; keys before it aren't seen. None for 0.
        window: how many keys a row sees, its own included; None for all.
        softcap: bound c of the scores, `c * tanh(score / c)`.
        k_scale: `[num_kv_heads]` or `[num_kv_heads, head_dim]`, what stored K is multiplied by.
        v_scale: the same for V.

    Returns:
        The output, `[num_tokens, num_heads, head_dim]`, and the natural log of the sum of the
        exponentials of each row's scores, `[num_tokens, num_heads]`; zeros and minus infinity
        for a row that sees nothing. Both are float64 if the query is and float32 otherwise, which
        is also what is computed in.
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    num_tokens, num_heads, head_dim = query.shape
    block_size = k_pool.shape[1]
    out = torch.zeros((num_tokens, num_heads, head_dim), dtype=dtype, device=query.device)
    lse = torch.zeros((num_tokens, num_heads), dtype=dtype, device=query.device)
    for i, seq_len in enumerate(seq_lens.tolist()):
        start, end = int(query_start_loc[i]), int(query_start_loc[i + 1])
        blocks = block_tables[i][: -(-seq_len // block_size)].long().to(query.device)
        k = _dense(k_pool, blocks, seq_len, k_scale, num_heads, dtype)
        v = _dense(v_pool, blocks, seq_len, v_scale, num_heads, dtype)
        scores = torch.einsum("qhd,khd->hqk", query[start:end].to(dtype), k) * scale
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        query_pos = torch.arange(seq_len - (end - start), seq_len, device=query.device)[:, None]
        key_pos = torch.arange(seq_len, device=query.device)
        hidden = key_pos > query_pos
        if window is not None:
            hidden = hidden | (key_pos <= query_pos - window)
        if start_lens is not None:
            hidden = hidden | (key_pos < start_lens[i])
        scores.masked_fill_(hidden, float("-inf"))
        # The softmax of a row that sees nothing is NaN.
        weights = scores.softmax(-1).masked_fill(hidden, 0.0)
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, v)
        lse[start:end] = scores.logsumexp(-1).T
    return out, lse


def paged_decode(
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: Sequence[torch.Tensor],
    seq_lens: torch.Tensor,
    scale: float,
    *,
    start_lens: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and log-sum-exp of `radixkv.kernels.paged_decode.paged_decode`.

    One query token per sequence, `[num_seqs, num_heads, head_dim]`; else as `paged_attention`.
    """
    return paged_attention(
        query, k_pool, v_pool, block_tables, seq_lens, torch.arange(len(query) + 1), scale,
        start_lens=start_lens, window=window, softcap=softcap, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip


def prefix_decode(
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: Sequence[torch.Tensor],
    seq_lens: torch.Tensor,
    ranges: Sequence[tuple[int, int, int, int]],
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and log-sum-exp of `radixkv.kernels.prefix_decode.prefix_decode`.

    Args:
        query: `[num_seqs, num_heads, head_dim]`; what isn't named here is as in `paged_attention`.
        ranges: (first_seq, last_seq, first_block, last_block) of each group, parents before
            children.
    """
    block_size = k_pool.shape[1]
    start_lens = torch.zeros_like(seq_lens)
    outs, lses = [], []
    for first_seq, last_seq, first_block, last_block in ranges:
        members = slice(first_seq, last_seq)
        start_lens[members] = last_block * block_size
        # The run, read through the first member's table, and what the window leaves of it.
        run = block_tables[first_seq][first_block:last_block]
        shift = first_block * block_size
        lens = torch.full_like(seq_lens[members], last_block * block_size - shift)
        hidden = torch.zeros_like(lens)
        if window is not None:
            hidden = (seq_lens[members] - window - shift).clamp(min=0)
        out, lse = paged_decode(
            query[members], k_pool, v_pool, [run] * len(lens), lens, scale,
            start_lens=hidden, softcap=softcap, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        outs.append(out.new_zeros(query.shape))
        lses.append(lse.new_full(query.shape[:2], float("-inf")))
        outs[-1][members], lses[-1][members] = out, lse
    out, lse = paged_decode(
        query, k_pool, v_pool, block_tables, seq_lens, scale, start_lens=start_lens,
        window=window, softcap=softcap, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    return merge_partials(torch.stack([*outs, out]), torch.stack([*lses, lse]))


def merge_partials(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over disjoint sets of tokens into attention over their union.

    A part with no tokens has a log-sum-exp of minus infinity and doesn't count, provided its
    output is finite. A row whose parts all have none gets zeros and minus infinity.

    Args:
        outs: `[num_parts, ..., head_dim]`, each part's softmax-weighted mean of V.
        lses: `[num_parts, ...]`, each part's log of the sum of the exponentials of the scores.

    Returns:
        The output `[..., head_dim]` and the log-sum-exp `[...]`, in the dtypes of the inputs.

    Source:
        Flash-Decoding (Dao et al., 2023); Cascade Inference (Ye et al., 2024).
    """
    lse = lses.logsumexp(0)
    # Minus infinity from itself is NaN.
    weights = (lses - lse.masked_fill(lse.isneginf(), 0.0)).exp()
    return (outs * weights.unsqueeze(-1)).sum(0).to(outs.dtype), lse


def _dense(
    pool: torch.Tensor,
    blocks: torch.Tensor,
    seq_len: int,
    scale: torch.Tensor | None,
    num_heads: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return a sequence's K or V, `[seq_len, num_heads, head_dim]`."""
    # Bytes, as float8 can't be indexed everywhere; cut before any arithmetic, as 0 * NaN is NaN.
    raw = pool.view(torch.uint8) if pool.itemsize == 1 else pool
    x = raw[blocks].flatten(0, 1)[:seq_len].contiguous().view(pool.dtype).to(dtype)
    if scale is not None:
        x = x * (scale[:, None] if scale.ndim == 1 else scale).to(dtype)
    return x.repeat_interleave(num_heads // pool.shape[2], dim=1)
