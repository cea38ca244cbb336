"""Decode steps as CUDA graphs: the launches of a forward pass recorded once and replayed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from radixkv.model.attention import AttentionMetadata
from radixkv.model.packed_buffer import PackedBuffer
from radixkv.model.triton_attention import MAX_LEVELS, TritonAttention
from radixkv.model.triton_attention_plan import BatchSplit, GraphShape

__all__ = ["CudaGraphCapture", "DecodeGraphs", "Forward", "GraphCapture", "batch_ladder"]

log = logging.getLogger(__name__)

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(token ids `[n]`, positions `[n]`, logits `[n, vocab]` to be written)."""

# Past this many sequences a step takes the GPU longer than the host needs to launch it.
MAX_ROWS = 256
# Contexts are told apart by powers of two from this many tokens up: they decide the width of the
# block tables and the number of splits, which a graph has fixed.
MIN_CONTEXT = 1024


class GraphCapture(Protocol):
    """Records launches."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return a function that repeats the launches of `run` on the same memory.

        `run` may be called any number of times meanwhile, so it must be safe to repeat.
        """
        ...


class CudaGraphCapture:
    """Records CUDA (or HIP) graphs that share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """See `GraphCapture.capture`."""
        stream, current = self._stream, torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        # Compiling kernels and setting up libraries is not allowed while launches are recorded.
        with torch.cuda.stream(stream):
            run()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        ):
            run()
        replay: Callable[[], None] = graph.replay
        return replay


class DecodeGraphs:
    """Owns one recorded forward pass per shape, and the static buffers that all of them use.

    A shape is a step of the ladder of batch sizes, a power of two of context, and 0, 1, 2 or 4
    levels of groups. A step is padded up to the next shape: rows of length 0, slot -1, groups of no
    sequences. `warm_up_shapes` are those of short contexts; the others are recorded when they are
    first needed, which makes that one step slower.

    The graphs share their memory, so one runs at a time, and `run`'s result is overwritten by the
    next. If a shape can't be recorded, no graph is used from then on.
    """

    def __init__(
        self,
        forward: Forward,
        attention: TritonAttention,
        capture: GraphCapture,
        *,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        """Allocate the buffers; nothing is recorded yet.

        Args:
            forward: runs the model on a decode batch that `attention` has planned.
            attention: the backend that `forward` uses.
            capture: records.
            max_num_seqs: sequences of the largest batch.
            max_model_len: tokens of the longest sequence.
            vocab_size: of the model.
        """
        self._forward = forward
        self._attention = attention
        self._capture = capture
        self._ladder = batch_ladder(min(max_num_seqs, MAX_ROWS))
        self._max_model_len = max_model_len
        self._replays: dict[GraphShape, Callable[[], None]] = {}
        self._is_broken = False
        largest = GraphShape(self._ladder[-1], self._max_blocks(max_model_len), MAX_LEVELS)
        device = attention.pool.device
        size = PackedBuffer.size_of(attention.graph_fields(largest, 2))
        self._buffer = PackedBuffer(device, capacity=size)
        shape = (largest.num_rows, vocab_size)
        self._logits = torch.empty(shape, dtype=torch.float32, device=device)

    @property
    def shapes(self) -> tuple[GraphShape, ...]:
        """The shapes recorded so far."""
        return tuple(self._replays)

    @property
    def warm_up_shapes(self) -> tuple[GraphShape, ...]:
        """What to record before serving: every batch size, with and without groups, for the
        shortest contexts; the largest first, so that the others find room in its memory."""
        blocks = self._max_blocks(1)
        return tuple(
            GraphShape(rows, blocks, num_levels)
            for rows in reversed(self._ladder)
            for num_levels in (0, 1)
            if rows > 1 or not num_levels
        )

    def record(self, shape: GraphShape) -> None:
        """Record a shape with a batch of nothing but padding, unless recording has failed."""
        if not self._is_broken:
            nothing = np.empty(0, dtype=np.int64)
            self._run_shape(shape, None, None, nothing, nothing)

    def run(
        self,
        token_ids: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        metadata: AttentionMetadata,
    ) -> torch.Tensor | None:
        """Run a decode step.

        Args:
            token_ids, positions: `[num_seqs]`, of the new token of each sequence.
            metadata: the batch.

        Returns:
            Logits `[num_seqs, vocab]` float32 in a static buffer, valid until the next call; None
            if no graph fits: a sequence has several new tokens, there are too many sequences, or
            recording has failed.

        Raises:
            ValueError: see `TritonAttention.plan`.
        """
        num_seqs = metadata.num_seqs
        if self._is_broken or not 0 < num_seqs <= self._ladder[-1]:
            return None
        longest = int(metadata.seq_lens.max())
        if metadata.num_tokens != num_seqs or longest > self._max_model_len:
            return None
        split = self._attention.split(metadata)
        shape = GraphShape(
            num_rows=next(rows for rows in self._ladder if rows >= num_seqs),
            max_blocks=self._max_blocks(longest),
            num_levels=_power_of_two(split.num_levels),
        )
        if not self._run_shape(shape, metadata, split, token_ids, positions):
            return None
        return self._logits[:num_seqs]

    def _run_shape(
        self,
        shape: GraphShape,
        metadata: AttentionMetadata | None,
        split: BatchSplit | None,
        token_ids: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
    ) -> bool:
        """Replay the graph of a shape, recorded now if need be; whether that was possible."""
        inputs = (token_ids, positions)
        ids, places = self._attention.plan_decode(metadata, split, inputs, shape, self._buffer)
        replay = self._replays.get(shape)
        if replay is None:
            step = self._attention.step
            logits = self._logits[: shape.num_rows]

            def run() -> None:
                self._attention.step = step
                self._forward(ids, places, logits)

            try:
                replay = self._capture.capture(run)
            except RuntimeError:
                log.exception("a CUDA graph can't be recorded; steps run without from now on")
                self._is_broken = True
                self._replays.clear()
                return False
            self._replays[shape] = replay
        replay()
        return True

    def _max_blocks(self, seq_len: int) -> int:
        context = min(max(_power_of_two(seq_len), MIN_CONTEXT), self._max_model_len)
        return self._attention.table_width(context)


def batch_ladder(max_num_seqs: int) -> tuple[int, ...]:
    """Return the batch sizes that steps are padded to: 1, 2, 4, then every 8th, and the largest.

    >>> batch_ladder(20)
    (1, 2, 4, 8, 16, 20)
    """
    steps = {1, 2, 4, *range(8, max_num_seqs, 8), max_num_seqs}
    return tuple(sorted(step for step in steps if step <= max_num_seqs))


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`; 0 for 0."""
    return 1 << (number - 1).bit_length() if number else 0
