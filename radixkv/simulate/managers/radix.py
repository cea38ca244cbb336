"""RadixKV's own cache: the very classes that the server runs."""

from __future__ import annotations

from itertools import count, islice

from radixkv.cache import RadixCache, Sequence
from radixkv.errors import OutOfBlocksError
from radixkv.simulate.managers.base import Allocation, MemoryManager
from radixkv.simulate.traffic import Request

__all__ = ["RadixTreeBlocks"]


class RadixTreeBlocks(MemoryManager):
    """Runs `RadixCache` with one key per block.

    A key stands for a block's tokens and all before them, so the tree is the one that the tokens
    would make. What is smaller than a block (tails and copies of them) a trace doesn't show, and it
    doesn't say which prompts hold an answer: answers take their place in the tree, as keys that
    nobody asks for, so the server can only hit more.
    """

    name = "radix"
    reuses = True

    def __init__(self, total: int, block_size: int, policy: str = "lru") -> None:
        super().__init__(total)
        self.block_size = block_size
        self.now = 0.0
        self.cache = RadixCache(
            max(total // block_size, 1), 1, policy=policy, clock=lambda: self.now
        )
        self._sequences: dict[Allocation, Sequence] = {}
        self._num_seqs = 0
        self._answers = count(-1, -1)

    @property
    def cached(self) -> float:
        """Slots of evictable blocks."""
        return float(self.cache.num_evictable_blocks * self.block_size)

    @property
    def shared(self) -> float:
        """Slots of blocks in the tree that somebody uses."""
        return float(self.cache.num_referenced_blocks * self.block_size) - self.slots

    def computed(self, allocation: Allocation) -> None:
        """File the prompt's whole blocks in the tree."""
        self._count(allocation, -1)
        self._sequences[allocation].commit(len(allocation.request.keys))
        self._resize(allocation, allocation.limit)
        self._count(allocation, 1)

    def _allocate(self, request: Request, generated: int) -> Allocation | None:
        common, rest = divmod(request.prompt_len, self.block_size)
        own = -(-(rest + generated) // self.block_size)
        sequence = self.cache.create_sequence(request.keys, ())
        hit = sequence.reuse(len(sequence))
        blocks = common + request.num_samples * own
        # As in the server: each running answer may soon want a block.
        spare = self._num_seqs
        if blocks - hit + spare > self.cache.num_available_blocks:
            sequence.free()
            return None
        sequence.reserve(blocks)
        self._num_seqs += request.num_samples
        allocation = Allocation(request, 0, 0.0, 0, 0.0, num_cached=hit * self.block_size)
        self._sequences[allocation] = sequence
        self._resize(allocation, (common + own) * self.block_size)
        return allocation

    def _extend(self, allocation: Allocation) -> bool:
        sequence = self._sequences[allocation]
        try:
            sequence.reserve(sequence.num_blocks + allocation.request.num_samples)
        except OutOfBlocksError:
            return False
        self._resize(allocation, allocation.limit + self.block_size)
        return True

    def _free(self, allocation: Allocation, generated: int) -> None:
        request, sequence = allocation.request, self._sequences.pop(allocation)
        self._num_seqs -= request.num_samples
        if generated:
            # What is left of the prompt's last block goes with the answer.
            rest = request.prompt_len - len(sequence) * self.block_size
            blocks = request.num_samples * -(-(rest + generated) // self.block_size)
            kept = min(blocks, sequence.num_blocks - len(sequence))
            sequence.append(islice(self._answers, kept))
            sequence.commit(len(sequence))
        sequence.free()

    def _resize(self, allocation: Allocation, limit: int) -> None:
        request, sequence = allocation.request, self._sequences[allocation]
        n, size = request.num_samples, self.block_size
        common, rest = divmod(request.prompt_len, size)
        own_common = common - sequence.num_tree_blocks
        filled = min(limit, request.final_len) - common * size
        allocation.limit = limit
        allocation.slots = float((sequence.num_blocks - sequence.num_tree_blocks) * size)
        allocation.stored = own_common * size + n * rest
        allocation.needed = float(own_common * size + n * filled)
