"""Preempted requests whose KV waits in host memory."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from radixkv.cache import RadixCache
from radixkv.cache import Sequence as CacheSequence
from radixkv.cache.radix_tree import Node
from radixkv.engine.tiering import BlockStore

__all__ = ["SwapPlan", "SwapSpace"]

log = logging.getLogger(__name__)

FIRST_RATE = 2e9  # bytes/s, assumed until something was measured
PROBE_BLOCKS = 8
PROBE_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class _SwappedSequence:
    """Blocks `first` to `first + len(rows)` of a sequence: which rows of the content they are."""

    first: int
    rows: list[int]
    num_computed: int


@dataclass(frozen=True, slots=True)
class SwapPlan:
    """What swapping out a group of sequences would copy.

    Attributes:
        block_ids: the blocks that nobody outside the group holds, each once.
        sequences: where they belong.
        first_token: the first token that would be lost without a copy, over all sequences.
        num_tokens: computed tokens in the blocks.
    """

    block_ids: list[int]
    sequences: dict[CacheSequence, _SwappedSequence]
    first_token: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Entry:
    contents: torch.Tensor  # [num_blocks, content_bytes] uint8
    sequences: dict[CacheSequence, _SwappedSequence]


class SwapSpace:
    """Owns copies of the blocks of preempted requests, up to a number of bytes.

    Only blocks that nobody else holds are copied. When the request gives its blocks back they stay
    in the tree, evictable, like those of any other: the copy is counted here, the block there. A
    request that comes back takes from the tree what is left, and the rest from here; if the tree
    has lost blocks that others held when it was swapped out, what lies behind them is computed.

    Attributes:
        rates: bytes/s "out" of the pool and "in".
    """

    def __init__(
        self,
        store: BlockStore,
        cache: RadixCache,
        content_bytes: int,
        capacity_bytes: int,
        *,
        pinned: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make an empty space; memory is taken as requests come.

        Args:
            store: the content of the cache's blocks.
            cache: which blocks there are.
            content_bytes: bytes of a block's KV.
            capacity_bytes: all copies together.
            pinned: keep the copies in page-locked memory, for a pool on a GPU.
            clock: seconds.
        """
        self.content_bytes = content_bytes
        self.capacity = capacity_bytes // content_bytes
        self.num_used = 0
        self.rates = {"out": FIRST_RATE, "in": FIRST_RATE}
        self._measured: set[str] = set()
        self.counters: Counter[str] = Counter(
            swapped_out=0, swapped_in=0, blocks_out=0, blocks_in=0, refused=0, errors=0
        )
        self._store = store
        self._cache = cache
        self._pinned = pinned
        self._clock = clock
        self._entries: dict[int, _Entry] = {}

    def __len__(self) -> int:
        """Requests that have something here."""
        return len(self._entries)

    def __contains__(self, owner: int) -> bool:
        return owner in self._entries

    def measure(self) -> None:
        """Measure both ways with the pool's first blocks, whose content stays what it is."""
        block_ids = list(range(min(PROBE_BLOCKS, self._cache.num_blocks)))
        for _ in range(PROBE_ROUNDS):
            contents = self._gather(block_ids)
            self._scatter(block_ids, contents)

    def plan(self, sequences: Sequence[CacheSequence]) -> SwapPlan:
        """Say what to copy for sequences that are about to be preempted together.

        Cost: O(depth + blocks).
        """
        locks: Counter[Node] = Counter()
        for sequence in sequences:
            node = sequence.node
            while node is not None:
                locks[node] += 1
                node = node.parent
        rows: dict[int, int] = {}
        swapped = {}
        size = self._cache.block_size
        num_tokens = 0
        for sequence in sequences:
            if not sequence.is_open:
                continue
            first = sequence.num_tree_blocks
            node = sequence.node
            # From a node that only the group locks, all below it is the group's alone.
            while node is not None and not node.is_root and node.ref_count == locks[node]:
                first -= node.num_blocks
                node = node.parent
            used = -(-sequence.num_computed // size)
            own = sequence.block_table[first:used].tolist()
            for position, block_id in enumerate(own, first):
                if block_id not in rows:
                    rows[block_id] = len(rows)
                    num_tokens += min(size, sequence.num_computed - position * size)
            swapped[sequence] = _SwappedSequence(
                first, [rows[block_id] for block_id in own], sequence.num_computed
            )
        starts = [s.first for s in swapped.values() if s.rows]
        return SwapPlan(list(rows), swapped, min(starts, default=0) * size, num_tokens)

    def has_room(self, plan: SwapPlan) -> bool:
        """Whether a plan's blocks fit beside what is here."""
        return self.num_used + len(plan.block_ids) <= self.capacity

    def seconds(self, plan: SwapPlan) -> float:
        """Return how long the copies of a plan take, there and back."""
        num_bytes = len(plan.block_ids) * self.content_bytes
        return num_bytes / self.rates["out"] + num_bytes / self.rates["in"]

    def swap_out(self, owner: int, plan: SwapPlan) -> bool:
        """Copy a plan's blocks, before they are given back; False if nothing was kept.

        Args:
            owner: the request's number.
            plan: made just before; nothing has changed since.
        """
        if not plan.block_ids or owner in self._entries:
            return False
        if not self.has_room(plan):
            self.counters["refused"] += 1
            return False
        # What a step is still to copy into a block lies in the copy's source for now.
        pending = self._cache.pending_copies
        try:
            contents = self._gather([pending.get(b, b) for b in plan.block_ids])
        except Exception:  # the request computes its tokens again
            log.exception("a preempted request's blocks can't be copied")
            self.counters["errors"] += 1
            return False
        self._entries[owner] = _Entry(contents, plan.sequences)
        self.num_used += len(contents)
        self.counters["swapped_out"] += 1
        self.counters["blocks_out"] += len(contents)
        return True

    def can_restore(self, owner: int, sequence: CacheSequence, num_matched: int) -> bool:
        """Whether there is more of a sequence here than its `num_matched` blocks in the tree."""
        entry = self._entries.get(owner)
        kept = entry.sequences.get(sequence) if entry is not None else None
        return (
            kept is not None
            and kept.first <= num_matched
            and num_matched * self._cache.block_size < kept.num_computed
        )

    def num_kept(self, owner: int, sequence: CacheSequence) -> int:
        """Return how many whole blocks a sequence has, from its start, when it is restored."""
        return self._entries[owner].sequences[sequence].num_computed // self._cache.block_size

    def restore(self, owner: int, sequence: CacheSequence) -> int:
        """Bring back what follows the blocks that a sequence has taken from the tree.

        Args:
            owner: the request's number.
            sequence: open, with whole blocks only, and all its blocks reserved.

        Returns:
            The tokens brought back, committed; 0 if there is nothing or the copy fails.
        """
        first = sequence.num_tree_blocks
        if not self.can_restore(owner, sequence, first):
            return 0
        entry = self._entries[owner]
        kept = entry.sequences[sequence]
        rows = kept.rows[first - kept.first :]
        block_ids = sequence.block_table[first : first + len(rows)].tolist()
        try:
            # Of a request with one answer they are neighbours: no copy of the copy.
            whole = rows[-1] - rows[0] == len(rows) - 1
            part = slice(rows[0], rows[-1] + 1) if whole else rows
            self._scatter(block_ids, entry.contents[part])
        except Exception:
            log.exception("a preempted request's blocks can't be brought back")
            self.counters["errors"] += 1
            return 0
        restored = kept.num_computed - sequence.num_computed
        sequence.commit(kept.num_computed)
        self.counters["blocks_in"] += len(rows)
        return restored

    def drop(self, owner: int, *, resumed: bool = False) -> None:
        """Give up what a request has here. Idempotent.

        Args:
            resumed: it came back, rather than ended.
        """
        entry = self._entries.pop(owner, None)
        if entry is not None:
            self.num_used -= len(entry.contents)
            self.counters["swapped_in"] += resumed

    def stats(self) -> dict[str, Any]:
        """Return counters and sizes as plain types."""
        return {
            **self.counters,
            "requests": len(self._entries),
            "blocks": self.num_used,
            "capacity_blocks": self.capacity,
            "bytes_per_s": dict(self.rates),
        }

    def check_integrity(self) -> None:
        """Raise ValueError unless the blocks in use are those of the entries."""
        used = sum(len(entry.contents) for entry in self._entries.values())
        if not self.num_used == used <= self.capacity:
            raise ValueError(f"{used} blocks kept, {self.num_used} counted of {self.capacity}")

    def _gather(self, block_ids: list[int]) -> torch.Tensor:
        begin = self._clock()
        contents = self._store.gather_blocks(block_ids)
        if self._pinned:
            contents = contents.pin_memory()
        self._record("out", contents, begin)
        return contents

    def _scatter(self, block_ids: list[int], contents: torch.Tensor) -> None:
        begin = self._clock()
        self._store.scatter_blocks(block_ids, contents)
        self._record("in", contents, begin)

    def _record(self, way: str, contents: torch.Tensor, begin: float) -> None:
        seconds = self._clock() - begin
        if seconds > 0 and contents.numel():
            rate = contents.numel() / seconds
            if way in self._measured:
                rate = (self.rates[way] + rate) / 2
            self.rates[way] = rate
            self._measured.add(way)
