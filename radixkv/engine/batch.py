"""One step's work as flat arrays, ordered so that sequences that share blocks are neighbours."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixkv.cache import Sequence
from radixkv.engine.scheduler import ScheduledChunk
from radixkv.model.attention import AttentionMetadata, PrefixGroup

__all__ = ["ForwardBatch", "build_batch", "group_by_prefix"]

Path = list[tuple[int, int]]
"""(node id, blocks up to the end of the node), from the root down."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """What a runner is given. See docs/kv_layout.md for the arrays.

    Attributes:
        token_ids: `[num_tokens]` int64.
        positions: `[num_tokens]` int64, position of each token in its sequence.
        logits_rows: `[num_logits]` int64, the query rows whose logits are wanted.
        attention: where the tokens' KV lies and goes.
        copies: (source, destination) blocks to copy before anything is written.
    """

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    logits_rows: npt.NDArray[np.int64]
    attention: AttentionMetadata
    copies: tuple[tuple[int, int], ...] = ()


def build_batch(
    chunks: SequenceOf[ScheduledChunk], block_size: int, copies: SequenceOf[tuple[int, int]]
) -> tuple[ForwardBatch, list[ScheduledChunk]]:
    """Flatten chunks into a batch.

    Returns:
        The batch, and the chunks in the order of its sequences. The i-th row of logits belongs to
        the i-th of those that sample.
    """
    paths = [_path(c.request.sequence) for c in chunks]
    order = sorted(range(len(chunks)), key=lambda i: paths[i])
    ordered = [chunks[i] for i in order]
    groups = group_by_prefix([paths[i] for i in order])
    counts = np.array([c.count for c in ordered], dtype=np.int32)
    starts = np.zeros(len(ordered) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    token_ids = np.concatenate(
        [c.request.sequence.token_ids[c.start : c.start + c.count] for c in ordered]
    ).astype(np.int64)
    positions = np.concatenate(
        [np.arange(c.start, c.start + c.count, dtype=np.int64) for c in ordered]
    )
    tables = tuple(c.request.sequence.block_table for c in ordered)
    slots = np.empty(len(token_ids), dtype=np.int64)
    for table, first, last in zip(tables, starts[:-1], starts[1:], strict=True):
        position = positions[first:last]
        slots[first:last] = table[position // block_size] * np.int64(block_size)
    slots += positions % block_size
    rows = [int(end) - 1 for c, end in zip(ordered, starts[1:], strict=True) if c.samples]
    attention = AttentionMetadata(
        query_start_loc=starts,
        seq_lens=np.array([c.start + c.count for c in ordered], dtype=np.int32),
        block_tables=tables,
        slot_mapping=slots,
        groups=tuple(groups),
    )
    batch = ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        logits_rows=np.array(rows, dtype=np.int64),
        attention=attention,
        copies=tuple(copies),
    )
    return batch, ordered


def group_by_prefix(paths: SequenceOf[Path]) -> list[PrefixGroup]:
    """Return the runs of blocks that neighbouring sequences share, parents before children.

    Args:
        paths: of each sequence, sorted, so that equal beginnings are neighbours.

    Cost: O(total path length).
    """
    groups: list[PrefixGroup] = []
    stack = [(0, len(paths), 0, 0)]  # first sequence, last sequence, depth, first block
    while stack:
        first, last, depth, first_block = stack.pop()
        start = first
        while start < last:
            if len(paths[start]) <= depth:
                start += 1
                continue
            node = paths[start][depth]
            end = start + 1
            while end < last and len(paths[end]) > depth and paths[end][depth] == node:
                end += 1
            if end - start > 1:
                # Nodes that exactly the same sequences share are one run.
                deep = depth + 1
                shallowest = min(len(paths[start]), len(paths[end - 1]))
                while deep < shallowest and paths[start][deep] == paths[end - 1][deep]:
                    deep += 1
                last_block = paths[start][deep - 1][1]
                groups.append(PrefixGroup(start, end, first_block, last_block))
                stack.append((start, end, deep, last_block))
            start = end
    return groups


def _path(sequence: Sequence) -> Path:
    path: Path = []
    node = sequence.node
    end = sequence.num_tree_blocks
    while node is not None and node.parent is not None:
        path.append((node.node_id, end))
        end -= node.num_blocks
        node = node.parent
    path.reverse()
    return path
