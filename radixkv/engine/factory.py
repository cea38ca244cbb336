"""Builds an engine from a configuration: model, KV pool, attention, cache, scheduler."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from radixkv.cache import RadixCache
from radixkv.config import ServeConfig, format_bytes
from radixkv.engine.async_engine import AsyncEngine
from radixkv.engine.batch import ForwardBatch
from radixkv.engine.engine import Engine, EngineLimits
from radixkv.engine.kv_events import KVEventStream, ZmqEventPublisher
from radixkv.engine.runner import ModelRunner
from radixkv.engine.tiering_setup import build_tiering
from radixkv.errors import ConfigError
from radixkv.model.attention import AttentionMetadata
from radixkv.model.config import ModelConfig
from radixkv.model.cpu_attention import CpuAttention
from radixkv.model.kv_pool import KVPool, kv_bytes_per_block
from radixkv.model.loader import LoadedModel, load_model

__all__ = ["BuiltEngine", "assemble_engine", "available_memory", "build_engine"]

AUTO_KV_CACHE_LIMIT = 4 * 1024**3
AUTO_KV_CACHE_SHARE = 3  # auto takes at most this part of the available memory
# A step is as long as its tokens, and every running answer waits for it: on a CPU this keeps the
# gap between two tokens small, and larger chunks are hardly faster per token.
AUTO_BATCHED_TOKENS = 256
WARM_UP_TOKENS = 32


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine that is ready to start, and what it costs.

    Attributes:
        num_blocks, bytes_per_block, kv_bytes: the KV pool.
        weight_bytes: the weights in memory.
        dtype: name of the type of weights and KV.
    """

    engine: AsyncEngine
    num_blocks: int
    block_size: int
    bytes_per_block: int
    weight_bytes: int
    dtype: str

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV pool."""
        return self.num_blocks * self.bytes_per_block


def build_engine(config: ServeConfig, *, console: Console | None = None) -> BuiltEngine:
    """Load the model, size the pool, and warm up.

    Args:
        config: checked options.
        console: where progress is shown; None is stderr.

    Raises:
        ConfigError: an option does not fit the model or this machine; the message names it.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    loaded = load_model(
        config.model,
        dtype=config.dtype,
        device=config.device,
        load_format=config.load_format,
        max_model_len=config.max_model_len,
        console=console,
    )
    return assemble_engine(loaded, config)


def assemble_engine(loaded: LoadedModel, config: ServeConfig) -> BuiltEngine:
    """Put an engine around a loaded model; several engines may share one model's weights.

    Raises:
        ConfigError: as for `build_engine`.
    """
    model, dtype = loaded.config, loaded.decoder.dtype
    bytes_per_block = kv_bytes_per_block(
        model.num_layers, config.block_size, model.num_kv_heads, model.head_dim, dtype
    )
    num_blocks = _num_blocks(config, bytes_per_block)
    max_model_len = _max_model_len(config, model, num_blocks * config.block_size)
    pool = KVPool(
        model.num_layers,
        num_blocks,
        config.block_size,
        model.num_kv_heads,
        model.head_dim,
        dtype,
        config.device,
    )
    attention = CpuAttention(
        pool,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        scale=model.head_dim**-0.5,
    )
    runner = ModelRunner(loaded.decoder, pool, attention)
    _warm_up(runner, pool)
    cache = RadixCache(
        num_blocks,
        config.block_size,
        enabled=config.prefix_caching,
        policy=config.eviction_policy,
        default_quota=config.namespace_quota,
    )
    engine = Engine(
        runner,
        loaded.tokenizer,
        cache,
        EngineLimits(
            max_model_len,
            config.max_num_seqs,
            config.max_num_batched_tokens or max(AUTO_BATCHED_TOKENS, config.max_num_seqs),
        ),
        eos_token_ids=loaded.tokenizer.eos_token_ids | set(model.eos_token_ids),
        bytes_per_block=bytes_per_block,
        # The pool takes its memory only as its blocks are used.
        tiers=build_tiering(loaded, config, pool, cache, available_memory() - pool.nbytes),
    )
    if config.kv_events is not None:
        publisher = ZmqEventPublisher(
            config.kv_events, replay_endpoint=config.kv_events_replay, topic=config.kv_events_topic
        )
        engine.kv_events = KVEventStream(engine.cache, publisher)
    return BuiltEngine(
        engine=AsyncEngine(
            engine,
            loaded.tokenizer,
            model_name=config.served_model_name or loaded.name,
            max_num_waiting=config.max_num_waiting,
        ),
        num_blocks=num_blocks,
        block_size=config.block_size,
        bytes_per_block=bytes_per_block,
        weight_bytes=loaded.weight_bytes,
        dtype=str(dtype).removeprefix("torch."),
    )


def available_memory() -> int:
    """Return the bytes of memory that can be used without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _num_blocks(config: ServeConfig, bytes_per_block: int) -> int:
    available = available_memory()
    if config.kv_cache_memory is None:
        memory = min(AUTO_KV_CACHE_LIMIT, available // AUTO_KV_CACHE_SHARE)
    else:
        memory = config.kv_cache_memory
    if not 2 * bytes_per_block <= memory <= available:
        raise ConfigError(
            f"--kv-cache-memory must be from {format_bytes(2 * bytes_per_block)} (two blocks of "
            f"this model) to {format_bytes(available)} (the memory available), "
            f"got {format_bytes(memory)}"
        )
    return memory // bytes_per_block


def _max_model_len(config: ServeConfig, model: ModelConfig, num_slots: int) -> int:
    limit = model.max_model_len
    if config.max_model_len is None:
        return min(limit, num_slots)
    if config.max_model_len > limit:
        raise ConfigError(
            f"--max-model-len must be at most {limit} for this model, got {config.max_model_len}"
        )
    if config.max_model_len > num_slots:
        raise ConfigError(
            f"--max-model-len must be at most {num_slots}, the tokens that --kv-cache-memory "
            f"holds, got {config.max_model_len}"
        )
    return config.max_model_len


def _warm_up(runner: ModelRunner, pool: KVPool) -> None:
    """Run one small prefill, so that the first request doesn't pay for lazy initialisation."""
    count = min(WARM_UP_TOKENS, pool.num_blocks * pool.block_size)
    blocks = -(-count // pool.block_size)
    metadata = AttentionMetadata(
        query_start_loc=np.array([0, count], dtype=np.int32),
        seq_lens=np.array([count], dtype=np.int32),
        block_tables=(np.arange(blocks, dtype=np.int32),),
        slot_mapping=np.arange(count, dtype=np.int64),
    )
    positions = np.arange(count, dtype=np.int64)
    batch = ForwardBatch(
        token_ids=np.zeros(count, dtype=np.int64),
        positions=positions,
        logits_rows=positions[-1:],
        attention=metadata,
    )
    runner.execute(batch)
