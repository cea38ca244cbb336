"""Which kernel calls a batch needs on the CPU: arithmetic on block ids, no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from radixkv.model.attention import AttentionMetadata

__all__ = ["AttentionPlan", "CausalCall", "RunCall", "TailCall", "Tuning", "plan_attention"]

_Slots = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]
# A sequence of few new tokens and the slots that it has left to read.
_Tail = tuple[int, _Slots]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes at which one way of reading K and V becomes cheaper than another.

    Attributes:
        min_run: tokens in consecutive slots from which a call of their own is cheaper than
            gathering them together with other short runs.
        max_runs: most such calls for one segment of one sequence or group, the longest runs
            first, since each of them adds a partial result to merge.
        min_split: tokens each part must have when a run is halved to keep all threads busy.
        min_wide_split: the same for calls over one wide head.
        min_bucket: padded tokens that a second batch of tails must save to be worth its call.
        max_wide: widest `num_kv_heads * head_dim` at which the KV heads are read as one wide
            head, by calls of few query tokens.
        max_wide_tokens: most query tokens of such a call.
        max_tail_tokens: most new tokens of a sequence that is read in one call with others, at
            least 1.
        min_float32_rows: query rows of a KV head from which a call over bfloat16 is made in
            float32, K and V converted for it, on a CPU where that is faster.
    """

    min_run: int = 384
    max_runs: int = 4
    min_split: int = 512
    min_wide_split: int = 256
    min_bucket: int = 512
    max_wide: int = 512
    max_wide_tokens: int = 2
    max_tail_tokens: int = 32
    min_float32_rows: int = 192


@dataclass(frozen=True, slots=True)
class RunCall:
    """Attention of query tokens `first_token` to `last_token` over consecutive tokens.

    They start at row `start` of the gathered tokens, or at slot `start` of the pool, and lie
    before every one of the query tokens, or are those of a decode, its new token included. The
    `length` tokens are cut into `num_splits` parts, whose results go to consecutive levels. A wide
    call takes all KV heads for one.
    """

    first_token: int
    last_token: int
    gathered: bool
    start: int
    length: int
    num_splits: int
    level: int
    is_wide: bool = False


@dataclass(frozen=True, slots=True)
class TailCall:
    """Attention of the few new tokens of some sequences, each over its own short rest of tokens.

    Query tokens `tokens[i]` attend to `width` rows of the gathered tokens, from row
    `start + i * width`. A sequence with fewer new tokens than others repeats its last one; rows
    past its own tokens repeat one of them, since the kernel multiplies them by zero.

    Attributes:
        tokens: `[num_seqs, num_tokens]`.
        visible: `[num_seqs, num_tokens, width]`, which rows a token attends to; None: all.
    """

    tokens: npt.NDArray[np.int64]
    start: int
    width: int
    visible: _Mask | None
    level: int


@dataclass(frozen=True, slots=True)
class CausalCall:
    """Attention of query tokens `first_token` to `last_token` among themselves.

    Attributes:
        mask: `[num_tokens, num_tokens]`, which of them a token sees; None: those before it.
    """

    first_token: int
    last_token: int
    level: int
    mask: _Mask | None = None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The calls of one batch.

    Every call yields a partial result for its query tokens, kept at its level; a token has at
    most one partial a level and at least one in all.

    Attributes:
        gather_slots: int64, the slots whose tokens are gathered, in order.
        num_levels: levels in use.
        is_full: whether every token has a partial at every level.
    """

    num_tokens: int
    num_levels: int
    is_full: bool
    gather_slots: _Slots
    runs: tuple[RunCall, ...]
    tails: tuple[TailCall, ...]
    causals: tuple[CausalCall, ...]


def plan_attention(
    metadata: AttentionMetadata,
    *,
    block_size: int,
    num_blocks: int,
    num_kv_heads: int,
    group_size: int,
    num_threads: int,
    tuning: Tuning,
    can_widen: bool = False,
    gathers_all: bool = False,
) -> AttentionPlan:
    """Choose the calls for a batch.

    Args:
        group_size: query heads of a KV head.
        num_threads: threads that a kernel call runs on.
        can_widen: whether calls of few query tokens may read all KV heads as one.
        gathers_all: whether long runs are gathered too, as they must be if no call can read the
            pool's numbers.

    Raises:
        ValueError: an empty batch or sequence, a block id outside the pool, or a group that
            isn't one.

    Cost: a few numpy calls a sequence, O(blocks).
    """
    _check(metadata, block_size, num_blocks)
    planner = _Planner(
        metadata,
        block_size,
        num_kv_heads,
        group_size,
        num_threads,
        tuning,
        can_widen,
        gathers_all,
    )
    planner.add_groups()
    planner.add_private()
    return planner.finish()


@dataclass(slots=True)
class _Planner:
    metadata: AttentionMetadata
    block_size: int
    num_kv_heads: int
    group_size: int
    num_threads: int
    tuning: Tuning
    can_widen: bool
    gathers_all: bool
    runs: list[RunCall] = field(default_factory=list)
    tails: list[TailCall] = field(default_factory=list)
    causals: list[CausalCall] = field(default_factory=list)
    gathered: list[_Slots] = field(default_factory=list)
    num_gathered: int = 0
    token_loc: list[int] = field(init=False)
    levels: list[int] = field(init=False)
    num_shared: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.token_loc = self.metadata.query_start_loc.tolist()
        # Per sequence, a bit for each level that is taken.
        self.levels = [0] * self.metadata.num_seqs
        # Per sequence, the tokens that its groups have read.
        self.num_shared = [0] * self.metadata.num_seqs

    def add_groups(self) -> None:
        for group in self.metadata.groups:
            table = self.metadata.block_tables[group.first_seq]
            blocks = table[group.first_block : group.last_block]
            self._add_segment(
                group.first_seq, group.last_seq, blocks, len(blocks) * self.block_size
            )
            for seq in range(group.first_seq, group.last_seq):
                self.num_shared[seq] = group.last_block * self.block_size

    def add_private(self) -> None:
        metadata, block_size = self.metadata, self.block_size
        decodes: list[_Tail] = []
        chunks: list[_Tail] = []
        for seq, seq_len in enumerate(metadata.seq_lens.tolist()):
            query_len = self._query_len(seq)
            # A decode's only new token was just written: to the kernel it is one more old one.
            end = seq_len if query_len == 1 else seq_len - query_len
            start, num_tokens = self.num_shared[seq], end - self.num_shared[seq]
            table = metadata.block_tables[seq]
            blocks = table[start // block_size : -(-end // block_size)]
            if query_len > self.tuning.max_tail_tokens:
                self._add_segment(seq, seq + 1, blocks, num_tokens)
                self._add_causal(seq)
                continue
            runs, rest = self._divide(blocks, num_tokens)
            for first_slot, length in runs:
                self._add_run(seq, seq + 1, first_slot, length, gathered=False)
            if query_len > 1:
                chunks.append((seq, rest))
            elif len(rest):
                decodes.append((seq, rest))
        for bucket in self._buckets(decodes):
            if len(bucket) == 1:
                self._add_rest(bucket[0][0], bucket[0][0] + 1, bucket[0][1])
            else:
                self._add_tails(bucket)
        for bucket in self._buckets(chunks):
            if len(bucket) == 1:
                seq, rest = bucket[0]
                if len(rest):
                    self._add_rest(seq, seq + 1, rest)
                self._add_causal(seq)
            else:
                self._add_tails([(seq, self._with_new(seq, rest)) for seq, rest in bucket])

    def finish(self) -> AttentionPlan:
        num_levels = max(mask.bit_length() for mask in self.levels)
        return AttentionPlan(
            num_tokens=self.metadata.num_tokens,
            num_levels=num_levels,
            is_full=all(mask == (1 << num_levels) - 1 for mask in self.levels),
            gather_slots=np.concatenate([np.empty(0, dtype=np.int64), *self.gathered]),
            runs=tuple(self.runs),
            tails=tuple(self.tails),
            causals=tuple(self.causals),
        )

    def _add_segment(
        self, first_seq: int, last_seq: int, blocks: npt.NDArray[np.int32], num_tokens: int
    ) -> None:
        """Add the calls that read tokens of `blocks` for all queries of a range of sequences."""
        runs, rest = self._divide(blocks, num_tokens)
        for first_slot, length in runs:
            self._add_run(first_seq, last_seq, first_slot, length, gathered=False)
        if len(rest):
            self._add_rest(first_seq, last_seq, rest)

    def _add_rest(self, first_seq: int, last_seq: int, slots: _Slots) -> None:
        """Add the one call that reads `slots` for all queries of a range of sequences."""
        if (np.diff(slots) == 1).all():
            self._add_run(first_seq, last_seq, int(slots[0]), len(slots), gathered=False)
        else:
            self._add_run(first_seq, last_seq, self._gather(slots), len(slots), gathered=True)

    def _divide(
        self, blocks: npt.NDArray[np.int32], num_tokens: int
    ) -> tuple[list[tuple[int, int]], _Slots]:
        """Divide the first `num_tokens` tokens of `blocks` by how they are read.

        Returns:
            First slot and length of each run that is read where it is, and the slots of the
            other tokens.
        """
        if not num_tokens:
            return [], np.empty(0, dtype=np.int64)
        jumps = np.flatnonzero(np.diff(blocks) != 1) + 1
        bounds = np.array([0, *jumps.tolist(), len(blocks)])
        lengths = np.diff(bounds) * self.block_size
        lengths[-1] -= len(blocks) * self.block_size - num_tokens
        long = np.flatnonzero(lengths >= self.tuning.min_run)
        if len(long) > self.tuning.max_runs:
            order = np.argsort(-lengths[long], kind="stable")
            long = np.sort(long[order[: self.tuning.max_runs]])
        runs = [(int(blocks[bounds[i]]) * self.block_size, int(lengths[i])) for i in long]
        if len(long) == len(lengths):
            return runs, np.empty(0, dtype=np.int64)
        slots = blocks.astype(np.int64)[:, None] * self.block_size + np.arange(self.block_size)
        is_rest = np.ones(len(lengths), dtype=np.bool_)
        is_rest[long] = False
        return runs, slots.ravel()[:num_tokens][np.repeat(is_rest, lengths)]

    def _add_run(
        self, first_seq: int, last_seq: int, start: int, length: int, *, gathered: bool
    ) -> None:
        if self.gathers_all and not gathered:
            start, gathered = self._gather(np.arange(start, start + length)), True
        first_token, last_token = self.token_loc[first_seq], self.token_loc[last_seq]
        is_wide = self.can_widen and last_token - first_token <= self.tuning.max_wide_tokens
        heads, num_rows = self.num_kv_heads, (last_token - first_token) * self.group_size
        if is_wide:
            heads, num_rows = 1, heads * num_rows
        min_split = self.tuning.min_wide_split if is_wide else self.tuning.min_split
        num_tasks = heads * -(-num_rows // _rows_per_task(num_rows))
        num_splits = self._num_splits(num_tasks, length, min_split)
        level = self._take_levels(first_seq, last_seq, num_splits)
        self.runs.append(
            RunCall(first_token, last_token, gathered, start, length, num_splits, level, is_wide)
        )

    def _num_splits(self, num_tasks: int, length: int, min_split: int) -> int:
        """Return into how many parts to cut a run, so that no thread waits long for another."""
        best, best_cost = 1, -(-num_tasks // self.num_threads) * 1.0
        for splits in range(2, self.num_threads + 1):
            cost = -(-num_tasks * splits // self.num_threads) / splits
            if length // splits >= min_split and cost < 0.95 * best_cost:
                best, best_cost = splits, cost
        return best

    def _buckets(self, tails: Iterable[_Tail]) -> list[list[_Tail]]:
        """Return the tails in batches of similar length, sequences in order in each."""
        by_length = sorted(tails, key=lambda tail: -len(tail[1]))
        buckets: list[list[_Tail]] = []
        width = 0
        for i, tail in enumerate(by_length):
            length = len(tail[1])
            waste = (width - length) * (len(by_length) - i)
            if not buckets or (waste >= self.tuning.min_bucket and 2 * length <= width):
                buckets.append([])
                width = length
            buckets[-1].append(tail)
        return [sorted(bucket, key=lambda tail: tail[0]) for bucket in buckets]

    def _add_causal(self, seq: int) -> None:
        first, last = self.token_loc[seq], self.token_loc[seq + 1]
        level = self._take_levels(seq, seq + 1, 1)
        self.causals.append(CausalCall(first, last, level, self._tree_mask(seq)))

    def _add_tails(self, bucket: Sequence[_Tail]) -> None:
        """Add the one call in which some sequences' new tokens read what these have left."""
        seqs = [seq for seq, _ in bucket]
        query_lens = np.array([self._query_len(seq) for seq in seqs])
        lengths = np.array([len(slots) for _, slots in bucket], dtype=np.int64)
        width, num_tokens = int(lengths.max()), int(query_lens.max())
        padded = np.empty((len(bucket), width), dtype=np.int64)
        for row, (_, slots) in zip(padded, bucket, strict=True):
            row[: len(slots)] = slots
            # The kernel multiplies masked tokens by zero, so they must be finite.
            row[len(slots) :] = slots[-1]
        offsets = np.minimum(np.arange(num_tokens), query_lens[:, None] - 1)
        tokens = offsets + np.array([self.token_loc[seq] for seq in seqs], dtype=np.int64)[:, None]
        visible = np.broadcast_to(
            (np.arange(width) < lengths[:, None])[:, None], (len(bucket), num_tokens, width)
        )
        if num_tokens > 1:
            visible = visible.copy()
            for i, seq in enumerate(seqs):
                new = int(query_lens[i])
                tree = self._tree_mask(seq)
                among = np.tri(new, dtype=np.bool_) if tree is None else tree
                visible[i, :, lengths[i] - new : lengths[i]] = among[offsets[i]]
        level = self._take_level_of(seqs)
        start = self._gather(padded.ravel())
        mask = None if visible.all() else visible
        self.tails.append(TailCall(tokens, start, width, mask, level))

    def _with_new(self, seq: int, slots: _Slots) -> _Slots:
        """Return `slots` and behind them those of the sequence's new tokens."""
        first, last = self.token_loc[seq], self.token_loc[seq + 1]
        return np.concatenate([slots, self.metadata.slot_mapping[first:last]])

    def _query_len(self, seq: int) -> int:
        return self.token_loc[seq + 1] - self.token_loc[seq]

    def _tree_mask(self, seq: int) -> _Mask | None:
        masks = self.metadata.tree_masks
        return masks[seq] if masks else None

    def _gather(self, slots: _Slots) -> int:
        """Append to what is gathered and return the row at which it starts."""
        start = self.num_gathered
        self.gathered.append(slots)
        self.num_gathered += len(slots)
        return start

    def _take_levels(self, first_seq: int, last_seq: int, count: int) -> int:
        """Return the first of `count` consecutive levels that are free for all sequences."""
        taken = 0
        for mask in self.levels[first_seq:last_seq]:
            taken |= mask
        wanted, level = (1 << count) - 1, 0
        while taken & (wanted << level):
            level += 1
        for seq in range(first_seq, last_seq):
            self.levels[seq] |= wanted << level
        return level

    def _take_level_of(self, seqs: Sequence[int]) -> int:
        """Return a level that is free for all `seqs`."""
        taken = 0
        for seq in seqs:
            taken |= self.levels[seq]
        level = (~taken & (taken + 1)).bit_length() - 1
        for seq in seqs:
            self.levels[seq] |= 1 << level
        return level


def _check(metadata: AttentionMetadata, block_size: int, num_blocks: int) -> None:
    query_lens = np.diff(metadata.query_start_loc)
    if (
        not len(query_lens)
        or len(query_lens) != metadata.num_seqs
        or (query_lens < 1).any()
        or (metadata.seq_lens < query_lens).any()
    ):
        raise ValueError(
            "every sequence must have at least one new token and none more than its length, got "
            f"{query_lens.tolist()} new tokens of {metadata.seq_lens.tolist()}"
        )
    slots, num_slots = metadata.slot_mapping, num_blocks * block_size
    if len(slots) != metadata.num_tokens or slots.min() < 0 or slots.max() >= num_slots:
        raise ValueError(
            f"slot_mapping must have {metadata.num_tokens} slots in [0, {num_slots}), "
            f"got {slots.tolist()}"
        )
    num_used = (-(-metadata.seq_lens // block_size)).tolist()
    used = [table[:n] for table, n in zip(metadata.block_tables, num_used, strict=True)]
    ids = np.concatenate(used)
    if len(ids) != sum(num_used) or ids.min() < 0 or ids.max() >= num_blocks:
        raise ValueError(
            f"block tables must name {num_used} blocks in [0, {num_blocks}), "
            f"got {[table.tolist() for table in used]}"
        )
    _check_trees(metadata, query_lens.tolist())
    contexts = (metadata.seq_lens - query_lens).tolist()
    next_block = [0] * metadata.num_seqs
    for group in metadata.groups:
        for seq in range(group.first_seq, group.last_seq):
            if (
                next_block[seq] != group.first_block
                or group.last_block * block_size > contexts[seq]
            ):
                raise ValueError(
                    f"{group} must start at block {next_block[seq]} of sequence {seq} and end "
                    f"within the {contexts[seq]} tokens before its new ones"
                )
            next_block[seq] = group.last_block


def _check_trees(metadata: AttentionMetadata, query_lens: list[int]) -> None:
    if metadata.tree_masks and len(metadata.tree_masks) != metadata.num_seqs:
        raise ValueError(
            f"tree_masks must be empty or have {metadata.num_seqs} entries, "
            f"got {len(metadata.tree_masks)}"
        )
    for seq, mask in enumerate(metadata.tree_masks):
        if mask is None:
            continue
        size = query_lens[seq]
        if mask.shape != (size, size) or not mask.diagonal().all() or np.triu(mask, 1).any():
            raise ValueError(
                f"the tree mask of sequence {seq} must be [{size}, {size}], true on the diagonal "
                f"and false above it"
            )


def _rows_per_task(num_rows: int) -> int:
    # The query rows that the kernel hands a thread at once (q_split_size in torch's
    # aten/src/ATen/native/cpu/FlashAttentionKernel.cpp).
    if num_rows >= 768:
        return 256
    return 64 if num_rows >= 192 else 32
