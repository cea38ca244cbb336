"""Paged pools for kernel tests: shuffled, shared, and poisoned wherever no kernel may look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = [
    "QUANTISED",
    "TOLERANCE",
    "PagedBatch",
    "assert_attention_close",
    "make_paged_batch",
    "random_tensor",
]

QUANTISED = (torch.int8, torch.float8_e4m3fn)

# Largest difference of an output (of values near 1) from float64, by the query's dtype.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

# Table entries nobody may follow: far outside of any pool, on both sides.
POISON_IDS = (2**30, -(2**30))


@dataclass(frozen=True)
class PagedBatch:
    """K and V of some sequences in a pool, with everything that isn't theirs poisoned."""

    k_pool: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    v_pool: torch.Tensor
    block_tables: torch.Tensor  # [num_seqs, max_blocks] int32
    seq_lens: torch.Tensor  # [num_seqs] int32
    k_scale: torch.Tensor | None  # [num_kv_heads] or [num_kv_heads, head_dim] float32, if quantised
    v_scale: torch.Tensor | None

    @property
    def block_size(self) -> int:
        return self.k_pool.shape[1]

    def dense(self, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a sequence's K and V on the CPU, `[seq_len, num_kv_heads, head_dim]` float64."""
        seq_len = int(self.seq_lens[seq])
        blocks = self.block_tables[seq, : -(-seq_len // self.block_size)].long().cpu()
        dense = []
        for pool, scale in ((self.k_pool, self.k_scale), (self.v_pool, self.v_scale)):
            # float8 has no indexing on every device: gather its bytes.
            raw = pool.cpu().view(torch.int8) if pool.dtype in QUANTISED else pool.cpu()
            x = raw[blocks].flatten(0, 1)[:seq_len].contiguous().view(pool.dtype).double()
            if scale is not None:
                wide = scale.cpu().double()
                x = x * (wide[:, None] if wide.ndim == 1 else wide)
            dense.append(x)
        return dense[0], dense[1]


def random_tensor(
    shape: Sequence[int],
    dtype: torch.dtype,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return normal values (int8: -100 to 100), the same ones on every device."""
    if dtype == torch.int8:
        return torch.randint(-100, 101, shape, generator=generator, dtype=dtype).to(device)
    return torch.randn(tuple(shape), generator=generator).to(dtype).to(device)


def make_paged_batch(
    seq_lens: Sequence[int],
    *,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    shared: Sequence[tuple[int, int, int, int]] = (),
    per_channel: bool = False,
    heads_first: bool = False,
    max_blocks: int | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> PagedBatch:
    """Fill a pool with sequences in shuffled blocks.

    Slots past a sequence's end, blocks that belong to nobody and every table entry past the
    sequence's last block are poisoned: NaN (the largest value in an int8 pool), ids far outside.

    Args:
        seq_lens: tokens of each sequence; 0 is a padding row.
        dtype: of the pool; an int8 or float8_e4m3fn pool gets random scales.
        shared: (first_seq, last_seq, first_block, last_block) runs of blocks that are the same
            in all sequences of the range; parents before children, full blocks of every member.
        per_channel: whether scales are `[num_kv_heads, head_dim]`.
        heads_first: whether the memory is `[blocks, heads, block_size, dim]` and the pool a view.
        max_blocks: columns of the tables; one more than needed if None.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-n // block_size) for n in seq_lens]
    width = max(counts, default=0) + 1 if max_blocks is None else max_blocks
    num_blocks = sum(counts) + 3
    free = torch.randperm(num_blocks, generator=generator).tolist()
    tables = torch.empty((len(seq_lens), width), dtype=torch.int32)
    tables.view(-1)[0::2], tables.view(-1)[1::2] = POISON_IDS
    for i, count in enumerate(counts):
        tables[i, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
    for first_seq, last_seq, first_block, last_block in shared:
        if min(seq_lens[first_seq:last_seq]) < last_block * block_size:
            raise ValueError(f"a member of {(first_seq, last_seq)} ends before its shared run")
        run = tables[first_seq, first_block:last_block].clone()
        tables[first_seq:last_seq, first_block:last_block] = run

    used = torch.zeros((num_blocks, block_size), dtype=torch.bool)
    for i, n in enumerate(seq_lens):
        pos = torch.arange(n)
        used[tables[i, pos // block_size].long(), pos % block_size] = True

    pools, scales = [], []
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    for _ in range(2):
        pool = random_tensor(shape, dtype, generator)
        raw = pool.view(torch.int8) if dtype in QUANTISED else pool
        raw[~used] = 127 if dtype in QUANTISED else float("nan")  # 127 is float8_e4m3fn's NaN too
        if heads_first:
            raw = raw.transpose(1, 2).contiguous().transpose(1, 2)
        pools.append(raw.view(dtype).to(device))
        scale = None
        if dtype in QUANTISED:
            size = (num_kv_heads, head_dim) if per_channel else (num_kv_heads,)
            # int8 values up to 100 become values up to about 2, float8's stay near 1.
            scale = 0.5 + torch.rand(size, generator=generator)
            scale = (scale / 70 if dtype == torch.int8 else scale).to(device)
        scales.append(scale)
    return PagedBatch(
        k_pool=pools[0],
        v_pool=pools[1],
        block_tables=tables.to(device),
        seq_lens=torch.tensor(list(seq_lens), dtype=torch.int32, device=device),
        k_scale=scales[0],
        v_scale=scales[1],
    )


def assert_attention_close(
    got: tuple[torch.Tensor, torch.Tensor],
    want: tuple[torch.Tensor, torch.Tensor],
    dtype: torch.dtype,
    *,
    exact_scores: bool = True,
) -> None:
    """Compare an output and its log-sum-exp with the float64 reference's.

    Args:
        got: output in `dtype` and log-sum-exp in float32, of a kernel.
        want: the same in float64.
        dtype: of the query.
        exact_scores: whether scores are computed from the query as it is, so that only sums in
            float32 differ; not so if scales of channels were multiplied into it.
    """
    assert got[0].dtype == dtype
    assert got[1].dtype == torch.float32
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got[0].double().cpu(), want[0].cpu(), rtol=tolerance, atol=tolerance)
    tolerance = TOLERANCE[torch.float32 if exact_scores else dtype]
    torch.testing.assert_close(got[1].double().cpu(), want[1].cpu(), rtol=tolerance, atol=tolerance)
