"""The blocks of the pool: which are free, and how many hold each of the others."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from sortedcontainers import SortedDict, SortedList

from radixkv.errors import CacheCorruptionError, OutOfBlocksError

__all__ = ["BlockPool"]


class BlockPool:
    """Owns a ref count per block id; knows nothing of tokens.

    Invariant: a block is free exactly when its ref count is 0, and then it lies in exactly one
    free extent. Extents are maximal: no two of them touch. Blocks are handed out in consecutive
    runs where possible, because on a CPU a consecutive run is a zero-copy view for attention.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._ref_counts = array("i", bytes(4 * num_blocks))
        self._extents: SortedDict = SortedDict({0: num_blocks})  # start -> length
        self._by_length: SortedList = SortedList([(num_blocks, 0)])  # (length, start)

    def ref_count(self, block_id: int) -> int:
        """Return how many hold the block; 0 means free."""
        return self._ref_counts[block_id]

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` free blocks, each with ref count 1.

        Args:
            count: blocks wanted.
            after: continue right behind this block id if the blocks there are free, so that a
                sequence that grows stays one consecutive run.

        Raises:
            OutOfBlocksError: fewer than `count` are free; nothing is taken.

        Cost: O(pieces * log extents), one piece when a long enough extent exists.
        """
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} blocks wanted, {self.num_free} free")
        taken: list[int] = []
        while len(taken) < count:
            wanted = count - len(taken)
            start, length = self._choose(wanted, after)
            run = min(wanted, length)
            self._take(start, run)
            taken.extend(range(start, start + run))
            after = start + run - 1
        for block_id in taken:
            self._ref_counts[block_id] = 1
        self.num_free -= count
        return taken

    def share(self, block_id: int) -> None:
        """Add a holder to a block in use.

        Raises:
            CacheCorruptionError: the block is free.
        """
        if self._ref_counts[block_id] < 1:
            raise CacheCorruptionError(f"block {block_id} is free and can't be shared")
        self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> int:
        """Drop one holder of each block; return how many became free.

        Raises:
            CacheCorruptionError: a block is free already (a double free).
        """
        freed = []
        for block_id in block_ids:
            count = self._ref_counts[block_id] - 1
            if count < 0:
                raise CacheCorruptionError(f"block {block_id} is released twice")
            self._ref_counts[block_id] = count
            if count == 0:
                freed.append(block_id)
        freed.sort()
        start = 0
        for end in range(1, len(freed) + 1):
            if end == len(freed) or freed[end] != freed[end - 1] + 1:
                self._give(freed[start], end - start)
                start = end
        self.num_free += len(freed)
        return len(freed)

    def free_extents(self) -> list[tuple[int, int]]:
        """Return (start, length) of every free extent, in order."""
        return list(self._extents.items())

    def check_integrity(self) -> None:
        """Raise CacheCorruptionError unless extents and ref counts describe the same free set."""
        covered = 0
        previous_end = -1
        for start, length in self._extents.items():
            if length < 1 or start <= previous_end or start + length > self.num_blocks:
                raise CacheCorruptionError(f"bad free extent ({start}, {length})")
            if any(self._ref_counts[b] for b in range(start, start + length)):
                raise CacheCorruptionError(f"extent ({start}, {length}) holds a block in use")
            covered += length
            previous_end = start + length
        zero = self._ref_counts.count(0)
        if not covered == zero == self.num_free:
            raise CacheCorruptionError(
                f"free blocks: {covered} in extents, {zero} by ref count, {self.num_free} counted"
            )
        if list(self._by_length) != sorted((n, s) for s, n in self._extents.items()):
            raise CacheCorruptionError("the two indexes of free extents differ")

    def _choose(self, wanted: int, after: int | None) -> tuple[int, int]:
        """Return (start, usable length) of the place to take blocks from."""
        if after is not None and (length := self._extents.get(after + 1)) is not None:
            return after + 1, length
        length, start = self._by_length[-1]
        if length < wanted:
            return start, length
        # A fresh run goes to the middle of the longest extent, so that both it and whoever ends
        # before it can grow in place.
        if after is None and length >= 4 * wanted:
            offset = length // 2
            return start + offset, length - offset
        return start, length

    def _take(self, start: int, count: int) -> None:
        """Cut `[start, start + count)` out of the extent that holds it."""
        index = self._extents.bisect_right(start) - 1
        extent_start, extent_length = self._extents.peekitem(index)
        self._drop(extent_start, extent_length)
        if start > extent_start:
            self._add(extent_start, start - extent_start)
        if rest := extent_start + extent_length - start - count:
            self._add(start + count, rest)

    def _give(self, start: int, count: int) -> None:
        """Add `[start, start + count)` to the free extents, merging with its neighbours."""
        index = self._extents.bisect_left(start)
        if index < len(self._extents):
            next_start, next_length = self._extents.peekitem(index)
            if next_start == start + count:
                self._drop(next_start, next_length)
                count += next_length
        if index > 0:
            before_start, before_length = self._extents.peekitem(index - 1)
            if before_start + before_length == start:
                self._drop(before_start, before_length)
                start, count = before_start, count + before_length
        self._add(start, count)

    def _add(self, start: int, length: int) -> None:
        self._extents[start] = length
        self._by_length.add((length, start))

    def _drop(self, start: int, length: int) -> None:
        del self._extents[start]
        self._by_length.remove((length, start))
