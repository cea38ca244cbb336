"""The cache's changes as the KV events that public prefix-aware routers understand.

Field names and meaning are those of vLLM's KV events; see `docs/events.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from radixkv.cache.hashing import HASH_BYTES
from radixkv.cache.radix_tree import Node

if TYPE_CHECKING:
    from radixkv.cache.radix_cache import RadixCache

__all__ = [
    "MEDIUM_CPU",
    "MEDIUM_GPU",
    "MEDIUM_STORAGE",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "KVEvent",
    "KVEventLog",
]

# Tiers as routers name them: where the model computes, whatever chip that is; host memory; disk.
MEDIUM_GPU = "GPU"
MEDIUM_CPU = "CPU"
MEDIUM_STORAGE = "STORAGE"


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks that follow each other were filed.

    Attributes:
        block_hashes: HASH_BYTES each, in order.
        parent_block_hash: hash of the block before the first one; None at the start of a prompt.
        token_ids: of all these blocks, `len(block_hashes) * block_size` of them.
        block_size: tokens in a block.
        lora_id: always None.
        medium: the tier.
        namespace_key: hex of the namespace's hash seed, "" for the default one. It tells
            namespaces apart without telling what they are called.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str = MEDIUM_GPU
    namespace_key: str = ""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks were evicted from a tier."""

    block_hashes: list[bytes]
    medium: str = MEDIUM_GPU


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing is cached any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventLog:
    """An observer of a cache that collects its changes and hands them on in batches.

    Applying the events in order to a set of hashes gives exactly the hashes in the tree. Tails
    (partly filled blocks) have no hash and make no events. A split makes none either, since it
    changes no block.
    """

    def __init__(
        self,
        cache: RadixCache,
        sink: Callable[[list[KVEvent]], object],
        *,
        medium: str = MEDIUM_GPU,
    ) -> None:
        """Follow `cache` from now on; what it holds already comes first.

        Args:
            cache: its observers get this one.
            sink: called by `flush`, in the cache's thread, with at least one event.
            medium: the tier this cache stands for.
        """
        self.cache = cache
        self.medium = medium
        self._sink = sink
        self._events: list[KVEvent] = []
        for node in cache.tree.nodes():
            self.on_stored(node, 0, node.num_blocks)
        cache.observers.append(self)

    def flush(self) -> None:
        """Hand what happened since the last call to the sink."""
        if self._events:
            events, self._events = self._events, []
            self._sink(events)

    def close(self) -> None:
        """Stop following; what is not flushed is dropped. Idempotent."""
        if self in self.cache.observers:
            self.cache.observers.remove(self)
        self._events.clear()

    def on_stored(self, node: Node, first: int, count: int) -> None:
        """Note a BlockStored. Cost: O(tokens stored)."""
        if not node.hashes or not count:
            return
        block_bytes = self.cache.tree.block_bytes
        tokens = node.tokens[first * block_bytes : (first + count) * block_bytes]
        root = node.root
        self._events.append(
            BlockStored(
                _hashes(node, first, count),
                _parent_hash(node, first),
                np.frombuffer(tokens, dtype="<i4").tolist(),
                self.cache.block_size,
                medium=self.medium,
                namespace_key=root.seed.hex() if root.namespace else "",
            )
        )

    def on_removed(self, node: Node, first: int, count: int) -> None:
        """Note a BlockRemoved; one that follows another is added to it."""
        if not node.hashes or not count:
            return
        hashes = _hashes(node, first, count)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.extend(hashes)
        else:
            self._events.append(BlockRemoved(hashes, self.medium))

    def on_cleared(self) -> None:
        """Note an AllBlocksCleared, unless something in use had to stay."""
        if self.cache.tree.num_nodes == 0:
            self._events.append(AllBlocksCleared())


def _hashes(node: Node, first: int, count: int) -> list[bytes]:
    packed = node.hashes
    stop = (first + count) * HASH_BYTES
    return [packed[at : at + HASH_BYTES] for at in range(first * HASH_BYTES, stop, HASH_BYTES)]


def _parent_hash(node: Node, first: int) -> bytes | None:
    if first:
        return node.hashes[(first - 1) * HASH_BYTES : first * HASH_BYTES]
    assert node.parent is not None
    return None if node.parent.is_root else node.parent.last_hash
