"""A look at the tree: a report in plain types, bounded in depth, breadth and size."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from radixkv.cache.hashing import TOKEN_BYTES
from radixkv.cache.radix_tree import Node
from radixkv.request import Namespace

if TYPE_CHECKING:
    from radixkv.cache.radix_cache import RadixCache

__all__ = ["Decode", "SessionTokens", "tree_report"]

START_TOKENS = 24
MAX_NODES = 10_000
# Of more children than this, only the ones added last are looked at to find the latest used.
MAX_SORTED = 1024

Decode = Callable[[Sequence[int]], str]
SessionTokens = tuple[str, Namespace, Iterable[int]]


def tree_report(
    cache: RadixCache,
    max_depth: int = 8,
    max_breadth: int = 16,
    *,
    decode: Decode | None = None,
    namespace: Namespace | None = None,
    sessions: Iterable[SessionTokens] = (),
    start_tokens: int = START_TOKENS,
    max_nodes: int = MAX_NODES,
) -> dict[str, Any]:
    """Return the tree as nested dicts of plain types; changes nothing.

    A node tells `tokens`, `blocks`, `hits` (lookups that came back to it), `locks` (held now, on it
    or below it; pins count), `pins`, `age_s` (since it was last used), `kind` ("run", or "tail" for
    a partly filled block), `token_ids` (the start of its edge, also as `text` when `decode` is
    given), `sessions` (those whose cached part ends in it), `children` (latest used first) and
    `elided_children`, the number left out by the bounds.

    Args:
        cache: what to look at.
        max_depth: nodes on a path at most.
        max_breadth: children of a node at most, and namespaces.
        decode: turns the start of an edge into text.
        namespace: show this one only.
        sessions: (name, namespace, token ids) of conversations to be found in the tree; each costs
            a lookup.
        start_tokens: token ids shown of each edge.
        max_nodes: nodes in all at most.

    Cost: O(nodes shown + children of the nodes shown + sessions), whatever the tree holds.
    """
    now = cache.clock()
    ends = _session_ends(cache, sessions)
    roots = [
        root
        for root in cache.tree.roots.values()
        if namespace is None or root.root.namespace == namespace
    ]
    shown = heapq.nlargest(max_breadth, roots, key=lambda root: root.last_access)
    report: dict[str, Any] = {
        "block_size": cache.block_size,
        "blocks": cache.num_tree_blocks,
        "nodes": cache.tree.num_nodes,
        "namespaces": [],
        "elided_namespaces": len(roots) - len(shown),
    }
    queue: deque[tuple[Node, dict[str, Any], int]] = deque()
    for root in shown:
        entry: dict[str, Any] = {
            "namespace": list(root.root.namespace),
            "blocks": root.root.num_blocks,
            "locks": root.ref_count,
            "pins": root.pins,
            "age_s": max(0.0, now - root.accessed_at),
            "sessions": ends.get(root, []),
        }
        report["namespaces"].append(entry)
        queue.append((root, entry, 0))
    budget = max_nodes
    while queue:
        node, entry, depth = queue.popleft()
        total = len(node.children) + len(node.tails)
        wanted = min(max_breadth, budget, total) if depth < max_depth else 0
        children = _latest_used(node, wanted)
        budget -= len(children)
        entry["children"] = []
        entry["elided_children"] = total - len(children)
        for child in children:
            item = _node_entry(child, now, decode, start_tokens)
            item["sessions"] = ends.get(child, [])
            entry["children"].append(item)
            queue.append((child, item, depth + 1))
    return report


def _node_entry(node: Node, now: float, decode: Decode | None, start_tokens: int) -> dict[str, Any]:
    start: list[int] = np.frombuffer(node.tokens[: start_tokens * TOKEN_BYTES], "<i4").tolist()
    entry: dict[str, Any] = {
        "id": node.node_id,
        "kind": "tail" if node.is_tail else "run",
        "tokens": len(node.tokens) // TOKEN_BYTES,
        "blocks": node.num_blocks,
        "hits": node.hits,
        "locks": node.ref_count,
        "pins": node.pins,
        "age_s": max(0.0, now - node.accessed_at),
        "token_ids": start,
    }
    if decode is not None:
        entry["text"] = decode(start)
    return entry


def _session_ends(cache: RadixCache, sessions: Iterable[SessionTokens]) -> dict[Node, list[str]]:
    """Return the sessions by the node in which their cached part ends."""
    ends: dict[Node, list[str]] = {}
    for name, namespace, token_ids in sessions:
        match = cache.match_prefix(token_ids, namespace).match
        if match is not None:
            ends.setdefault(match.partial or match.node, []).append(name)
    return ends


def _latest_used(node: Node, count: int) -> list[Node]:
    """Return `count` children and tails, latest used first."""
    if not count:
        return []
    edges = chain(reversed(node.tails), reversed(node.children.values()))
    return heapq.nlargest(count, islice(edges, MAX_SORTED), key=lambda child: child.last_access)
