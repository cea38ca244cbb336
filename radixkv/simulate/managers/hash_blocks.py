"""Blocks that are found again by the hash of their content and all before it."""

from __future__ import annotations

from collections import OrderedDict

from radixkv.simulate.managers.base import Allocation
from radixkv.simulate.managers.paged import PagedBlocks
from radixkv.simulate.traffic import Request

__all__ = ["HashBlocks"]


class HashBlocks(PagedBlocks):
    """Keeps whole prompt blocks in a table by hash, and evicts them one by one.

    A block that nobody uses goes to the end of a queue from which evictions take the head; a
    request gives its blocks back from last to first, so that of one prompt the deepest goes first.
    A block evicted from the middle makes those behind it unreachable. Answers aren't kept: a trace
    doesn't say which prompts hold them. Source: vLLM, "Automatic Prefix Caching" (design docs).
    """

    name = "hash-blocks"
    reuses = True

    def __init__(self, total: int, block_size: int) -> None:
        super().__init__(total, block_size)
        self._users: dict[int, int] = {}  # key -> running requests
        self._idle: OrderedDict[int, None] = OrderedDict()  # keys nobody uses, next to go first
        self._held: dict[Allocation, list[int]] = {}  # keys whose blocks a request reads

    @property
    def cached(self) -> float:
        """Slots of blocks that nobody uses."""
        return float(len(self._idle) * self.block_size)

    @property
    def shared(self) -> float:
        """Slots of blocks in the table that somebody uses."""
        return float((len(self._users) - len(self._idle)) * self.block_size)

    def computed(self, allocation: Allocation) -> None:
        """Enter the prompt's whole blocks into the table."""
        keys = allocation.request.keys.tolist()
        held = self._held[allocation]
        self._count(allocation, -1)
        for key in keys[len(held) :]:
            # Another may have been quicker; then this request's own block stays unlisted.
            if key not in self._users:
                self._users[key] = 1
                held.append(key)
        self._resize(allocation, allocation.limit)
        self._count(allocation, 1)

    def _allocate(self, request: Request, generated: int) -> Allocation | None:
        keys = request.keys.tolist()
        hit = next((i for i, key in enumerate(keys) if key not in self._users), len(keys))
        idle = sum(key in self._idle for key in keys[:hit])
        common, rest = divmod(request.prompt_len, self.block_size)
        own = -(-(rest + generated) // self.block_size)
        missing = common - hit + request.num_samples * own
        spare = self.watermark if self.num_held else 0
        if missing + spare > self.num_free + len(self._idle) - idle:
            return None
        for key in keys[:hit]:
            self._users[key] += 1
            self._idle.pop(key, None)
        self._take(missing)
        allocation = Allocation(request, 0, 0.0, 0, 0.0, num_cached=hit * self.block_size)
        self._held[allocation] = keys[:hit]
        self._resize(allocation, (common + own) * self.block_size)
        return allocation

    def _extend(self, allocation: Allocation) -> bool:
        n = allocation.request.num_samples
        if n > self.num_free + len(self._idle):
            return False
        self._take(n)
        self._resize(allocation, allocation.limit + self.block_size)
        return True

    def _free(self, allocation: Allocation, generated: int) -> None:
        self.num_free += round(allocation.slots) // self.block_size
        for key in reversed(self._held.pop(allocation)):
            self._users[key] -= 1
            if not self._users[key]:
                self._idle[key] = None

    def _take(self, count: int) -> None:
        while self.num_free < count:
            key, _ = self._idle.popitem(last=False)
            del self._users[key]
            self.num_free += 1
        self.num_free -= count

    def _resize(self, allocation: Allocation, limit: int) -> None:
        super()._resize(allocation, limit)
        request = allocation.request
        listed = len(self._held[allocation]) * self.block_size
        rest = request.prompt_len % self.block_size
        allocation.slots -= listed
        allocation.needed -= listed
        allocation.stored = request.prompt_len - rest - listed + request.num_samples * rest
