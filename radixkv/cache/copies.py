"""Copies of blocks that are owed before the next write."""

from __future__ import annotations

from collections import Counter

from radixkv.cache.block_pool import BlockPool

__all__ = ["CopyQueue"]


class CopyQueue:
    """Owns the pending copies; the source of each holds one ref more until it is made.

    Attributes:
        pending: destination to source.
        cached_reads: destinations whose source is a cached block.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.pending: dict[int, int] = {}
        self.cached_reads: set[int] = set()
        self._readers: Counter[int] = Counter()

    def num_readers(self, block_id: int) -> int:
        """Return how many pending copies read a block; all do before anything is written."""
        return self._readers[block_id]

    def add_cached(self, source: int, destination: int) -> None:
        """Note a copy of a cached block whose ref the caller has taken already."""
        self.pending[destination] = source
        self._readers[source] += 1
        self.cached_reads.add(destination)

    def add(self, source: int, destination: int) -> None:
        """Note that `source` is to be copied into `destination` before the next write.

        Args:
            source: a block that sequences hold, not a cached one; it stays readable until `take`.
            destination: a block of the caller's.
        """
        if source in self.cached_reads:
            self.cached_reads.add(destination)
        # A source that itself waits for its content is replaced by where the content is.
        source = self.pending.get(source, source)
        self._pool.share(source)
        self.pending[destination] = source
        self._readers[source] += 1

    def cancel(self, destination: int) -> bool:
        """Forget a pending copy; return whether there was one."""
        source = self.pending.pop(destination, None)
        if source is None:
            return False
        self._readers[source] -= 1
        self.cached_reads.discard(destination)
        self._pool.release((source,))
        return True

    def take(self) -> list[tuple[int, int]]:
        """Return the pending (source, destination) copies; the caller does them at once."""
        copies = [(source, destination) for destination, source in self.pending.items()]
        self.pending.clear()
        self._readers.clear()
        self.cached_reads.clear()
        self._pool.release(source for source, _ in copies)
        return copies
