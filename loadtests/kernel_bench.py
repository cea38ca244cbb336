"""Times of the kernels on given shapes, beside other people's on the same sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from loadtests.kernel_batches import Batch, make_batch, random_values
from loadtests.kernel_peers import decode_peers, prefill_peers
from loadtests.kernel_timing import Clock, Limits
from radixkv.kernels.copy_blocks import copy_blocks
from radixkv.kernels.paged_decode import choose_num_splits, paged_decode
from radixkv.kernels.paged_prefill import choose_tile_rows, paged_prefill, plan_tiles
from radixkv.kernels.prefix_decode import prefix_decode
from radixkv.kernels.tree_verify import pack_tree_mask, tree_verify
from radixkv.kernels.write_kv import write_kv

__all__ = ["BLOCK_SIZE", "Bench", "Heads", "Timing", "first_line"]

BLOCK_SIZE = 16
# Of the memory that is free; K and V are there twice, for us and contiguous for the others.
MEMORY_SHARE = 0.7
# Two kernels that both work differ by less, on outputs of about 1 in bfloat16.
MAX_DISAGREEMENT = 0.05


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of the model whose attention is timed."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return float(self.head_dim**-0.5)

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of a token of one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Timing:
    """One shape, timed.

    Attributes:
        kernel, shape: what ran.
        ms: median milliseconds, by contender; ours are "plain", "grouped" and "ours".
        gb_per_s: distinct bytes that ours must move, over its time.
        tflop_per_s: operations that ours must do, over its time; 0 where memory is the limit.
        of_limit: the share of the bandwidth of a copy, or of the rate of a large product.
        notes: peers that didn't run, with the reason, or that disagree.
    """

    kernel: str
    shape: str
    ms: dict[str, float]
    gb_per_s: float
    tflop_per_s: float
    of_limit: float
    notes: tuple[str, ...] = ()

    @property
    def ours_ms(self) -> float:
        """The better way of ours."""
        return min(ms for name, ms in self.ms.items() if name in ("plain", "grouped", "ours"))


class Bench:
    """Times shapes one after the other on one device."""

    def __init__(self, device: torch.device, heads: Heads, clock: Clock, limits: Limits) -> None:
        self.device, self.heads, self.clock, self.limits = device, heads, clock, limits
        self.num_multiprocessors = 1
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self.num_multiprocessors = properties.multi_processor_count

    def fits(self, num_tokens: int) -> bool:
        """Whether the K and V of `num_tokens` fit twice."""
        if self.device.type == "cpu":
            return True
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        return 2 * num_tokens * self.heads.token_bytes < MEMORY_SHARE * free

    def decode(self, num_seqs: int, context: int, share: int, *, with_flex: bool) -> Timing:
        """Time a decode step's attention; `share` percent of each context is common to all."""
        shared = context * share // 100 // BLOCK_SIZE * BLOCK_SIZE if num_seqs > 1 else 0
        return self.decode_shared(num_seqs, context, shared, with_flex=with_flex)

    def decode_shared(
        self, num_seqs: int, context: int, shared: int, *, with_flex: bool = False
    ) -> Timing:
        """Time a decode step's attention; the first `shared` tokens are common to all."""
        heads = self.heads
        runs = [(0, num_seqs, 0, shared // BLOCK_SIZE)] if shared else []
        batch = self._batch([context] * num_seqs, runs)
        query = random_values((num_seqs, heads.num_heads, heads.head_dim), heads.dtype, self.device)
        calls: dict[str, Callable[[], object]] = {
            "plain": lambda: paged_decode(query, *batch.paged, heads.scale)
        }
        distinct = num_seqs * context - (num_seqs - 1) * shared if shared else num_seqs * context
        if shared:
            groups = batch.groups(heads.group_size)
            splits = [
                choose_num_splits(n, heads.num_kv_heads, length, self.num_multiprocessors)
                for n, length in ((num_seqs, context - shared), (1, shared))
            ]
            calls["grouped"] = lambda: prefix_decode(
                query,
                *batch.paged,
                groups,
                heads.scale,
                num_splits=splits[0],
                num_prefix_splits=splits[1],
            )
        peers = decode_peers(query, batch, heads.scale, with_flex=with_flex)
        name = f"{num_seqs} x {context}" + (f", {shared} shared" if shared else "")
        return self._time("decode", name, calls, peers, distinct * heads.token_bytes, 0)

    def prefill(self, num_seqs: int, num_new: int, context: int) -> Timing:
        """Time chunks of `num_new` tokens behind `context` tokens that are in the pool already."""
        heads = self.heads
        seq_len = context + num_new
        batch = self._batch([seq_len] * num_seqs, [])
        shape = (num_seqs, num_new, heads.num_heads, heads.head_dim)
        query = random_values(shape, heads.dtype, self.device)
        rows = choose_tile_rows(num_new, heads.group_size, heads.head_dim, heads.dtype)
        tiles = plan_tiles([num_new] * num_seqs, rows).to(self.device)
        starts = self._starts(num_seqs, num_new)
        out = torch.empty_like(query)

        def ours() -> torch.Tensor:
            paged_prefill(
                query.flatten(0, 1),
                *batch.paged,
                starts,
                heads.scale,
                tiles=tiles,
                tile_rows=rows,
                out=out.flatten(0, 1),
            )
            return out

        pairs = num_seqs * num_new * (context + (num_new + 1) / 2)
        flops = 4 * heads.num_heads * heads.head_dim * pairs
        peers = prefill_peers(query, batch, heads.scale)
        name = f"{num_seqs} x {num_new} behind {context}"
        return self._time(
            "prefill", name, {"ours": ours}, peers, num_seqs * seq_len * heads.token_bytes, flops
        )

    def verify(self, num_seqs: int, num_nodes: int, context: int) -> Timing:
        """Time trees of drafted tokens, each node seeing every other one before it."""
        heads = self.heads
        batch = self._batch([context + num_nodes] * num_seqs, [])
        shape = (num_seqs * num_nodes, heads.num_heads, heads.head_dim)
        query = random_values(shape, heads.dtype, self.device)
        rows = choose_tile_rows(num_nodes, heads.group_size, heads.head_dim, heads.dtype)
        tiles = plan_tiles([num_nodes] * num_seqs, rows).to(self.device)
        starts = self._starts(num_seqs, num_nodes)
        steps = torch.arange(num_nodes, device=self.device)
        mask = pack_tree_mask(
            ((steps[None] <= steps[:, None]) & ((steps[None] - steps[:, None]) % 2 == 0)).repeat(
                num_seqs, 1
            )
        )
        calls: dict[str, Callable[[], object]] = {
            "ours": lambda: tree_verify(
                query, *batch.paged, starts, heads.scale, tree_mask=mask, tiles=tiles,
                tile_rows=rows,
            )
        }  # fmt: skip
        num_bytes = num_seqs * (context + num_nodes) * heads.token_bytes
        name = f"{num_seqs} x {num_nodes} nodes behind {context}"
        return self._time("verify", name, calls, {}, num_bytes, 0)

    def write(self, num_tokens: int) -> Timing:
        """Time the write of new tokens into random slots of one layer."""
        heads = self.heads
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        batch = self._batch([num_blocks * BLOCK_SIZE], [])
        shape = (num_tokens, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim)
        fused = random_values(shape, heads.dtype, self.device)
        _, key, value = fused.split_with_sizes(
            [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=1
        )
        slots = torch.randperm(num_blocks * BLOCK_SIZE, device=self.device)[:num_tokens]
        calls: dict[str, Callable[[], object]] = {
            "ours": lambda: write_kv(key, value, batch.k_pool, batch.v_pool, slots)
        }
        num_bytes = 2 * num_tokens * heads.token_bytes
        return self._time("write_kv", f"{num_tokens} tokens", calls, {}, num_bytes, 0)

    def copy(self, num_pairs: int, num_layers: int) -> Timing:
        """Time copies of whole blocks, and torch's own way to do it."""
        heads = self.heads
        shape = (
            2, num_layers, 2 * num_pairs, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim,
        )  # fmt: skip
        data = random_values(shape, heads.dtype, self.device)
        pairs = torch.randperm(2 * num_pairs, device=self.device).view(num_pairs, 2)
        source, target = pairs.unbind(1)
        calls: dict[str, Callable[[], object]] = {
            "ours": lambda: copy_blocks(data, pairs),
            "torch": lambda: data.index_copy_(2, target, data.index_select(2, source)),
        }
        num_bytes = 2 * num_pairs * num_layers * BLOCK_SIZE * heads.token_bytes
        name = f"{num_pairs} blocks, {num_layers} layers"
        return self._time("copy_blocks", name, calls, {}, num_bytes, 0)

    def _batch(self, seq_lens: list[int], runs: list[tuple[int, int, int, int]]) -> Batch:
        heads = self.heads
        return make_batch(
            seq_lens,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            block_size=BLOCK_SIZE,
            dtype=heads.dtype,
            device=self.device,
            shared=runs,
        )

    def _starts(self, num_seqs: int, num_new: int) -> torch.Tensor:
        starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=self.device)
        return starts * num_new

    def _time(
        self,
        kernel: str,
        shape: str,
        calls: dict[str, Callable[[], object]],
        peers: dict[str, Callable[[], Callable[[], torch.Tensor]]],
        num_bytes: float,
        flops: float,
    ) -> Timing:
        prepared = {name: self.clock.prepare(call) for name, call in calls.items()}
        ours = next(iter(calls.values()))() if peers else None
        notes = []
        for name, prepare in peers.items():
            assert isinstance(ours, torch.Tensor)
            try:
                call = prepare()
                error = float((call().reshape(ours.shape).float() - ours.float()).abs().max())
                prepared[name] = self.clock.prepare(call)
            except Exception as reason:
                # Whatever stops somebody else's code mustn't stop the rest of the report.
                notes.append(f"{name} doesn't run: {first_line(reason)}")
                continue
            if not error < MAX_DISAGREEMENT:
                notes.append(f"{name} differs by {error:.3g}")
        seconds = self.clock.race(prepared)
        best = min(seconds[name] for name in calls if name != "torch")
        limit = self.limits.copy_bytes_per_s
        share = flops / best / self.limits.matmul_flops_per_s if flops else num_bytes / best / limit
        return Timing(
            kernel=kernel,
            shape=shape,
            ms={name: value * 1e3 for name, value in seconds.items()},
            gb_per_s=num_bytes / best / 1e9,
            tflop_per_s=flops / best / 1e12,
            of_limit=share,
            notes=tuple(notes),
        )


def first_line(error: Exception) -> str:
    """Return what an error says, cut to fit into a table."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]
