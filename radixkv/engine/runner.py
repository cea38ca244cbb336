"""Runs the model on a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch

from radixkv.engine.batch import ForwardBatch
from radixkv.model.attention import AttentionBackend
from radixkv.model.kv_pool import KVPool

if TYPE_CHECKING:
    from radixkv.model.cuda_graphs import DecodeGraphs
    from radixkv.model.decoder import Decoder

__all__ = ["LaunchedStep", "LaunchingRunner", "ModelRunner", "Runner", "launch"]


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the device has been given, and may still be computing."""

    _logits: torch.Tensor

    @property
    def is_pending(self) -> bool:
        """Whether the device may still be computing, so that the host has time for other work."""
        return self._logits.device.type == "cuda"

    def logits(self) -> torch.Tensor:
        """Return `[num_logits, vocab]` float32 logits on the runner's device, without waiting.

        What is done to them on the device comes after the step; reading them on the host waits.
        They may be overwritten, as they are by the next step.
        """
        return self._logits

    def result(self) -> torch.Tensor:
        """Return the logits when the device has computed them."""
        if self.is_pending:
            torch.cuda.current_stream(self._logits.device).synchronize()
        return self._logits


class Runner(Protocol):
    """What the engine needs of a model."""

    vocab_size: int

    def execute(self, batch: ForwardBatch) -> torch.Tensor:
        """Copy blocks, write KV, and return `[num_logits, vocab]` float32 logits."""
        ...

    def move_slots(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy the KV of single tokens, all layers, for (source, destination) slots.

        All sources are read before anything is written.
        """
        ...


@runtime_checkable
class LaunchingRunner(Protocol):
    """A runner that can return while the device is at work."""

    def launch(self, batch: ForwardBatch) -> LaunchedStep:
        """Give the device everything that `execute` does, without waiting for any of it.

        The host is free until it reads the logits: it can take in requests, build what the next
        step needs whatever is sampled, or publish what the last step produced. The blocks of the
        step must not be given to anybody meanwhile except in steps launched later.
        """
        ...


def launch(runner: Runner, batch: ForwardBatch) -> LaunchedStep:
    """Start a step; a runner that can only `execute` has finished it on return."""
    if isinstance(runner, LaunchingRunner):
        return runner.launch(batch)
    return LaunchedStep(runner.execute(batch))


class ModelRunner:
    """Owns the decoder, the KV tensors, the attention backend, and on a GPU the recorded steps."""

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        attention: AttentionBackend,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.decoder = decoder
        self.pool = pool
        self.attention = attention
        self.graphs = graphs
        self.vocab_size = decoder.config.vocab_size

    def move_slots(self, moves: Sequence[tuple[int, int]]) -> None:
        """See `Runner.move_slots`."""
        self.pool.move_slots(moves)

    def execute(self, batch: ForwardBatch) -> torch.Tensor:
        """See `Runner.execute`; on a GPU the logits are there when it returns, and stay there."""
        return self.launch(batch).result()

    @torch.inference_mode()
    def launch(self, batch: ForwardBatch) -> LaunchedStep:
        """See `LaunchingRunner.launch`. On a CPU it takes as long as the step."""
        self.pool.copy_blocks(batch.copies)
        if self.graphs is not None and _wants_every_row(batch):
            logits = self.graphs.run(batch.token_ids, batch.positions, batch.attention)
            if logits is not None:
                return LaunchedStep(logits)
        inputs = (batch.token_ids, batch.positions, batch.logits_rows)
        token_ids, positions, rows = self.attention.plan_step(batch.attention, inputs)
        return LaunchedStep(self.decoder.forward(token_ids, positions, self.attention, rows))


def _wants_every_row(batch: ForwardBatch) -> bool:
    return np.array_equal(batch.logits_rows, np.arange(len(batch.token_ids)))
