"""Attention over the paged pool with the Triton kernels, on a GPU or under the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from radixkv.model.attention import AttentionBackend, AttentionMetadata
from radixkv.model.kv_pool import KVPool
from radixkv.model.packed_buffer import Field, PackedBuffer
from radixkv.model.triton_attention_plan import (
    BatchSplit,
    GraphShape,
    check_batch,
    fill_tables,
    pack_masks,
    split_batch,
)
from radixkv.model.triton_kernels import Kernels, load_kernels
from radixkv.model.triton_step import (
    GROUP_ARRAYS,
    Chunks,
    Decodes,
    Step,
    decode_fields,
    fill_decodes,
)

__all__ = ["TritonAttention"]

MAX_LEVELS = 4
# Groups take two launches a layer more. In their time, one to two microseconds in a CUDA graph, a
# GPU reads about this much. An estimate from data sheets, not a measurement.
MIN_SAVED_BYTES = 4 * 1024**2
_HEAD_DIMS = (64, 80, 96, 128, 256)
_BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
# Triton compiles a kernel anew for arguments that aren't multiples of 16, such as a table's stride.
_WIDTH_STEP = 16
# What the heuristic for the number of splits is told of a machine without multiprocessors.
_CPU_MULTIPROCESSORS = 1


class TritonAttention(AttentionBackend):
    """Exact attention through the kernels in `radixkv.kernels`.

    `plan` builds everything on the host and uploads it in one copy; `run` only launches, so that
    it can be recorded into a CUDA graph. Sequences with one new token go to the decode kernel, as
    groups that share runs of blocks where that pays; longer chunks to the prefill kernel; trees
    of speculated tokens to the verification kernel.

    Attributes:
        step: the planned batch that `run` works on. Whoever records launches keeps the one they
            were recorded with, and sets it again before running the same launches anew.
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        query_dtype: torch.dtype | None = None,
        min_saved_bytes: int = MIN_SAVED_BYTES,
        kernels: Kernels | None = None,
    ) -> None:
        """Make a backend.

        Args:
            pool: on the device; its dtype may be a quantised one.
            num_heads, num_kv_heads, head_dim, scale: see `AttentionBackend`.
            query_dtype: of queries and new K and V; None is the pool's.
            min_saved_bytes: of K and V of one layer that groups must save a step to be used.
            kernels: others than `load_kernels` returns for the device.

        Raises:
            ValueError: the kernels don't know this head_dim or block size.
            ConfigError: see `load_kernels`.
        """
        super().__init__(
            pool, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=scale
        )
        if head_dim not in _HEAD_DIMS or pool.block_size not in _BLOCK_SIZES:
            raise ValueError(
                f"head_dim must be one of {_HEAD_DIMS} and block_size one of {_BLOCK_SIZES}, "
                f"got {head_dim} and {pool.block_size}"
            )
        self._query_dtype = query_dtype or pool.dtype
        self.kernels = kernels or load_kernels(pool.device)
        self.group_size = num_heads // num_kv_heads
        # A partial result of a KV head is `group_size` rows of float32, written and read once; a
        # token of it is a row of K and one of V, read once.
        self._partial_tokens = max(1, 4 * self.group_size // pool.dtype.itemsize)
        token_bytes = 2 * num_kv_heads * head_dim * pool.dtype.itemsize
        self._min_saved_tokens = -(-min_saved_bytes // token_bytes)
        self._num_multiprocessors = _CPU_MULTIPROCESSORS
        if pool.device.type == "cuda":
            properties = torch.cuda.get_device_properties(pool.device)
            self._num_multiprocessors = properties.multi_processor_count
        # The same shapes come again and again, and the choice tries up to 128 numbers.
        self._choose_num_splits = lru_cache(maxsize=1024)(self.kernels.choose_num_splits)
        self._buffer = PackedBuffer(pool.device)
        self.step: Step | None = None

    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepare the batch described by `metadata`; valid until the next call.

        Raises:
            ValueError: it isn't a valid batch; see `AttentionMetadata` and `PrefixGroup`.
        """
        self.plan_step(metadata, ())

    def plan_step(
        self, metadata: AttentionMetadata, inputs: Sequence[npt.NDArray[np.int64]]
    ) -> list[torch.Tensor]:
        """See `AttentionBackend.plan_step`; all arrays go to the device in one copy.

        Raises:
            ValueError: see `plan`.
        """
        split = self.split(metadata)
        query_lens = np.diff(metadata.query_start_loc)
        num_decodes, is_mixed = len(split.decodes), len(split.decodes) < metadata.num_seqs
        width = self.table_width(int(metadata.seq_lens.max()))
        tilings = [
            (self._tile(metadata, seqs, query_lens), seqs is split.trees)
            for seqs in (split.chunks, split.trees)
            if len(seqs)
        ]
        fields: dict[str, Field] = {
            f"input{i}": (array.shape, np.int64) for i, array in enumerate(inputs)
        }
        fields["slots"] = ((metadata.num_tokens,), np.int64)
        fields |= decode_fields(num_decodes, width, len(split.groups))
        if is_mixed:
            words = -(-int(query_lens.max()) // 32)
            fields |= {
                "decode_rows": ((num_decodes,), np.int64),
                "all_tables": ((metadata.num_seqs, width), np.int32),
                "all_seq_lens": ((metadata.num_seqs,), np.int32),
                "query_start_loc": ((metadata.num_seqs + 1,), np.int32),
                "mask": ((metadata.num_tokens if len(split.trees) else 0, words), np.int32),
            }
            fields |= {f"tiles{i}": (t[0].shape, np.int32) for i, (t, _) in enumerate(tilings)}
        host, device = self._buffer.carve(fields)
        for i, array in enumerate(inputs):
            host[f"input{i}"][...] = array
        host["slots"][:] = metadata.slot_mapping
        tables = host["all_tables" if is_mixed else "tables"]
        fill_tables(metadata, self.pool.block_size, self.pool.num_blocks, tables)
        fill_decodes(host, metadata, split)
        if is_mixed:
            host["tables"][:] = tables[split.decodes]
            host["decode_rows"][:] = metadata.query_start_loc[split.decodes]
            host["all_seq_lens"][:] = metadata.seq_lens
            host["query_start_loc"][:] = metadata.query_start_loc
            for i, ((tiles, _), _) in enumerate(tilings):
                host[f"tiles{i}"][:] = tiles
            if len(split.trees):
                pack_masks(metadata.tree_masks, metadata.query_start_loc, host["mask"])
        self._buffer.upload()
        tails = metadata.seq_lens[split.decodes] - split.start_lens
        max_tail_len = int(tails.max(initial=0))
        self.step = Step(
            num_tokens=metadata.num_tokens,
            slot_mapping=device["slots"],
            decodes=self._decodes(device, split, max_tail_len, is_mixed=is_mixed)
            if num_decodes
            else None,
            chunks=tuple(
                Chunks(
                    tiles=device[f"tiles{i}"],
                    tile_rows=tile_rows,
                    tables=device["all_tables"],
                    seq_lens=device["all_seq_lens"],
                    query_start_loc=device["query_start_loc"],
                    mask=device["mask"] if is_tree else None,
                )
                for i, ((_, tile_rows), is_tree) in enumerate(tilings)
            ),
        )
        return [device[f"input{i}"] for i in range(len(inputs))]

    def table_width(self, seq_len: int) -> int:
        """Return the columns of block tables for sequences of up to `seq_len` tokens."""
        num_blocks = -(-seq_len // self.pool.block_size)
        return -(-num_blocks // _WIDTH_STEP) * _WIDTH_STEP

    def split(self, metadata: AttentionMetadata) -> BatchSplit:
        """Return which kernel takes which sequence of a batch.

        Raises:
            ValueError: see `plan`.
        """
        pool = self.pool
        check_batch(metadata, pool.num_blocks * pool.block_size, pool.block_size)
        return split_batch(
            metadata,
            block_size=pool.block_size,
            partial_tokens=self._partial_tokens,
            min_saved_tokens=self._min_saved_tokens,
            max_levels=MAX_LEVELS,
        )

    def plan_decode(
        self,
        metadata: AttentionMetadata | None,
        split: BatchSplit | None,
        inputs: Sequence[npt.NDArray[np.int64]],
        shape: GraphShape,
        buffer: PackedBuffer,
    ) -> list[torch.Tensor]:
        """Plan a batch that only decodes, padded to `shape`, in a buffer with fixed addresses.

        Rows past the batch have length 0 and slot -1: nothing is read or written for them.

        Args:
            metadata: the batch, every sequence with one new token; None for padding only.
            split: of the batch.
            inputs: `[num_seqs]` int64 arrays; padded with 0.
            shape: at least as large as the batch in every respect.
            buffer: where the arrays are laid out; the same shape is always laid out the same way.

        Returns:
            The inputs on the device, `[num_rows]`.
        """
        host, device = buffer.carve(self.graph_fields(shape, len(inputs)))
        num_seqs = 0 if metadata is None else metadata.num_seqs
        for i, array in enumerate(inputs):
            host[f"input{i}"][:num_seqs] = array
            host[f"input{i}"][num_seqs:] = 0
        host["slots"][num_seqs:] = -1
        host["seq_lens"][num_seqs:] = 0
        # A group of no sequences does nothing.
        for name in GROUP_ARRAYS if shape.num_levels else ():
            host[name][:] = 0
        if shape.num_levels:
            host["start_lens"][:] = 0
        if metadata is not None and split is not None:
            host["slots"][:num_seqs] = metadata.slot_mapping
            fill_tables(metadata, self.pool.block_size, self.pool.num_blocks, host["tables"])
            fill_decodes(host, metadata, split)
        buffer.upload()
        self.step = Step(
            num_tokens=shape.num_rows,
            slot_mapping=device["slots"],
            decodes=self._padded_decodes(device, shape),
            chunks=(),
        )
        return [device[f"input{i}"] for i in range(len(inputs))]

    def graph_fields(self, shape: GraphShape, num_inputs: int) -> dict[str, Field]:
        """Return the arrays that `plan_decode` lays out for a shape."""
        fields: dict[str, Field] = {
            f"input{i}": ((shape.num_rows,), np.int64) for i in range(num_inputs)
        }
        fields["slots"] = ((shape.num_rows,), np.int64)
        return fields | decode_fields(shape.num_rows, shape.max_blocks, shape.max_groups)

    def run(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Write the new K and V into the pool and return the attention output.

        Args and result: see `AttentionBackend.run`. Launches only: no copy from or to the host,
        no synchronisation.

        Raises:
            ValueError: no batch was planned, or the query is not of that batch.
        """
        step, pool = self.step, self.pool
        if step is None or query.shape[0] != step.num_tokens:
            planned = None if step is None else step.num_tokens
            raise ValueError(f"planned for {planned} tokens, got {query.shape[0]}")
        k_pool, v_pool = pool.k[layer], pool.v[layer]
        scales: dict[str, torch.Tensor] = {}
        if pool.k_scales is not None and pool.v_scales is not None:
            scales = {"k_scale": pool.k_scales[layer], "v_scale": pool.v_scales[layer]}
        self.kernels.write_kv(key, value, k_pool, v_pool, step.slot_mapping, **scales)
        decodes = step.decodes
        if decodes is not None and decodes.rows is None:
            return self._run_decodes(decodes, query, k_pool, v_pool, scales)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for chunks in step.chunks:
            kernel = self.kernels.paged_prefill if chunks.mask is None else self.kernels.tree_verify
            mask = {} if chunks.mask is None else {"tree_mask": chunks.mask}
            kernel(
                query,
                k_pool,
                v_pool,
                chunks.tables,
                chunks.seq_lens,
                chunks.query_start_loc,
                self.scale,
                tiles=chunks.tiles,
                tile_rows=chunks.tile_rows,
                out=out,
                **mask,
                **scales,
            )
        if decodes is not None and decodes.rows is not None:
            rows = query.index_select(0, decodes.rows)
            out.index_copy_(
                0, decodes.rows, self._run_decodes(decodes, rows, k_pool, v_pool, scales)
            )
        return out

    def _run_decodes(
        self,
        decodes: Decodes,
        query: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        scales: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        kernels = self.kernels
        arguments = (query, k_pool, v_pool, decodes.tables, decodes.seq_lens)
        options = {"num_splits": decodes.num_splits, **scales}
        result: torch.Tensor
        if decodes.groups is None:
            result = kernels.paged_decode(*arguments, self.scale, **options)
        else:
            options["num_prefix_splits"] = decodes.num_prefix_splits
            result = kernels.prefix_decode(*arguments, decodes.groups, self.scale, **options)
        return result

    def _decodes(
        self,
        device: dict[str, torch.Tensor],
        split: BatchSplit,
        max_tail_len: int,
        *,
        is_mixed: bool,
    ) -> Decodes:
        """Return what the decode kernel is given for a batch that isn't padded."""
        num_rows = len(split.decodes)
        num_splits = self._num_splits(num_rows, max_tail_len)
        result = Decodes(
            rows=device["decode_rows"] if is_mixed else None,
            tables=device["tables"],
            seq_lens=device["seq_lens"],
            num_splits=num_splits,
        )
        if not split.groups:
            return result
        longest = max(g.last_block - g.first_block for g in split.groups) * self.pool.block_size
        return replace(
            result,
            groups=self._groups(
                device, split.num_levels, max(g.last_seq - g.first_seq for g in split.groups)
            ),
            num_prefix_splits=self._num_splits(len(split.groups), longest),
        )

    def _padded_decodes(self, device: dict[str, torch.Tensor], shape: GraphShape) -> Decodes:
        """Return what the decode kernel is given for any batch of a shape.

        What a shared run and a private tail are split into must suit all of them, one run over
        the whole context as well as none. Ranges beyond the end of a run or tail are left at once.
        """
        context = shape.max_blocks * self.pool.block_size
        groups, num_prefix_splits = None, 1
        if shape.num_levels:
            groups = self._groups(device, shape.num_levels, shape.num_rows)
            num_prefix_splits = self._num_splits(1, context)
        return Decodes(
            rows=None,
            tables=device["tables"],
            seq_lens=device["seq_lens"],
            num_splits=self._num_splits(shape.num_rows, context),
            groups=groups,
            num_prefix_splits=num_prefix_splits,
        )

    def _groups(self, device: dict[str, torch.Tensor], num_levels: int, max_seqs: int) -> Any:
        return self.kernels.decode_groups(
            **{name: device[name] for name in GROUP_ARRAYS},
            start_lens=device["start_lens"],
            num_levels=num_levels,
            max_group_rows=max_seqs * self.group_size,
        )

    def _num_splits(self, num_seqs: int, max_len: int) -> int:
        return int(
            self._choose_num_splits(num_seqs, self.num_kv_heads, max_len, self._num_multiprocessors)
        )

    def _tile(
        self,
        metadata: AttentionMetadata,
        seqs: npt.NDArray[np.intp],
        query_lens: npt.NDArray[np.int32],
    ) -> tuple[npt.NDArray[np.int32], int]:
        """Return the tiles of some sequences, `[num_tiles, 2]`, and the tokens of a tile."""
        lens = query_lens[seqs]
        tile_rows = self.kernels.choose_tile_rows(
            int(lens.max()), self.group_size, self.head_dim, self._query_dtype
        )
        contexts = metadata.seq_lens[seqs] - lens
        tiles = self.kernels.plan_tiles(lens.tolist(), tile_rows, contexts.tolist()).numpy()
        tiles[:, 0] = seqs[tiles[:, 0]]
        return tiles, int(tile_rows)
