"""Attention over a paged KV pool in plain torch: slow, obviously right, the oracle of the tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["merge_partials", "paged_attention"]


def paged_attention(
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: Sequence[torch.Tensor],
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return causal attention of each sequence's last tokens over all its tokens.

    The new tokens' K and V must be in the pool already. Query head h reads KV head
    `h // (num_heads // num_kv_heads)`.

    Args:
        query: `[num_tokens, num_heads, head_dim]`, any float dtype; sequence i owns rows
            `query_start_loc[i]` to `query_start_loc[i + 1]`.
        k_pool: `[num_blocks, block_size, num_kv_heads, head_dim]`.
        v_pool: the same shape as `k_pool`.
        block_tables: per sequence, integer `[>= ceil(seq_len / block_size)]`; entries past the
            length aren't read. A `[num_seqs, max_blocks]` tensor will do.
        seq_lens: `[num_seqs]` integer, the new tokens included.
        query_start_loc: `[num_seqs + 1]` integer.
        scale: factor of the scores.

    Returns:
        The output, `[num_tokens, num_heads, head_dim]`, and the natural log of the sum of the
        exponentials of each row's scores, `[num_tokens, num_heads]`. Both are float64 if the
        query is and float32 otherwise, which is also what is computed in.
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    num_tokens, num_heads, head_dim = query.shape
    block_size, num_kv_heads = k_pool.shape[1:3]
    out = torch.zeros((num_tokens, num_heads, head_dim), dtype=dtype, device=query.device)
    lse = torch.zeros((num_tokens, num_heads), dtype=dtype, device=query.device)
    for i, seq_len in enumerate(seq_lens.tolist()):
        start, end = int(query_start_loc[i]), int(query_start_loc[i + 1])
        blocks = block_tables[i][: -(-seq_len // block_size)].long().to(query.device)
        # [seq_len, num_heads, head_dim]; cut before any arithmetic, as 0 * NaN is NaN.
        k = k_pool[blocks].flatten(0, 1)[:seq_len].to(dtype)
        v = v_pool[blocks].flatten(0, 1)[:seq_len].to(dtype)
        k = k.repeat_interleave(num_heads // num_kv_heads, dim=1)
        v = v.repeat_interleave(num_heads // num_kv_heads, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[start:end].to(dtype), k) * scale
        query_pos = torch.arange(seq_len - (end - start), seq_len, device=query.device)
        key_pos = torch.arange(seq_len, device=query.device)
        scores.masked_fill_(key_pos[None, :] > query_pos[:, None], float("-inf"))
        out[start:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        lse[start:end] = scores.logsumexp(-1).T
    return out, lse


def merge_partials(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over disjoint sets of tokens into attention over their union.

    A part with no tokens has a log-sum-exp of minus infinity and doesn't count, provided its
    output is finite. At least one part of each row must have tokens.

    Args:
        outs: `[num_parts, ..., head_dim]`, each part's softmax-weighted mean of V.
        lses: `[num_parts, ...]`, each part's log of the sum of the exponentials of the scores.

    Returns:
        The output `[..., head_dim]` and the log-sum-exp `[...]`, in the dtypes of the inputs.

    Source:
        Flash-Decoding (Dao et al., 2023); Cascade Inference (Ye et al., 2024).
    """
    lse = lses.logsumexp(0)
    weights = (lses - lse).exp()
    return (outs * weights.unsqueeze(-1)).sum(0).to(outs.dtype), lse
