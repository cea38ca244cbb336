"""Why a prompt missed: what hit, where it left the cached path, and what was there instead."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Literal

import numpy as np

from radixkv.cache.hashing import HASH_BYTES, TOKEN_BYTES, namespace_seed
from radixkv.cache.radix_tree import Match, Node
from radixkv.request import Namespace

if TYPE_CHECKING:
    from radixkv.cache.radix_cache import RadixCache

__all__ = ["EvictionMemory", "Explanation", "MissReason", "explain_bytes"]

MissReason = Literal[
    "complete",
    "diverged",
    "evicted",
    "other_namespace",
    "never_seen",
    "below_block",
    "disabled",
]
"""Why a lookup ended where it did.

- complete: everything asked for is cached;
- diverged: a cached path goes on, but with another token at `position`;
- evicted: the next block was cached and had to go;
- other_namespace: the next block is cached, but under another namespace;
- never_seen: the cached path ends at `position` (or shares nothing), and the rest is new;
- below_block: as never_seen, but the rest is shorter than a block, so it can't be found as one;
- disabled: the cache keeps nothing.
"""

WINDOW_TOKENS = 32
MAX_MEMORY = 65_536
MEMORY_PER_BLOCK = 4
# Namespaces that are looked into; each costs a digest, so a lookup stays cheap with many tenants.
MAX_NAMESPACES = 32


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a lookup finds, and why no more.

    Attributes:
        num_tokens: tokens of the prompt.
        num_wanted: tokens the lookup asked for; an engine asks for all but the last.
        num_block_tokens: tokens in whole blocks that hit.
        num_partial_tokens: tokens of a partly matching block that hit.
        reason: see `MissReason`.
        window_start: position of the first token of `before`.
        before: int32 bytes, the tokens just before `position`, equal on both sides.
        prompt_after: int32 bytes, the prompt's tokens from `position` on.
        cached_after: int32 bytes, the nearest cached path's tokens there; empty where it ends.
        evicted_s: seconds since the next block was evicted, if it was.
        evicted_by: the eviction policy, or "flush".
        other_namespace: a namespace that holds the next block, if one does.
    """

    num_tokens: int
    num_wanted: int
    num_block_tokens: int
    num_partial_tokens: int
    reason: MissReason
    window_start: int = 0
    before: bytes = b""
    prompt_after: bytes = b""
    cached_after: bytes = b""
    evicted_s: float | None = None
    evicted_by: str | None = None
    other_namespace: Namespace | None = None

    @property
    def num_hit_tokens(self) -> int:
        """Tokens that hit, whole blocks and the partial one."""
        return self.num_block_tokens + self.num_partial_tokens

    @property
    def position(self) -> int:
        """The first token that isn't cached; `num_wanted` on a complete hit."""
        return self.num_hit_tokens

    @property
    def prompt_window(self) -> list[int]:
        """The prompt's token ids around `position`."""
        return _ids(self.before + self.prompt_after)

    @property
    def cached_window(self) -> list[int]:
        """The nearest cached path's token ids around `position`."""
        return _ids(self.before + self.cached_after)


class EvictionMemory:
    """Remembers when which block was evicted: hashes only, the last `capacity` of them.

    An observer of one cache. Cost: O(1) per evicted block.
    """

    def __init__(self, num_blocks: int, clock: Callable[[], float], policy: str = "lru") -> None:
        """Remember nothing yet.

        Args:
            num_blocks: blocks of the pool; up to four times as many are remembered.
            clock: seconds.
            policy: name of what chooses the blocks that go.
        """
        self.capacity = min(MEMORY_PER_BLOCK * num_blocks, MAX_MEMORY)
        self.cause = policy
        self._clock = clock
        # Oldest first. In a plain dict the places of what was taken from its front stay, and each
        # look for the oldest walks over them.
        self._evicted: OrderedDict[bytes, tuple[float, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._evicted)

    @contextmanager
    def blaming(self, cause: str) -> Iterator[None]:
        """Name another cause for what is evicted meanwhile."""
        before, self.cause = self.cause, cause
        try:
            yield
        finally:
            self.cause = before

    def find(self, block_hash: bytes) -> tuple[float, str] | None:
        """Return (seconds ago, by what) of the block's last eviction, if it is remembered."""
        entry = self._evicted.get(block_hash)
        return None if entry is None else (max(0.0, self._clock() - entry[0]), entry[1])

    def on_stored(self, node: Node, first: int, count: int) -> None:
        """Nothing: only blocks that are missing are looked up here."""

    def on_removed(self, node: Node, first: int, count: int) -> None:
        """Remember the blocks. A tail has no hash and is not remembered."""
        if node.is_tail:
            return
        entry = (self._clock(), self.cause)
        evicted, hashes = self._evicted, node.hashes
        start, stop = first * HASH_BYTES, (first + count) * HASH_BYTES
        for offset in range(start, stop, HASH_BYTES):
            block_hash = hashes[offset : offset + HASH_BYTES]
            evicted.pop(block_hash, None)  # so that it becomes the youngest
            evicted[block_hash] = entry
        while len(evicted) > self.capacity:
            evicted.popitem(last=False)

    def on_cleared(self) -> None:
        """Nothing: each block was reported by itself."""


def explain_bytes(
    cache: RadixCache,
    tokens: bytes,
    namespace: Namespace = (),
    max_tokens: int | None = None,
    *,
    memory: EvictionMemory | None = None,
    window: int = WINDOW_TOKENS,
    max_namespaces: int = MAX_NAMESPACES,
) -> Explanation:
    """Say what a lookup of these tokens finds and why no more; changes nothing.

    Args:
        cache: where to look.
        tokens: int32 ids, little-endian.
        namespace: as for `RadixCache.match_prefix`.
        max_tokens: as for `RadixCache.match_prefix`.
        memory: what was evicted lately.
        window: tokens shown on each side of the first miss.
        max_namespaces: other namespaces that are looked into, the latest made first.

    Cost: O(depth + window + namespaces) plus one memcmp over the matched tokens.
    """
    num_tokens = len(tokens) // TOKEN_BYTES
    wanted = num_tokens if max_tokens is None else max(0, min(max_tokens, num_tokens))
    if not cache.enabled:
        after = tokens[: window * TOKEN_BYTES]
        return Explanation(num_tokens, wanted, 0, 0, "disabled", prompt_after=after)
    match = cache.tree.find(tokens, wanted, namespace)
    num_blocks = match.num_blocks if match else 0
    partial = match.num_partial_tokens if match else 0
    whole = num_blocks * cache.block_size
    position = whole + partial
    if position >= wanted:
        return Explanation(num_tokens, wanted, whole, partial, "complete")

    at = position * TOKEN_BYTES
    start = max(0, position - window)
    cached_after = _cached_side(match, cache.tree.block_bytes, window) if match else b""
    evicted, other = None, None
    next_block = tokens[num_blocks * cache.tree.block_bytes :][: cache.tree.block_bytes]
    has_block = len(next_block) == cache.tree.block_bytes
    if has_block:
        if memory is not None:
            parent = _chain_end(cache, match, namespace)
            evicted = memory.find(cache.tree.digest(parent + next_block))
        if evicted is None:
            other = _other_holder(cache, tokens, namespace, num_blocks + 1, max_namespaces)
    reason: MissReason
    if evicted is not None:
        reason = "evicted"
    elif other is not None:
        reason = "other_namespace"
    elif cached_after:
        reason = "diverged"
    else:
        reason = "never_seen" if has_block else "below_block"
    return Explanation(
        num_tokens,
        wanted,
        whole,
        partial,
        reason,
        window_start=start,
        before=tokens[start * TOKEN_BYTES : at],
        prompt_after=tokens[at : at + window * TOKEN_BYTES],
        cached_after=cached_after,
        evicted_s=evicted[0] if evicted else None,
        evicted_by=evicted[1] if evicted else None,
        other_namespace=other,
    )


def _cached_side(match: Match, block_bytes: int, window: int) -> bytes:
    """Return up to `window` cached tokens that stand where the prompt goes another way."""
    node: Node | None
    if match.partial is not None:
        node = match.partial
        offset = match.partial_index * block_bytes + match.num_partial_tokens * TOKEN_BYTES
    elif match.num_node_blocks < match.node.num_blocks:
        node, offset = match.node, match.num_node_blocks * block_bytes
    elif match.node.is_root:
        return b""  # not even the first token is shared, so no path is near
    else:
        node, offset = _latest_edge(match.node), 0
    size = window * TOKEN_BYTES
    parts: list[bytes] = []
    while node is not None and size > 0:
        part = node.tokens[offset : offset + size]
        parts.append(part)
        size -= len(part)
        node, offset = _latest_edge(node), 0
    return b"".join(parts)


def _latest_edge(node: Node) -> Node | None:
    """Return the child added last, or else the last tail. Cost: O(1)."""
    if node.children:
        return next(reversed(node.children.values()))
    return node.tails[-1] if node.tails else None


def _chain_end(cache: RadixCache, match: Match | None, namespace: Namespace) -> bytes:
    """Return the chained hash up to the end of the whole blocks that matched."""
    if match is None:
        return namespace_seed(namespace, cache.tree.digest)
    end = match.num_node_blocks * HASH_BYTES
    return match.node.hashes[max(0, end - HASH_BYTES) : end] or match.node.last_hash


def _other_holder(
    cache: RadixCache, tokens: bytes, own: Namespace, num_blocks: int, limit: int
) -> Namespace | None:
    """Return another namespace that holds the first `num_blocks` blocks of the tokens."""
    wanted = num_blocks * cache.block_size
    for namespace in islice(reversed(cache.tree.roots), limit):
        root = cache.tree.roots[namespace].root
        if namespace == own or root.num_blocks < num_blocks:
            continue
        match = cache.tree.find(tokens, wanted, namespace)
        if match is not None and match.num_blocks == num_blocks:
            return namespace
    return None


def _ids(tokens: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(tokens, dtype="<i4").tolist()
    return ids
