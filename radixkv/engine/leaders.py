"""Prompts in flight that begin alike: one computes what they share, the others wait for it."""

from __future__ import annotations

import numpy as np
from sortedcontainers import SortedList

from radixkv.cache import RadixCache
from radixkv.cache import Sequence as CacheSequence
from radixkv.cache.int_vector import Int32Array
from radixkv.engine.branch import Branch
from radixkv.request import Namespace

__all__ = ["PrefillLeaders", "num_common"]


class PrefillLeaders:
    """Owns which running branches are computing a prompt, and who waits for which of them.

    A follower waits until its leader has computed all the whole blocks that they share, or has
    stopped computing. Branches are found by their first block, and compared once.
    """

    def __init__(self, cache: RadixCache) -> None:
        self._cache = cache
        self._by_start: dict[tuple[Namespace, bytes], list[Branch]] = {}
        self._followers: dict[Branch, SortedList] = {}  # leader -> (tokens to wait for, order)
        self._following: dict[int, tuple[Branch, int]] = {}  # order -> (leader, tokens)

    def __len__(self) -> int:
        return len(self._followers)

    @property
    def num_followers(self) -> int:
        """Requests that wait for another one's prefill."""
        return len(self._following)

    def add(self, branch: Branch) -> None:
        """Let others wait for a branch that begins to compute. Cost: O(1)."""
        whole = len(branch.sequence) >= self._cache.block_size
        if self._cache.enabled and whole and branch.is_prefilling and branch not in self._followers:
            self._followers[branch] = SortedList()
            self._by_start.setdefault(self._start(branch.sequence), []).append(branch)

    def discard(self, branch: Branch) -> list[int]:
        """Forget a branch that computes no more; return the orders of those that waited for it."""
        followers = self._followers.pop(branch, None)
        if followers is None:
            return []
        start = self._start(branch.sequence)
        self._by_start[start].remove(branch)
        if not self._by_start[start]:
            del self._by_start[start]
        orders = [order for _, order in followers]
        for order in orders:
            del self._following[order]
        return orders

    def find(self, sequence: CacheSequence, num_matched: int) -> tuple[Branch, int] | None:
        """Return whom to wait for, and the token up to which, or None if nobody helps.

        Args:
            sequence: of a request that could start.
            num_matched: whole blocks of it that are cached.

        Cost: O(1), and a comparison with each running prefill that has the same first block.
        """
        size = self._cache.block_size
        best: tuple[Branch, int] | None = None
        for branch in self._by_start.get(self._start(sequence), ()):
            if not branch.is_prefilling:
                continue
            shared = num_common(branch.sequence.token_ids, sequence.token_ids) // size * size
            if shared > max(num_matched * size, branch.sequence.num_computed) and (
                best is None or shared > best[1]
            ):
                best = branch, shared
        return best

    def follow(self, order: int, leader: Branch, num_tokens: int) -> None:
        """Note that a request waits until `leader` has computed its first `num_tokens` tokens."""
        self._followers[leader].add((num_tokens, order))
        self._following[order] = leader, num_tokens

    def forget(self, order: int) -> None:
        """Note that a request waits no more. Idempotent."""
        leader, num_tokens = self._following.pop(order, (None, 0))
        if leader is not None:
            self._followers[leader].remove((num_tokens, order))

    def release(self) -> list[int]:
        """Return the orders of those whose wait is over. Cost: O(prefills + released)."""
        released: list[int] = []
        for branch in list(self._followers):
            if not branch.is_prefilling:
                released += self.discard(branch)
                continue
            followers = self._followers[branch]
            while followers and followers[0][0] <= branch.sequence.num_computed:
                _, order = followers.pop(0)
                del self._following[order]
                released.append(order)
        return released

    def _start(self, sequence: CacheSequence) -> tuple[Namespace, bytes]:
        return sequence.namespace, sequence.token_ids[: self._cache.block_size].tobytes()


def num_common(first: Int32Array, second: Int32Array) -> int:
    """Return the length of the longest common beginning of two arrays of token ids."""
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if len(different) else length
