"""What the Triton backend decides on the host: who decodes, which shared runs pay, which shape."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixkv.model.attention import AttentionMetadata, PrefixGroup

__all__ = [
    "BatchSplit",
    "DecodeGroup",
    "GraphShape",
    "check_batch",
    "fill_tables",
    "pack_masks",
    "split_batch",
]

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """A shared run of blocks that is read once for decode sequences `[first_seq, last_seq)`.

    Like `PrefixGroup`, but sequences are counted among those that decode. The groups of a sequence
    have the levels 0, 1, ... from the root, and cover its table up to its private tail.
    """

    first_seq: int
    last_seq: int
    first_block: int
    last_block: int
    level: int


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """Which kernel takes which sequence.

    Attributes:
        decodes: sequences with one new token.
        chunks: sequences with more, each seeing those before it.
        trees: sequences whose new tokens are a tree.
        groups: shared runs of the decode sequences.
        start_lens: `[len(decodes)]` int32, tokens that the groups of each cover.
    """

    decodes: npt.NDArray[np.intp]
    chunks: npt.NDArray[np.intp]
    trees: npt.NDArray[np.intp]
    groups: tuple[DecodeGroup, ...]
    start_lens: Int32s

    @property
    def num_levels(self) -> int:
        """Levels of the groups; 0 without any."""
        return max((group.level + 1 for group in self.groups), default=0)


@dataclass(frozen=True, slots=True)
class GraphShape:
    """Everything about a decode step that is fixed when its launches are recorded.

    Attributes:
        num_rows: sequences, those that only pad included.
        max_blocks: columns of the block tables; decides the number of splits, too.
        num_levels: levels of groups that there is room for; 0 is the kernel without groups.
    """

    num_rows: int
    max_blocks: int
    num_levels: int

    @property
    def max_groups(self) -> int:
        """Groups there is room for: a family of different nested or disjoint ranges of at least
        two out of n has n - 1 members at most."""
        return max(self.num_rows - 1, 1) if self.num_levels else 0


def split_batch(
    metadata: AttentionMetadata,
    *,
    block_size: int,
    partial_tokens: int,
    min_saved_tokens: int,
    max_levels: int,
) -> BatchSplit:
    """Decide which kernel takes which sequence, and which groups are worth it.

    A group of m sequences over n tokens saves reading (m - 1) * n tokens of K and V. It costs each
    of the m a partial result that is written and read again, as many bytes as `partial_tokens`
    tokens. One that does not save more than it costs is dropped: a group below it, if it pays,
    then begins where the dropped one did. If all that are left together save too little for the
    launches that they add, there are none.

    Args:
        metadata: a valid batch.
        block_size: tokens in a block.
        partial_tokens: what a partial result costs, in tokens' worth of K and V.
        min_saved_tokens: what all groups together must save, in tokens' worth of K and V.
        max_levels: groups on the path of a sequence at most; deeper ones are dropped.

    Cost:
        O(sequences + groups).
    """
    query_lens = np.diff(metadata.query_start_loc)
    is_tree = np.zeros(metadata.num_seqs, dtype=np.bool_)
    if metadata.tree_masks:
        is_tree[:] = [mask is not None for mask in metadata.tree_masks]
    # A tree of one node is a line of one token.
    is_tree &= query_lens > 1
    is_decode = query_lens == 1
    decodes = np.flatnonzero(is_decode)
    groups, start_lens = _choose_groups(
        metadata.groups, is_decode, block_size, partial_tokens, max_levels
    )
    saved = sum((g.last_seq - g.first_seq - 1) * (g.last_block - g.first_block) for g in groups)
    if saved * block_size < min_saved_tokens:
        groups, start_lens = (), np.zeros_like(start_lens)
    return BatchSplit(
        decodes=decodes,
        chunks=np.flatnonzero(~is_decode & ~is_tree),
        trees=np.flatnonzero(is_tree),
        groups=groups,
        start_lens=start_lens,
    )


def _choose_groups(
    groups: tuple[PrefixGroup, ...],
    is_decode: npt.NDArray[np.bool_],
    block_size: int,
    partial_tokens: int,
    max_levels: int,
) -> tuple[tuple[DecodeGroup, ...], Int32s]:
    # rank[i]: decode sequences before sequence i.
    rank = np.concatenate([[0], np.cumsum(is_decode)]).tolist()
    kept: list[DecodeGroup] = []
    deepest = [-1] * rank[-1]  # of each decode sequence, the kept group that covers its last block
    for group in groups:
        first, last = rank[group.first_seq], rank[group.last_seq]
        if last - first < 2:
            continue
        # Members of a group have all groups above it in common, so one speaks for all of them.
        parent = kept[deepest[first]] if deepest[first] >= 0 else None
        if parent is not None and (parent.first_seq, parent.last_seq) == (first, last):
            kept[deepest[first]] = DecodeGroup(
                first, last, parent.first_block, group.last_block, parent.level
            )
            continue
        start, level = (parent.last_block, parent.level + 1) if parent is not None else (0, 0)
        saved = (last - first - 1) * (group.last_block - start) * block_size
        if saved <= partial_tokens * (last - first) or level >= max_levels:
            continue
        deepest[first:last] = [len(kept)] * (last - first)
        kept.append(DecodeGroup(first, last, start, group.last_block, level))
    starts = [kept[index].last_block * block_size if index >= 0 else 0 for index in deepest]
    return tuple(kept), np.array(starts, dtype=np.int32)


def pack_masks(
    masks: tuple[npt.NDArray[np.bool_] | None, ...], query_start_loc: Int32s, out: Int32s
) -> None:
    """Write the masks of a batch as bits: bit j % 32 of word j // 32 of a row is column j.

    Args:
        masks: per sequence, bool `[query_len, query_len]`, or None, whose rows become 0.
        query_start_loc: of the batch.
        out: `[num_tokens, words]`.
    """
    out[:] = 0
    for mask, start in zip(masks, query_start_loc[:-1].tolist(), strict=True):
        if mask is not None:
            bits = np.packbits(mask, axis=1, bitorder="little")
            out.view(np.uint8)[start : start + len(mask), : bits.shape[1]] = bits


def check_batch(metadata: AttentionMetadata, num_slots: int, block_size: int) -> None:
    """Check what would make a kernel write outside of the pool or see the wrong tokens.

    Raises:
        ValueError: a length, slot, group or mask is out of its bounds.
    """
    query_lens = np.diff(metadata.query_start_loc)
    num_seqs, slots = metadata.num_seqs, metadata.slot_mapping
    if (
        len(query_lens) != num_seqs
        or (query_lens < 1).any()
        or (metadata.seq_lens < query_lens).any()
    ):
        raise ValueError(
            "every sequence must have at least one new token and none more than its length, got "
            f"{query_lens.tolist()} new tokens of {metadata.seq_lens.tolist()}"
        )
    if len(slots) != metadata.num_tokens or (
        len(slots) and (slots.min() < -1 or slots.max() >= num_slots)
    ):
        raise ValueError(
            f"slot_mapping must have {metadata.num_tokens} slots in [0, {num_slots}) or -1, "
            f"got {slots.tolist()}"
        )
    _check_groups(metadata, query_lens, block_size)
    if metadata.tree_masks:
        _check_masks(metadata, query_lens)


def fill_tables(metadata: AttentionMetadata, block_size: int, num_blocks: int, out: Int32s) -> None:
    """Write the block tables side by side; entries past a sequence's length stay as they are.

    Args:
        metadata: of the batch.
        block_size: tokens in a block.
        num_blocks: in the pool.
        out: `[>= num_seqs, >= blocks of the longest sequence]`.

    Raises:
        ValueError: a table is too short or names a block that isn't in the pool.
    """
    counts = -(-metadata.seq_lens // block_size)
    used = [t[:n] for t, n in zip(metadata.block_tables, counts.tolist(), strict=True)]
    ids = np.concatenate(used) if used else np.empty(0, dtype=np.int32)
    if len(ids) != counts.sum() or (len(ids) and (ids.min() < 0 or ids.max() >= num_blocks)):
        raise ValueError(
            f"block tables must name {counts.tolist()} blocks in [0, {num_blocks}), "
            f"got {[table.tolist() for table in used]}"
        )
    rows = out[: metadata.num_seqs]
    rows[np.arange(out.shape[1]) < counts[:, None]] = ids


def _check_groups(metadata: AttentionMetadata, query_lens: Int32s, block_size: int) -> None:
    contexts = metadata.seq_lens - query_lens
    deepest = np.full(metadata.num_seqs, -1)  # of each sequence, the last group above
    for index, group in enumerate(metadata.groups):
        members = slice(group.first_seq, group.last_seq)
        if not 0 <= group.first_seq < group.last_seq <= metadata.num_seqs:
            raise ValueError(f"{group} must be of some of {metadata.num_seqs} sequences")
        parent = deepest[group.first_seq]
        start = metadata.groups[parent].last_block if parent >= 0 else 0
        if (deepest[members] != parent).any() or group.first_block != start:
            raise ValueError(
                f"{group} must start at block {start}, where the group above it ends, and have "
                "only sequences of that group"
            )
        if not start < group.last_block <= contexts[members].min() // block_size:
            raise ValueError(
                f"{group} must end after block {start} and within the "
                f"{contexts[members].tolist()} tokens before the new ones"
            )
        deepest[members] = index


def _check_masks(metadata: AttentionMetadata, query_lens: Int32s) -> None:
    if len(metadata.tree_masks) != metadata.num_seqs:
        raise ValueError(
            f"tree_masks must have {metadata.num_seqs} entries, got {len(metadata.tree_masks)}"
        )
    for mask, count in zip(metadata.tree_masks, query_lens.tolist(), strict=True):
        if mask is None:
            continue
        if mask.shape != (count, count) or mask.dtype != np.bool_:
            raise ValueError(
                f"a tree mask must be bool [{count}, {count}], got {mask.dtype} {list(mask.shape)}"
            )
        if not mask.diagonal().all() or np.triu(mask, 1).any():
            raise ValueError("a node of a tree must see itself and no node after it")
