"""Builds an engine from a configuration: model, KV pool, attention, cache, scheduler."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
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
from radixkv.engine.grammar_compiler import GrammarCompiler
from radixkv.engine.kv_events import KVEventStream
from radixkv.engine.kv_publisher import ZmqEventPublisher
from radixkv.engine.runner import ModelRunner
from radixkv.engine.runner_setup import prepare_runner
from radixkv.engine.scheduler import SchedulingOptions
from radixkv.engine.swap_setup import build_swap
from radixkv.engine.tiering_setup import build_tiering
from radixkv.errors import ConfigError
from radixkv.model.attention import AttentionMetadata
from radixkv.model.backends import resolve_device
from radixkv.model.config import ModelConfig
from radixkv.model.cuda_graphs import CudaGraphCapture, DecodeGraphs
from radixkv.model.kv_pool import KVPool
from radixkv.model.loader import LoadedModel, load_model
from radixkv.model.progress import progress
from radixkv.model.triton_attention import TritonAttention
from radixkv.request import Namespace

__all__ = ["BuiltEngine", "assemble_engine", "available_memory", "build_engine"]

AUTO_KV_CACHE_LIMIT = 4 * 1024**3
AUTO_KV_CACHE_SHARE = 3  # auto takes at most this part of the available memory
# A step is as long as its tokens, and every running answer waits for it: on a CPU this keeps the
# gap between two tokens small, and larger chunks are hardly faster per token.
AUTO_BATCHED_TOKENS = 256
# A GPU computes as many in the time that it takes to read the weights a few times.
AUTO_BATCHED_TOKENS_GPU = 2048
# Of what a warm-up leaves free on a GPU. The rest is for CUDA graphs and fragmentation.
AUTO_KV_CACHE_SHARE_GPU = 0.9
WARM_UP_TOKENS = 32


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine that is ready to start, and what it costs.

    Attributes:
        num_blocks, bytes_per_block, kv_bytes: the KV pool.
        weight_bytes: the weights in memory.
        dtype: name of the type of activations and, unless they are quantized, of weights and KV.
        device: where the model runs, such as "cpu" or "cuda:0".
        attention: "cpu" or "triton".
        kv_dtype: name of the type of KV.
    """

    engine: AsyncEngine
    num_blocks: int
    block_size: int
    bytes_per_block: int
    weight_bytes: int
    dtype: str
    device: str
    attention: str
    kv_dtype: str

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV pool."""
        return self.num_blocks * self.bytes_per_block


def build_engine(
    config: ServeConfig,
    *,
    quotas: Mapping[Namespace, float] | None = None,
    console: Console | None = None,
) -> BuiltEngine:
    """Load the model, size the pool, and warm up.

    Args:
        config: checked options.
        quotas: shares of the pool that namespaces have instead of `config.namespace_quota`.
        console: where progress is shown; None is stderr.

    Raises:
        ConfigError: an option does not fit the model or this machine; the message names it.
    """
    # On a thread that ends. OpenMP keeps a set of threads for each thread that has computed, and
    # where there are more of them than cores they sleep at every barrier instead of spinning: a
    # decode step of the engine's thread then took 46 ms instead of 30.
    with ThreadPoolExecutor(1, "radixkv-build") as builder:
        return builder.submit(_build, config, quotas, console).result()


def _build(
    config: ServeConfig, quotas: Mapping[Namespace, float] | None, console: Console | None
) -> BuiltEngine:
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    loaded = load_model(
        config.model,
        dtype=config.dtype,
        device=str(resolve_device(config.device)),
        load_format=config.load_format,
        max_model_len=config.max_model_len,
        quantization=config.quantization,
        console=console,
    )
    return assemble_engine(loaded, config, quotas=quotas, console=console)


def assemble_engine(
    loaded: LoadedModel,
    config: ServeConfig,
    *,
    quotas: Mapping[Namespace, float] | None = None,
    console: Console | None = None,
) -> BuiltEngine:
    """Put an engine around a loaded model; several engines may share one model's weights.

    Args:
        loaded: the model; the engine runs where its weights are.
        config: checked options.
        quotas: as for `build_engine`.
        console: where progress is shown; None is stderr.

    Raises:
        ConfigError: as for `build_engine`.
    """
    model, dtype = loaded.config, loaded.decoder.dtype
    device = loaded.decoder.device
    setup = prepare_runner(
        loaded,
        block_size=config.block_size,
        attention=config.attention,
        kv_cache_dtype=config.kv_cache_dtype,
    )
    bytes_per_block = setup.bytes_per_block
    max_num_batched_tokens = config.max_num_batched_tokens or max(
        AUTO_BATCHED_TOKENS if device.type == "cpu" else AUTO_BATCHED_TOKENS_GPU,
        config.max_num_seqs,
    )

    if device.type == "cpu":
        available = available_memory()
        auto_memory = min(AUTO_KV_CACHE_LIMIT, available // AUTO_KV_CACHE_SHARE)
    else:
        available = _free_gpu_memory(
            setup.build, config.block_size, max_num_batched_tokens, config.max_num_seqs
        )
        auto_memory = int(available * AUTO_KV_CACHE_SHARE_GPU)
    memory = auto_memory if config.kv_cache_memory is None else config.kv_cache_memory
    num_blocks = _num_blocks(memory, bytes_per_block, available)
    max_model_len = _max_model_len(config, model, num_blocks * config.block_size)
    runner = setup.build(num_blocks)
    pool = runner.pool
    if device.type != "cpu" and config.cuda_graphs:
        runner.graphs = _record_graphs(runner, config.max_num_seqs, max_model_len, console)
    else:
        # One token compiles the decode kernel; interpreted, more would take seconds.
        _warm_up(runner, WARM_UP_TOKENS if setup.attention == "cpu" else 1)
    cache = RadixCache(
        num_blocks,
        config.block_size,
        enabled=config.prefix_caching,
        policy=config.eviction_policy,
        pin_share=config.pin_share,
        quotas=quotas,
        default_quota=config.namespace_quota,
    )
    eos_token_ids = loaded.tokenizer.eos_token_ids | set(model.eos_token_ids)
    engine = Engine(
        runner,
        loaded.tokenizer,
        cache,
        EngineLimits(
            max_model_len,
            config.max_num_seqs,
            max_num_batched_tokens,
            config.request_timeout,
        ),
        eos_token_ids=eos_token_ids,
        grammars=GrammarCompiler(loaded.tokenizer, runner.vocab_size, eos_token_ids),
        bytes_per_block=bytes_per_block,
        # On a CPU the pool takes its memory only as its blocks are used.
        tiers=build_tiering(loaded, config, pool, cache, _host_memory(pool)),
        swap=build_swap(config, pool, cache, _host_memory(pool) - config.host_cache_memory),
        scheduling=SchedulingOptions(
            policy=config.scheduling_policy,
            max_skip_s=config.max_queue_skip,
            itl_target_s=None if config.itl_target is None else config.itl_target / 1000,
            preemption_mode=config.preemption_mode,
            speculative_tokens=config.speculative_tokens,
        ),
    )
    if config.kv_events is not None:
        publisher = ZmqEventPublisher(
            config.kv_events, replay_endpoint=config.kv_events_replay, topic=config.kv_events_topic
        )
        engine.kv_events = KVEventStream(engine.cache, publisher, engine.tiers)
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
        device=str(device),
        attention=setup.attention,
        kv_dtype=str(setup.kv_dtype).removeprefix("torch."),
    )


def available_memory() -> int:
    """Return the bytes of memory that can be used without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _host_memory(pool: KVPool) -> int:
    """Return the bytes of host memory that are left when the pool is full."""
    return available_memory() - (pool.nbytes if pool.device.type == "cpu" else 0)


def _num_blocks(memory: int, bytes_per_block: int, available: int) -> int:
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


def _warm_up(runner: ModelRunner, num_tokens: int, num_logits: int = 1) -> None:
    """Run one prefill, so that the first request doesn't pay for lazy initialisation."""
    pool = runner.pool
    count = min(num_tokens, pool.num_blocks * pool.block_size)
    blocks = -(-count // pool.block_size)
    metadata = AttentionMetadata(
        query_start_loc=np.array([0, count], dtype=np.int32),
        seq_lens=np.array([count], dtype=np.int32),
        block_tables=(np.arange(blocks, dtype=np.int32),),
        slot_mapping=np.arange(count, dtype=np.int64),
    )
    rows = np.arange(count, dtype=np.int64)
    batch = ForwardBatch(
        token_ids=np.zeros(count, dtype=np.int64),
        positions=rows % runner.decoder.max_positions,
        logits_rows=rows[-num_logits:],
        attention=metadata,
    )
    runner.launch(batch).result()


def _free_gpu_memory(
    make_runner: Callable[[int], ModelRunner], block_size: int, num_tokens: int, num_logits: int
) -> int:
    """Return the bytes of GPU memory that the largest step leaves free, by running one."""
    runner = make_runner(-(-num_tokens // block_size))
    device = runner.pool.device
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    _warm_up(runner, num_tokens, num_logits)
    needed = torch.cuda.max_memory_allocated(device) - before
    del runner
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0]) - needed


def _record_graphs(
    runner: ModelRunner, max_num_seqs: int, max_model_len: int, console: Console | None
) -> DecodeGraphs:
    decoder, attention = runner.decoder, runner.attention
    assert isinstance(attention, TritonAttention)

    def forward(token_ids: torch.Tensor, positions: torch.Tensor, logits: torch.Tensor) -> None:
        decoder.forward(token_ids, positions, attention, None, out=logits)

    graphs = DecodeGraphs(
        forward,
        attention,
        CudaGraphCapture(runner.pool.device),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        vocab_size=runner.vocab_size,
    )
    with (
        torch.inference_mode(),
        progress("Recording CUDA graphs", len(graphs.warm_up_shapes), console=console) as task,
    ):
        for shape in graphs.warm_up_shapes:
            graphs.record(shape)
            task.advance()
    return graphs
