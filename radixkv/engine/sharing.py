"""How much KV memory running sequences save by sharing blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from radixkv.cache import RadixCache

__all__ = ["KVSharing"]


@dataclass(frozen=True, slots=True)
class KVSharing:
    """What running sequences refer to, and what is really there for them.

    Attributes:
        tokens_referenced: tokens with KV, summed over the sequences: what copies would take.
        tokens_stored: slots that hold the KV of at least one of them, each counted once.
        slots_allocated: slots of all blocks that they hold, filled or not.
    """

    tokens_referenced: int = 0
    tokens_stored: int = 0
    slots_allocated: int = 0

    @classmethod
    def of(cls, cache: RadixCache) -> KVSharing:
        """Count between two steps. Cost: O(blocks in the tables of all running sequences)."""
        block_size = cache.block_size
        filled = np.full(cache.num_blocks, -1, dtype=np.int64)
        referenced = 0
        for sequence in cache.sequences:
            referenced += sequence.num_computed
            table = sequence.block_table
            in_block = sequence.num_computed - np.arange(len(table)) * block_size
            # The blocks of one table are distinct, so that no entry is written twice.
            filled[table] = np.maximum(filled[table], np.clip(in_block, 0, block_size))
        held = filled[filled >= 0]
        return cls(referenced, int(held.sum()), len(held) * block_size)
