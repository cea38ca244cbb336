"""`paged_prefill` and `tree_verify` in plain torch, row by row: slow, obviously right, in float64.

One query row at a time, over an explicit list of the keys it sees: no masks, no tiles, nothing
shared with the kernels but the meaning of the arguments.
"""

from __future__ import annotations

import math

import torch

__all__ = ["prefill_reference", "tree_reference"]


def prefill_reference(
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `paged_prefill` computes, with the log-sum-exp, both in float64.

    Args: as of `paged_prefill`, on any device.
    """
    tree_mask = _causal_mask(query_start_loc)
    return tree_reference(
        query,
        k_pool,
        v_pool,
        block_tables,
        seq_lens,
        query_start_loc,
        scale,
        tree_mask=tree_mask,
        window=window,
        softcap=softcap,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def tree_reference(
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    *,
    tree_mask: torch.Tensor,
    positions: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `tree_verify` computes, with the log-sum-exp, both in float64.

    Args: as of `tree_verify`, on any device, but for the mask.
        tree_mask: `[num_tokens, >= longest query_len]` bool, unpacked.
    """
    num_tokens, num_heads, head_dim = query.shape
    group_size = num_heads // k_pool.shape[2]
    out = torch.zeros((num_tokens, num_heads, head_dim), dtype=torch.float64)
    lse = torch.full((num_tokens, num_heads), -math.inf, dtype=torch.float64)
    starts = query_start_loc.tolist()
    for seq, seq_len in enumerate(seq_lens.tolist()):
        first, last = starts[seq], starts[seq + 1]
        context_len = seq_len - (last - first)
        k = _gather(k_pool, block_tables[seq], seq_len, k_scale)
        v = _gather(v_pool, block_tables[seq], seq_len, v_scale)
        key_positions = list(range(seq_len))
        if positions is not None:
            key_positions[context_len:] = positions[first:last].tolist()
        for row in range(first, last):
            position = key_positions[context_len + row - first]
            bits = tree_mask[row].tolist()
            seen = [
                key
                for key in range(seq_len)
                if (key < context_len or bits[key - context_len])
                and (window is None or position - key_positions[key] < window)
            ]
            if not seen:
                continue
            for head in range(num_heads):
                kv_head = head // group_size
                scores = k[seen, kv_head] @ query[row, head].double().cpu() * scale
                if softcap is not None:
                    scores = torch.tanh(scores / softcap) * softcap
                lse[row, head] = torch.logsumexp(scores, 0)
                out[row, head] = (scores - lse[row, head]).exp() @ v[seen, kv_head]
    return out, lse


def _gather(
    pool: torch.Tensor, table: torch.Tensor, seq_len: int, scale: torch.Tensor | None
) -> torch.Tensor:
    """Return the sequence's K or V, `[seq_len, num_kv_heads, head_dim]` float64 on the host."""
    positions = torch.arange(seq_len)
    blocks = table.cpu()[positions // pool.shape[1]].long()
    # Only whole bytes can be indexed on every device and in every version.
    raw = pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool
    values = raw.cpu()[blocks, positions % pool.shape[1]].view(pool.dtype).double()
    if scale is None:
        return values
    wide = scale.cpu().double()
    return values * (wide if wide.ndim == 2 else wide[:, None])


def _causal_mask(query_start_loc: torch.Tensor) -> torch.Tensor:
    """Return for each row which new tokens of its sequence come before it or are it."""
    lens = query_start_loc.diff().tolist()
    width = max(lens, default=0)
    rows = [torch.arange(width) <= j for n in lens for j in range(n)]
    return torch.stack(rows) if rows else torch.zeros((0, width), dtype=torch.bool)
