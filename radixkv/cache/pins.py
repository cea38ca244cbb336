"""Prefixes that are kept for a while even if nobody uses them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sortedcontainers import SortedDict

from radixkv.cache.radix_tree import Node
from radixkv.request import Namespace

if TYPE_CHECKING:
    from radixkv.cache.radix_cache import RadixCache

__all__ = ["Pin", "Pins"]


@dataclass(slots=True, eq=False)
class Pin:
    """One pin: it holds a lock on `node`, and so on all above it, until `expires_at`.

    `source` says who asked for it, for reports; the cache makes no use of it.
    """

    pin_id: int
    node: Node
    ttl_s: float
    expires_at: float
    source: str = ""


class Pins:
    """Owns the pins of a cache, in the order of their expiry and in the order of their last use.

    Pins can't wedge the pool. All of them together hold at most `max_blocks`: a new one makes the
    least recently used ones lapse. And where the only open sequence can't get its blocks, so that
    nobody else will ever free any, they lapse one by one until it can.

    `Node.pins` counts the pins on a node or below it.

    Attributes:
        max_blocks: blocks that all pins together may hold.
        num_blocks: blocks they hold; one that two pins share counts once.
        num_expired: pins that ran out of time.
        num_lapsed: pins that gave way.
    """

    def __init__(self, cache: RadixCache, max_blocks: int) -> None:
        self._cache = cache
        self.max_blocks = max_blocks
        self.num_blocks = 0
        self.num_expired = 0
        self.num_lapsed = 0
        self._pins: OrderedDict[int, Pin] = OrderedDict()  # least recently used first
        self._by_expiry: SortedDict = SortedDict()  # (expires_at, pin_id) -> pin
        self._by_node: dict[Node, dict[int, Pin]] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def get(self, pin_id: int) -> Pin | None:
        """Return a pin, or None if it is gone."""
        return self._pins.get(pin_id)

    def at(self, node: Node) -> list[Pin]:
        """Return the pins that end at a node."""
        return list(self._by_node.get(node, {}).values())

    def add(self, tokens: bytes, namespace: Namespace, ttl_s: float) -> int | None:
        """Pin the cached whole blocks that `tokens` begin with; see `RadixCache.pin`."""
        if not ttl_s > 0:
            raise ValueError(f"ttl_s must be over 0, got {ttl_s}")
        cache = self._cache
        self.expire()
        most = self.max_blocks * cache.block_size
        handle = cache.match_bytes(tokens, namespace, most)
        if handle.match is None or not handle.match.num_blocks:
            return None
        node = cache.hold(handle, namespace)
        pin = Pin(self._next_id, node, ttl_s, cache.clock() + ttl_s)
        self._next_id += 1
        self._pins[pin.pin_id] = pin
        self._by_expiry[pin.expires_at, pin.pin_id] = pin
        self._by_node.setdefault(node, {})[pin.pin_id] = pin
        current: Node | None = node
        while current is not None:
            if current.pins == 0:
                self.num_blocks += current.num_blocks
            current.pins += 1
            current = current.parent
        while self.num_blocks > self.max_blocks:
            self._lapse()
        return pin.pin_id

    def drop(self, pin_id: int) -> bool:
        """Give up a pin; return whether there was one. Cost: O(depth + log pins)."""
        pin = self._pins.pop(pin_id, None)
        if pin is None:
            return False
        del self._by_expiry[pin.expires_at, pin_id]
        at_node = self._by_node[pin.node]
        del at_node[pin_id]
        if not at_node:
            del self._by_node[pin.node]
        current: Node | None = pin.node
        while current is not None:
            current.pins -= 1
            if current.pins == 0:
                self.num_blocks -= current.num_blocks
            current = current.parent
        self._cache.release_hold(pin.node)
        return True

    def touch(self, node: Node) -> None:
        """Restart the time of the pins that end at a node. Cost: O(log pins) each."""
        for pin in self._by_node.get(node, {}).values():
            del self._by_expiry[pin.expires_at, pin.pin_id]
            pin.expires_at = self._cache.clock() + pin.ttl_s
            self._by_expiry[pin.expires_at, pin.pin_id] = pin
            self._pins.move_to_end(pin.pin_id)

    def expire(self) -> None:
        """Give up the pins whose time is over. Cost: O(depth + log pins) each, O(1) if none."""
        while self._by_expiry:
            (expires_at, pin_id), _ = self._by_expiry.peekitem(0)
            if expires_at > self._cache.clock():
                return
            self.num_expired += 1
            self.drop(pin_id)

    def give_way(self, num_blocks: int) -> None:
        """Lapse, oldest first, if nobody else can free what the only open sequence needs."""
        cache = self._cache
        if num_blocks > cache.num_available_blocks + self.num_blocks:
            return
        while self._pins and len(cache.sequences) <= 1 and num_blocks > cache.num_available_blocks:
            self._lapse()

    def clear(self) -> None:
        """Give up all pins."""
        while self._pins:
            self.drop(next(iter(self._pins)))

    def check(self, nodes: list[Node]) -> str | None:
        """Recompute the counts; return what is wrong, or None."""
        expected: dict[Node, int] = dict.fromkeys(nodes, 0)
        for pin in self._pins.values():
            current: Node | None = pin.node
            while current is not None:
                if current not in expected:
                    return f"pin {pin.pin_id} holds a node outside the tree"
                expected[current] += 1
                current = current.parent
        for node, count in expected.items():
            if node.pins != count or node.ref_count < count:
                return f"node {node.node_id}: {node.pins} pins counted, {count} there"
        held = sum(node.num_blocks for node, count in expected.items() if count)
        if held != self.num_blocks or held > self.max_blocks:
            return f"pinned blocks {held} != {self.num_blocks}, at most {self.max_blocks}"
        keys = {(pin.expires_at, pin.pin_id) for pin in self._pins.values()}
        filed = {(pin_id, node) for node, pins in self._by_node.items() for pin_id in pins}
        if set(self._by_expiry) != keys or filed != {(p.pin_id, p.node) for p in self}:
            return "the indexes of pins differ"
        return None

    def _lapse(self) -> None:
        self.num_lapsed += 1
        self.drop(next(iter(self._pins)))
