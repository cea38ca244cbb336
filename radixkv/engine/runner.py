"""Runs the model on a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from radixkv.engine.batch import ForwardBatch
from radixkv.model.attention import AttentionBackend
from radixkv.model.kv_pool import KVPool

if TYPE_CHECKING:
    from radixkv.model.decoder import Decoder

__all__ = ["ModelRunner", "Runner"]


class Runner(Protocol):
    """What the engine needs of a model."""

    vocab_size: int

    def execute(self, batch: ForwardBatch) -> torch.Tensor:
        """Copy blocks, write KV, and return `[num_logits, vocab]` float32 logits."""
        ...


class ModelRunner:
    """Owns the decoder, the KV tensors and the attention backend."""

    def __init__(self, decoder: Decoder, pool: KVPool, attention: AttentionBackend) -> None:
        self.decoder = decoder
        self.pool = pool
        self.attention = attention
        self.vocab_size = decoder.config.vocab_size

    @torch.inference_mode()
    def execute(self, batch: ForwardBatch) -> torch.Tensor:
        """See `Runner.execute`."""
        self.pool.copy_blocks(batch.copies)
        self.attention.plan(batch.attention)
        device = self.pool.device
        return self.decoder.forward(
            torch.from_numpy(batch.token_ids).to(device),
            torch.from_numpy(batch.positions).to(device),
            self.attention,
            torch.from_numpy(batch.logits_rows).to(device),
        )
