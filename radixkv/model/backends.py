"""Where a model runs and which attention it uses, from what the options say."""

from __future__ import annotations

import torch

from radixkv.errors import ConfigError
from radixkv.model.attention import AttentionBackend
from radixkv.model.config import ModelConfig
from radixkv.model.cpu_attention import CpuAttention
from radixkv.model.kv_pool import KVPool
from radixkv.model.triton_attention import TritonAttention

__all__ = ["build_attention", "choose_attention", "resolve_device"]


def resolve_device(name: str) -> torch.device:
    """Return the device that "auto", "cpu" or "cuda" (an AMD GPU, too) means here.

    Raises:
        ConfigError: cuda is asked for, and torch sees no GPU.
    """
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        built_for = torch.version.cuda or torch.version.hip
        reason = "torch sees no GPU" if built_for else "torch is built for CPUs only"
        raise ConfigError(f"--device cuda can't be used: {reason}")
    if name == "cpu" or not has_gpu:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def choose_attention(name: str, device: torch.device) -> str:
    """Return "cpu" or "triton"; "auto" is what suits the device.

    Raises:
        ConfigError: the CPU's attention is asked for on a GPU.
    """
    if name == "auto":
        return "cpu" if device.type == "cpu" else "triton"
    if name == "cpu" and device.type != "cpu":
        raise ConfigError(f"--attention cpu can't be used on {device}; --device cpu can")
    return name


def build_attention(
    name: str, pool: KVPool, model: ModelConfig, dtype: torch.dtype
) -> AttentionBackend:
    """Return the backend called `name` for a pool.

    Args:
        name: from `choose_attention`.
        pool: that it reads and writes.
        model: its heads.
        dtype: of queries.

    Raises:
        ConfigError: Triton can't be used (see `load_kernels`), or not with this model or block
            size.
    """
    num_heads, num_kv_heads, head_dim = model.num_heads, model.num_kv_heads, model.head_dim
    scale = head_dim**-0.5
    if name == "cpu":
        return CpuAttention(
            pool,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=scale,
            query_dtype=dtype,
        )
    try:
        return TritonAttention(
            pool,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=scale,
            query_dtype=dtype,
        )
    except ValueError as error:
        raise ConfigError(f"--attention triton can't be used: {error}") from None
