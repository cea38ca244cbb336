"""Blocks as they should be: who holds them, and what they hold."""

from __future__ import annotations

from collections import Counter

Tokens = tuple[int, ...]
Namespace = tuple[str, ...]
Name = tuple[Namespace, Tokens]
POISON = -1


class PoolModel:
    """Knows the holders of every block and a fake KV, in which every prefix differs."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.size = block_size
        self.refs: Counter[int] = Counter()
        self.copies: dict[int, int] = {}  # destination -> source
        self.cached_reads: set[int] = set()
        self.slots = [[POISON] * block_size for _ in range(num_blocks)]
        self.contents: dict[Name, int] = {}
        self.evicted: list[tuple[Name, int]] = []  # whole blocks, not copied away yet
        self.spoiled: set[int] = set()  # to be poisoned once evicted blocks are copied away

    def content(self, namespace: Namespace, prefix: Tokens) -> int:
        """What the KV of the last token of a prefix is: a number that no other prefix has."""
        return self.contents.setdefault((namespace, prefix), 1000 + len(self.contents))

    def block_content(self, namespace: Namespace, prefix: Tokens) -> list[int]:
        """What the last block of a prefix holds."""
        start = (len(prefix) - 1) // self.size * self.size
        return [self.content(namespace, prefix[:end]) for end in range(start + 1, len(prefix) + 1)]

    def read(self, block: int) -> list[int]:
        """What the block will hold once the pending copies are made."""
        return self.slots[self.copies.get(block, block)]

    def spoil(self, block: int) -> None:
        """Lose a block's content, now or, if it is still to be copied away, right after that."""
        if any(block == waiting for _, waiting in self.evicted):
            self.spoiled.add(block)
        else:
            self.slots[block] = [POISON] * self.size

    def copied_away(self) -> list[tuple[Name, list[int]]]:
        """Return the evicted blocks' contents, and lose them here."""
        found = [(name, list(self.slots[block])) for name, block in self.evicted]
        self.evicted.clear()
        for block in self.spoiled:
            self.spoil(block)
        self.spoiled.clear()
        return found

    def num_free(self) -> int:
        return sum(self.refs[b] == 0 for b in range(self.num_blocks))

    def release(self, block: int) -> int:
        self.refs[block] -= 1
        assert self.refs[block] >= 0
        return int(self.refs[block] == 0)

    def obtain(self, blocks: list[int]) -> None:
        """Note that the cache handed out these blocks; their old content is gone."""
        for block in blocks:
            assert self.refs[block] == 0, f"block {block} was handed out twice"
            self.refs[block] = 1
            self.spoil(block)

    def copy(self, source: int, destination: int, *, cached: bool) -> None:
        if cached or source in self.cached_reads:
            self.cached_reads.add(destination)
        source = self.copies.get(source, source)
        self.refs[source] += 1
        self.copies[destination] = source

    def make_copies(self, copies: list[tuple[int, int]]) -> None:
        assert not self.evicted, "something is written before evicted blocks are copied away"
        assert sorted((d, s) for s, d in copies) == sorted(self.copies.items())
        for source, destination in copies:
            self.slots[destination] = list(self.slots[source])
            self.release(source)
        self.copies.clear()
        self.cached_reads.clear()
