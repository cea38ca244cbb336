"""Random batches over a paged pool, for the checks and timings of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from radixkv.kernels.decode_groups import DecodeGroups

__all__ = ["Batch", "make_batch", "random_values"]

_QUANTISED = (torch.int8, torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences in shuffled blocks of a pool; see docs/kv_layout.md.

    Attributes:
        ranges: (first_seq, last_seq, first_block, last_block) of each shared run.
        scales: k_scale and v_scale `[num_kv_heads]` float32 of a quantised pool, else empty.
    """

    k_pool: torch.Tensor
    v_pool: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    ranges: tuple[tuple[int, int, int, int], ...]
    scales: dict[str, Any]

    @property
    def paged(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """What every kernel takes after the query."""
        return self.k_pool, self.v_pool, self.block_tables, self.seq_lens

    @property
    def reference(self) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """What the references take after the query."""
        return self.k_pool, self.v_pool, list(self.block_tables), self.seq_lens

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.k_pool.shape[1]

    def groups(self, group_size: int) -> DecodeGroups:
        """Return the shared runs for a decode with `group_size` query heads per KV head."""
        return DecodeGroups.from_ranges(
            self.ranges,
            num_seqs=len(self.seq_lens),
            block_size=self.block_size,
            group_size=group_size,
            device=self.k_pool.device,
        )

    def contiguous(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies `[num_seqs, num_kv_heads, seq_len, head_dim]` of sequences of one length.

        The pool mustn't be quantised.
        """
        seq_len = int(self.seq_lens[0])
        tables = self.block_tables[:, : -(-seq_len // self.block_size)].long()
        copies = []
        for pool in (self.k_pool, self.v_pool):
            # One sequence at a time: gathering all and then copying would take the memory twice.
            shape = (len(tables), pool.shape[2], seq_len, pool.shape[3])
            copy = torch.empty(shape, dtype=pool.dtype, device=pool.device)
            for row, table in zip(copy, tables, strict=True):
                row.copy_(pool[table].flatten(0, 1)[:seq_len].transpose(0, 1))
            copies.append(copy)
        return copies[0], copies[1]


def make_batch(
    seq_lens: Sequence[int],
    *,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    shared: Sequence[tuple[int, int, int, int]] = (),
    poisoned: bool = False,
) -> Batch:
    """Return a batch of random K and V.

    Args:
        seq_lens: tokens of each sequence.
        num_kv_heads, head_dim, block_size, dtype, device: of the pool.
        shared: runs of full blocks that sequences have in common, parents before children.
        poisoned: fill what no sequence owns with NaN (int8: the largest number), and table entries
            that nobody may follow with ids outside of the pool.
    """
    counts = [-(-n // block_size) for n in seq_lens]
    tables = torch.full((len(seq_lens), max(counts) + 1), -1)
    num_used = 0
    starts = [0] * len(seq_lens)
    for first_seq, last_seq, first_block, last_block in shared:
        num_run = last_block - first_block
        tables[first_seq:last_seq, first_block:last_block] = num_used + torch.arange(num_run)
        num_used += num_run
        starts[first_seq:last_seq] = [last_block] * (last_seq - first_seq)
    for seq, (start, count) in enumerate(zip(starts, counts, strict=True)):
        tables[seq, start:count] = num_used + torch.arange(count - start)
        num_used += count - start
    # One block is nobody's; entry -1 stands for it until the tables are shuffled.
    order = torch.cat([torch.randperm(num_used), torch.tensor([num_used])])
    is_own = tables >= 0
    tables = torch.where(is_own, order[tables], 2**30 if poisoned else 0).to(torch.int32)
    owned = torch.ones((num_used + 1, block_size), dtype=torch.bool)
    owned[num_used] = False
    for seq, (seq_len, count) in enumerate(zip(seq_lens, counts, strict=True)):
        if seq_len % block_size:
            owned[tables[seq, count - 1].long(), seq_len % block_size :] = False

    shape = (num_used + 1, block_size, num_kv_heads, head_dim)
    pools = [random_values(shape, dtype, device) for _ in range(2)]
    scales: dict[str, Any] = {}
    for name, pool in zip(("k_scale", "v_scale"), pools, strict=True):
        if poisoned:
            raw = pool.view(torch.int8) if dtype in _QUANTISED else pool
            # As int8, 127 is the NaN of float8_e4m3fn.
            raw[~owned.to(device)] = 127 if dtype in _QUANTISED else float("nan")
        if dtype in _QUANTISED:
            scale = 0.5 + torch.rand(num_kv_heads, device=device)
            scales[name] = scale / 64 if dtype == torch.int8 else scale
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    return Batch(pools[0], pools[1], tables.to(device), lens, tuple(shared), scales)


def random_values(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return standard normal values, or integers from -127 to 127."""
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, dtype=dtype, device=device)
    if dtype == torch.float8_e4m3fn:
        return torch.randn(shape, device=device).to(dtype)
    return torch.randn(shape, dtype=dtype, device=device)
