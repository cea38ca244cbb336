"""The second phase of split decoding: partial results into one, by their log-sum-exp."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["MERGE_TILE_PARTS", "MERGE_WARPS", "merge_kernel", "merge_parts"]

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN2: tl.constexpr = tl.constexpr(0.6931471805599453)

MERGE_TILE_PARTS = 8
MERGE_WARPS = 2


def merge_parts(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Merge attention over disjoint sets of keys, in one launch; modifies `out` and `lse`.

    A part whose log-sum-exp is minus infinity isn't read. A row without any other gets zeros and
    minus infinity. The arguments aren't checked: they are the decode kernels' own.

    Args:
        partial_out: `[num_parts, num_seqs, num_heads, head_dim]` float32, contiguous.
        partial_lse: `[num_parts, num_seqs, num_heads]` float32, contiguous.
        out: `[num_seqs, num_heads, head_dim]`, any float dtype, last dimension contiguous.
        lse: `[num_seqs, num_heads]` float32, contiguous, or None.
    """
    num_parts, num_seqs, num_heads, head_dim = partial_out.shape
    merge_kernel[(num_heads, num_seqs)](
        partial_out,
        partial_lse,
        out,
        lse,
        out.stride(0),
        out.stride(1),
        num_parts,
        num_seqs,
        num_heads,
        HEAD_DIM=head_dim,
        PAD_DIM=triton.next_power_of_2(head_dim),
        TILE_PARTS=MERGE_TILE_PARTS,
        num_warps=MERGE_WARPS,
    )


@triton.jit
def merge_kernel(
    partial_out,
    partial_lse,
    out,
    lse,
    out_stride_seq,
    out_stride_head,
    num_parts,
    num_seqs,
    num_heads,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    TILE_PARTS: tl.constexpr,
):
    """Merge all parts of one query head of one sequence."""
    head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    row = seq * num_heads + head
    dim = tl.arange(0, PAD_DIM)
    acc = tl.zeros([PAD_DIM], tl.float32)
    row_max = float("-inf")
    row_sum = 0.0
    for first_part in tl.range(0, num_parts, TILE_PARTS):
        part = first_part + tl.arange(0, TILE_PARTS)
        part_row = part.to(tl.int64) * num_seqs * num_heads + row
        part_max = tl.load(partial_lse + part_row, mask=part < num_parts, other=float("-inf"))
        part_max *= _LOG2E
        has_keys = part_max > float("-inf")
        values = tl.load(
            partial_out + part_row[:, None] * HEAD_DIM + dim[None, :],
            mask=has_keys[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )
        new_max = tl.maximum(row_max, tl.max(part_max, 0))
        # Minus infinity from itself is NaN.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(part_max - base)
        decay = tl.exp2(row_max - base)
        row_sum = row_sum * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(weights[:, None] * values, 0)
        row_max = new_max
    total = tl.where(row_sum == 0.0, 1.0, row_sum)
    out_row = out + seq * out_stride_seq + head * out_stride_head
    tl.store(out_row + dim, (acc / total).to(out.dtype.element_ty), mask=dim < HEAD_DIM)
    if lse is not None:
        tl.store(lse + row, (row_max + tl.log2(total)) * _LN2)
