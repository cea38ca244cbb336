from __future__ import annotations

from collections.abc import Callable

import pytest
from cache_helpers import compute, store

from radixkv.cache import RadixCache
from radixkv.cache.integrity import dump_tree
from radixkv.cache.radix_tree import Node
from radixkv.errors import CacheCorruptionError

Fault = Callable[[RadixCache], object]


def busy_cache() -> RadixCache:
    """A root with a locked run, an unlocked run below it and beside it, and a tail."""
    cache = RadixCache(32, 2, quotas={(): 0.1})
    store(cache, [1, 2, 3, 4, 5, 6])
    store(cache, [1, 2, 9, 9, 7])
    store(cache, [8, 8])
    compute(cache, [1, 2, 3, 4, 11])
    cache.pin([1, 2, 3, 4])
    cache.check_integrity()
    return cache


def nodes(cache: RadixCache) -> list[Node]:
    return [n for n in cache.tree.nodes() if not n.is_root]


def leaf(cache: RadixCache) -> Node:
    return next(n for n in nodes(cache) if n.is_leaf and not n.is_tail and not n.ref_count)


def tail(cache: RadixCache) -> Node:
    return next(n for n in nodes(cache) if n.is_tail)


def locked(cache: RadixCache) -> Node:
    return next(n for n in nodes(cache) if n.ref_count)


def bump(owner: object, name: str, by: int = 1) -> None:
    setattr(owner, name, getattr(owner, name) + by)


def flip(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def shift_lock(cache: RadixCache) -> None:
    bump(leaf(cache), "ref_count")


def lose_lock(cache: RadixCache) -> None:
    node: Node | None = next(iter(cache.sequences)).node
    while node is not None:
        node.ref_count -= 1
        node = node.parent


def swap_hash(cache: RadixCache) -> None:
    node = leaf(cache)
    node.hashes = flip(node.hashes)


def swap_tokens(cache: RadixCache) -> None:
    node = leaf(cache)
    node.tokens = flip(node.tokens)


def shorten_tokens(cache: RadixCache) -> None:
    node = leaf(cache)
    node.tokens = node.tokens[:-4]


def move_block(cache: RadixCache) -> None:
    leaf(cache).block_ids[0] = locked(cache).block_ids[0]


def free_cached_block(cache: RadixCache) -> None:
    cache.pool.release(leaf(cache).block_ids)


def foreign_parent(cache: RadixCache) -> None:
    leaf(cache).parent = tail(cache)


def stale_key(cache: RadixCache) -> None:
    leaf(cache).last_access += 100


def swap_table(cache: RadixCache) -> None:
    sequence = next(iter(cache.sequences))
    sequence._blocks[0] = sequence._blocks[1]


def other_history(cache: RadixCache) -> None:
    next(iter(cache.sequences)).token_ids[0] = 77


FAULTS: dict[str, Fault] = {
    "free count": lambda c: bump(c.pool, "num_free"),
    "ref count raised": lambda c: c.pool.share(leaf(c).block_ids[0]),
    "ref count lowered": free_cached_block,
    "extent lost": lambda c: c.pool._extents.popitem(),
    "extent too long": lambda c: c.pool._extents.update({c.pool.free_extents()[0][0]: 99}),
    "extent index": lambda c: c.pool._by_length.pop(),
    "tree blocks": lambda c: bump(c, "num_tree_blocks"),
    "locked blocks": lambda c: bump(c, "num_locked_blocks", -1),
    "node count": lambda c: bump(c.tree, "num_nodes"),
    "namespace blocks": lambda c: bump(leaf(c).root, "num_blocks"),
    "evictable leaf lost": lambda c: c.evictor.discard(leaf(c)),
    "locked node evictable": lambda c: c.evictor.add(locked(c)),
    "leaf under a stale key": stale_key,
    "lock too many on a leaf": shift_lock,
    "lock lost": lose_lock,
    "hash": swap_hash,
    "tokens": swap_tokens,
    "tokens and blocks": shorten_tokens,
    "block in two nodes": move_block,
    "foreign parent": foreign_parent,
    "tail too long": lambda c: setattr(tail(c), "tokens", bytes(8)),
    "child under a wrong key": lambda c: c.tree.roots[()].children.update(
        {b"x": c.tree.roots[()].children.popitem()[1]}
    ),
    "block table": swap_table,
    "history": other_history,
    "sequence unregistered": lambda c: c.sequences.clear(),
    "tree blocks of a sequence": lambda c: bump(next(iter(c.sequences)), "num_tree_blocks", -1),
    "computed without a block": lambda c: bump(next(iter(c.sequences)), "num_computed", 40),
    "leaked block": lambda c: c.pool.allocate(1),
    "pin count of a node": lambda c: bump(locked(c), "pins"),
    "pinned blocks": lambda c: bump(c.pins, "num_blocks"),
    "pinned over the budget": lambda c: setattr(c.pins, "max_blocks", 1),
    "expiry order of pins": lambda c: c.pins._by_expiry.clear(),
    "pins by node": lambda c: c.pins._by_node.clear(),
    "lock of a pin lost": lambda c: c.release_hold(next(iter(c.pins)).node),
    "held blocks of a namespace": lambda c: bump(c.tree.roots[()].root, "num_held"),
    "namespace over its quota lost": lambda c: c.quotas._over.clear(),
    "order of a namespace": lambda c: c.evictor._own.clear(),
    "empty root": lambda c: c.tree.get_root(("empty",)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_check_integrity_detects(name: str) -> None:
    cache = busy_cache()
    FAULTS[name](cache)
    with pytest.raises(CacheCorruptionError):
        cache.check_integrity()


def test_error_shows_the_tree() -> None:
    cache = busy_cache()
    cache.num_tree_blocks += 1
    with pytest.raises(CacheCorruptionError, match=r"tree blocks 6 != 7\n(?s:.*)tail \d+ blocks="):
        cache.check_integrity()


def test_dump_tree_is_bounded() -> None:
    cache = RadixCache(64, 1)
    for i in range(60):
        store(cache, [i])
    assert len(dump_tree(cache, max_lines=10).splitlines()) == 10
