"""Blocks: PagedAttention without reuse across requests, and vAttention's pages."""

from __future__ import annotations

import math

from radixkv.simulate.managers.base import WATERMARK, Allocation, MemoryManager
from radixkv.simulate.traffic import Request

__all__ = ["PagedBlocks", "VirtualPages"]


class PagedBlocks(MemoryManager):
    """Gives out blocks one by one, as answers grow into them.

    The samples of a request share the whole blocks of its prompt; each has a copy of the last,
    partly filled one. Source: PagedAttention (arXiv:2309.06180), sections 4.3 and 4.4.
    """

    name = "paged"

    def __init__(self, total: int, block_size: int) -> None:
        super().__init__(total)
        self.block_size = block_size
        self.num_blocks = total // block_size
        self.num_free = self.num_blocks
        self.watermark = math.ceil(WATERMARK * self.num_blocks)

    def _allocate(self, request: Request, generated: int) -> Allocation | None:
        common, rest = divmod(request.prompt_len, self.block_size)
        own = -(-(rest + generated) // self.block_size)
        n = request.num_samples
        blocks = common + n * own
        spare = self.watermark if self.num_held else 0
        if blocks + spare > self.num_free:
            return None
        self.num_free -= blocks
        allocation = Allocation(request, 0, 0.0, common * self.block_size + n * rest, 0.0)
        self._resize(allocation, (common + own) * self.block_size)
        return allocation

    def _extend(self, allocation: Allocation) -> bool:
        n = allocation.request.num_samples
        if n > self.num_free:
            return False
        self.num_free -= n
        self._resize(allocation, allocation.limit + self.block_size)
        return True

    def _free(self, allocation: Allocation, generated: int) -> None:
        self.num_free += round(allocation.slots) // self.block_size

    def _resize(self, allocation: Allocation, limit: int) -> None:
        request = allocation.request
        common = request.prompt_len // self.block_size * self.block_size
        allocation.limit = limit
        allocation.slots = float(common + request.num_samples * (limit - common))
        filled = min(limit, request.final_len)
        allocation.needed = float(common + request.num_samples * (filled - common))


class VirtualPages(MemoryManager):
    """Gives each answer a contiguous range of virtual memory and maps pages into it as it grows.

    K and V of each layer are tensors of their own, so that one more page of each is mapped at
    once: `2 * layers` pages, which hold `page_tokens` tokens (not a whole number, since tokens may
    lie across the border of two pages). Nothing is shared.
    Source: vAttention (arXiv:2405.04437).
    """

    name = "vattention"

    def __init__(self, total: int, page_tokens: float) -> None:
        super().__init__(total)
        self.page_tokens = page_tokens
        self.num_pages = int(total / page_tokens)
        self.num_free = self.num_pages
        self.watermark = math.ceil(WATERMARK * self.num_pages)
        self._pages: dict[Allocation, int] = {}  # per sample

    def _allocate(self, request: Request, generated: int) -> Allocation | None:
        pages = math.ceil((request.prompt_len + generated) / self.page_tokens)
        n = request.num_samples
        spare = self.watermark if self.num_held else 0
        if n * pages + spare > self.num_free:
            return None
        self.num_free -= n * pages
        allocation = Allocation(request, 0, 0.0, n * request.prompt_len, 0.0)
        self._resize(allocation, pages)
        return allocation

    def _extend(self, allocation: Allocation) -> bool:
        n = allocation.request.num_samples
        # A page may be smaller than a token's row, so that one token needs several.
        pages = math.ceil((allocation.limit + 1) / self.page_tokens)
        missing = n * (pages - self._pages[allocation])
        if missing > self.num_free:
            return False
        self.num_free -= missing
        self._resize(allocation, pages)
        return True

    def _free(self, allocation: Allocation, generated: int) -> None:
        self.num_free += allocation.request.num_samples * self._pages.pop(allocation)

    def _resize(self, allocation: Allocation, pages: int) -> None:
        n = allocation.request.num_samples
        self._pages[allocation] = pages
        allocation.limit = int(pages * self.page_tokens)
        allocation.slots = n * pages * self.page_tokens
        allocation.needed = float(n * min(allocation.limit, allocation.request.final_len))
