"""Attention over the paged pool on a CPU, with torch's flash kernel and no copies where it can."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from radixkv.model.attention import AttentionBackend, AttentionMetadata
from radixkv.model.cpu_attention_plan import (
    AttentionPlan,
    CausalCall,
    RunCall,
    TailCall,
    Tuning,
    plan_attention,
)
from radixkv.model.cpu_speed import float32_is_faster
from radixkv.model.kv_pool import KVPool
from radixkv.model.kv_staging import KVStaging

__all__ = ["CpuAttention"]


@dataclass(frozen=True, slots=True)
class _Call:
    """One kernel call over the pool or the gathered tokens, the same in every layer.

    Attributes:
        query: `[batch, heads, rows, head_dim]`, a view of the query buffer, or None if the rows
            must be picked from it by `tokens`.
        key, value: `[batch, heads, length, head_dim]`, views of the gather buffer, or None if
            the call reads the pool, as a view of `size` and `stride` at `offset` elements into
            the layer.
        mask: additive, broadcast to `[batch, heads, rows, length]`.
        out, lse: views of the slabs, `[batch, heads, rows, head_dim]` and without the last; with
            `tokens`, the whole level, `[num_kv_heads, num_tokens, group_size(, head_dim)]`.
        is_wide: the KV heads are one head of `num_kv_heads * head_dim` to the kernel; `out` and
            `lse` are `[parts, num_kv_heads, tokens, group_size(, head_dim)]`, of a tail without
            the tokens.
    """

    query: torch.Tensor | None
    key: torch.Tensor | None
    value: torch.Tensor | None
    mask: torch.Tensor | None
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    out: torch.Tensor
    lse: torch.Tensor
    tokens: torch.Tensor | None = None
    is_tail: bool = False
    is_wide: bool = False


class CpuAttention(AttentionBackend):
    """Exact attention on the CPU that reads a shared run of blocks once for all its sequences.

    The work of a step is a handful of calls of the flash kernel, each for some query rows and
    some tokens before them; what they return is merged by log-sum-exp, in float32. Inside, heads
    are laid out `[num_kv_heads, num_tokens * group_size, head_dim]`: the query heads of a KV head
    are just more rows, and the sequences of a group are a slice. A run of consecutive blocks is
    a strided view of the pool with the KV heads as its batch. Runs too short for a call of their
    own are gathered, all of a layer's at once.

    One or two decode tokens have so few rows that the kernel spends its time on starting products.
    Their queries are therefore laid out block-diagonally, `[num_heads, num_kv_heads * head_dim]`
    with zeros outside of each query's own KV head, and all KV heads are read as one wide head: a
    third of the products for three heads, each over contiguous memory, and the same result, since
    what the zeros add is exactly zero.

    The kernel can't read a pool of 8 bits: all that a step reads of it is gathered, each run once,
    and converted to the query's dtype, which holds such numbers exactly (`KVStaging`). They are
    never multiplied by their scales: K's go into the query, V's into the output. New K and V
    are read back from what the pool keeps of them, so that a token's output does not depend on
    which of the others were in the pool before.

    Invariants: only slots of a sequence's own tokens are read, so nothing that lies elsewhere in
    the pool, NaN included, can reach an output. The same batch gives the same bits every time,
    for a fixed number of torch threads.

    Source:
        Cascade Inference (Ye et al., 2024); Flash-Decoding (Dao et al., 2023).
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        tuning: Tuning | None = None,
        query_dtype: torch.dtype | None = None,
    ) -> None:
        """Make the buffers.

        Args:
            pool: K and V.
            num_heads, num_kv_heads, head_dim: of the model.
            scale: factor of the scores.
            tuning: None is what was measured to be good.
            query_dtype: of queries; None is the pool's, and an 8-bit pool needs another.
        """
        super().__init__(
            pool, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=scale
        )
        self.tuning = tuning or Tuning()
        self._dtype = query_dtype or pool.dtype
        if pool.k_scales is None and self._dtype != pool.dtype:
            raise ValueError(f"query_dtype must be the pool's {pool.dtype}, got {self._dtype}")
        self.group_size = num_heads // num_kv_heads
        self._width = num_kv_heads * head_dim
        self._can_widen = num_kv_heads > 1 and self._width <= self.tuning.max_wide
        self._has_wide = self._has_narrow = False
        self._float32_rows = math.inf
        if self._dtype == torch.bfloat16 and float32_is_faster():
            self._float32_rows = self.tuning.min_float32_rows
        self._plan: AttentionPlan | None = None
        self._calls: list[_Call] = []
        self._causals: list[tuple[CausalCall, torch.Tensor, torch.Tensor]] = []
        self._writes: list[tuple[slice, slice]] = []
        self._slots = torch.empty(0, dtype=torch.int64)
        self._gather_rows = torch.empty(0, dtype=torch.int64)
        self._buffers: dict[str, torch.Tensor] = {}
        # Row s of a layer's view is K of slot s, row num_layers * num_slots + s is V of it, so
        # that one index_select gathers both.
        num_slots = pool.num_blocks * pool.block_size
        self._layer_rows = [
            pool.data.view(-1, num_kv_heads * head_dim).narrow(
                0, layer * num_slots, (pool.num_layers + 1) * num_slots
            )
            for layer in range(pool.num_layers)
        ]
        self._value_row = pool.num_layers * num_slots
        self._staging: KVStaging | None = None
        if pool.k_scales is not None:
            self._staging = KVStaging(pool, self._dtype, self._layer_rows)
        self._layer_elements = num_slots * num_kv_heads * head_dim

    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepare the batch described by `metadata`; valid until the next call.

        Raises:
            ValueError: see `plan_attention`.
        """
        plan = plan_attention(
            metadata,
            block_size=self.pool.block_size,
            num_blocks=self.pool.num_blocks,
            num_kv_heads=self.num_kv_heads,
            group_size=self.group_size,
            num_threads=torch.get_num_threads(),
            tuning=self.tuning,
            can_widen=self._can_widen,
            gathers_all=self._staging is not None,
        )
        self._plan = plan
        self._plan_writes(metadata.slot_mapping)
        kvh, dim, rows = self.num_kv_heads, self.head_dim, plan.num_tokens * self.group_size
        slots = torch.from_numpy(plan.gather_slots)
        self._gather_rows = torch.cat([slots, slots + self._value_row])
        if self._staging is not None:
            self._staging.plan(self._gather_rows.numpy())
        self._gathered = self._buffer("gathered", (len(self._gather_rows), kvh * dim))
        self._query = self._buffer("query", (kvh, rows, dim))
        self._has_wide = any(run.is_wide for run in plan.runs) or (
            self._can_widen and bool(plan.tails)
        )
        if self._has_wide:
            # Zero outside the diagonal blocks, which are all that is ever written.
            shape = (plan.num_tokens, kvh, self.group_size, kvh, dim)
            self._wide = self._buffer("wide", shape)
        levels = plan.num_levels
        self._out = self._buffer("out", (levels, kvh, rows, dim), torch.float32)
        self._lse = self._buffer("lse", (levels, kvh, rows), torch.float32)
        self._weights = self._buffer("weights", (levels, kvh, rows), torch.float32)
        self._merged = self._buffer("merged", (kvh, rows, dim), torch.float32)
        if not plan.is_full:
            self._out.zero_()
            self._lse.fill_(-math.inf)
        self._calls = [self._run_call(run) for run in plan.runs]
        self._calls += [self._tail_call(tail) for tail in plan.tails]
        self._has_narrow = any(not call.is_wide for call in self._calls)
        self._causals = [
            (causal, *self._slab_rows(causal.level, causal.first_token, causal.last_token))
            for causal in plan.causals
        ]

    def run(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Write the new K and V into the pool and return the attention output.

        Args and result: see `AttentionBackend.run`.

        Raises:
            ValueError: no batch was planned, or the query is not of that batch.
        """
        plan = self._plan
        if plan is None or query.shape[0] != plan.num_tokens:
            planned = None if plan is None else plan.num_tokens
            raise ValueError(f"planned for {planned} tokens, got {query.shape[0]}")
        if query.dtype != self._dtype:
            raise ValueError(f"query must be {self._dtype}, got {query.dtype}")
        grouped = query.view(plan.num_tokens, self.num_kv_heads, self.group_size, self.head_dim)
        if self._staging is not None:
            grouped = self._staging.scale_query(layer, grouped)
            key, value = self._staging.quantize(layer, key, value)
        self._write(layer, key, value)
        if self._staging is not None:
            self._staging.gather(layer, self._gathered)
            key, value = self._staging.to_dtype(key), self._staging.to_dtype(value)
        elif len(plan.gather_slots):
            torch.index_select(self._layer_rows[layer], 0, self._gather_rows, out=self._gathered)
        if self._has_narrow:
            self._by_token(self._query).copy_(grouped)
        if self._has_wide:
            _diagonal(self._wide).copy_(grouped.permute(0, 2, 3, 1))
        if (
            len(self._calls) + len(self._causals) == 1
            and plan.num_levels == 1
            and all(call.tokens is None for call in self._calls)
        ):
            only = self._run_only_call(layer, grouped, key, value)
            if self._staging is not None:
                only = self._staging.scale_output(layer, only)
            return only.to(query.dtype).reshape(query.shape)
        for call in self._calls:
            out, lse = self._attend(layer, call)
            if call.tokens is None:
                call.out.copy_(out)
                call.lse.copy_(lse)
            else:
                # A repeated token's results are the same each time.
                shape = (self.num_kv_heads, -1, self.group_size)
                out = out.transpose(0, 1).reshape(*shape, self.head_dim)
                call.out.index_copy_(1, call.tokens, out.float())
                call.lse.index_copy_(1, call.tokens, lse.transpose(0, 1).reshape(shape))
        for causal, slab_out, slab_lse in self._causals:
            out, lse = self._attend_causal(causal, grouped, key, value)
            slab_out.copy_(out.transpose(1, 2))
            slab_lse.copy_(lse.transpose(1, 2))
        merged = self._by_token(self._merge(plan.num_levels))
        if self._staging is not None:
            merged = self._staging.scale_output(layer, merged)
        result = torch.empty(grouped.shape, dtype=query.dtype)
        result.copy_(merged)
        return result.view(query.shape)

    def _run_only_call(
        self, layer: int, grouped: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Return `[num_tokens, num_kv_heads, group_size, head_dim]` if there's nothing to merge."""
        if not self._calls:
            out, _ = self._attend_causal(self._causals[0][0], grouped, key, value)
            return out.permute(2, 0, 1, 3)
        call = self._calls[0]
        out, _ = self._attend(layer, call)
        # A batch of tails has its sequences in front already; a lone run is of one token.
        if call.is_tail:
            by_token = out.view(len(out), self.num_kv_heads, -1, self.group_size, self.head_dim)
            return by_token.transpose(1, 2).flatten(0, 1)
        return out[0].transpose(0, 1) if call.is_wide else out.transpose(0, 1)

    def _merge(self, num_levels: int) -> torch.Tensor:
        """Return `[num_kv_heads, rows, head_dim]`, the slabs' levels merged."""
        if num_levels == 1:
            return self._out[0]
        torch.softmax(self._lse, 0, out=self._weights)
        self._out.mul_(self._weights.unsqueeze(-1))
        return torch.sum(self._out, 0, out=self._merged)

    def _by_token(self, rows: torch.Tensor) -> torch.Tensor:
        """Return `[num_kv_heads, rows, head_dim]` seen token by token, KV heads second."""
        shape = (self.num_kv_heads, -1, self.group_size, self.head_dim)
        return rows.view(shape).transpose(0, 1)

    def _attend(self, layer: int, call: _Call) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = call.query, call.key, call.value
        if query is None:
            assert call.tokens is not None
            if call.is_wide:
                query = self._wide_rows(self._wide.index_select(0, call.tokens))
            else:
                query = self._query.view(self.num_kv_heads, -1, self.group_size, self.head_dim)
                query = query.index_select(1, call.tokens)
                shape = (self.num_kv_heads, call.size[0], -1, self.head_dim)
                query = query.view(shape).transpose(0, 1)
        if key is None or value is None:
            pool = self.pool
            offset = layer * self._layer_elements + call.offset
            key = pool.data.as_strided(call.size, call.stride, offset)
            offset += pool.num_layers * self._layer_elements
            value = pool.data.as_strided(call.size, call.stride, offset)
        mask = call.mask
        if query.shape[-2] >= self._float32_rows:
            query, key, value = query.float(), key.float(), value.float()
            mask = None if mask is None else mask.float()
        out, lse = _flash(query, key, value, self.scale, mask=mask)
        if call.is_wide:
            # Of [parts, tokens, kvh, group, kvh, dim] each query's own KV head, in front of the
            # tokens.
            kvh, group = self.num_kv_heads, self.group_size
            parts = out.shape[0] * out.shape[1]
            out = out.view(parts, -1, kvh, group, kvh, self.head_dim)
            out = out.diagonal(dim1=2, dim2=4).permute(0, 4, 1, 2, 3)
            lse = lse.view(parts, -1, kvh, group).transpose(1, 2)
            if call.is_tail:
                out, lse = out.squeeze(2), lse.squeeze(2)
        return out, lse

    def _wide_rows(self, wide: torch.Tensor) -> torch.Tensor:
        """Return wide queries as the kernel takes them, `[tokens, 1, rows, width]`."""
        kvh, dim = self.num_kv_heads, self.head_dim
        return wide.view(-1, 1, kvh * self.group_size, kvh * dim)

    def _attend_causal(
        self, call: CausalCall, grouped: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and log-sum-exp, `[num_kv_heads, group_size, rows(, head_dim)]`."""
        rows = slice(call.first_token, call.last_token)
        query = grouped[rows].permute(1, 2, 0, 3)
        key = key[rows].transpose(0, 1).unsqueeze(1).expand(query.shape)
        value = value[rows].transpose(0, 1).unsqueeze(1).expand(query.shape)
        if len(query[0]) * query.shape[-2] >= self._float32_rows:
            query, key, value = query.float(), key.float(), value.float()
        if call.mask is None:
            return _flash(query, key, value, self.scale, is_causal=True)
        mask = torch.zeros(call.mask.shape, dtype=query.dtype)
        mask = mask.masked_fill_(torch.from_numpy(~call.mask), -math.inf)[None, None]
        return _flash(query, key, value, self.scale, mask=mask)

    def _write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        k_slots, v_slots = self.pool.k_slots[layer], self.pool.v_slots[layer]
        if self._staging is not None:
            # torch copies numbers of 8 bits by index as integers only.
            k_slots, v_slots, key, value = (
                x.view(torch.uint8) for x in (k_slots, v_slots, key, value)
            )
        if self._writes:
            for slots, rows in self._writes:
                k_slots[slots] = key[rows]
                v_slots[slots] = value[rows]
        else:
            k_slots.index_copy_(0, self._slots, key)
            v_slots.index_copy_(0, self._slots, value)

    def _plan_writes(self, slot_mapping: npt.NDArray[np.int64]) -> None:
        self._slots = torch.tensor(slot_mapping)
        starts = np.flatnonzero(np.diff(slot_mapping) != 1) + 1
        self._writes = []
        # A slice assignment costs about as much as index_copy_ of a dozen rows.
        if (len(starts) + 1) * 12 <= len(slot_mapping) or len(slot_mapping) == 1:
            bounds = [0, *starts.tolist(), len(slot_mapping)]
            for lo, hi in pairwise(bounds):
                slot = int(slot_mapping[lo])
                self._writes.append((slice(slot, slot + hi - lo), slice(lo, hi)))

    def _run_call(self, run: RunCall) -> _Call:
        splits = run.num_splits
        kvh, dim = (1, self._width) if run.is_wide else (self.num_kv_heads, self.head_dim)
        lo, hi = run.first_token * self.group_size, run.last_token * self.group_size
        part, rest = divmod(run.length, splits)
        # Parts start `part` tokens apart and are `rest` tokens longer than that, so the first
        # `rest` tokens of all but the first part were also the previous one's last: masked.
        size = (kvh, splits, part + rest, dim)
        stride = (dim, part * kvh * dim, kvh * dim, 1)
        mask = None
        if rest:
            mask = torch.zeros((1, splits, 1, part + rest), dtype=self._dtype)
            mask[:, 1:, :, :rest] = -math.inf
        key = value = None
        if run.gathered:
            key, value = self._gathered_views(size, stride, run.start)
        levels = slice(run.level, run.level + splits)
        out, lse = self._out[levels, :, lo:hi], self._lse[levels, :, lo:hi]
        if run.is_wide:
            query = self._wide[run.first_token : run.last_token].view(1, 1, -1, self._width)
            shape = (splits, self.num_kv_heads, -1, self.group_size)
            out, lse = out.view(*shape, self.head_dim), lse.view(shape)
        else:
            query = self._query[:, None, lo:hi]
            out, lse = out.transpose(0, 1), lse.transpose(0, 1)
        return _Call(
            query=query.expand(-1, splits, -1, -1),
            key=key,
            value=value,
            mask=mask,
            size=size,
            stride=stride,
            offset=run.start * self._width,
            out=out,
            lse=lse,
            is_wide=run.is_wide,
        )

    def _tail_call(self, tail: TailCall) -> _Call:
        count, num_tokens = tail.tokens.shape
        wide = self._can_widen and num_tokens == 1
        kvh, dim = (1, self._width) if wide else (self.num_kv_heads, self.head_dim)
        size = (count, kvh, tail.width, dim)
        stride = (tail.width * self._width, dim, self._width, 1)
        key, value = self._gathered_views(size, stride, tail.start)
        mask = None
        if tail.visible is not None:
            rows = self.group_size if num_tokens > 1 else 1
            hidden = torch.from_numpy(~tail.visible).repeat_interleave(rows, 1)
            mask = torch.zeros(hidden.shape, dtype=self._dtype)
            mask = mask.masked_fill_(hidden, -math.inf).unsqueeze(1)
        flat, first = tail.tokens.ravel(), int(tail.tokens[0, 0])
        out = self._out[tail.level].view(self.num_kv_heads, -1, self.group_size, self.head_dim)
        lse = self._lse[tail.level].view(self.num_kv_heads, -1, self.group_size)
        query: torch.Tensor | None = None
        tokens: torch.Tensor | None = None
        if (flat == np.arange(first, first + len(flat))).all():
            neighbours = slice(first, first + len(flat))
            shape = (self.num_kv_heads, count, num_tokens * self.group_size)
            out = out[:, neighbours].view(*shape, self.head_dim).transpose(0, 1)
            lse = lse[:, neighbours].view(shape).transpose(0, 1)
            query = (
                self._wide_rows(self._wide[neighbours])
                if wide
                else self._narrow_rows(neighbours).view(*shape, self.head_dim).transpose(0, 1)
            )
        else:
            tokens = torch.from_numpy(flat)
        return _Call(
            query, key, value, mask, size, stride, 0, out, lse, tokens, is_tail=True, is_wide=wide
        )

    def _narrow_rows(self, tokens: slice) -> torch.Tensor:
        """Return `[num_kv_heads, tokens, group_size, head_dim]` of the query buffer."""
        shape = (self.num_kv_heads, -1, self.group_size, self.head_dim)
        return self._query.view(shape)[:, tokens]

    def _gathered_views(
        self, size: tuple[int, ...], stride: tuple[int, ...], row: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of gathered tokens from `row` on."""
        assert self._plan is not None
        value_row = row + len(self._plan.gather_slots)
        return (
            self._gathered.as_strided(size, stride, row * self._width),
            self._gathered.as_strided(size, stride, value_row * self._width),
        )

    def _slab_rows(
        self, level: int, first_token: int, last_token: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slabs' rows of some tokens, `[num_kv_heads, tokens, group_size(, dim)]`."""
        rows = slice(first_token, last_token)
        shape = (self.num_kv_heads, -1, self.group_size)
        out = self._out[level].view(*shape, self.head_dim)[:, rows]
        return out, self._lse[level].view(shape)[:, rows]

    def _buffer(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return the start of a buffer that is kept across steps and grows when it must."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            # Made inside inference mode, it could not be written outside of it.
            with torch.inference_mode(False):
                buffer = torch.zeros(size + size // 2, dtype=dtype or self._dtype)
            self._buffers[name] = buffer
        return buffer[:size].view(shape)


def _diagonal(wide: torch.Tensor) -> torch.Tensor:
    """Return `[tokens, group_size, head_dim, num_kv_heads]` of `[tokens, kvh, group, kvh, dim]`:
    what belongs to each query's own KV head."""
    return wide.diagonal(dim1=1, dim2=3)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    *,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, in the query's dtype, and the float32 log-sum-exp."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return out, lse
