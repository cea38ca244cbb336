"""How the decode kernels are launched: checks, tile sizes, splits and workspace; no kernels."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton

from radixkv.kernels.checks import FLOAT_DTYPES, KV_DTYPES, check_tensor
from radixkv.kernels.tile_plan import device_target

__all__ = [
    "BLOCK_SIZES",
    "HEAD_DIMS",
    "DecodeConfig",
    "DecodeInputs",
    "allocate_parts",
    "check_decode",
    "choose_num_splits",
    "count_multiprocessors",
    "decode_config",
    "has_fp8_loads",
    "prefix_config",
    "workspace_numel",
]

HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
MAX_SPLITS = 128

# Chips with 99 KiB of shared memory for a program instead of 163 or 227.
_SMALL_SHARED = ("sm_86", "sm_89", "sm_120", "sm_121")
# A shorter split would spend more on its partial result than it gains.
_MIN_SPLIT_TOKENS = 256
# Programs that a multiprocessor holds at once; two hide each other's latency.
_PROGRAMS_PER_MULTIPROCESSOR = 2
# More splits cost more partial results: they must gain more than this.
_GOOD_ENOUGH = 0.85


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Launch parameters of a decode kernel.

    Attributes:
        tile_m: query rows of a tile, a power of two from 16.
        tile_n: keys read per iteration, a power of two from 16.
        num_warps: of 32 threads (64 on AMD).
        num_stages: of the pipeline, which is two loads long, a table entry and then its block:
            3 keep one tile of K and V on the way, 5 two.
    """

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """What `check_decode` found.

    Attributes:
        k_pool: as given, or its bytes if the chip can't convert float8_e4m3fn.
        v_pool: the same for V.
        scale_strides: of K's scales, head and channel, then of V's; 0 for what they don't have.
        fp8_bits: whether the kernel must decode float8_e4m3fn from bytes.
        upcast: whether products must be computed in float32: the interpreter has no bfloat16.
    """

    k_pool: torch.Tensor
    v_pool: torch.Tensor
    num_seqs: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    group_size: int
    max_seq_len: int
    scale_strides: tuple[int, int, int, int]
    target: str
    fp8_bits: bool
    upcast: bool

    def constants(self, config: DecodeConfig, softcap: float | None) -> dict[str, Any]:
        """Return what the decode kernels are compiled for, by the names of their parameters."""
        return {
            "GROUP_SIZE": self.group_size,
            "HEAD_DIM": self.head_dim,
            "PAD_DIM": triton.next_power_of_2(self.head_dim),
            "BLOCK_SIZE": self.block_size,
            "TILE_M": config.tile_m,
            "TILE_N": config.tile_n,
            "SOFTCAP": softcap,
            "FP8_BITS": self.fp8_bits,
            "UPCAST": self.upcast,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        }


def decode_config(
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    group_size: int,
    target: str,
) -> DecodeConfig:
    """Return the launch parameters of `paged_decode`.

    Args:
        head_dim: of query, K and V.
        block_size: tokens in a block of the pool.
        dtype: of the query.
        kv_dtype: of the pool.
        group_size: query heads per KV head.
        target: "sm_80", "sm_90", "gfx942", ...; see `device_target`.
    """
    pad_dim = triton.next_power_of_2(head_dim)
    tile_m = min(max(16, triton.next_power_of_2(group_size)), 64 if pad_dim <= 128 else 32)
    if dtype == torch.float32:
        # Products are sums in registers, not on tensor cores.
        return DecodeConfig(16, 32 if pad_dim <= 128 else 16, 4, 1)
    # 16 KiB of K in 16-bit, so that few programs have enough bytes under way.
    return DecodeConfig(tile_m, max(32, 8192 // pad_dim), 4, 2 if target.startswith("gfx") else 5)


def prefix_config(
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    num_rows: int,
    target: str,
) -> DecodeConfig:
    """Return the launch parameters of `prefix_decode`'s shared part.

    Args:
        head_dim: of query, K and V.
        block_size: tokens in a block of the pool.
        dtype: of the query.
        kv_dtype: of the pool.
        num_rows: most rows of a group: sequences times query heads per KV head.
        target: "sm_80", "sm_90", "gfx942", ...; see `device_target`.
    """
    pad_dim = triton.next_power_of_2(head_dim)
    tile_m = max(16, triton.next_power_of_2(num_rows))
    if dtype == torch.float32:
        return DecodeConfig(16, 32 if pad_dim <= 128 else 16, 4, 1)
    tile_m = min(tile_m, 128 if pad_dim <= 128 else 64)
    num_warps = 8 if tile_m * max(pad_dim, 128) >= 128 * 128 else 4
    # Before sm_90 the operands of the products take registers, of which there are 255.
    is_old = target in ("sm_80", "sm_86", "sm_87", "sm_89")
    tile_n = 32 if pad_dim == 256 or (is_old and tile_m * pad_dim == 128 * 128) else 64
    if target.startswith("gfx"):
        return DecodeConfig(tile_m, tile_n, num_warps, 2)
    return DecodeConfig(tile_m, tile_n, num_warps, 3 if target in _SMALL_SHARED else 5)


def choose_num_splits(
    num_seqs: int, num_kv_heads: int, max_seq_len: int, num_multiprocessors: int
) -> int:
    """Return into how many ranges of keys each sequence should be cut.

    The fewest that come within 15 % of the best use of the multiprocessors, none shorter than
    256 tokens of the longest sequence. The lengths themselves aren't needed, so that the number
    suits a captured graph.

    Args:
        num_seqs: sequences in the batch.
        num_kv_heads: KV heads, or programs per sequence.
        max_seq_len: tokens of the longest sequence, or a bound.
        num_multiprocessors: of the device.

    Raises:
        ValueError: an argument is negative, or there are no multiprocessors.
    """
    if min(num_seqs, num_kv_heads, max_seq_len) < 0 or num_multiprocessors < 1:
        raise ValueError(
            "choose_num_splits needs sizes of at least 0 and at least 1 multiprocessor, got "
            f"{(num_seqs, num_kv_heads, max_seq_len, num_multiprocessors)}"
        )
    programs = max(1, num_seqs * num_kv_heads)
    slots = num_multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR
    most = max(1, min(MAX_SPLITS, max_seq_len // _MIN_SPLIT_TOKENS))
    # Share of the slots that are busy, averaged over the waves of programs.
    busy = [programs * n / (slots * -(-programs * n // slots)) for n in range(1, most + 1)]
    return next(i + 1 for i, share in enumerate(busy) if share >= _GOOD_ENOUGH * max(busy))


def check_decode(
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    window: int | None,
    softcap: float | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    out: torch.Tensor | None,
) -> DecodeInputs:
    """Check what `paged_decode` and `prefix_decode` have in common; see there.

    Raises:
        ValueError: a shape, dtype, device, stride or option isn't as documented.
    """
    device = query.device
    check_tensor(
        "query", query, shape=(None, None, None), dtypes=FLOAT_DTYPES, has_unit_stride=True
    )
    num_seqs, num_heads, head_dim = query.shape
    check_tensor("k_pool", k_pool, shape=(None, None, None, head_dim), dtypes=KV_DTYPES,
                 device=device, has_unit_stride=True)  # fmt: skip
    check_tensor("v_pool", v_pool, shape=k_pool.shape, dtypes=(k_pool.dtype,), device=device,
                 has_unit_stride=True)  # fmt: skip
    _, block_size, num_kv_heads, _ = k_pool.shape
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim must be one of {HEAD_DIMS}, got {head_dim}")
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size must be one of {BLOCK_SIZES}, got {block_size}")
    if num_kv_heads == 0 or num_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}"
        )
    check_tensor("block_tables", block_tables, shape=(num_seqs, None), dtypes=(torch.int32,),
                 device=device, has_unit_stride=True)  # fmt: skip
    check_tensor("seq_lens", seq_lens, shape=(num_seqs,), dtypes=(torch.int32,), device=device,
                 has_unit_stride=True)  # fmt: skip
    if out is not None:
        check_tensor("out", out, shape=query.shape, dtypes=(query.dtype,), device=device,
                     has_unit_stride=True)  # fmt: skip
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, got {softcap}")
    strides = _check_scales(query, k_pool, k_scale, v_scale)
    target = device_target(device)
    fp8_bits = k_pool.dtype == torch.float8_e4m3fn and not has_fp8_loads(target)
    if fp8_bits:
        k_pool, v_pool = k_pool.view(torch.uint8), v_pool.view(torch.uint8)
    return DecodeInputs(
        k_pool=k_pool,
        v_pool=v_pool,
        num_seqs=num_seqs,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        group_size=num_heads // num_kv_heads,
        max_seq_len=block_tables.shape[1] * block_size,
        scale_strides=strides,
        target=target,
        fp8_bits=fp8_bits,
        upcast=triton.knobs.runtime.interpret and query.dtype == torch.bfloat16,
    )


def has_fp8_loads(target: str) -> bool:
    """Return whether the compiler converts float8_e4m3fn for a chip."""
    return target.startswith("gfx") or int(target.removeprefix("sm_")) >= 89


def workspace_numel(num_parts: int, num_seqs: int, num_heads: int, head_dim: int) -> int:
    """Return how many float32 the partial results of `num_parts` parts take."""
    return num_parts * num_seqs * num_heads * (head_dim + 1)


def allocate_parts(
    workspace: torch.Tensor | None, num_parts: int, inputs: DecodeInputs, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return room for `num_parts` partial outputs and their log-sum-exps.

    Args:
        workspace: float32, one-dimensional and contiguous, to take it from; None allocates.
        num_parts: partial results of each query.
        inputs: the checked arguments.
        device: of the query.

    Returns:
        `[num_parts, num_seqs, num_heads, head_dim]` and `[num_parts, num_seqs, num_heads]`
        float32, views of the workspace.

    Raises:
        ValueError: the workspace is too small, or no such tensor.
    """
    rows = num_parts * inputs.num_seqs * inputs.num_heads
    numel = workspace_numel(num_parts, inputs.num_seqs, inputs.num_heads, inputs.head_dim)
    if workspace is None:
        workspace = torch.empty(numel, dtype=torch.float32, device=device)
    check_tensor("workspace", workspace, shape=(None,), dtypes=(torch.float32,), device=device,
                 has_unit_stride=True)  # fmt: skip
    if workspace.numel() < numel:
        raise ValueError(f"workspace must have at least {numel} elements, got {workspace.numel()}")
    outs = workspace[: rows * inputs.head_dim]
    lses = workspace[rows * inputs.head_dim : numel]
    shape = (num_parts, inputs.num_seqs, inputs.num_heads)
    return outs.view(*shape, inputs.head_dim), lses.view(shape)


@functools.cache
def count_multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has; 1 for a CPU, whose programs run in turn."""
    if device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _check_scales(
    query: torch.Tensor,
    k_pool: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> tuple[int, int, int, int]:
    """Check that a quantised pool, and no other, has scales; return their strides."""
    num_kv_heads, head_dim = k_pool.shape[2:]
    if k_pool.dtype in FLOAT_DTYPES:
        if k_pool.dtype != query.dtype:
            raise ValueError(
                f"k_pool must have the dtype of query, {query.dtype}, or be quantised, "
                f"got {k_pool.dtype}"
            )
        if k_scale is not None or v_scale is not None:
            raise ValueError(f"a {k_pool.dtype} pool has no scales, got k_scale or v_scale")
        return 0, 0, 0, 0
    strides = []
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            raise ValueError(f"a {k_pool.dtype} pool needs {name}, got None")
        shape = (num_kv_heads,) if scale.ndim == 1 else (num_kv_heads, head_dim)
        check_tensor(name, scale, shape=shape, dtypes=(torch.float32,), device=query.device)
        strides += [scale.stride(0), 0 if scale.ndim == 1 else scale.stride(1)]
    return strides[0], strides[1], strides[2], strides[3]
