"""The random machine: every operation of the cache, its tiers, and failures, beside a model."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar
from unittest import mock

import hypothesis.strategies as st
import pytest
from cache_model import CacheModel, ModelPin, ModelSequence, starts
from faults import FailingCache, FailingOS
from hypothesis.stateful import initialize, precondition, rule
from machine_checks import CheckedMachine, path_tokens
from policy_model import SessionModel
from pool_model import Tokens
from tier_model import Mover, TierModel, open_disk

from radixkv.cache import KVEventLog, Sequence, tiers_disk
from radixkv.cache.events import AllBlocksCleared, BlockStored, KVEvent
from radixkv.cache.hashing import default_digest
from radixkv.cache.radix_tree import Node
from radixkv.cache.session_policy import SessionPolicy
from radixkv.errors import OutOfBlocksError
from radixkv.request import Namespace

DIGESTS: list[Callable[[bytes], bytes]] = [
    default_digest,
    lambda data: bytes(16),
    lambda data: bytes(15) + bytes([default_digest(data)[0] & 15]),
]
QUOTAS: list[dict[Namespace, float]] = [{}, {("a",): 0.3}, {(): 0.4, ("a",): 0.3, ("b",): 0.3}]
namespaces = st.sampled_from([(), ("a",), ("b",), ("a",)])
token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
picks = st.integers(0, 99)


class CacheMachine(CheckedMachine):
    """Drives a cache and its model with the same operations and compares everything."""

    policy: ClassVar[str] = "lru"

    @initialize(
        block_size=st.sampled_from([2, 3, 4, 2, 3, 4, 1]),
        num_blocks=st.integers(3, 12),
        digest=st.sampled_from(DIGESTS),
        shares=st.sampled_from(QUOTAS),
        host_blocks=st.integers(1, 4),
        disk_blocks=st.integers(2, 8),
    )
    def start(
        self,
        block_size: int,
        num_blocks: int,
        digest: Callable[[bytes], bytes],
        shares: dict[Namespace, float],
        host_blocks: int,
        disk_blocks: int,
    ) -> None:
        model = self.model = CacheModel(num_blocks, block_size, shares, self.policy, digest)
        self.cache = FailingCache(
            num_blocks,
            block_size,
            digest=digest,
            clock=lambda: float(model.now),
            quotas=shares,
            policy=self.policy,
        )
        evictor = self.cache.evictor
        if isinstance(model.policy, SessionModel) and isinstance(evictor, SessionPolicy):
            model.policy.values = lambda: evictor._values
        self.folder = tempfile.TemporaryDirectory()
        self.io = FailingOS(os, fcntl)
        self.patch = mock.patch.multiple(tiers_disk, os=self.io, fcntl=self.io)
        self.patch.start()
        self.mover = Mover(self.cache, lambda block: model.slots[block], host_blocks)
        self.tiers = TierModel(self.mover, self.io, host_blocks, disk_blocks)
        self.tiers.restart(self.open_disk, is_orderly=True)
        self.hashes: set[bytes] = set()
        self.events = KVEventLog(self.cache, self.apply_events)
        self.open: list[tuple[Sequence, ModelSequence]] = []
        self.locked: list[tuple[Node, Namespace, list[Tokens]]] = []
        self.past: list[Tokens] = [()]

    def open_disk(self) -> tiers_disk.DiskTier:
        return open_disk(Path(self.folder.name), self.model.size, self.tiers.disk_blocks)

    def apply_events(self, events: list[KVEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self.hashes.update(event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                self.hashes.clear()
            else:
                self.hashes.difference_update(event.block_hashes)

    def tokens_from(self, base: int, suffix: Tokens) -> Tokens:
        """The beginning of an earlier prompt, and something after it."""
        return (self.past[base % len(self.past)][: base // 3] + suffix)[:16]

    # --- sequences ------------------------------------------------------------------------------

    @rule(
        namespace=namespaces,
        base=picks,
        suffix=token_lists,
        partial=st.booleans(),
        limit=st.none() | st.integers(0, 12),
        priority=st.integers(0, 2),
    )
    def reuse(
        self,
        namespace: Namespace,
        base: int,
        suffix: Tokens,
        partial: bool,
        limit: int | None,
        priority: int = 0,
    ) -> None:
        tokens = self.tokens_from(base, suffix)
        model, size = self.model, self.model.size
        sequence = self.cache.create_sequence(tokens, namespace, priority=priority)
        mirror = ModelSequence(namespace, tokens, priority)
        want = tokens[: len(tokens) - 1 if limit is None else limit]
        source, found = self.lookup(namespace, tokens, want)
        whole = found // size * size
        path = model.path(want[:whole])
        model.hit(namespace, path, priority)
        model.open.append(mirror)
        mirror.table = [model.entries(namespace)[p].block for p in path]
        mirror.computed, mirror.num_tree_blocks = whole, len(path)
        room = model.num_free() or model.num_available() >= 2
        self.cache.fired = ""

        hit = sequence.reuse(limit, partial=partial)

        if partial and found > whole:
            copied = False
            if room and self.cache.fired != "cache":
                model.refs[source] += 1
                model.evict(int(not model.num_free()), namespace, 1)
                model.release(source)
                copied = not self.cache.fired
            tail = model.entries(namespace).get(want[:found])
            if copied:
                own = sequence.block_table.tolist()[-1]
                assert self.cache.pending_copies[own] == source
                model.copy(source, own, cached=True)
                model.obtain([own])
                mirror.table.append(own)
                mirror.computed = found
            elif tail is not None and tail.run.is_tail and model.refs[tail.block] == 1:
                del model.entries(namespace)[want[:found]]
                mirror.table.append(tail.block)
                mirror.computed = found
        assert hit == sequence.num_cached_tokens == mirror.computed
        self.open.append((sequence, mirror))

    def lookup(self, namespace: Namespace, tokens: Tokens, want: Tokens) -> tuple[int, int]:
        """Return the block that a partial match would copy (or -1) and the tokens found."""
        model, size = self.model, self.model.size
        found = model.longest(namespace, want)
        handle = self.cache.match_prefix(tokens, namespace, len(want))
        assert handle.num_cached_tokens == found
        explained = self.cache.explain(tokens, namespace, len(want))
        assert explained.num_hit_tokens == found
        assert explained.reason == model.explain(namespace, tokens, len(want))
        if explained.reason == "evicted":
            end = found // size * size + size
            when, cause = model.memory[model.block_hash(namespace, tokens[:end])]
            assert (explained.evicted_s, explained.evicted_by) == (model.now - when, cause)
        if found % size == 0:
            return -1, found
        whole = found // size * size
        assert handle.match is not None
        assert handle.match.partial is not None
        source = handle.match.partial.block_ids[handle.match.partial_index]
        assert source in {
            entry.block
            for p, entry in model.entries(namespace).items()
            if whole < len(p) <= whole + size and starts(p, want[:found])
        }
        return source, found

    def reserve(self, sequence: Sequence, mirror: ModelSequence, num_tokens: int) -> bool:
        model, size = self.model, self.model.size
        missing = max(0, -(-num_tokens // size) - len(mirror.table))
        position, filled = divmod(mirror.computed, size)
        shared = bool(
            filled and num_tokens > mirror.computed and model.refs[mirror.table[position]] > 1
        )
        wanted = missing + shared
        self.cache.fired = ""
        try:
            sequence.reserve(num_tokens)
            failed = False
        except OutOfBlocksError:
            failed = True
        if self.cache.fired == "cache":
            assert failed
            return False
        model.expire()
        is_allowed = model.allow(wanted)
        if is_allowed:
            model.evict(max(0, wanted - model.num_free()), mirror.namespace, wanted)
        assert failed == (not is_allowed or self.cache.fired == "pool")
        if failed:
            return False
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
            self.model.write(mirror, computed)
            self.model.commit(mirror, computed)
            sequence.commit(computed)

    @rule(namespace=namespaces, base=picks, suffix=token_lists, priority=st.integers(0, 2))
    def store(self, namespace: Namespace, base: int, suffix: Tokens, priority: int) -> None:
        """A whole request at once, so that the pool is full most of the time."""
        self.reuse(namespace, base, suffix, True, None, priority)
        self.write_to(*self.open[-1], len(self.open[-1][1].tokens))
        self.free(-1, True)

    @rule(namespace=namespaces, base=picks, suffix=token_lists, more=token_lists)
    def race(self, namespace: Namespace, base: int, suffix: Tokens, more: Tokens) -> None:
        """Two prompts, one the beginning of the other, looked up before either is computed."""
        self.reuse(namespace, base, suffix + more, True, None, base % 2)
        self.reuse(namespace, base, suffix, True, None, 1 - base % 2)
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
        model = self.model
        used = -(-mirror.computed // model.size)
        path = model.path(mirror.tokens[: mirror.computed])
        model.lock(mirror.namespace, path)
        for block in mirror.table[mirror.num_tree_blocks : used]:
            model.refs[block] += 1
        twin = ModelSequence(
            mirror.namespace,
            mirror.tokens,
            mirror.priority,
            mirror.computed,
            mirror.num_tree_blocks,
            mirror.table[:used],
        )
        self.open.append((child, twin))
        model.open.append(twin)

    @precondition(lambda self: self.open)
    @rule(pick=picks, keep_tail=st.integers(0, 3).map(bool))
    def free(self, pick: int, keep_tail: bool) -> None:
        sequence, mirror = self.open.pop(pick % len(self.open))
        self.past = [*self.past[-6:], mirror.tokens]
        self.model.free(mirror, keep_tail=keep_tail)
        sequence.free(keep_tail=keep_tail)
        sequence.free()

    # --- prefixes -------------------------------------------------------------------------------

    @rule(namespace=namespaces, base=picks, suffix=token_lists, priority=st.integers(0, 2))
    def lock(self, namespace: Namespace, base: int, suffix: Tokens, priority: int) -> None:
        tokens = self.past[base % len(self.past)][: base // 3] + suffix
        found = self.model.longest(namespace, tokens)
        handle = self.cache.match_prefix(tokens, namespace)
        assert handle.num_cached_tokens == found
        path = self.model.path(tokens[:found])
        self.model.hit(namespace, path, priority)
        self.locked.append((self.cache.lock(handle, namespace, priority), namespace, path))

    @precondition(lambda self: self.locked)
    @rule(pick=picks)
    def unlock(self, pick: int) -> None:
        node, namespace, path = self.locked.pop(pick % len(self.locked))
        self.cache.unlock(node)
        self.model.unlock(namespace, path)

    @rule(count=st.sampled_from([0, 1, 1, 1, 2, 2, 3]))
    def evict(self, count: int) -> None:
        self.model.expire()
        assert self.cache.evict(count) == self.model.evict(count)

    @rule()
    def reset(self) -> None:
        model = self.model
        for pin_id in list(model.pins):
            model.unpin(pin_id)
        model.cause = "flush"
        self.io.reset()
        assert self.cache.reset() == model.evict(model.num_blocks)
        model.cause = self.policy
        model.copied_away()  # the tiers forget them, too
        self.tiers.clear()

    @rule(namespace=namespaces)
    def reset_namespace(self, namespace: Namespace) -> None:
        model, top = self.model, self.cache.tree.roots.get(namespace)
        nodes = [top] if top is not None else []
        for node in nodes:
            nodes += [*node.children.values(), *node.tails]
        ends = [path_tokens(node) for node in reversed(nodes[1:])]
        for pin_id in [i for i, pin in model.pins.items() if pin.namespace == namespace]:
            model.unpin(pin_id)
        freed, model.cause = 0, "flush"
        for run in [model.entries(namespace)[end].run for end in ends]:
            if model.is_evictable(run):
                freed += model.shorten(run, model.num_blocks)
        model.cause = self.policy
        assert self.cache.reset_namespace(namespace) == freed
        unlocked = [p for p in model.entries(namespace) if not model.locks[namespace, p]]
        assert not unlocked

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

    @rule(seconds=st.sampled_from([1, 1, 2, 3, 5, 40]))
    def wait(self, seconds: int) -> None:
        self.model.now += seconds

    # --- tiers and failures ---------------------------------------------------------------------

    @rule()
    def flush(self) -> None:
        """Copy evicted blocks away, as must be done before anything is written."""
        self.tiers.flush(self.model.copied_away)

    @rule()
    def take_copies(self) -> None:
        self.flush()
        self.model.make_copies(self.cache.take_copies())

    @rule(namespace=namespaces, base=picks, suffix=token_lists)
    def bring_back(self, namespace: Namespace, base: int, suffix: Tokens) -> None:
        """Start a request with what the tiers have behind the cached blocks."""
        self.flush()
        self.reuse(namespace, base, suffix, False, None)
        sequence, mirror = self.open[-1]
        size, first = self.model.size, mirror.num_tree_blocks
        last = (len(mirror.tokens) - 1) // size
        if last <= first:
            return
        blocks = self.mover.blocks(namespace, mirror.tokens, first, last)
        names = [(namespace, mirror.tokens[: (first + i + 1) * size]) for i in range(len(blocks))]
        assert [self.mover.where(b) for b in blocks] == [self.tiers.where(n) for n in names]
        missing = next((i for i, n in enumerate(names) if not self.tiers.where(n)), len(names))
        if not missing or not self.reserve(sequence, mirror, (first + missing) * size):
            return
        contents: list[list[int]] = []
        for block, name in zip(blocks[:missing], names, strict=False):
            self.io.reset()
            content = self.mover.load(block)
            self.tiers.load(name, content)
            if content is None:
                break
            contents.append(content)
        self.flush()
        self.take_copies()
        self.model.load(mirror, contents)
        computed = (first + len(contents)) * size
        self.model.commit(mirror, computed)
        sequence.commit(computed)

    @rule(is_orderly=st.booleans(), reads_all=st.booleans())
    def restart(self, is_orderly: bool, reads_all: bool) -> None:
        """Of the disk tier alone: the cache goes on, to find what the tier had before."""
        self.flush()
        self.tiers.restart(self.open_disk, is_orderly=is_orderly, reads_all=reads_all)

    @rule(countdown=st.integers(1, 2), place=st.sampled_from(["cache", "pool"]))
    def let_allocation_fail(self, countdown: int, place: str) -> None:
        self.cache.countdown, self.cache.place = countdown, place

    @rule(countdown=st.integers(1, 5), kind=st.sampled_from(["error", "torn", "lie"]))
    def let_io_fail(self, countdown: int, kind: str) -> None:
        self.io.countdown, self.io.kind = countdown, kind

    def teardown(self) -> None:
        if not hasattr(self, "past"):
            return
        try:
            self.end()
        finally:
            self.patch.stop()
            if self.mover.disk is not None:
                self.mover.disk.close()
            self.folder.cleanup()

    def end(self) -> None:
        self.cache.countdown = self.io.countdown = 0
        while self.open:
            self.free(0, True)
        while self.locked:
            self.unlock(0)
        while self.model.pins:
            self.unpin(0)
        self.take_copies()
        self.counts_agree()
        assert self.cache.num_referenced_blocks == 0
        self.restart(True, True)
        self.reset()
        self.restart(True, True)
        self.events_tell_what_is_cached()
        assert self.cache.num_free_blocks == self.model.num_blocks
        assert not self.cache.tree.roots
        with pytest.raises(OutOfBlocksError):
            self.cache.allocate(self.model.num_blocks + 1)
