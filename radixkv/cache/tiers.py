"""What the tiers below the pool have in common: the key of a block, and slots in LRU order.

Plain bytes and numbers; the content of blocks is moved by the engine.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from radixkv.cache.hashing import namespace_seed
from radixkv.cache.radix_tree import Node
from radixkv.request import Namespace

__all__ = ["KEY_BYTES", "Entry", "SlotIndex", "node_prefix", "prefix_keys"]

KEY_BYTES = 32


def prefix_keys(
    namespace: Namespace, tokens: bytes, block_bytes: int, first: int, last: int
) -> Iterator[bytes]:
    """Yield the keys of blocks `first` to `last` of a prompt.

    A key is the SHA-256 of the namespace and of every token up to the block's end. The tree tells
    colliding prompts apart by comparing all their tokens; a tier keeps a block without the ones
    before it, so here the key itself must prove the prefix, against crafted collisions too.

    Args:
        namespace: its fields are length-prefixed, as in `namespace_seed`.
        tokens: int32 ids from the start of the prompt, little-endian.
        block_bytes: bytes of one block of ids.
        first: first block wanted.
        last: end of the range; `tokens` must cover it.

    Cost: one pass over the prefix, about 1 us per key.

    >>> a, b = prefix_keys((), bytes(8), 4, 0, 2)
    >>> [b] == list(prefix_keys((), bytes(8), 4, 1, 2)), a == b
    (True, False)
    """
    state = hashlib.sha256(namespace_seed(namespace, bytes))
    view = memoryview(tokens)
    state.update(view[: first * block_bytes])
    for block in range(first, last):
        state.update(view[block * block_bytes : (block + 1) * block_bytes])
        yield state.copy().digest()


def node_prefix(node: Node) -> bytes:
    """Return all tokens from the root to the end of the node's run. Cost: O(tokens)."""
    runs = []
    current: Node | None = node
    while current is not None:
        runs.append(current.tokens)
        current = current.parent
    return b"".join(reversed(runs))


@dataclass(frozen=True, slots=True)
class Entry:
    """A block and the slot that holds its content, or held it until another took the slot."""

    key: bytes
    tokens: bytes
    slot: int


class SlotIndex:
    """Owns the slots of one tier: which are free, and which block each of the others holds.

    A slot is free, or taken (being filled, findable by nobody), or holds the block of exactly one
    key. The least recently used block makes room. Every operation is O(1).

    >>> index = SlotIndex(1)
    >>> slot, _ = index.take()
    >>> index.put(b"key", b"tokens", slot), index.find(b"key", b"tokens")
    (None, 0)
    >>> index.take()
    (0, Entry(key=b'key', tokens=b'tokens', slot=0))
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        self._entries: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()
        self._free: list[int] = []  # slots given back
        self._next = 0  # from here on no slot was ever taken

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def find(self, key: bytes, tokens: bytes) -> int | None:
        """Return the slot of a block, if its tokens are these; changes nothing."""
        entry = self._entries.get(key)
        return entry[1] if entry is not None and entry[0] == tokens else None

    def touch(self, key: bytes) -> None:
        """Make a block the most recently used, if it is here."""
        if key in self._entries:
            self._entries.move_to_end(key)

    def demote(self, key: bytes) -> None:
        """Make a block the first to make room, if it is here."""
        if key in self._entries:
            self._entries.move_to_end(key, last=False)

    def take(self) -> tuple[int, Entry | None]:
        """Take a slot to fill, and say which block lost it.

        Raises:
            IndexError: every slot is being filled.
        """
        if self._free:
            return self._free.pop(), None
        if self._next < self.capacity:
            self._next += 1
            return self._next - 1, None
        if not self._entries:
            raise IndexError("every slot is being filled")
        key, (tokens, slot) = self._entries.popitem(last=False)
        return slot, Entry(key, tokens, slot)

    def put(self, key: bytes, tokens: bytes, slot: int) -> None:
        """File a taken slot, now filled, as the most recently used block."""
        self.drop(key)
        self._entries[key] = (tokens, slot)

    def restore(self, entries: Iterable[Entry]) -> None:
        """Fill an empty index with blocks, least recently used first, as after a restart."""
        kept = [e for e in entries if e.slot < self.capacity]
        held = {e.slot for e in kept}
        self._next = max(held, default=-1) + 1
        self._free = [slot for slot in range(self._next) if slot not in held]
        for entry in kept:
            self.put(entry.key, entry.tokens, entry.slot)

    def give_back(self, slot: int) -> None:
        """Free a taken slot that could not be filled."""
        self._free.append(slot)

    def drop(self, key: bytes) -> None:
        """Forget a block, if it is here."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._free.append(entry[1])

    def clear(self) -> None:
        """Forget every block."""
        for key in list(self._entries):
            self.drop(key)

    def items(self) -> Iterator[Entry]:
        """Yield every block, least recently used first."""
        for key, (tokens, slot) in self._entries.items():
            yield Entry(key, tokens, slot)

    def check_integrity(self) -> None:
        """Raise ValueError unless every slot ever handed out is in one place."""
        held = [slot for _, slot in self._entries.values()]
        known = held + self._free
        if len(known) != len(set(known)) or not all(0 <= s < self._next for s in known):
            raise ValueError(f"slots in two places or unknown: {sorted(known)}")
        if self._next > self.capacity:
            raise ValueError(f"{self._next} slots handed out of {self.capacity}")
