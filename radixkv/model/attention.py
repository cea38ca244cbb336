"""What the decoder asks of an attention backend, and what a backend is told about a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from radixkv.model.kv_pool import KVPool

__all__ = ["AttentionBackend", "AttentionMetadata", "PrefixGroup"]


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Sequences of a batch that share a run of blocks, so that it is read once for all of them.

    Sequences `first_seq` (inclusive) to `last_seq` (exclusive) have the same block ids at table
    positions `first_block` (inclusive) to `last_block` (exclusive), and every token in those
    blocks lies before the first new token of each of them. Groups nest: a group of a deeper level
    covers a subrange of the sequences of the level above and begins where that one ends.
    """

    first_seq: int
    last_seq: int
    first_block: int
    last_block: int


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One batch, described on the host. The batch is flat: sequence i owns query rows
    `query_start_loc[i]` to `query_start_loc[i + 1]`.

    Attributes:
        query_start_loc: `[num_seqs + 1]` int32.
        seq_lens: `[num_seqs]` int32, tokens that the last query row of the sequence attends to,
            the new ones included; `seq_lens[i] - query_len[i]` tokens were in the pool before.
        block_tables: per sequence, int32 `[>= ceil(seq_len / block_size)]`; entries past the
            length must not be read.
        slot_mapping: `[num_tokens]` int64, the slot that each new token's K and V go to.
        groups: shared runs, parents before children; the sequences are ordered so that every
            group is a contiguous range of at least two of them.
        tree_masks: empty if the new tokens of every sequence are one line of text, each seeing
            those before it. Otherwise one entry per sequence: None for such a line, or, where the
            new tokens are the nodes of a tree of speculated tokens, bool `[query_len, query_len]`:
            entry (i, j) says whether new token i sees new token j. A node sees itself, and none
            that comes after it (parents come before children). All of them see everything before
            the first new token. The positions of the batch are those that the nodes would have in
            their own line (context length plus depth); their slots are consecutive all the same,
            new token j in the place of token `context_len + j`.
    """

    query_start_loc: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_tables: tuple[npt.NDArray[np.int32], ...]
    slot_mapping: npt.NDArray[np.int64]
    groups: tuple[PrefixGroup, ...] = ()
    tree_masks: tuple[npt.NDArray[np.bool_] | None, ...] = ()

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch."""
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        """Query rows in the batch."""
        return int(self.query_start_loc[-1])


class AttentionBackend(ABC):
    """Causal attention of new tokens over a paged KV pool.

    `plan` is called once a step, then `run` once a layer.
    """

    def __init__(
        self, pool: KVPool, *, num_heads: int, num_kv_heads: int, head_dim: int, scale: float
    ) -> None:
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads ({num_kv_heads}), got {num_heads}"
            )
        self.pool = pool
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale

    @abstractmethod
    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepare the batch described by `metadata`; valid until the next call."""

    def plan_step(
        self, metadata: AttentionMetadata, inputs: Sequence[npt.NDArray[np.int64]]
    ) -> list[torch.Tensor]:
        """Call `plan`, and bring the other arrays of the step to the pool's device.

        Args:
            metadata: of the batch.
            inputs: int64 arrays of any shape.

        Returns:
            The inputs on the device, valid until the next call.
        """
        self.plan(metadata)
        return [torch.from_numpy(array).to(self.pool.device) for array in inputs]

    @abstractmethod
    def run(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Write the new K and V into the pool and return the attention output.

        Args:
            layer: index into the pool's layers.
            query: `[num_tokens, num_heads, head_dim]`, rotated.
            key, value: `[num_tokens, num_kv_heads, head_dim]`, key rotated.

        All three may be strided views of rows whose heads lie side by side.

        Returns:
            `[num_tokens, num_heads, head_dim]`, in the query's dtype.
        """
