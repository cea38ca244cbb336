"""Which sequences of a decode batch share which blocks: device arrays for `prefix_decode`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from radixkv.kernels.checks import check_tensor

__all__ = ["DecodeGroups"]


@dataclass(frozen=True, slots=True)
class DecodeGroups:
    """Groups of neighbouring sequences whose tables agree in a range of full blocks.

    Group i: sequences `[first_seq, last_seq)` share blocks `[first_block, last_block)`, all of
    whose tokens lie before every member's query. Groups nest: those that contain a sequence have
    different levels and cover the blocks before its `start_len` once each. A padding group has
    `first_seq == last_seq`.

    Attributes:
        first_seq: `[num_groups]` int32.
        last_seq: `[num_groups]` int32, exclusive.
        first_block: `[num_groups]` int32.
        last_block: `[num_groups]` int32, exclusive.
        level: `[num_groups]` int32 in `[0, num_levels)`: how many groups are around this one.
        start_lens: `[num_seqs]` int32, tokens in all of a sequence's groups, where its private
            tail starts; 0 if it has none.
        num_levels: greatest depth of nesting, or more (graph ladder).
        max_group_rows: `(last_seq - first_seq) * (num_heads // num_kv_heads)` of the largest
            group, or more. Rows beyond it would be left out.
    """

    first_seq: torch.Tensor
    last_seq: torch.Tensor
    first_block: torch.Tensor
    last_block: torch.Tensor
    level: torch.Tensor
    start_lens: torch.Tensor
    num_levels: int
    max_group_rows: int

    @classmethod
    def from_ranges(
        cls,
        ranges: Iterable[tuple[int, int, int, int]],
        *,
        num_seqs: int,
        block_size: int,
        group_size: int,
        device: torch.device | str,
        num_groups: int | None = None,
    ) -> DecodeGroups:
        """Return the arrays of some groups, worked out on the host.

        Args:
            ranges: (first_seq, last_seq, first_block, last_block), parents before children.
            num_seqs: sequences in the batch.
            block_size: tokens in a block.
            group_size: query heads per KV head.
            device: of the arrays.
            num_groups: pad to this many groups (graph ladder).

        Raises:
            ValueError: the groups don't nest, leave a gap, or are more than `num_groups`.

        Cost: O(the sum of the groups' sizes), and one copy to the device.
        """
        innermost = [-1] * num_seqs
        starts = [0] * num_seqs
        rows: list[list[int]] = []
        for first_seq, last_seq, first_block, last_block in ranges:
            is_range = 0 <= first_seq < last_seq <= num_seqs and 0 <= first_block < last_block
            parents = set(innermost[first_seq:last_seq]) if is_range else set()
            if len(parents) != 1 or starts[first_seq] != first_block * block_size:
                raise ValueError(
                    f"group {(first_seq, last_seq, first_block, last_block)} must lie in one "
                    f"group, or in none, and start where it ends; {num_seqs} sequences"
                )
            parent = parents.pop()
            level = 0 if parent < 0 else rows[parent][4] + 1
            innermost[first_seq:last_seq] = [len(rows)] * (last_seq - first_seq)
            starts[first_seq:last_seq] = [last_block * block_size] * (last_seq - first_seq)
            rows.append([first_seq, last_seq, first_block, last_block, level])
        if num_groups is not None:
            if len(rows) > num_groups:
                raise ValueError(f"num_groups must be at least {len(rows)}, got {num_groups}")
            rows += [[0] * 5] * (num_groups - len(rows))
        flat = [value for column in zip(*rows, strict=True) for value in column]
        arrays = torch.tensor(flat + starts, dtype=torch.int32).to(device)
        n = len(rows)
        first_seqs, last_seqs, first_blocks, last_blocks, levels = arrays[: 5 * n].view(5, n)
        return cls(
            first_seq=first_seqs,
            last_seq=last_seqs,
            first_block=first_blocks,
            last_block=last_blocks,
            level=levels,
            start_lens=arrays[5 * n :],
            num_levels=max((row[4] + 1 for row in rows if row[0] < row[1]), default=0),
            max_group_rows=max((row[1] - row[0] for row in rows), default=0) * group_size,
        )

    @property
    def num_groups(self) -> int:
        """Number of groups, padding included."""
        return self.first_seq.shape[0]

    def check(self, num_seqs: int, device: torch.device) -> None:
        """Check the arrays' shapes, dtypes and device, not what is in them.

        Raises:
            ValueError: one of them isn't as documented.
        """
        for name in ("first_seq", "last_seq", "first_block", "last_block", "level", "start_lens"):
            size = num_seqs if name == "start_lens" else self.num_groups
            check_tensor(f"groups.{name}", getattr(self, name), shape=(size,),
                         dtypes=(torch.int32,), device=device, has_unit_stride=True)  # fmt: skip
        if self.num_levels < 1 or self.max_group_rows < 1:
            raise ValueError(
                "groups must have at least 1 level and 1 row, got "
                f"{self.num_levels} and {self.max_group_rows}"
            )
