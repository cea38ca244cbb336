"""Random operations on the cache, step by step against a brute-force model."""

from __future__ import annotations

import os
from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
from cache_model import POISON, CacheModel, ModelPin, ModelSequence, Tokens, starts
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixkv.cache import RadixCache, Sequence
from radixkv.cache.hashing import default_digest
from radixkv.cache.radix_tree import Node
from radixkv.errors import OutOfBlocksError
from radixkv.request import Namespace

DIGESTS: list[Callable[[bytes], bytes]] = [
    default_digest,
    lambda data: bytes(16),
    lambda data: bytes(15) + bytes([default_digest(data)[0] & 15]),
]
QUOTAS: list[dict[Namespace, float]] = [{}, {("a",): 0.3}, {(): 0.5, ("a",): 0.5}]
namespaces = st.sampled_from([(), ("a",)])
token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
picks = st.integers(0, 99)


def path_tokens(node: Node) -> Tokens:
    above = path_tokens(node.parent) if node.parent is not None else ()
    return above + tuple(np.frombuffer(node.tokens, "<i4").tolist())


class CacheMachine(RuleBasedStateMachine):
    """Drives a cache and its model with the same operations and compares everything."""

    @initialize(
        block_size=st.sampled_from([2, 3, 4, 2, 3, 4, 1]),
        num_blocks=st.integers(3, 12),
        digest=st.sampled_from(DIGESTS),
        shares=st.sampled_from(QUOTAS),
    )
    def start(
        self,
        block_size: int,
        num_blocks: int,
        digest: Callable[[bytes], bytes],
        shares: dict[Namespace, float],
    ) -> None:
        self.model = CacheModel(num_blocks, block_size, shares)
        self.cache = RadixCache(
            num_blocks, block_size, digest=digest, clock=lambda: self.model.now, quotas=shares
        )
        self.open: list[tuple[Sequence, ModelSequence]] = []
        self.locked: list[tuple[Node, Namespace, list[Tokens]]] = []
        self.past: list[Tokens] = [()]

    # --- sequences ------------------------------------------------------------------------------

    @rule(
        namespace=namespaces,
        base=picks,
        suffix=token_lists,
        partial=st.booleans(),
        limit=st.none() | st.integers(0, 12),
    )
    def reuse(
        self, namespace: Namespace, base: int, suffix: Tokens, partial: bool, limit: int | None
    ) -> None:
        old = self.past[base % len(self.past)]
        tokens = (old[: base // 3] + suffix)[:16]
        model, size = self.model, self.model.size
        sequence = self.cache.create_sequence(tokens, namespace)
        mirror = ModelSequence(namespace, tokens)
        want = tokens[: len(tokens) - 1 if limit is None else limit]
        found = model.longest(namespace, want)
        whole = found // size * size
        entries = model.entries(namespace)
        sources = [
            p
            for p in entries
            if whole < len(p) <= whole + size and starts(p, want[:found]) and found > whole
        ]
        path = model.path(want[:whole])
        model.hit(namespace, path)
        model.open.append(mirror)
        mirror.table = [entries[p].block for p in path]
        mirror.computed, mirror.num_tree_blocks = whole, len(path)
        tail = want[:found] if want[:found] in sources else None
        in_place = tail is not None and model.refs[entries[tail].block] == 1
        room = model.num_free() or model.num_available() >= 2
        source_blocks = {entries[p].block for p in sources}

        hit = sequence.reuse(limit, partial=partial)

        if partial and sources and room:
            own = sequence.block_table.tolist()[-1]
            source = self.cache.pending_copies[own]
            assert source in source_blocks
            model.copy(source, own, cached=True)
            model.evict(int(not model.num_free()), namespace, 1)
            model.obtain([own])
            mirror.table.append(own)
            mirror.computed = found
        elif partial and sources and in_place:
            assert tail is not None
            mirror.table.append(entries.pop(tail).block)
            mirror.computed = found
        assert hit == sequence.num_cached_tokens == mirror.computed
        self.open.append((sequence, mirror))

    def reserve(self, sequence: Sequence, mirror: ModelSequence, num_tokens: int) -> bool:
        model, size = self.model, self.model.size
        missing = max(0, -(-num_tokens // size) - len(mirror.table))
        position, filled = divmod(mirror.computed, size)
        shared = bool(
            filled and num_tokens > mirror.computed and model.refs[mirror.table[position]] > 1
        )
        wanted = missing + shared
        model.expire()
        if not model.allow(wanted):
            with pytest.raises(OutOfBlocksError):
                sequence.reserve(num_tokens)
            return False
        model.evict(max(0, wanted - model.num_free()), mirror.namespace, wanted)
        sequence.reserve(num_tokens)
        table = sequence.block_table.tolist()
        model.obtain(table[len(mirror.table) :])
        if shared:
            own, source = table[position], mirror.table[position]
            model.obtain([own])
            model.copy(source, own, cached=False)
            model.release(source)
            mirror.table[position] = own
        mirror.table += table[len(mirror.table) :]
        return True

    @precondition(lambda self: self.open)
    @rule(pick=picks, count=st.integers(0, 12))
    def reserve_ahead(self, pick: int, count: int) -> None:
        self.reserve(*self.open[pick % len(self.open)], count)

    @precondition(lambda self: self.open)
    @rule(pick=picks, tokens=token_lists)
    def append(self, pick: int, tokens: Tokens) -> None:
        sequence, mirror = self.open[pick % len(self.open)]
        if len(mirror.tokens) + len(tokens) <= 20:
            sequence.append(tokens)
            mirror.tokens += tokens

    @precondition(lambda self: self.open)
    @rule(pick=picks, count=st.integers(1, 12))
    def write(self, pick: int, count: int) -> None:
        """What an engine does: reserve, copy, write, commit."""
        sequence, mirror = self.open[pick % len(self.open)]
        if mirror.computed == len(mirror.tokens) < 20:
            sequence.append([count % 2])
            mirror.tokens += (count % 2,)
        self.write_to(sequence, mirror, count)

    def write_to(self, sequence: Sequence, mirror: ModelSequence, count: int) -> None:
        computed = min(len(mirror.tokens), mirror.computed + count)
        if self.reserve(sequence, mirror, computed):
            self.take_copies()
            self.model.commit(mirror, computed)
            sequence.commit(computed)

    @rule(namespace=namespaces, base=picks, suffix=token_lists)
    def store(self, namespace: Namespace, base: int, suffix: Tokens) -> None:
        """A whole request at once, so that the pool is full most of the time."""
        self.reuse(namespace, base, suffix, True, None)
        self.write_to(*self.open[-1], len(self.open[-1][1].tokens))
        self.free(-1, True)

    @rule(namespace=namespaces, base=picks, suffix=token_lists, more=token_lists)
    def race(self, namespace: Namespace, base: int, suffix: Tokens, more: Tokens) -> None:
        """Two prompts, one the beginning of the other, looked up before either is computed."""
        self.reuse(namespace, base, suffix + more, True, None)
        self.reuse(namespace, base, suffix, True, None)
        short = self.open[-1]
        self.write_to(*short, len(short[1].tokens))
        if len(more) % 2:
            self.free(-1, True)
        longer = self.open[-1 - (1 - len(more) % 2)]
        self.write_to(*longer, len(longer[1].tokens))

    @precondition(lambda self: self.open)
    @rule(pick=picks)
    def fork(self, pick: int) -> None:
        sequence, mirror = self.open[pick % len(self.open)]
        child = sequence.fork()
        used = -(-mirror.computed // self.model.size)
        self.model.lock(mirror.namespace, self.model.path(mirror.tokens[: mirror.computed]))
        for block in mirror.table[mirror.num_tree_blocks : used]:
            self.model.refs[block] += 1
        twin = ModelSequence(
            mirror.namespace,
            mirror.tokens,
            mirror.computed,
            mirror.num_tree_blocks,
            mirror.table[:used],
        )
        self.open.append((child, twin))
        self.model.open.append(twin)

    @precondition(lambda self: self.open)
    @rule(pick=picks, keep_tail=st.integers(0, 3).map(bool))
    def free(self, pick: int, keep_tail: bool) -> None:
        sequence, mirror = self.open.pop(pick % len(self.open))
        self.past = [*self.past[-6:], mirror.tokens]
        self.model.free(mirror, keep_tail=keep_tail)
        sequence.free(keep_tail=keep_tail)
        sequence.free()

    # --- prefixes -------------------------------------------------------------------------------

    @rule(namespace=namespaces, base=picks, suffix=token_lists)
    def lock(self, namespace: Namespace, base: int, suffix: Tokens) -> None:
        tokens = self.past[base % len(self.past)][: base // 3] + suffix
        found = self.model.longest(namespace, tokens)
        handle = self.cache.match_prefix(tokens, namespace)
        assert handle.num_cached_tokens == found
        path = self.model.path(tokens[:found])
        self.model.hit(namespace, path)
        self.locked.append((self.cache.lock(handle, namespace), namespace, path))

    @precondition(lambda self: self.locked)
    @rule(pick=picks)
    def unlock(self, pick: int) -> None:
        node, namespace, path = self.locked.pop(pick % len(self.locked))
        self.cache.unlock(node)
        self.model.unlock(namespace, path)

    @rule(count=st.sampled_from([0, 1, 1, 1, 2, 2, 3, 99]))
    def evict(self, count: int) -> None:
        self.model.expire()
        if count == 99:
            for pin_id in list(self.model.pins):
                self.model.unpin(pin_id)
            assert self.cache.reset() == self.model.evict(self.model.num_blocks)
        else:
            assert self.cache.evict(count) == self.model.evict(count)

    # --- pins -----------------------------------------------------------------------------------

    @rule(namespace=namespaces, base=picks, ttl=st.integers(1, 9))
    def pin(self, namespace: Namespace, base: int, ttl: int) -> None:
        tokens = self.past[base % len(self.past)]
        model = self.model
        model.expire()
        want = tokens[: model.num_blocks // 2 * model.size]
        path = model.path(want[: model.longest(namespace, want)])
        pin_id = self.cache.pin(tokens, namespace, ttl)
        assert (pin_id is None) == (not path)
        if pin_id is not None:
            model.pin(pin_id, ModelPin(namespace, path, ttl, model.now + ttl))

    @rule(pick=picks)
    def unpin(self, pick: int) -> None:
        assert not self.cache.unpin(-1)
        if self.model.pins:
            pin_id = list(self.model.pins)[pick % len(self.model.pins)]
            self.model.unpin(pin_id)
            assert self.cache.unpin(pin_id)

    @rule(seconds=st.integers(1, 5))
    def wait(self, seconds: int) -> None:
        self.model.now += seconds

    @rule()
    def take_copies(self) -> None:
        self.model.make_copies(self.cache.take_copies())

    # --- what must hold -------------------------------------------------------------------------

    @invariant()
    def counts_agree(self) -> None:
        cache, model = self.cache, self.model
        cache.check_integrity()
        assert cache.num_free_blocks == model.num_free()
        assert cache.num_evictable_blocks == model.num_evictable()
        assert cache.num_available_blocks == model.num_available()
        assert [pin.pin_id for pin in cache.pins] == list(model.pins)
        assert cache.pins.num_blocks == len(model.pinned())
        for block in range(model.num_blocks):
            assert cache.pool.ref_count(block) == model.refs[block]
            if model.refs[block] == 0:
                model.slots[block] = [POISON] * model.size

    @invariant()
    def sequences_read_back_their_history(self) -> None:
        for sequence, mirror in self.open:
            assert sequence.num_computed == mirror.computed
            table = sequence.block_table.tolist()
            assert table == mirror.table
            content = [t for b in table for t in self.model.read(b)]
            assert tuple(content[: mirror.computed]) == mirror.tokens[: mirror.computed]

    @invariant()
    def exactly_the_modelled_prefixes_are_cached(self) -> None:
        everything = self.model.everything()
        assert self.cache.num_tree_blocks == len(everything)
        for namespace, prefix, entry in everything:
            handle = self.cache.match_prefix(prefix, namespace)
            assert handle.num_cached_tokens == len(prefix)
            match = handle.match
            assert match is not None
            if match.partial is None:
                block = match.node.block_ids[match.num_node_blocks - 1]
            else:
                block = match.partial.block_ids[match.partial_index]
            assert block == entry.block
            start = (len(prefix) - 1) // self.model.size * self.model.size
            assert tuple(self.model.read(block)[: len(prefix) - start]) == prefix[start:]

    @invariant()
    def leaves_are_in_the_modelled_order(self) -> None:
        assert [(n.root.namespace, path_tokens(n)) for n in self.cache.evictor] == (
            self.model.leaves()
        )

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        while self.open:
            self.free(0, True)
        while self.locked:
            self.unlock(0)
        while self.model.pins:
            self.unpin(0)
        self.take_copies()
        self.counts_agree()
        assert self.cache.num_referenced_blocks == 0
        self.evict(99)
        assert self.cache.num_free_blocks == self.model.num_blocks
        assert not self.cache.tree.roots


CacheMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("RADIXKV_STATE_EXAMPLES", "200")),
    stateful_step_count=50,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
TestCacheMachine = CacheMachine.TestCase
