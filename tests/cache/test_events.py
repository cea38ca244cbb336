from __future__ import annotations

import random

import pytest
from cache_helpers import compute, store

from radixkv.cache import AllBlocksCleared, BlockRemoved, BlockStored, KVEventLog, RadixCache
from radixkv.cache.events import KVEvent
from radixkv.cache.hashing import HASH_BYTES, hash_blocks, namespace_seed
from radixkv.cache.int_vector import as_int32
from radixkv.errors import OutOfBlocksError


class Follower:
    """A router's view: the hashes it believes to be cached."""

    def __init__(self) -> None:
        self.events: list[KVEvent] = []
        self.batches = 0
        self.hashes: set[bytes] = set()

    def __call__(self, events: list[KVEvent]) -> None:
        self.batches += 1
        for event in events:
            self.events.append(event)
            if isinstance(event, BlockStored):
                parent = event.parent_block_hash
                assert parent is None or parent in self.hashes, "a block before its parent"
                assert not self.hashes.intersection(event.block_hashes), "a block stored twice"
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                self.hashes.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                assert self.hashes.issuperset(event.block_hashes), "an unknown block removed"
                self.hashes.difference_update(event.block_hashes)
            else:
                assert not self.hashes
                self.hashes.clear()


def tree_hashes(cache: RadixCache) -> set[bytes]:
    return {
        node.hashes[i : i + HASH_BYTES]
        for node in cache.tree.nodes()
        for i in range(0, len(node.hashes), HASH_BYTES)
    }


@pytest.fixture
def cache() -> RadixCache:
    return RadixCache(16, 4)


@pytest.fixture
def follower() -> Follower:
    return Follower()


def test_stored_blocks_have_the_fields_of_the_protocol(
    cache: RadixCache, follower: Follower
) -> None:
    log = KVEventLog(cache, follower)
    store(cache, range(10))
    log.flush()
    packed = hash_blocks(namespace_seed(()), as_int32(list(range(8))).tobytes(), 16)
    hashes = [packed[:16], packed[16:]]
    (event,) = follower.events
    assert event == BlockStored(hashes, None, list(range(8)), 4, None, "GPU", "")


def test_a_continued_run_names_its_parent_block(cache: RadixCache, follower: Follower) -> None:
    log = KVEventLog(cache, follower)
    first = compute(cache, range(4))
    first.append(range(4, 8))
    first.reserve(8)
    first.commit(8)
    store(cache, [*range(8), 1, 1, 1, 1])
    store(cache, [*range(4), 2, 2, 2, 2])
    log.flush()
    stored = [e for e in follower.events if isinstance(e, BlockStored)]
    assert [e.parent_block_hash for e in stored] == [
        None,
        stored[0].block_hashes[0],
        stored[1].block_hashes[0],
        stored[0].block_hashes[0],
    ]
    first.free()


def test_removed_blocks_are_named_in_one_event(cache: RadixCache, follower: Follower) -> None:
    log = KVEventLog(cache, follower)
    store(cache, range(8))
    store(cache, range(50, 62))
    log.flush()
    held = set(follower.hashes)
    cache.evict(4)
    log.flush()
    event = follower.events[-1]
    assert isinstance(event, BlockRemoved)
    assert set(event.block_hashes) == held - tree_hashes(cache)
    assert (len(event.block_hashes), event.medium) == (4, "GPU")


def test_a_reset_ends_with_all_blocks_cleared(cache: RadixCache, follower: Follower) -> None:
    log = KVEventLog(cache, follower)
    store(cache, range(10))
    cache.reset()
    log.flush()
    assert isinstance(follower.events[-1], AllBlocksCleared)
    assert follower.hashes == set()


def test_a_reset_that_leaves_blocks_in_use_clears_nothing_more(
    cache: RadixCache, follower: Follower
) -> None:
    log = KVEventLog(cache, follower)
    sequence = compute(cache, range(8))
    store(cache, range(50, 58))
    cache.reset()
    log.flush()
    assert not any(isinstance(e, AllBlocksCleared) for e in follower.events)
    assert follower.hashes == tree_hashes(cache)
    assert len(follower.hashes) == 2
    sequence.free()


def test_namespaces_differ_without_being_named(cache: RadixCache, follower: Follower) -> None:
    log = KVEventLog(cache, follower)
    store(cache, range(4))
    store(cache, range(4), ("tenant", "secret salt"))
    log.flush()
    first, second = follower.events
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert first.namespace_key == ""
    assert second.namespace_key == namespace_seed(("tenant", "secret salt")).hex()
    assert first.block_hashes != second.block_hashes


def test_a_log_begins_with_what_is_cached(cache: RadixCache, follower: Follower) -> None:
    store(cache, range(10))
    store(cache, [*range(4), 9, 9, 9, 9])
    log = KVEventLog(cache, follower)
    log.flush()
    assert follower.hashes == tree_hashes(cache)
    assert len(follower.hashes) == 3


def test_nothing_is_handed_on_when_nothing_happened(cache: RadixCache, follower: Follower) -> None:
    log = KVEventLog(cache, follower)
    log.flush()
    store(cache, range(3))  # a tail alone
    store(cache, range(3))
    log.flush()
    assert follower.batches == 0


def test_a_closed_log_hears_nothing(cache: RadixCache, follower: Follower) -> None:
    log = KVEventLog(cache, follower)
    log.close()
    log.close()
    store(cache, range(8))
    log.flush()
    assert follower.events == []


@pytest.mark.parametrize("seed", range(8))
def test_stress_events_rebuild_the_tree(seed: int, follower: Follower) -> None:
    """Any sequence of operations: the events, applied to a set, give the tree's hashes."""
    rng = random.Random(seed)
    cache = RadixCache(24, 2)
    log = KVEventLog(cache, follower)
    past: list[list[int]] = [[0]]
    running = []
    for _ in range(400):
        action = rng.random()
        if action < 0.45:
            base = rng.choice(past)
            prompt = base[: rng.randrange(len(base) + 1)]
            prompt += [rng.randrange(3) for _ in range(rng.randrange(1, 8))]
            sequence = cache.create_sequence(prompt, rng.choice([(), ("a",)]))
            sequence.reuse()
            try:
                sequence.reserve(len(sequence))
            except OutOfBlocksError:
                sequence.free(keep_tail=False)
                continue
            cache.take_copies()
            sequence.commit(rng.randrange(sequence.num_computed, len(prompt) + 1))
            past.append(prompt)
            running.append(sequence)
        elif action < 0.55 and running:
            running.append(rng.choice(running).fork())
        elif action < 0.85 and running:
            running.pop(rng.randrange(len(running))).free(keep_tail=rng.random() < 0.8)
        elif action < 0.95:
            cache.evict(rng.randrange(1, 6))
        elif action > 0.99:
            cache.reset()
        if rng.random() < 0.5:
            log.flush()
            assert follower.hashes == tree_hashes(cache)
    log.flush()
    assert follower.hashes == tree_hashes(cache)
    assert sum(isinstance(e, BlockRemoved) for e in follower.events) > 10
