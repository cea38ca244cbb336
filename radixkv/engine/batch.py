"""One step's work as flat arrays, ordered so that sequences that share blocks are neighbours."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixkv.cache import RadixCache, Sequence
from radixkv.cache.int_vector import Int32Array
from radixkv.cache.radix_tree import Node
from radixkv.engine.scheduler import ScheduledChunk
from radixkv.model.attention import AttentionMetadata, PrefixGroup

__all__ = ["BatchBuilder", "ForwardBatch", "group_by_prefix"]

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


class BatchBuilder:
    """Makes the batches of one engine; keeps the order and the groups of the last one.

    These depend on the sequences and on the nodes that they hold. A sequence whose own run grows
    stays where it is, so that as long as the same answers go on nothing of it is computed again.
    """

    def __init__(self, cache: RadixCache) -> None:
        self._block_size = cache.block_size
        self._sequences: list[Sequence] = []
        self._nodes: list[Node | None] = []
        self._order: list[int] = []
        self._groups: tuple[PrefixGroup, ...] = ()

    def build(
        self, chunks: SequenceOf[ScheduledChunk], copies: SequenceOf[tuple[int, int]]
    ) -> tuple[ForwardBatch, list[ScheduledChunk]]:
        """Flatten chunks into a batch.

        Returns:
            The batch, and the chunks in the order of its sequences. The rows of logits belong to
            those that sample, in order: one for the last token of a chunk, and one behind it for
            each token of its draft.
        """
        self._arrange([chunk.branch.sequence for chunk in chunks])
        ordered = [chunks[i] for i in self._order]
        starts = np.zeros(len(ordered) + 1, dtype=np.int32)
        np.cumsum([chunk.num_rows for chunk in ordered], out=starts[1:])
        num_tokens = int(starts[-1])
        token_ids = np.empty(num_tokens, dtype=np.int64)
        positions = np.empty(num_tokens, dtype=np.int64)
        places = np.empty(num_tokens, dtype=np.int64)  # where in the sequence's slots
        blocks = np.empty(num_tokens, dtype=np.int64)
        size = self._block_size
        tables: list[Int32Array] = []
        singles: list[tuple[int, int, int]] = []  # token, position, block
        for chunk, row in zip(ordered, starts.tolist(), strict=False):
            sequence, start, count = chunk.branch.sequence, chunk.start, chunk.count
            table = sequence.block_table
            tables.append(table)
            if chunk.num_rows == 1:
                singles.append((sequence.token_ids[start], start, table[start // size]))
                continue
            rows, known = slice(row, row + chunk.num_rows), slice(row, row + count)
            token_ids[known] = sequence.token_ids[start : start + count]
            places[rows] = place = np.arange(start, start + chunk.num_rows)
            positions[known] = place[:count]
            blocks[rows] = table[place // size]
            if chunk.draft is not None:
                token_ids[row + count : row + chunk.num_rows] = chunk.draft.token_ids
                depths = chunk.draft.depths()
                positions[row + count : row + chunk.num_rows] = start + count - 1 + depths
        if singles:
            lone = starts[:-1][np.diff(starts) == 1]
            token_ids[lone], positions[lone], blocks[lone] = np.array(singles, dtype=np.int64).T
            places[lone] = positions[lone]
        ends = starts[1:].tolist()
        rows_wanted: list[int] = []
        for chunk, end in zip(ordered, ends, strict=True):
            if chunk.samples:
                rows_wanted += range(end - 1 - (chunk.num_rows - chunk.count), end)
        attention = AttentionMetadata(
            query_start_loc=starts,
            seq_lens=places[starts[1:] - 1].astype(np.int32) + 1,
            block_tables=tuple(tables),
            slot_mapping=blocks * size + places % size,
            groups=self._groups,
            tree_masks=_tree_masks(ordered),
        )
        batch = ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            logits_rows=np.array(rows_wanted, dtype=np.int64),
            attention=attention,
            copies=tuple(copies),
        )
        return batch, ordered

    def _arrange(self, sequences: list[Sequence]) -> None:
        """Order the sequences, and group them, unless they are those of the last step."""
        nodes = [sequence.node for sequence in sequences]
        # A run that is split meanwhile is shared by the same sequences as before.
        if nodes == self._nodes and sequences == self._sequences:
            return
        self._sequences, self._nodes = sequences, nodes
        paths = [_path(sequence) for sequence in sequences]
        self._order = sorted(range(len(paths)), key=paths.__getitem__)
        self._groups = tuple(group_by_prefix([paths[i] for i in self._order]))


def _tree_masks(chunks: SequenceOf[ScheduledChunk]) -> tuple[npt.NDArray[np.bool_] | None, ...]:
    drafts = [chunk.draft for chunk in chunks]
    if all(draft is None or draft.is_line for draft in drafts):
        return ()
    return tuple(None if draft is None or draft.is_line else draft.mask() for draft in drafts)


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
