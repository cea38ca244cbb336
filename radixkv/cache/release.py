"""What of a conversation nobody else uses, and giving that back at once.

Eviction frees what nobody uses when somebody needs blocks. A conversation that is deleted gives its
blocks back now, but none that another one can still use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from radixkv.cache.hashing import TOKEN_BYTES
from radixkv.cache.radix_tree import Node
from radixkv.request import Namespace

if TYPE_CHECKING:
    from radixkv.cache.radix_cache import RadixCache

__all__ = ["Release", "path_locks"]


class Release:
    """A plan of what to free; valid until the cache changes.

    What is locked or pinned by others stays, and so does all above it, and all that others' prompts
    hang on.
    """

    def __init__(self, cache: RadixCache, own_locks: Mapping[Node, int] | None = None) -> None:
        """Plan nothing yet.

        Args:
            cache: to free in.
            own_locks: locks that will be gone by then, see `path_locks`.
        """
        self._cache = cache
        self._own_locks = own_locks or {}
        self._drops: dict[Node, int] = {}  # blocks at the end of each node, children first
        self._cuts: dict[Node, bytes] = {}  # what stays of the last block after that

    @property
    def num_blocks(self) -> int:
        """Blocks that become free."""
        return sum(self._drops.values())

    def add(self, tokens: bytes, namespace: Namespace, shared_tokens: int = 0) -> None:
        """Plan to free a conversation's blocks from its end on.

        Args:
            tokens: the conversation, little-endian int32 ids.
            namespace: its own.
            shared_tokens: of its beginning, those that somebody else means to use again, whether or
                not the tree shows it. A block of which a part is shared becomes a tail with just
                that, as if the other one alone had left it.

        Cost: that of a lookup, and O(edges of the node where it stops).
        """
        match = self._cache.match_bytes(tokens, namespace).match
        if match is None:
            return
        kept, part = divmod(shared_tokens, self._cache.block_size)
        tail = match.partial
        if (
            tail is not None
            and tail.is_tail
            and len(tail.tokens) == match.num_partial_tokens * TOKEN_BYTES
            and not self._is_locked(tail)
            and not self._free_from(tail, kept - match.num_blocks, part)
        ):
            return
        node, matched = match.node, match.num_node_blocks
        start = match.num_blocks - matched
        while node.parent is not None:
            if node.num_blocks - self._drops.get(node, 0) > matched or not self._is_free(node):
                break
            if not self._free_from(node, kept - start, part):
                break
            node = node.parent
            matched = node.num_blocks
            start -= matched

    def add_below(self, tokens: bytes, namespace: Namespace) -> None:
        """Plan to free whatever continues `tokens`, but not `tokens` themselves.

        For a prompt whose answer was broken off: nobody knows how far that came.
        """
        match = self._cache.match_bytes(tokens, namespace).match
        if match is None or not tokens:
            return
        node, block_bytes = match.node, self._cache.tree.block_bytes
        rest = tokens[match.num_blocks * block_bytes :]
        remainder = node.num_blocks - match.num_node_blocks
        nodes = [*node.children.values(), *node.tails]
        if not remainder:
            nodes = [edge for edge in nodes if edge.tokens.startswith(rest)]
        elif not node.tokens.startswith(rest, match.num_node_blocks * block_bytes):
            return
        for below in nodes:  # grows meanwhile: parents come before their children
            nodes += [*below.children.values(), *below.tails]
        for below in reversed(nodes):
            if self._is_free(below):
                self._drop(below, below.num_blocks)
        if remainder and self._is_free(node):
            self._drop(node, remainder)

    def run(self) -> int:
        """Free what is planned; return how many blocks became free.

        Cost: O(log leaves) per node, O(1) per block.
        """
        cache = self._cache
        with cache.evictions.blaming("flush"):
            freed = sum(cache.drop_end(n, count) for n, count in self._drops.items() if count)
            for node, tokens in self._cuts.items():
                cache.shorten(node, tokens)
        return freed

    def _free_from(self, node: Node, first: int, part: int) -> bool:
        """Plan to free a node's blocks but the first ones; return whether all of it goes.

        Args:
            node: nothing that stays hangs on it.
            first: blocks that stay; may be negative, or more than it has.
            part: tokens of the block after them that stay, too.
        """
        if first < 0:
            first = part = 0
        if first >= node.num_blocks:
            return False
        block_bytes = self._cache.tree.block_bytes
        rest = node.tokens[first * block_bytes :][: part * TOKEN_BYTES]
        if not rest or (not first and self._is_elsewhere(node, rest)):
            self._drop(node, node.num_blocks - first)
            return not first
        if first * block_bytes + len(rest) < len(node.tokens):
            self._drop(node, node.num_blocks - first - 1)
            self._cuts[node] = rest
        return False

    def _is_elsewhere(self, node: Node, start: bytes) -> bool:
        """Whether what stays beside a node begins with `start`, too."""
        assert node.parent is not None
        return any(
            edge is not node and edge.tokens.startswith(start) and not self._is_gone(edge)
            for edges in (node.parent.tails, node.parent.children.values())
            for edge in edges
        )

    def _drop(self, node: Node, count: int) -> None:
        # Put at the end again, behind children that were planned later.
        self._drops[node] = max(count, self._drops.pop(node, 0))
        if self._is_gone(node):
            self._cuts.pop(node, None)

    def _is_gone(self, node: Node) -> bool:
        return self._drops.get(node, 0) == node.num_blocks

    def _is_free(self, node: Node) -> bool:
        """Whether nobody holds the node, and nothing hangs on it that stays."""
        return not self._is_locked(node) and all(
            self._is_gone(edge) for edges in (node.tails, node.children.values()) for edge in edges
        )

    def _is_locked(self, node: Node) -> bool:
        return node.ref_count > self._own_locks.get(node, 0)


def path_locks(*nodes: Node | None) -> dict[Node, int]:
    """Return how often each node is locked by a lock on each of `nodes`."""
    locks: dict[Node, int] = {}
    for node in nodes:
        current = node
        while current is not None:
            locks[current] = locks.get(current, 0) + 1
            current = current.parent
    return locks
