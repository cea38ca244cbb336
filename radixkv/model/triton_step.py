"""One planned batch of the Triton backend: the arrays of a step, and how they are filled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from radixkv.model.attention import AttentionMetadata
from radixkv.model.packed_buffer import Field
from radixkv.model.triton_attention_plan import BatchSplit

__all__ = ["GROUP_ARRAYS", "Chunks", "Decodes", "Step", "decode_fields", "fill_decodes"]

GROUP_ARRAYS = ("first_seq", "last_seq", "first_block", "last_block", "level")
"""The `[num_groups]` arrays of the kernel's `DecodeGroups`, attributes of `DecodeGroup`, too."""


@dataclass(frozen=True, slots=True)
class Decodes:
    """The sequences with one new token. All tensors lie on the device.

    Attributes:
        rows: `[num_decodes]` int64, their rows in the batch; None if the batch has no others.
        tables: `[num_decodes, max_blocks]` int32.
        seq_lens: `[num_decodes]` int32.
        num_splits: ranges that the keys of a sequence, or of its private tail, are read in.
        groups: the kernel's `DecodeGroups`, or None.
        num_prefix_splits: ranges that the keys of a shared run are read in.
    """

    rows: torch.Tensor | None
    tables: torch.Tensor
    seq_lens: torch.Tensor
    num_splits: int
    groups: Any = None
    num_prefix_splits: int = 1


@dataclass(frozen=True, slots=True)
class Chunks:
    """The sequences with several new tokens, in a line or as trees. Arrays are of all sequences.

    Attributes:
        tiles: `[num_tiles, 2]` int32, (sequence, first row).
        tile_rows: tokens of a tile.
        mask: `[num_tokens, words]` int32 for trees, else None.
    """

    tiles: torch.Tensor
    tile_rows: int
    tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Step:
    """One planned batch: views of a buffer on the device, and what is passed by value."""

    num_tokens: int
    slot_mapping: torch.Tensor
    decodes: Decodes | None
    chunks: tuple[Chunks, ...]


def decode_fields(num_rows: int, width: int, num_groups: int) -> dict[str, Field]:
    """Return the arrays of the decode sequences, as `PackedBuffer` lays them out."""
    fields: dict[str, Field] = {
        "tables": ((num_rows, width), np.int32),
        "seq_lens": ((num_rows,), np.int32),
    }
    if num_groups:
        fields |= dict.fromkeys(GROUP_ARRAYS, ((num_groups,), np.int32))
        fields["start_lens"] = ((num_rows,), np.int32)
    return fields


def fill_decodes(
    host: dict[str, npt.NDArray[Any]], metadata: AttentionMetadata, split: BatchSplit
) -> None:
    """Write the lengths and groups of the decode sequences to the first places of their arrays."""
    host["seq_lens"][: len(split.decodes)] = metadata.seq_lens[split.decodes]
    if split.groups:
        for name in GROUP_ARRAYS:
            host[name][: len(split.groups)] = [getattr(group, name) for group in split.groups]
    if "start_lens" in host:
        host["start_lens"][: len(split.decodes)] = split.start_lens
