"""A brute-force model of the cache: prefixes in plain dicts."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from policy_model import POLICY_MODELS, LRUModel
from pool_model import Name, Namespace, PoolModel, Tokens

from radixkv.cache.hashing import default_digest, namespace_seed


@dataclass(eq=False)
class Run:
    """Blocks that are evicted together: the tokens from `start` to `end`, both from the root."""

    namespace: Namespace
    start: Tokens
    end: Tokens
    is_tail: bool = False
    hits: int = 0
    priority: int = 0
    rank: float = 0.0
    used: int = 0
    used_at: float = 0.0


@dataclass
class Entry:
    """One cached block, found under all tokens up to its end."""

    block: int
    run: Run


@dataclass(eq=False)
class ModelSequence:
    """What a sequence should be; `table` is [blocks of the tree, then private ones]."""

    namespace: Namespace
    tokens: Tokens
    priority: int = 0
    computed: int = 0
    num_tree_blocks: int = 0
    table: list[int] = field(default_factory=list)


@dataclass
class ModelPin:
    namespace: Namespace
    path: list[Tokens]
    ttl: int
    expires: int


class CacheModel(PoolModel):
    """Knows every cached prefix by its tokens; walks all of them for every question."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        shares: dict[Namespace, float] | None = None,
        policy: str = "lru",
        digest: Callable[[bytes], bytes] = default_digest,
    ) -> None:
        super().__init__(num_blocks, block_size)
        self.shares = shares or {}
        self.digest = digest
        self.policy: LRUModel = POLICY_MODELS[policy](self)
        self.cause = policy
        self.open: list[ModelSequence] = []
        self.pins: dict[int, ModelPin] = {}  # least recently used first
        self.now = 0
        self.cached: dict[Namespace, dict[Tokens, Entry]] = {}
        self.locks: Counter[Name] = Counter()
        self.memory: OrderedDict[bytes, tuple[int, str]] = OrderedDict()  # when, by what
        self.clock = 0

    # --- questions ------------------------------------------------------------------------------

    def entries(self, namespace: Namespace) -> dict[Tokens, Entry]:
        return self.cached.setdefault(namespace, {})

    def everything(self) -> list[tuple[Namespace, Tokens, Entry]]:
        return [(n, p, e) for n, prefixes in self.cached.items() for p, e in prefixes.items()]

    def runs(self) -> list[Run]:
        return list({id(e.run): e.run for _, _, e in self.everything()}.values())

    def longest(self, namespace: Namespace, tokens: Tokens) -> int:
        return max((common(p, tokens) for p in self.entries(namespace)), default=0)

    def path(self, tokens: Tokens) -> list[Tokens]:
        return [tokens[:end] for end in range(self.size, len(tokens) + 1, self.size)]

    def parent(self, run: Run) -> Run | None:
        return self.entries(run.namespace)[run.start].run if run.start else None

    def below(self, run: Run) -> list[Run]:
        return [r for r in self.runs() if r.namespace == run.namespace and r.start == run.end]

    def num_blocks_of(self, run: Run) -> int:
        return -(-(len(run.end) - len(run.start)) // self.size)

    def is_locked(self, run: Run) -> bool:
        return self.locks[run.namespace, run.end] > 0

    def is_evictable(self, run: Run) -> bool:
        return not self.is_locked(run) and not self.below(run)

    def leaves(self, only: Namespace | None = None) -> list[Run]:
        """The evictable runs, of one namespace or of all, in the order of the policy's key."""
        found = [r for r in self.runs() if only in (None, r.namespace) and self.is_evictable(r)]
        return sorted(found, key=self.policy.key)

    def block_hash(self, namespace: Namespace, prefix: Tokens) -> bytes:
        if not prefix:
            return namespace_seed(namespace, self.digest)
        own = np.array(prefix[-self.size :], dtype="<i4").tobytes()
        return self.digest(self.block_hash(namespace, prefix[: -self.size]) + own)

    def block_hashes(self, run: Run) -> list[bytes]:
        if run.is_tail:
            return []
        ends = range(len(run.start) + self.size, len(run.end) + 1, self.size)
        return [self.block_hash(run.namespace, run.end[:end]) for end in ends]

    def num_evictable(self) -> int:
        return sum(not self.locks[n, p] for n, p, _ in self.everything())

    def num_available(self) -> int:
        return self.num_free() + max(0, self.num_evictable() - len(self.cached_reads))

    def explain(self, namespace: Namespace, tokens: Tokens, wanted: int) -> str:
        """Why a lookup of the first `wanted` tokens finds no more than it does."""
        position = self.longest(namespace, tokens[:wanted])
        if position >= wanted:
            return "complete"
        end = position // self.size * self.size + self.size
        if end <= len(tokens):
            if self.block_hash(namespace, tokens[:end]) in self.memory:
                return "evicted"
            if any(tokens[:end] in own for n, own in self.cached.items() if n != namespace):
                return "other_namespace"
        ahead = [p for p in self.entries(namespace) if len(p) > position]
        if position and any(starts(p, tokens[:position]) for p in ahead):
            return "diverged"
        return "never_seen" if end <= len(tokens) else "below_block"

    # --- locks ----------------------------------------------------------------------------------

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def lock(self, namespace: Namespace, path: list[Tokens]) -> None:
        for prefix in path:
            assert prefix in self.entries(namespace)
            self.locks[namespace, prefix] += 1

    def unlock(self, namespace: Namespace, path: list[Tokens], *, is_use: bool = True) -> None:
        now = self.tick()
        for prefix in path:
            self.locks[namespace, prefix] -= 1
            run = self.entries(namespace)[prefix].run
            if is_use:
                run.used, run.used_at = now, self.now
        if path and self.is_evictable(self.entries(namespace)[path[-1]].run):
            self.policy.added()

    def hit(self, namespace: Namespace, path: list[Tokens], priority: int = 0) -> None:
        """Lock a looked-up path and restart the pins it covers, the longest first."""
        self.expire()
        self.split(namespace, path)
        runs = [r for r in self.runs() if r.namespace == namespace and r.end in path]
        for run in sorted(runs, key=lambda r: -len(r.end)):
            run.hits += 1
            self.policy.hit(run)
            run.priority = max(run.priority, priority)
        now = self.tick()
        for run in runs:
            run.used, run.used_at = now, self.now
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

    def split(self, namespace: Namespace, path: list[Tokens]) -> None:
        """Make a run end where the path ends."""
        entries = self.entries(namespace)
        if not path or entries[path[-1]].run.end == path[-1]:
            return
        lower = entries[path[-1]].run
        upper = copy.copy(lower)
        upper.end = lower.start = path[-1]
        for prefix in path:
            if entries[prefix].run is lower:
                entries[prefix].run = upper
        self.policy.split(upper, lower)
        if self.is_evictable(lower):
            self.policy.added()

    # --- eviction -------------------------------------------------------------------------------

    def evict(self, wanted: int, namespace: Namespace | None = None, more: int = 0) -> int:
        """Drop blocks from unlocked ends: those over a quota first, then as the policy says.

        `namespace` is about to take `more` blocks.
        """
        freed = 0
        if namespace is not None:
            freed += self.evict_excess(namespace, wanted, more)
        while freed < wanted and (over := self.over()) is not None:
            freed += self.evict_excess(over, wanted - freed, 0)
        while freed < wanted and (leaves := self.leaves()):
            freed += self.shorten(self.policy.victim(leaves), wanted - freed)
        return freed

    def evict_excess(self, namespace: Namespace, wanted: int, more: int) -> int:
        freed = 0
        while freed < wanted and (excess := self.excess(namespace) + more) > 0:
            if not (leaves := self.leaves(namespace)):
                break
            freed += self.shorten(self.policy.victim(leaves), min(wanted - freed, excess))
        return freed

    def shorten(self, run: Run, wanted: int) -> int:
        """Drop up to `wanted` blocks from a run's end; return how many became free."""
        entries, namespace = self.entries(run.namespace), run.namespace
        own = sorted((p for p, e in entries.items() if e.run is run), key=len)
        dropped = own[-min(wanted, len(own)) :]
        parent = self.parent(run)
        self.policy.evicted(run, len(dropped))
        freed = 0
        if not run.is_tail:
            self.evicted += [((namespace, p), entries[p].block) for p in reversed(dropped)]
            for digest in (self.block_hash(namespace, prefix) for prefix in dropped):
                self.memory.pop(digest, None)
                self.memory[digest] = self.now, self.cause
        for prefix in dropped:
            freed += self.release(entries.pop(prefix).block)
        while len(self.memory) > 4 * self.num_blocks:
            self.memory.popitem(last=False)
        run.end = run.end[: -self.size * len(dropped)]
        if len(dropped) == len(own) and parent is not None and self.is_evictable(parent):
            self.policy.added()
        return freed

    def over(self) -> Namespace | None:
        """The namespace most over its quota that has something evictable."""
        found = [(-self.excess(n), n) for n in self.cached if self.excess(n) > 0]
        return next((n for _, n in sorted(found) if self.leaves(n)), None)

    def excess(self, namespace: Namespace) -> int:
        if not self.shares:
            return -2 * self.num_blocks  # nobody is over where there are no quotas
        held = sum(len(s.table) - s.num_tree_blocks for s in self.open if s.namespace == namespace)
        limit = int(self.shares.get(namespace, 1) * self.num_blocks)
        return len(self.entries(namespace)) + held - limit

    # --- pins -----------------------------------------------------------------------------------

    def allow(self, wanted: int) -> bool:
        """Whether so many blocks can be had; pins give way to a sequence that is alone."""
        pinned = len(self.pinned())
        if wanted <= self.num_available() + pinned:
            while self.pins and len(self.open) <= 1 and wanted > self.num_available():
                self.unpin(next(iter(self.pins)))
        return wanted <= self.num_available()

    def pinned(self) -> set[Name]:
        return {(pin.namespace, prefix) for pin in self.pins.values() for prefix in pin.path}

    def pin(self, pin_id: int, pin: ModelPin) -> None:
        self.split(pin.namespace, pin.path)
        self.lock(pin.namespace, pin.path)
        self.pins[pin_id] = pin
        while len(self.pinned()) > self.num_blocks // 2:
            self.unpin(next(iter(self.pins)))

    def unpin(self, pin_id: int) -> None:
        pin = self.pins.pop(pin_id)
        self.unlock(pin.namespace, pin.path, is_use=False)

    def expire(self) -> None:
        due = [(pin.expires, i) for i, pin in self.pins.items() if pin.expires <= self.now]
        for _, pin_id in sorted(due):
            self.unpin(pin_id)

    # --- sequences ------------------------------------------------------------------------------

    def write(self, sequence: ModelSequence, computed: int) -> None:
        """Compute the KV of the tokens up to `computed`."""
        assert not self.evicted, "something is written before evicted blocks are copied away"
        for position in range(sequence.computed, computed):
            block, offset = divmod(position, self.size)
            prefix = sequence.tokens[: position + 1]
            self.slots[sequence.table[block]][offset] = self.content(sequence.namespace, prefix)

    def load(self, sequence: ModelSequence, contents: Sequence[list[int]]) -> None:
        """Write blocks that a tier had behind the cached ones."""
        assert not self.evicted, "something is written before evicted blocks are copied away"
        for index, content in enumerate(contents, sequence.num_tree_blocks):
            self.slots[sequence.table[index]] = list(content)

    def commit(self, sequence: ModelSequence, computed: int) -> None:
        """File the blocks that are full now."""
        sequence.computed = computed
        namespace, entries = sequence.namespace, self.entries(sequence.namespace)
        path = self.path(sequence.tokens[:computed])
        while (first := sequence.num_tree_blocks) < len(path):
            if path[first] not in entries:
                self.append(sequence, path[first:])
                continue
            run = entries[path[first]].run
            own = [p for p in path[first:] if p in entries and entries[p].run is run]
            self.split(namespace, own)
            run = entries[own[-1]].run
            run.priority = max(run.priority, sequence.priority)
            run.used, run.used_at = self.tick(), self.now
            for index, prefix in enumerate(own, first):
                self.release(sequence.table[index])
                sequence.table[index] = entries[prefix].block
            self.lock(namespace, own)
            sequence.num_tree_blocks += len(own)

    def append(self, sequence: ModelSequence, new: list[Tokens]) -> None:
        """File blocks that nothing cached equals."""
        namespace, entries = sequence.namespace, self.entries(sequence.namespace)
        first = sequence.num_tree_blocks
        start = sequence.tokens[: first * self.size]
        self.drop_tails_within(namespace, start, new[0])
        above = entries[start].run if start else None
        if above and self.locks[namespace, start] == 1 and not self.below(above):
            run = above
            run.end = new[-1]
        else:
            run = Run(namespace, start, new[-1])
            if above:
                run.used, run.used_at = above.used, above.used_at
        for index, prefix in enumerate(new, first):
            entries[prefix] = Entry(sequence.table[index], run)
        if run is not above:
            self.policy.created(run)
        run.priority = max(run.priority, sequence.priority)
        self.lock(namespace, new)
        sequence.num_tree_blocks += len(new)

    def drop_tails_within(self, namespace: Namespace, start: Tokens, prefix: Tokens) -> None:
        entries = self.entries(namespace)
        for other, entry in list(entries.items()):
            if entry.run.is_tail and entry.run.start == start and starts(prefix, other):
                self.release(entries.pop(other).block)

    def free(self, sequence: ModelSequence, *, keep_tail: bool) -> None:
        namespace, computed = sequence.namespace, sequence.computed
        private = sequence.table[sequence.num_tree_blocks :]
        path = self.path(sequence.tokens[:computed])
        if computed % self.size and self.refs[private[0]] == 1:
            tail = sequence.tokens[:computed]
            if private[0] in self.copies:
                self.release(self.copies.pop(private[0]))
                self.cached_reads.discard(private[0])
            elif keep_tail and not any(starts(p, tail) for p in self.entries(namespace)):
                self.keep_tail(sequence, path[-1] if path else (), tail, private.pop(0))
        for block in private:
            self.release(block)
        self.open.remove(sequence)
        self.unlock(namespace, path)
        sequence.computed = sequence.num_tree_blocks = 0
        sequence.table = []

    def keep_tail(self, sequence: ModelSequence, start: Tokens, tail: Tokens, block: int) -> None:
        namespace = sequence.namespace
        self.drop_tails_within(namespace, start, tail)
        run = Run(namespace, start, tail, is_tail=True, priority=sequence.priority)
        run.used, run.used_at = self.tick(), self.now
        self.entries(namespace)[tail] = Entry(block, run)
        self.policy.created(run)
        self.policy.added()


def starts(tokens: Tokens, prefix: Tokens) -> bool:
    return tokens[: len(prefix)] == prefix


def common(a: Tokens, b: Tokens) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
