"""Makes runners for a loaded model: which KV they keep, and how attention reads it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radixkv.engine.runner import ModelRunner
from radixkv.model.attention import AttentionBackend
from radixkv.model.backends import build_attention, choose_attention
from radixkv.model.kv_pool import KVPool, kv_bytes_per_block
from radixkv.model.loader import LoadedModel
from radixkv.model.quantization import (
    KV_CACHE_DTYPES,
    KVScales,
    calibrate_kv,
    calibration_tokens,
)

__all__ = ["RunnerSetup", "prepare_runner"]


@dataclass(frozen=True, slots=True)
class RunnerSetup:
    """What all runners of a model have in common, whatever the size of their pool.

    Attributes:
        loaded: the model.
        attention: "cpu" or "triton".
        block_size: tokens in a block.
        kv_dtype: of K and V in the pool.
        scales: of an 8-bit pool.
    """

    loaded: LoadedModel
    attention: str
    block_size: int
    kv_dtype: torch.dtype
    scales: KVScales | None

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block."""
        config = self.loaded.config
        return kv_bytes_per_block(
            config.num_layers,
            self.block_size,
            config.num_kv_heads,
            config.head_dim,
            self.kv_dtype,
        )

    def build(self, num_blocks: int) -> ModelRunner:
        """Return a runner with a pool of its own.

        Raises:
            ConfigError: see `build_attention`.
        """
        decoder, config = self.loaded.decoder, self.loaded.config
        pool = KVPool(
            config.num_layers,
            num_blocks,
            self.block_size,
            config.num_kv_heads,
            config.head_dim,
            self.kv_dtype,
            decoder.device,
            k_scale=None if self.scales is None else self.scales.k,
            v_scale=None if self.scales is None else self.scales.v,
        )
        attention = build_attention(self.attention, pool, config, decoder.dtype)
        return ModelRunner(decoder, pool, attention)


def prepare_runner(
    loaded: LoadedModel,
    *,
    block_size: int,
    attention: str = "auto",
    kv_cache_dtype: str = "auto",
) -> RunnerSetup:
    """Choose the attention and, for a pool of 8 bits, measure the scales.

    Args:
        loaded: the model; runners are where its weights are.
        block_size: tokens in a block.
        attention: auto, cpu or triton.
        kv_cache_dtype: auto for the model's own, int8 or fp8.

    Raises:
        ConfigError: the attention can't be used there.

    Cost: with int8 or fp8, a forward pass over some 800 tokens.
    """
    name = choose_attention(attention, loaded.decoder.device)
    dtype = KV_CACHE_DTYPES.get(kv_cache_dtype, loaded.decoder.dtype)
    scales = None
    if kv_cache_dtype in KV_CACHE_DTYPES:

        def build(pool: KVPool) -> AttentionBackend:
            return build_attention(name, pool, loaded.config, loaded.decoder.dtype)

        tokens = calibration_tokens(loaded.tokenizer)
        scales = calibrate_kv(loaded.decoder, tokens, dtype, build)
    return RunnerSetup(loaded, name, block_size, dtype, scales)
