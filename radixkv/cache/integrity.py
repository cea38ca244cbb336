"""Recomputes every count of the cache from scratch and compares."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from radixkv.cache.hashing import TOKEN_BYTES, hash_blocks
from radixkv.cache.radix_tree import Node, Root
from radixkv.errors import CacheCorruptionError

if TYPE_CHECKING:
    from radixkv.cache.radix_cache import RadixCache

__all__ = ["check_cache", "dump_tree"]


def check_cache(cache: RadixCache) -> None:
    """Raise CacheCorruptionError, with the tree, if any law of `RadixCache` is broken."""
    try:
        cache.pool.check_integrity()
        nodes = list(cache.tree.nodes())
        for node in nodes:
            _check_node(cache, node)
        _check_counts(cache, nodes)
        _check_locks(cache, nodes)
        _check_blocks(cache, nodes)
        _check_shares(cache, nodes)
    except CacheCorruptionError as error:
        raise CacheCorruptionError(f"{error}\n{dump_tree(cache)}") from None


def dump_tree(cache: RadixCache, max_lines: int = 200) -> str:
    """Return the tree as text, a node a line."""
    lines: list[str] = []

    def walk(node: Node, depth: int) -> None:
        if len(lines) >= max_lines:
            return
        kind = "root" if node.is_root else "tail" if node.is_tail else "run"
        lines.append(
            f"{'  ' * depth}{kind} {node.node_id} blocks={list(node.block_ids[:8])} "
            f"n={node.num_blocks} tokens={len(node.tokens) // TOKEN_BYTES} "
            f"locks={node.ref_count} access={node.last_access}"
        )
        for child in [*node.children.values(), *node.tails]:
            walk(child, depth + 1)

    for root in cache.tree.roots.values():
        walk(root, 0)
    return "\n".join(lines)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise CacheCorruptionError(message)


def _check_node(cache: RadixCache, node: Node) -> None:
    tree, name = cache.tree, f"node {node.node_id}"
    below = [*node.children.values(), *node.tails]
    _require(all(n.parent is node for n in below), f"{name}: a child has another parent")
    _require(all(n.root is node.root for n in below), f"{name}: a child has another root")
    _require(
        node.ref_count >= sum(n.ref_count for n in below), f"{name}: fewer locks than below it"
    )
    firsts = [n.tokens[: tree.block_bytes] for n in below]
    _require(len(set(firsts)) == len(firsts), f"{name}: two edges begin alike")
    if node.edges is not None:
        _require(
            dict(node.edges) == dict(zip(firsts, below, strict=True)),
            f"{name}: the edge index differs from the edges",
        )
    if node.is_root:
        _require(tree.roots.get(node.root.namespace) is node, f"{name}: a foreign root")
        _require(bool(below) or node.ref_count > 0, f"{name}: an empty root was kept")
        return
    assert node.parent is not None
    if node.is_tail:
        _require(not below, f"{name}: a tail has children")
        _require(0 < len(node.tokens) < tree.block_bytes, f"{name}: a tail of a wrong length")
        siblings = [*node.parent.children.values(), *node.parent.tails]
        covered = any(s is not node and s.tokens.startswith(node.tokens) for s in siblings)
        _require(not covered, f"{name}: a tail that a sibling covers")
        return
    _require(len(node.tokens) == node.num_blocks * tree.block_bytes, f"{name}: tokens and blocks")
    expected = hash_blocks(node.parent.last_hash, node.tokens, tree.block_bytes, tree.digest)
    _require(node.hashes == expected, f"{name}: hashes differ from the tokens")
    first_block = node.tokens[: tree.block_bytes]
    found = tree.child(node.parent, first_block, 0)
    _require(found is node, f"{name}: not found under its own hash")


def _check_counts(cache: RadixCache, nodes: list[Node]) -> None:
    total = sum(n.num_blocks for n in nodes)
    locked = sum(n.num_blocks for n in nodes if n.ref_count)
    _require(total == cache.num_tree_blocks, f"tree blocks {total} != {cache.num_tree_blocks}")
    _require(
        locked == cache.num_locked_blocks, f"locked blocks {locked} != {cache.num_locked_blocks}"
    )
    count = sum(not n.is_root for n in nodes)
    _require(count == cache.tree.num_nodes, f"nodes {count} != {cache.tree.num_nodes}")
    per_root: Counter[int] = Counter()
    for node in nodes:
        per_root[id(node.root)] += node.num_blocks
    for root in cache.tree.roots.values():
        _require(per_root[id(root.root)] == root.root.num_blocks, "blocks of a namespace")
    leaves = {n for n in nodes if n.is_leaf and not n.ref_count and not n.is_root}
    evictable = list(cache.evictor)
    _require(
        len(evictable) == len(leaves) and leaves == set(evictable),
        "the evictable set differs from the unlocked leaves",
    )
    _require(all(n in cache.evictor for n in leaves), "a leaf is filed under a stale key")


def _check_locks(cache: RadixCache, nodes: list[Node]) -> None:
    own = Counter(s.node for s in cache.sequences)
    _require(None not in own, "a freed sequence is still registered")
    for sequence in cache.sequences:
        path = 0
        node = sequence.node
        while node is not None:
            path += node.num_blocks
            node = node.parent
        _require(path == sequence.num_tree_blocks, "a sequence's path and its tree blocks differ")
    for node in nodes:
        below = sum(n.ref_count for n in [*node.children.values(), *node.tails])
        # Locks taken by `RadixCache.lock` alone may come on top of the sequences' own.
        pins = node.pins - sum(n.pins for n in [*node.children.values(), *node.tails])
        _require(
            node.ref_count - below >= own[node] + pins, f"node {node.node_id}: a lock is missing"
        )


def _check_shares(cache: RadixCache, nodes: list[Node]) -> None:
    fault = cache.pins.check(nodes)
    _require(fault is None, str(fault))
    if not cache.quotas.enabled:
        return
    held: Counter[Root] = Counter()
    for sequence in cache.sequences:
        assert sequence.node is not None
        held[sequence.node.root] += sequence.num_blocks - sequence.num_tree_blocks
    roots = [node.root for node in cache.tree.roots.values()]
    _require(all(r.num_held == held[r] for r in roots), "privately held blocks of a namespace")
    over = {r.namespace for r in roots if cache.quotas.excess(r) > 0}
    _require(
        over == {r.namespace for r in cache.quotas.over()}, "namespaces over their quotas differ"
    )


def _check_blocks(cache: RadixCache, nodes: list[Node]) -> None:
    holders: Counter[int] = Counter()
    for node in nodes:
        holders.update(node.block_ids)
    _require(all(n == 1 for n in holders.values()), "a block is in two nodes")
    size = cache.block_size
    tree_tokens: dict[int, bytes] = {}
    for node in nodes:
        for i, block_id in enumerate(node.block_ids):
            start = i * cache.tree.block_bytes
            tree_tokens[block_id] = node.tokens[start : start + cache.tree.block_bytes]
    for sequence in cache.sequences:
        table = sequence.block_table.tolist()
        _require(len(set(table)) == len(table), "a block is twice in a block table")
        holders.update(table[sequence.num_tree_blocks :])
        for i, block_id in enumerate(table[: sequence.num_tree_blocks]):
            tokens = sequence.token_ids[i * size : (i + 1) * size].tobytes()
            _require(tree_tokens.get(block_id) == tokens, f"block {block_id} holds other tokens")
        if cache.enabled:
            _require(
                sequence.num_tree_blocks == sequence.num_computed // size,
                "a full block isn't in the tree",
            )
        _require(sequence.num_computed <= len(table) * size, "computed tokens without a block")
    holders.update(cache.pending_copies.values())
    for block_id in range(cache.num_blocks):
        count = cache.pool.ref_count(block_id)
        _require(
            count >= holders[block_id],
            f"block {block_id}: {count} refs, {holders[block_id]} holders",
        )
    _require(
        sum(holders.values()) == sum(cache.pool.ref_count(b) for b in range(cache.num_blocks)),
        "a block is held by nobody known",
    )
