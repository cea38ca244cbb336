"""The configurations that `radixkv.kernels.aot` compiles: which wrapper is called with what.

A case calls the public wrapper with tensors of the meta device, which have shapes, strides and
dtypes but no memory. So what is compiled is what a GPU would launch, tile sizes and all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from radixkv.kernels.copy_blocks import copy_blocks, gather_blocks
from radixkv.kernels.decode_groups import DecodeGroups
from radixkv.kernels.paged_decode import paged_decode
from radixkv.kernels.paged_prefill import choose_tile_rows, paged_prefill
from radixkv.kernels.prefix_decode import prefix_decode
from radixkv.kernels.tree_verify import tree_verify
from radixkv.kernels.write_kv import write_kv

__all__ = ["Case", "all_cases", "quick_cases"]

_NUM_SEQS, _MAX_BLOCKS, _NUM_BLOCKS, _NUM_KV_HEADS = 32, 512, 4096, 8


@dataclass(frozen=True, slots=True)
class Case:
    """A wrapper and what its launch configuration depends on.

    Attributes:
        kernel: name of the public function.
        head_dim: of query, K and V.
        dtype: of the query.
        kv_dtype: of the pool, if it is another one.
        block_size: tokens in a block.
        group_size: query heads per KV head.
    """

    kernel: str
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    block_size: int = 16
    group_size: int = 4

    @property
    def pool_dtype(self) -> torch.dtype:
        """Return the dtype of the pool."""
        return self.kv_dtype or self.dtype

    @property
    def label(self) -> str:
        """Return the configuration in words, without the kernel."""
        names = [str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.pool_dtype)]
        dtypes = names[0] if names[0] == names[1] else f"{names[0]}, {names[1]} pool"
        heads = "MHA" if self.group_size == 1 else f"GQA {self.group_size}"
        block = "" if self.block_size == 16 else f", block {self.block_size}"
        return f"d {self.head_dim}, {heads}, {dtypes}{block}"

    def launch(self) -> None:
        """Call the wrapper; whoever calls this keeps the launch from happening."""
        _WRAPPERS[self.kernel](self)


def all_cases() -> list[Case]:
    """Return every configuration of the table in docs/kernels.md."""
    cases = []
    for kernel in ATTENTION:
        for head_dim in (64, 80, 96, 128, 256):
            cases += [Case(kernel, head_dim), Case(kernel, head_dim, group_size=1)]
        cases += _spot_checks(Case(kernel))
    for head_dim in (64, 80, 96, 128, 256):
        cases.append(Case("write_kv", head_dim))
    cases += [Case("write_kv", kv_dtype=torch.int8), Case("write_kv", kv_dtype=torch.float8_e4m3fn)]
    return [*cases, Case("copy_blocks"), Case("gather_blocks")]


def quick_cases() -> list[Case]:
    """Return the configurations that stand for the others where time matters."""
    cases = [Case(kernel) for kernel in (*ATTENTION, "write_kv", "copy_blocks")]
    return [*cases, Case("paged_decode", 80), Case("paged_decode", kv_dtype=torch.float8_e4m3fn)]


ATTENTION = ("paged_decode", "prefix_decode", "paged_prefill", "tree_verify")


def _spot_checks(case: Case) -> Iterator[Case]:
    yield replace(case, dtype=torch.float16)
    yield replace(case, dtype=torch.float32)
    yield replace(case, kv_dtype=torch.int8)
    yield replace(case, kv_dtype=torch.float8_e4m3fn)
    yield replace(case, block_size=8)
    yield replace(case, block_size=256)


def _pools(case: Case) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return K, V and the scales."""
    shape = (_NUM_BLOCKS, case.block_size, _NUM_KV_HEADS, case.head_dim)
    pools = [_meta(shape, case.pool_dtype) for _ in range(2)]
    scales = {}
    if case.pool_dtype != case.dtype:
        scales = {name: _meta((_NUM_KV_HEADS,), torch.float32) for name in ("k_scale", "v_scale")}
    return pools[0], pools[1], scales


def _query(case: Case, num_tokens: int) -> torch.Tensor:
    return _meta((num_tokens, _NUM_KV_HEADS * case.group_size, case.head_dim), case.dtype)


def _paged_decode(case: Case) -> None:
    k, v, scales = _pools(case)
    tables, lens = _ints(_NUM_SEQS, _MAX_BLOCKS), _ints(_NUM_SEQS)
    paged_decode(_query(case, _NUM_SEQS), k, v, tables, lens, 0.1, num_splits=4, **scales)


def _prefix_decode(case: Case) -> None:
    k, v, scales = _pools(case)
    tables, lens = _ints(_NUM_SEQS, _MAX_BLOCKS), _ints(_NUM_SEQS)
    first, last, first_block, last_block, level = (_ints(4) for _ in range(5))
    groups = DecodeGroups(
        first_seq=first,
        last_seq=last,
        first_block=first_block,
        last_block=last_block,
        level=level,
        start_lens=_ints(_NUM_SEQS),
        num_levels=2,
        max_group_rows=_NUM_SEQS * case.group_size,
    )
    prefix_decode(_query(case, _NUM_SEQS), k, v, tables, lens, groups, 0.1, **scales)


def _paged_prefill(case: Case) -> None:
    k, v, scales = _pools(case)
    paged_prefill(
        _query(case, 2048),
        k,
        v,
        _ints(4, _MAX_BLOCKS),
        _ints(4),
        _ints(5),
        0.1,
        tiles=_ints(64, 2),
        tile_rows=choose_tile_rows(512, case.group_size, case.head_dim, case.dtype),
        **scales,
    )


def _tree_verify(case: Case) -> None:
    k, v, scales = _pools(case)
    tree_verify(
        _query(case, 64 * _NUM_SEQS),
        k,
        v,
        _ints(_NUM_SEQS, _MAX_BLOCKS),
        _ints(_NUM_SEQS),
        _ints(_NUM_SEQS + 1),
        0.1,
        tree_mask=_ints(64 * _NUM_SEQS, 2),
        tiles=_ints(64, 2),
        tile_rows=choose_tile_rows(64, case.group_size, case.head_dim, case.dtype),
        **scales,
    )


def _write_kv(case: Case) -> None:
    k, v, scales = _pools(case)
    # A slice of a fused projection of queries, keys and values.
    heads = _NUM_KV_HEADS * case.group_size
    fused = _meta((2048, heads + 2 * _NUM_KV_HEADS, case.head_dim), case.dtype)
    _, key, value = fused.split_with_sizes([heads, _NUM_KV_HEADS, _NUM_KV_HEADS], dim=1)
    write_kv(key, value, k, v, _meta((2048,), torch.int64), **scales)


def _copy_blocks(case: Case) -> None:
    copy_blocks(_layers(case), _meta((16, 2), torch.int64))


def _gather_blocks(case: Case) -> None:
    gather_blocks(_layers(case), _meta((16,), torch.int64))


def _layers(case: Case) -> torch.Tensor:
    shape = (2, 32, _NUM_BLOCKS, case.block_size, _NUM_KV_HEADS, case.head_dim)
    return _meta(shape, case.pool_dtype)


def _ints(*shape: int) -> torch.Tensor:
    return _meta(shape, torch.int32)


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


_WRAPPERS: dict[str, Callable[[Case], None]] = {
    "paged_decode": _paged_decode,
    "prefix_decode": _prefix_decode,
    "paged_prefill": _paged_prefill,
    "tree_verify": _tree_verify,
    "write_kv": _write_kv,
    "copy_blocks": _copy_blocks,
    "gather_blocks": _gather_blocks,
}
