"""Every kernel against float64 on fresh random data, with outputs full of NaN beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from loadtests.kernel_batches import Batch, make_batch, random_values
from radixkv.kernels import reference, reference_copy
from radixkv.kernels.copy_blocks import copy_blocks, gather_blocks, scatter_blocks
from radixkv.kernels.paged_decode import paged_decode, workspace_numel
from radixkv.kernels.paged_prefill import choose_tile_rows, paged_prefill, plan_tiles
from radixkv.kernels.prefix_decode import prefix_decode
from radixkv.kernels.reference_prefill import tree_reference
from radixkv.kernels.tree_verify import pack_tree_mask, tree_verify
from radixkv.kernels.write_kv import write_kv

__all__ = ["Check", "CheckConfig", "check_configs", "run_checks"]

# Largest difference, for outputs of about 1, from float64.
_TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True)
class CheckConfig:
    """Shapes and dtypes of a round of checks."""

    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    head_dim: int = 128
    block_size: int = 16
    num_kv_heads: int = 2
    group_size: int = 4

    @property
    def label(self) -> str:
        """The configuration in words."""
        names = [str(d).removeprefix("torch.") for d in (self.dtype, self.kv_dtype) if d]
        heads = f"{self.num_kv_heads * self.group_size}/{self.num_kv_heads}/{self.head_dim}"
        return f"{' on '.join(names)}, heads {heads}, block {self.block_size}"


@dataclass(frozen=True, slots=True)
class Check:
    """How far a kernel was from its reference; not a number if it wrote none somewhere."""

    kernel: str
    config: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance; NaN isn't."""
        return self.error <= self.tolerance


def check_configs(*, tiny: bool) -> list[CheckConfig]:
    """Return all dtypes, and on bfloat16 all head_dims and some block sizes; few if tiny."""
    quantised = (torch.int8, torch.float8_e4m3fn)
    if tiny:
        # The interpreter has no bfloat16 products of its own; the kernels' tests cover it.
        small = CheckConfig(torch.float32, head_dim=64, num_kv_heads=1, group_size=2)
        return [small, CheckConfig(torch.float32, torch.int8, 64, 16, 1, 2)]
    configs = [CheckConfig(dtype) for dtype in _TOLERANCES]
    configs += [CheckConfig(kv_dtype=dtype) for dtype in quantised]
    configs += [CheckConfig(head_dim=64), CheckConfig(head_dim=80), CheckConfig(head_dim=96)]
    configs += [CheckConfig(head_dim=256), CheckConfig(group_size=1)]
    return configs + [CheckConfig(block_size=8), CheckConfig(block_size=256)]


def run_checks(config: CheckConfig, device: torch.device) -> Iterator[Check]:
    """Yield a check of every kernel in one configuration."""
    for name, check in _CHECKS.items():
        error = check(config, device)
        exact = name in ("write_kv", "copy_blocks")
        yield Check(name, config.label, error, 0.0 if exact else _TOLERANCES[config.dtype])


def _batch(config: CheckConfig, device: torch.device, seq_lens: list[int], **kwargs: Any) -> Batch:
    return make_batch(
        seq_lens,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=config.block_size,
        dtype=config.kv_dtype or config.dtype,
        device=device,
        poisoned=True,
        **kwargs,
    )


def _query(config: CheckConfig, device: torch.device, num_tokens: int) -> torch.Tensor:
    heads = config.num_kv_heads * config.group_size
    return random_values((num_tokens, heads, config.head_dim), config.dtype, device)


def _nans(like: torch.Tensor) -> torch.Tensor:
    return torch.full_like(like, float("nan"))


def _scale(config: CheckConfig) -> float:
    return float(config.head_dim**-0.5)


def _difference(out: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest difference; NaN if there is one anywhere, as `max` passes it on."""
    return float((out.double().cpu() - want.cpu()).abs().max())


def _check_decode(config: CheckConfig, device: torch.device) -> float:
    worst = 0.0
    batch = _batch(config, device, [1, config.block_size, 3 * config.block_size + 5])
    query = _query(config, device, 3)
    variants: list[tuple[int, dict[str, Any]]] = [(1, {}), (3, {})]
    if config == CheckConfig():
        variants.append((2, {"window": 20, "softcap": 3.0}))
    for splits, options in variants:
        arguments: dict[str, Any] = options | batch.scales
        size = workspace_numel(splits, 3, query.shape[1], config.head_dim)
        workspace = torch.full((size,), float("nan"), device=device)
        out = _nans(query)
        paged_decode(
            query,
            *batch.paged,
            _scale(config),
            out=out,
            workspace=workspace,
            num_splits=splits,
            **arguments,
        )
        want, _ = reference.paged_decode(
            query.double(), *batch.reference, _scale(config), **arguments
        )
        worst = _worse(worst, _difference(out, want))
    return worst


def _check_prefix(config: CheckConfig, device: torch.device) -> float:
    size = config.block_size
    ranges = [(0, 4, 0, 2), (0, 2, 2, 3)]
    batch = _batch(config, device, [3 * size + 1, 4 * size, 2 * size + 3, 3 * size], shared=ranges)
    query = _query(config, device, 4)
    out = _nans(query)
    parts = 2 * 2 + 2
    workspace = torch.full(
        (workspace_numel(parts, 4, query.shape[1], config.head_dim),), float("nan"), device=device
    )
    prefix_decode(
        query,
        *batch.paged,
        batch.groups(config.group_size),
        _scale(config),
        num_splits=2,
        num_prefix_splits=2,
        out=out,
        workspace=workspace,
        **batch.scales,
    )
    # The groups only save reading: the result is that of plain decoding.
    want, _ = reference.paged_decode(
        query.double(), *batch.reference, _scale(config), **batch.scales
    )
    return _difference(out, want)


def _check_prefill(config: CheckConfig, device: torch.device) -> float:
    query_lens, seq_lens = [1, 9, 20], [7, 9, 2 * config.block_size + 20]
    batch = _batch(config, device, seq_lens)
    query = _query(config, device, sum(query_lens))
    starts = torch.tensor([0, 1, 10, 30], dtype=torch.int32, device=device)
    rows = choose_tile_rows(max(query_lens), config.group_size, config.head_dim, config.dtype)
    out = _nans(query)
    paged_prefill(
        query,
        *batch.paged,
        starts,
        _scale(config),
        tiles=plan_tiles(query_lens, rows).to(device),
        tile_rows=rows,
        out=out,
        **batch.scales,
    )
    want, _ = reference.paged_attention(
        query.double(), *batch.reference, starts, _scale(config), **batch.scales
    )
    return _difference(out, want)


def _check_verify(config: CheckConfig, device: torch.device) -> float:
    query_lens, seq_lens = [5, 3], [config.block_size + 9, 3]
    batch = _batch(config, device, seq_lens)
    query = _query(config, device, sum(query_lens))
    starts = torch.tensor([0, 5, 8], dtype=torch.int32, device=device)
    rows = choose_tile_rows(max(query_lens), config.group_size, config.head_dim, config.dtype)
    mask = torch.rand(sum(query_lens), max(query_lens)) < 0.5
    row_in_sequence = torch.tensor([*range(5), *range(3)])
    mask[torch.arange(len(mask)), row_in_sequence] = True
    mask &= torch.arange(max(query_lens)) <= row_in_sequence[:, None]
    out = _nans(query)
    tree_verify(
        query,
        *batch.paged,
        starts,
        _scale(config),
        tree_mask=pack_tree_mask(mask.to(device)),
        tiles=plan_tiles(query_lens, rows).to(device),
        tile_rows=rows,
        out=out,
        **batch.scales,
    )
    want, _ = tree_reference(
        query, *batch.paged, starts, _scale(config), tree_mask=mask, **batch.scales
    )
    return _difference(out, want)


def _check_write(config: CheckConfig, device: torch.device) -> float:
    batch = _batch(config, device, [4 * config.block_size])
    shape = (9, config.num_kv_heads, config.head_dim)
    key, value = (random_values(shape, config.dtype, device) for _ in range(2))
    slots = torch.randperm(4 * config.block_size)[:9]
    slots[4] = -1
    pools, wanted = ([p.clone() for p in (batch.k_pool, batch.v_pool)] for _ in range(2))
    write_kv(key, value, pools[0], pools[1], slots.to(device), **batch.scales)
    reference_copy.write_kv(key, value, wanted[0], wanted[1], slots, **batch.scales)
    return max(_differing(pool, want) for pool, want in zip(pools, wanted, strict=True))


def _check_copies(config: CheckConfig, device: torch.device) -> float:
    shape = (2, 3, 6, config.block_size, config.num_kv_heads, config.head_dim)
    data = random_values(shape, config.kv_dtype or config.dtype, device)
    want, pairs = data.clone(), torch.tensor([[0, 3], [1, 4], [-1, -1], [0, 5]])
    reference_copy.copy_blocks(want, pairs)
    copy_blocks(data, pairs.to(device))
    ids = torch.tensor([4, 2], device=device)
    rows = gather_blocks(data, ids)
    errors = [_differing(data, want), _differing(rows, reference_copy.gather_blocks(want, ids))]
    scatter_blocks(data, ids.flip(0), rows)
    reference_copy.scatter_blocks(want, ids.flip(0), rows)
    return max(*errors, _differing(data, want))


def _differing(tensor: torch.Tensor, want: torch.Tensor) -> float:
    """Return how many bytes differ."""
    views = [t.contiguous().view(torch.uint8) for t in (tensor, want)]
    return float((views[0] != views[1]).sum())


def _worse(error: float, other: float) -> float:
    """Return the larger of two, or NaN if one is: `max` would let it go by."""
    return other if other != other else max(error, other)


_CHECKS: dict[str, Callable[[CheckConfig, torch.device], float]] = {
    "write_kv": _check_write,
    "copy_blocks": _check_copies,
    "paged_decode": _check_decode,
    "prefix_decode": _check_prefix,
    "paged_prefill": _check_prefill,
    "tree_verify": _check_verify,
}
