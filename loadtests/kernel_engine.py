"""A decode step of a whole model with random weights, against the time it takes to read them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from loadtests.kernel_timing import Limits
from radixkv.model.attention import AttentionMetadata
from radixkv.model.backends import build_attention
from radixkv.model.config import ModelConfig, RopeConfig
from radixkv.model.cuda_graphs import CudaGraphCapture, DecodeGraphs
from radixkv.model.decoder import Decoder
from radixkv.model.kv_pool import KVPool
from radixkv.model.layers import DecoderWeights, LayerWeights
from radixkv.model.triton_attention import TritonAttention

__all__ = ["EngineStep", "llama_8b", "measure_steps", "tiny_llama"]

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class EngineStep:
    """A decode step of `num_seqs` sequences of `context` tokens.

    Attributes:
        step_ms: with everything on the host, from ids to logits on the device.
        floor_ms: the weights, the K and V that must be read, at the bandwidth of a copy.
        graphs: whether the step was replayed from a CUDA graph.
    """

    num_seqs: int
    context: int
    step_ms: float
    floor_ms: float
    graphs: bool


def llama_8b() -> ModelConfig:
    """Return the shape of Llama-3-8B."""
    return _llama(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
    )


def tiny_llama() -> ModelConfig:
    """Return a shape that takes no time."""
    return _llama(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
    )


def measure_steps(
    config: ModelConfig,
    shapes: list[tuple[int, int]],
    device: torch.device,
    limits: Limits,
    rounds: int,
) -> list[EngineStep]:
    """Return a measured step for each (sequences, tokens of context).

    On a GPU the steps are recorded and replayed as the engine does it; on a CPU the same code runs
    them at once.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    max_len = max(context for _, context in shapes) + rounds + 8
    max_seqs = max(num_seqs for num_seqs, _ in shapes)
    num_blocks = max_seqs * -(-max_len // _BLOCK_SIZE)
    weights = _random_weights(config, dtype, device)
    decoder = Decoder(config, weights, max_positions=max_len)
    pool = KVPool(
        config.num_layers,
        num_blocks,
        _BLOCK_SIZE,
        config.num_kv_heads,
        config.head_dim,
        dtype,
        device,
    )
    attention = build_attention("triton", pool, config, dtype)
    assert isinstance(attention, TritonAttention)

    def forward(token_ids: torch.Tensor, positions: torch.Tensor, logits: torch.Tensor) -> None:
        decoder.forward(token_ids, positions, attention, None, out=logits)

    graphs = DecodeGraphs(
        forward,
        attention,
        CudaGraphCapture(device) if device.type == "cuda" else _Repeat(),
        max_num_seqs=max_seqs,
        max_model_len=max_len,
        vocab_size=config.vocab_size,
    )
    # Of the embeddings a step reads a row per token.
    embeddings = config.vocab_size * config.hidden_size * dtype.itemsize
    weight_bytes = decoder.weight_bytes - (0 if config.tie_word_embeddings else embeddings)
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
    steps = []
    with torch.inference_mode():
        for num_seqs, context in shapes:
            seconds = [_step(graphs, pool, num_seqs, context + i) for i in range(rounds + 2)]
            floor = (weight_bytes + num_seqs * context * token_bytes) / limits.copy_bytes_per_s
            steps.append(
                EngineStep(
                    num_seqs=num_seqs,
                    context=context,
                    # The first records; the second is warm.
                    step_ms=statistics.median(seconds[2:]) * 1e3,
                    floor_ms=floor * 1e3,
                    graphs=device.type == "cuda" and bool(graphs.shapes),
                )
            )
    return steps


def _step(graphs: DecodeGraphs, pool: KVPool, num_seqs: int, context: int) -> float:
    """Return the seconds of one step whose sequences have `context` tokens before it."""
    num_blocks = context // _BLOCK_SIZE + 1
    tables = np.arange(num_seqs * num_blocks, dtype=np.int32).reshape(num_seqs, num_blocks)
    slots = tables[:, -1].astype(np.int64) * _BLOCK_SIZE + context % _BLOCK_SIZE
    metadata = AttentionMetadata(
        query_start_loc=np.arange(num_seqs + 1, dtype=np.int32),
        seq_lens=np.full(num_seqs, context + 1, dtype=np.int32),
        block_tables=tuple(tables),
        slot_mapping=slots,
    )
    ids = np.arange(num_seqs, dtype=np.int64) % 64
    _wait(pool.device)
    start = time.perf_counter()
    logits = graphs.run(ids, np.full(num_seqs, context, dtype=np.int64), metadata)
    _wait(pool.device)
    if logits is None:
        raise RuntimeError("the decode step couldn't be recorded")
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Repeat:
    """Repeats a forward pass where there are no graphs to record."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return `run`."""
        return run


def _random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> DecoderWeights:
    """Return weights drawn on the device: billions of them take a CPU a minute."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, 0.02)

    hidden, inner = config.hidden_size, config.intermediate_size
    heads_dim = config.num_heads * config.head_dim
    ones = torch.ones(hidden, dtype=dtype, device=device)
    layers = [
        LayerWeights(
            input_norm=ones,
            qkv=draw(heads_dim + 2 * config.num_kv_heads * config.head_dim, hidden),
            qkv_bias=None,
            qk_norm=None,
            out=draw(hidden, heads_dim),
            out_bias=None,
            post_norm=ones,
            gate_up=draw(2 * inner, hidden),
            gate_up_bias=None,
            down=draw(hidden, inner),
            down_bias=None,
        )
        for _ in range(config.num_layers)
    ]
    vocab = config.vocab_size
    return DecoderWeights(draw(vocab, hidden), layers, ones, draw(vocab, hidden))


def _llama(
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=500_000.0),
        max_position_embeddings=8192,
        dtype=torch.bfloat16,
    )
