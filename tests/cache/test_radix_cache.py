from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest
from cache_helpers import compute, hit, lock, store

import radixkv
from radixkv.cache import RadixCache
from radixkv.cache.radix_tree import Node
from radixkv.errors import CacheCorruptionError, OutOfBlocksError


def test_recycled_block_is_not_found_under_its_old_prompt() -> None:
    """A hash entry outlived its block, so the old prompt hit foreign content."""
    cache = RadixCache(4, 4)
    old, new = list(range(8)), list(range(100, 113))
    store(cache, old)
    assert store(cache, new) == 0
    assert hit(cache, old) == 0
    assert cache.num_free_blocks == 0
    assert store(cache, old) == 0


@pytest.mark.parametrize(
    ("one", "other"),
    [(("x", ""), ("", "x")), (("ab", "c"), ("a", "bc")), (("x",), ("x", "")), ((), ("",))],
)
def test_namespaces_share_nothing(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    cache = RadixCache(32, 4)
    store(cache, range(10), one)
    assert hit(cache, range(10), other) == 0
    assert store(cache, range(10), other) == 0
    assert hit(cache, range(10), one) == hit(cache, range(10), other) == 10


def test_every_lookup_in_the_package_names_a_namespace() -> None:
    """One path that forgot the salt shared every tenant's prompts."""
    calls = [
        (f"{path.name}:{node.lineno}", len(node.args) + len(node.keywords))
        for path in Path(radixkv.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("match_prefix", "match_bytes", "create_sequence")
    ]
    assert len(calls) >= 4
    assert [where for where, num_arguments in calls if num_arguments < 2] == []


def test_fork_stays_in_its_namespace() -> None:
    cache = RadixCache(32, 4)
    parent = compute(cache, range(6), ("a",))
    child = parent.fork()
    parent.free()
    child.append(range(6, 12))
    child.reserve(12)
    cache.take_copies()
    child.commit(12)
    child.free()
    assert (hit(cache, range(12), ("a",)), hit(cache, range(12))) == (12, 0)


def test_unlock_without_lock_raises() -> None:
    cache = RadixCache(4, 2)
    store(cache, [1, 2])
    node = lock(cache, [1, 2])
    cache.unlock(node)
    with pytest.raises(CacheCorruptionError, match="without a lock"):
        cache.unlock(node)


def test_stale_handle_is_refused_after_eviction() -> None:
    cache = RadixCache(4, 2)
    store(cache, [1, 2, 3, 4])
    handle = cache.match_prefix([1, 2, 3, 4])
    cache.evict(1)
    with pytest.raises(CacheCorruptionError, match="stale"):
        cache.lock(handle)


def test_stale_handle_is_refused_after_a_split() -> None:
    """The node of the match became the lower part, and the lock protected other tokens."""
    cache = RadixCache(8, 2)
    store(cache, range(16))
    handle = cache.match_prefix(range(4))
    store(cache, [0, 1, 99])
    with pytest.raises(CacheCorruptionError, match="stale"):
        cache.lock(handle)
    cache.check_integrity()


def test_allocate_evicts_no_more_than_needed() -> None:
    cache = RadixCache(4, 2)
    store(cache, range(6))
    assert cache.num_available_blocks == 4
    cache.allocate(2)
    assert cache.num_evictable_blocks == 2


def test_allocate_too_many_evicts_nothing() -> None:
    cache = RadixCache(4, 2)
    store(cache, range(4))
    compute(cache, [8, 9])
    with pytest.raises(OutOfBlocksError):
        cache.allocate(4)
    assert hit(cache, range(4)) == 4


def test_key_shorter_than_a_block_has_no_whole_block() -> None:
    cache = RadixCache(4, 16)
    store(cache, range(15))
    handle = cache.match_prefix(range(15))
    assert handle.match is not None
    assert (handle.match.num_blocks, handle.num_cached_tokens) == (0, 15)


def test_copy_source_outlives_its_eviction() -> None:
    """The block that a pending copy reads may leave the tree, but nobody may be given it."""
    cache = RadixCache(3, 4)
    store(cache, [1, 2, 3, 4])
    reader = cache.create_sequence([1, 2, 9])
    assert reader.reuse() == 2
    cache.evict(3)
    assert hit(cache, [1, 2, 3, 4]) == 0
    ((source, _),) = [(s, d) for d, s in cache.pending_copies.items()]
    assert source not in cache.allocate(1)
    with pytest.raises(OutOfBlocksError):
        cache.allocate(1)
    cache.take_copies()
    assert cache.allocate(1) == [source]


def test_copy_never_goes_to_the_block_it_reads() -> None:
    """The source was the least recently used block, just when the pool was full."""
    cache = RadixCache(2, 4)
    first, second = compute(cache, [1, 2, 3, 4]), compute(cache, [5, 6, 7, 8])
    source, other = first.block_table[0], second.block_table[0]
    first.free()
    second.free()
    reader = cache.create_sequence([1, 2, 9])
    assert reader.reuse() == 2
    cache.check_integrity()
    assert cache.take_copies() == [(source, other)]


def test_disabled_cache_keeps_nothing() -> None:
    cache = RadixCache(8, 2, enabled=False)
    assert store(cache, range(7)) == store(cache, range(7)) == 0
    assert cache.num_free_blocks == 8
    assert cache.num_tree_blocks == 0


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_stress_counters_never_drift(block_size: int) -> None:
    """Splits that forgot a counter drove it to -5; double unlocks hid later locks."""
    rng = random.Random(block_size)
    cache = RadixCache(64, block_size)
    locked: list[Node] = []
    for step in range(20_000 // 3):
        tokens = [rng.randrange(4) for _ in range(rng.randrange(6 * block_size))]
        action = rng.randrange(4)
        if action == 0:
            sequence = cache.create_sequence(tokens)
            sequence.reuse(len(tokens))
            try:
                sequence.reserve(len(tokens))
                cache.take_copies()
                sequence.commit(len(tokens))
            except OutOfBlocksError:
                assert cache.num_available_blocks < 6
            sequence.free()
        elif action == 1 and len(locked) < 8:
            locked.append(lock(cache, tokens))
        elif action == 2 and locked:
            cache.unlock(locked.pop(rng.randrange(len(locked))))
        elif action == 3:
            cache.evict(rng.randrange(5))
        protected = cache.num_locked_blocks
        assert protected >= 0 <= cache.num_evictable_blocks
        assert protected + cache.num_evictable_blocks == cache.num_tree_blocks
        if step % 20 == 0:
            cache.check_integrity()
    while locked:
        cache.unlock(locked.pop())
    assert cache.num_locked_blocks == 0
    cache.reset()
    cache.check_integrity()
    assert cache.num_free_blocks == 64
