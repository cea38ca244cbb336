"""A brute-force model of the cache: prefixes in plain dicts, and a fake KV store beside them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

Tokens = tuple[int, ...]
Namespace = tuple[str, ...]
POISON = -1


@dataclass
class Entry:
    """One cached block, found under all tokens up to its end."""

    block: int
    used: int


@dataclass(eq=False)
class ModelSequence:
    """What a sequence should be; `table` is [blocks of the tree, then private ones]."""

    namespace: Namespace
    tokens: Tokens
    computed: int = 0
    num_tree_blocks: int = 0
    table: list[int] = field(default_factory=list)


@dataclass
class ModelPin:
    namespace: Namespace
    path: list[Tokens]
    ttl: int
    expires: int


class CacheModel:
    """Knows every cached prefix by its tokens; walks all of them for every question."""

    def __init__(
        self, num_blocks: int, block_size: int, shares: dict[Namespace, float] | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.shares = shares or {}
        self.open: list[ModelSequence] = []
        self.pins: dict[int, ModelPin] = {}  # least recently used first
        self.now = 0
        self.size = block_size
        self.cached: dict[Namespace, dict[Tokens, Entry]] = {}
        self.locks: Counter[tuple[Namespace, Tokens]] = Counter()
        self.refs: Counter[int] = Counter()
        self.copies: dict[int, int] = {}  # destination -> source
        self.cached_reads: set[int] = set()
        self.slots = [[POISON] * block_size for _ in range(num_blocks)]
        self.clock = 0

    # --- questions ------------------------------------------------------------------------------

    def entries(self, namespace: Namespace) -> dict[Tokens, Entry]:
        return self.cached.setdefault(namespace, {})

    def everything(self) -> list[tuple[Namespace, Tokens, Entry]]:
        return [(n, p, e) for n, prefixes in self.cached.items() for p, e in prefixes.items()]

    def longest(self, namespace: Namespace, tokens: Tokens) -> int:
        return max((common(p, tokens) for p in self.entries(namespace)), default=0)

    def path(self, tokens: Tokens) -> list[Tokens]:
        return [tokens[:end] for end in range(self.size, len(tokens) + 1, self.size)]

    def num_free(self) -> int:
        return sum(self.refs[b] == 0 for b in range(self.num_blocks))

    def num_evictable(self) -> int:
        return sum(not self.locks[n, p] for n, p, _ in self.everything())

    def num_available(self) -> int:
        return self.num_free() + max(0, self.num_evictable() - len(self.cached_reads))

    def read(self, block: int) -> list[int]:
        """What the block will hold once the pending copies are made."""
        return self.slots[self.copies.get(block, block)]

    # --- changes --------------------------------------------------------------------------------

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def lock(self, namespace: Namespace, path: list[Tokens]) -> None:
        for prefix in path:
            assert prefix in self.entries(namespace)
            self.locks[namespace, prefix] += 1

    def unlock(self, namespace: Namespace, path: list[Tokens]) -> None:
        now = self.tick()
        for prefix in path:
            self.locks[namespace, prefix] -= 1
            self.entries(namespace)[prefix].used = now

    def evict(self, wanted: int, namespace: Namespace | None = None, more: int = 0) -> int:
        """Drop unlocked prefixes that no other extends: those over a quota first, then the oldest.

        `namespace` is about to take `more` blocks.
        """
        freed = 0
        if namespace is not None:
            while freed < wanted and self.excess(namespace) + more > 0:
                if not (own := self.leaves(namespace)):
                    break
                freed += self.drop(*own[0])
        while freed < wanted and (over := self.over()) is not None:
            while freed < wanted and self.excess(over) > 0 and (own := self.leaves(over)):
                freed += self.drop(*own[0])
        while freed < wanted and (leaves := self.leaves()):
            freed += self.drop(*leaves[0])
        return freed

    def over(self) -> Namespace | None:
        """The namespace most over its quota that has something evictable."""
        found = [(-self.excess(n), n) for n in self.cached if self.excess(n) > 0]
        return next((n for _, n in sorted(found) if self.leaves(n)), None)

    def excess(self, namespace: Namespace) -> int:
        if not self.shares:
            return -self.num_blocks  # nobody is over where there are no quotas
        held = sum(len(s.table) - s.num_tree_blocks for s in self.open if s.namespace == namespace)
        limit = int(self.shares.get(namespace, 1) * self.num_blocks)
        return len(self.entries(namespace)) + held - limit

    def allow(self, wanted: int) -> bool:
        """Whether so many blocks can be had; pins give way to a sequence that is alone."""
        pinned = len(self.pinned())
        if wanted <= self.num_available() + pinned:
            while self.pins and len(self.open) <= 1 and wanted > self.num_available():
                self.unpin(next(iter(self.pins)))
        return wanted <= self.num_available()

    def pinned(self) -> set[tuple[Namespace, Tokens]]:
        return {(pin.namespace, prefix) for pin in self.pins.values() for prefix in pin.path}

    def pin(self, pin_id: int, pin: ModelPin) -> None:
        self.lock(pin.namespace, pin.path)
        self.pins[pin_id] = pin
        while len(self.pinned()) > self.num_blocks // 2:
            self.unpin(next(iter(self.pins)))

    def unpin(self, pin_id: int) -> None:
        pin = self.pins.pop(pin_id)
        for prefix in pin.path:
            self.locks[pin.namespace, prefix] -= 1

    def expire(self) -> None:
        for pin_id in [i for i, pin in self.pins.items() if pin.expires <= self.now]:
            self.unpin(pin_id)

    def hit(self, namespace: Namespace, path: list[Tokens]) -> None:
        """Lock a looked-up path and restart the pins it covers, the longest first."""
        self.expire()
        self.lock(namespace, path)
        covered = [
            (-len(pin.path), pin_id)
            for pin_id, pin in self.pins.items()
            if pin.namespace == namespace and pin.path[-1] in path
        ]
        for _, pin_id in sorted(covered):
            pin = self.pins.pop(pin_id)
            pin.expires = self.now + pin.ttl
            self.pins[pin_id] = pin

    def leaves(self, only: Namespace | None = None) -> list[tuple[Namespace, Tokens]]:
        """The evictable prefixes, of one namespace or of all, least recently used first."""
        found = [
            (entry.used, namespace, prefix)
            for namespace, prefix, entry in self.everything()
            if only in (None, namespace)
            and not self.locks[namespace, prefix]
            and not self.is_extended(namespace, prefix)
        ]
        return [(namespace, prefix) for _, namespace, prefix in sorted(found)]

    def is_extended(self, namespace: Namespace, prefix: Tokens) -> bool:
        return any(len(p) > len(prefix) and starts(p, prefix) for p in self.entries(namespace))

    def drop(self, namespace: Namespace, prefix: Tokens) -> int:
        return self.release(self.entries(namespace).pop(prefix).block)

    def release(self, block: int) -> int:
        self.refs[block] -= 1
        assert self.refs[block] >= 0
        return int(self.refs[block] == 0)

    def obtain(self, blocks: list[int]) -> None:
        """Note that the cache handed out these blocks; their old content is gone."""
        for block in blocks:
            assert self.refs[block] == 0, f"block {block} was handed out twice"
            self.refs[block] = 1
            self.slots[block] = [POISON] * self.size

    def copy(self, source: int, destination: int, *, cached: bool) -> None:
        if cached or source in self.cached_reads:
            self.cached_reads.add(destination)
        source = self.copies.get(source, source)
        self.refs[source] += 1
        self.copies[destination] = source

    def make_copies(self, copies: list[tuple[int, int]]) -> None:
        assert sorted((d, s) for s, d in copies) == sorted(self.copies.items())
        for source, destination in copies:
            self.slots[destination] = list(self.slots[source])
            self.release(source)
        self.copies.clear()
        self.cached_reads.clear()

    def commit(self, sequence: ModelSequence, computed: int) -> None:
        """Write the tokens up to `computed` into the slots and file the full blocks."""
        for position in range(sequence.computed, computed):
            block, offset = divmod(position, self.size)
            self.slots[sequence.table[block]][offset] = sequence.tokens[position]
        sequence.computed = computed
        entries = self.entries(sequence.namespace)
        while (sequence.num_tree_blocks + 1) * self.size <= computed:
            index = sequence.num_tree_blocks
            prefix = sequence.tokens[: (index + 1) * self.size]
            if prefix in entries:
                self.release(sequence.table[index])
                sequence.table[index] = entries[prefix].block
            else:
                self.drop_tails_within(sequence.namespace, prefix)
                entries[prefix] = Entry(sequence.table[index], self.tick())
            self.locks[sequence.namespace, prefix] += 1
            sequence.num_tree_blocks += 1

    def drop_tails_within(self, namespace: Namespace, prefix: Tokens) -> None:
        for other in list(self.entries(namespace)):
            if len(other) % self.size and len(other) < len(prefix) and starts(prefix, other):
                self.drop(namespace, other)

    def free(self, sequence: ModelSequence, *, keep_tail: bool) -> None:
        namespace, computed = sequence.namespace, sequence.computed
        private = sequence.table[sequence.num_tree_blocks :]
        if computed % self.size and self.refs[private[0]] == 1:
            tail = sequence.tokens[:computed]
            if private[0] in self.copies:
                self.release(self.copies.pop(private[0]))
                self.cached_reads.discard(private[0])
            elif keep_tail and not any(starts(p, tail) for p in self.entries(namespace)):
                self.drop_tails_within(namespace, tail)
                self.entries(namespace)[tail] = Entry(private.pop(0), self.tick())
        for block in private:
            self.release(block)
        self.open.remove(sequence)
        self.unlock(namespace, self.path(sequence.tokens[:computed]))
        sequence.computed = sequence.num_tree_blocks = 0
        sequence.table = []


def starts(tokens: Tokens, prefix: Tokens) -> bool:
    return tokens[: len(prefix)] == prefix


def common(a: Tokens, b: Tokens) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
