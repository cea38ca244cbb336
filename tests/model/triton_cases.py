"""Batches for the Triton backend with a dense oracle, and torch twins of the kernels it calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from radixkv.kernels.reference import merge_partials
from radixkv.model.attention import AttentionMetadata, PrefixGroup
from radixkv.model.kv_pool import QUANTISED_DTYPES, KVPool
from radixkv.model.triton_attention import TritonAttention
from radixkv.model.triton_kernels import Kernels

DIM = 64
LAYERS = 2
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case:
    """A batch over a pool in which everything that no sequence owns is poisoned."""

    pool: KVPool
    metadata: AttentionMetadata
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @property
    def num_heads(self) -> int:
        return self.query.shape[1]

    def backend(self, kernels: Kernels | None = None) -> TritonAttention:
        return make_backend(self.pool, self.num_heads, kernels, self.query.dtype)

    def run(self, kernels: Kernels | None = None, *, layer: int = 1) -> torch.Tensor:
        backend = self.backend(kernels)
        backend.plan(self.metadata)
        return backend.run(layer, self.query, self.key, self.value)

    def check(self, kernels: Kernels | None = None) -> None:
        out = self.run(kernels)
        assert out.dtype == self.query.dtype
        tol = TOLERANCE[out.dtype]
        torch.testing.assert_close(out.double().cpu(), self.expected(1), rtol=tol, atol=tol)

    def expected(self, layer: int) -> torch.Tensor:
        """Dense attention in float64 over what the pool holds, after `run`."""
        meta = self.metadata
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        for i in range(meta.num_seqs):
            start, stop = (int(x) for x in meta.query_start_loc[i : i + 2])
            seq_len, new = int(meta.seq_lens[i]), stop - start
            mask = torch.ones((new, seq_len), dtype=torch.bool)
            tree = meta.tree_masks[i] if meta.tree_masks else None
            line = torch.ones(new, new, dtype=torch.bool).tril()
            mask[:, seq_len - new :] = line if tree is None else torch.from_numpy(tree)
            k, v = self.dense(i, layer)
            repeat = self.num_heads // self.pool.num_kv_heads
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
            query = self.query[start:stop].double().cpu()
            scores = torch.einsum("qhd,khd->hqk", query, k) * DIM**-0.5
            scores.masked_fill_(~mask, float("-inf"))
            out[start:stop] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        return out

    def dense(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one sequence as float64 `[seq_len, num_kv_heads, head_dim]`."""
        pool, seq_len = self.pool, int(self.metadata.seq_lens[seq])
        position = np.arange(seq_len)
        table = self.metadata.block_tables[seq].astype(np.int64)
        slots = table[position // pool.block_size] * pool.block_size + position % pool.block_size
        result = []
        for data, scales in ((pool.k_slots, pool.k_scales), (pool.v_slots, pool.v_scales)):
            stored = raw(data[layer]).cpu()[torch.from_numpy(slots)].view(pool.dtype).double()
            result.append(stored if scales is None else stored * scales[layer].cpu())
        return result[0], result[1]


def make_backend(
    pool: KVPool,
    num_heads: int,
    kernels: Kernels | None = None,
    query_dtype: torch.dtype | None = None,
) -> TritonAttention:
    return TritonAttention(
        pool,
        num_heads=num_heads,
        num_kv_heads=pool.num_kv_heads,
        head_dim=DIM,
        scale=DIM**-0.5,
        query_dtype=query_dtype,
        min_saved_bytes=0,
        kernels=kernels,
    )


def make_case(
    seqs: Sequence[tuple[int, int]],
    groups: Sequence[tuple[int, int, int]] = (),
    *,
    trees: Sequence[int] = (),
    block_size: int = 8,
    heads: tuple[int, int] = (6, 2),
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Case:
    """Build a batch.

    Args:
        seqs: per sequence, tokens in the pool before (those of its groups included) and new ones.
        groups: first and last sequence and number of blocks, parents first.
        trees: sequences whose new tokens are a random tree.
        kv_dtype: of the pool; the query's if None.
    """
    rng = np.random.default_rng(seed)
    gen = torch.Generator().manual_seed(seed)
    kv_dtype = kv_dtype or dtype
    used = sum(-(-(old + new) // block_size) for old, new in seqs) + 1
    shape = (LAYERS, heads[1], DIM)
    scales = None
    if kv_dtype in QUANTISED_DTYPES:
        scales = 0.03 + 0.02 * torch.rand(shape, generator=gen)
    pool = KVPool(
        LAYERS, used, block_size, heads[1], DIM, kv_dtype, device, k_scale=scales, v_scale=scales
    )
    poison(pool)
    free = iter(rng.permutation(used).tolist())
    tables: list[list[int]] = [[] for _ in seqs]
    prefix_groups = []
    for first, last, count in groups:
        start = len(tables[first])
        shared = [next(free) for _ in range(count)]
        for table in tables[first:last]:
            table += shared
        prefix_groups.append(PrefixGroup(first, last, start, start + count))
    slot_mapping: list[int] = []
    for table, (old, new) in zip(tables, seqs, strict=True):
        while len(table) * block_size < old + new:
            table.append(next(free))
        slots = [table[i // block_size] * block_size + i % block_size for i in range(old + new)]
        slot_mapping += slots[old:]
        for data in pool.data.flatten(2, 3):
            values = torch.randn((LAYERS, old, heads[1], DIM), generator=gen)
            if scales is not None:
                values = (values / scales[:, None]).clamp(-127, 127).round()
            raw(data)[:, slots[:old]] = raw(values.to(kv_dtype)).to(device)
    num_tokens = sum(new for _, new in seqs)
    # The layout of a fused projection: query, key and value are strided views.
    fused = torch.randn((num_tokens, heads[0] + 2 * heads[1], DIM), generator=gen).to(dtype)
    query, key, value = torch.split(fused.to(device), [heads[0], heads[1], heads[1]], dim=1)
    masks = tuple(random_tree(new, rng) if i in trees else None for i, (_, new) in enumerate(seqs))
    metadata = AttentionMetadata(
        query_start_loc=np.cumsum([0] + [new for _, new in seqs], dtype=np.int32),
        seq_lens=np.array([old + new for old, new in seqs], dtype=np.int32),
        block_tables=tuple(np.array([*t, 2**31 - 1, -7], dtype=np.int32) for t in tables),
        slot_mapping=np.array(slot_mapping, dtype=np.int64),
        groups=tuple(prefix_groups),
        tree_masks=masks if trees else (),
    )
    return Case(pool, metadata, query, key, value)


def random_tree(num_nodes: int, rng: np.random.Generator) -> np.ndarray:
    """Mask of a tree in which every node but the first has a random earlier one as its parent."""
    mask = np.eye(num_nodes, dtype=np.bool_)
    for node in range(1, num_nodes):
        mask[node] |= mask[rng.integers(node)]
    return mask


def raw(data: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that torch can index: float8 as bytes."""
    return data.view(torch.int8) if data.dtype == torch.float8_e4m3fn else data


def poison(pool: KVPool) -> None:
    """Fill a pool with NaN, or the largest number if it has none; 127 is float8's NaN."""
    raw(pool.data).fill_(127 if pool.dtype in QUANTISED_DTYPES else float("nan"))


def twins() -> tuple[Kernels, Counter[str]]:
    """Torch twins of the kernels, as literal as can be, and how often each attention was called."""
    calls: Counter[str] = Counter()

    def counted(name: str) -> Counter[str]:
        calls[name] += 1
        return calls

    def paged_decode(query, k_pool, v_pool, tables, seq_lens, scale, **options):
        counted("paged_decode")
        starts = torch.zeros_like(seq_lens)
        return _attend_each(query, k_pool, v_pool, tables, starts, seq_lens, scale, options)[0]

    def prefix_decode(query, k_pool, v_pool, tables, seq_lens, groups, scale, **options):
        counted("prefix_decode")
        outs = torch.zeros((groups.num_levels + 1, *query.shape), device=query.device)
        lses = torch.full(outs.shape[:-1], float("-inf"), device=query.device)
        repeat = query.shape[1] // k_pool.shape[2]
        columns = ("first_seq", "last_seq", "first_block", "last_block", "level")
        for first, last, start, end, level in zip(
            *(getattr(groups, name).tolist() for name in columns), strict=True
        ):
            if first == last:
                continue
            assert (last - first) * repeat <= groups.max_group_rows
            keys = _keys(k_pool, v_pool, tables[first, start:end], None, options)
            for seq in range(first, last):
                assert lses[level, seq].isneginf().all(), "two groups of one level"
                outs[level, seq], lses[level, seq] = _attend(query[seq : seq + 1], keys, scale)
        outs[-1], lses[-1] = _attend_each(
            query, k_pool, v_pool, tables, groups.start_lens, seq_lens, scale, options
        )
        empty = seq_lens == 0
        lses[-1, empty] = 0.0
        return merge_partials(outs, lses)[0].to(query.dtype)

    def paged_prefill(query, k_pool, v_pool, tables, seq_lens, starts, scale, **options):
        counted("paged_prefill")
        _tiles(query, k_pool, v_pool, tables, seq_lens, starts, scale, None, options)

    def tree_verify(query, k_pool, v_pool, tables, seq_lens, starts, scale, **options):
        counted("tree_verify")
        mask = options.pop("tree_mask")
        _tiles(query, k_pool, v_pool, tables, seq_lens, starts, scale, mask, options)

    def write_kv(key, value, k_pool, v_pool, slots, *, k_scale=None, v_scale=None):
        kept = slots >= 0
        for new, pool, scale in ((key, k_pool, k_scale), (value, v_pool, v_scale)):
            rows = new[kept]
            if scale is not None:
                rows = (rows / scale).round().clamp(-127, 127)
            raw(pool).flatten(0, 1)[slots[kept]] = raw(rows.to(pool.dtype))

    from radixkv.kernels.decode_groups import DecodeGroups
    from radixkv.kernels.tile_plan import choose_tile_rows, plan_tiles

    def refuse(*_: object) -> None:
        raise AssertionError("attention does not copy blocks")

    kernels = Kernels(
        choose_num_splits=lambda *_: 1,
        paged_decode=paged_decode,
        decode_groups=DecodeGroups,
        prefix_decode=prefix_decode,
        choose_tile_rows=choose_tile_rows,
        plan_tiles=plan_tiles,
        paged_prefill=paged_prefill,
        tree_verify=tree_verify,
        write_kv=write_kv,
        copy_blocks=refuse,
        gather_blocks=refuse,
        scatter_blocks=refuse,
    )
    return kernels, calls


def without_groups(case: Case) -> Case:
    return replace(case, metadata=replace(case.metadata, groups=()))


def _keys(k_pool, v_pool, blocks, seq_len, options):
    """K and V of some blocks, cut to a length before any arithmetic."""
    result = []
    for pool, name in ((k_pool, "k_scale"), (v_pool, "v_scale")):
        rows = raw(pool)[blocks.long()].flatten(0, 1)[:seq_len].view(pool.dtype).float()
        scale = options.get(name)
        result.append(rows if scale is None else rows * scale)
    return result


def _attend(query, keys, scale, mask=None):
    """Output `[rows, heads, dim]` and log-sum-exp `[rows, heads]` of query rows over keys."""
    repeat = query.shape[1] // keys[0].shape[1]
    k, v = (x.repeat_interleave(repeat, 1) for x in keys)
    scores = torch.einsum("qhd,khd->qhk", query.float(), k) * scale
    if mask is not None:
        scores.masked_fill_(~mask[:, None], float("-inf"))
    return torch.einsum("qhk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


def _attend_each(query, k_pool, v_pool, tables, starts, seq_lens, scale, options):
    outs = torch.zeros(query.shape, device=query.device)
    lses = torch.full(query.shape[:2], float("-inf"), device=query.device)
    for i, (start, end) in enumerate(zip(starts.tolist(), seq_lens.tolist(), strict=True)):
        if end:
            blocks = tables[i, : -(-end // k_pool.shape[1])]
            keys = [x[start:] for x in _keys(k_pool, v_pool, blocks, end, options)]
            outs[i], lses[i] = _attend(query[i : i + 1], keys, scale)
    return outs.to(query.dtype) if (starts == 0).all() else outs, lses


def _tiles(query, k_pool, v_pool, tables, seq_lens, starts, scale, tree_mask, options):
    out, tile_rows = options["out"], options["tile_rows"]
    for seq, first in options["tiles"].tolist():
        begin, end = int(starts[seq]), int(starts[seq + 1])
        seq_len, new = int(seq_lens[seq]), end - begin
        keys = _keys(
            k_pool, v_pool, tables[seq, : -(-seq_len // k_pool.shape[1])], seq_len, options
        )
        mask = torch.ones((new, seq_len), dtype=torch.bool).tril(seq_len - new)
        if tree_mask is not None:
            bits = tree_mask[begin:end].cpu()
            node = torch.arange(new)
            mask[:, seq_len - new :] = (bits[:, node // 32] >> (node % 32)) & 1 == 1
        rows = slice(first, min(first + tile_rows, new))
        result, _ = _attend(query[begin:end][rows], keys, scale, mask[rows].to(query.device))
        out[begin:end][rows] = result.to(out.dtype)
