"""Shares of the pool, so that one namespace can't flush the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sortedcontainers import SortedDict

from radixkv.cache.radix_tree import Root
from radixkv.request import Namespace

__all__ = ["Quotas"]


class Quotas:
    """Owns who is over its share.

    A namespace may take more than its share while free blocks are to be had; when blocks must be
    evicted, whoever is over its share gives first: the one that asks, then the others, the most
    excessive first. So if the shares add up to at most 1, what a namespace caches within its share
    stays, as long as the others' excess isn't in use.

    A namespace's use is its cached blocks plus those that its sequences hold privately (one that
    forks share counts for each).
    """

    def __init__(
        self, num_blocks: int, shares: Mapping[Namespace, float] | None, default: float
    ) -> None:
        """Make quotas for a pool of `num_blocks`.

        Raises:
            ValueError: a share isn't in (0, 1].
        """
        self._shares = dict(shares or {})
        self._default = default
        for share in (default, *self._shares.values()):
            if not 0 < share <= 1:
                raise ValueError(f"a quota must be over 0 and at most 1, got {share}")
        self._num_blocks = num_blocks
        self.enabled = any(share < 1 for share in (default, *self._shares.values()))
        self._over: SortedDict = SortedDict()  # (-excess, namespace) -> root
        self._excess: dict[Namespace, int] = {}  # of those in _over

    @property
    def named(self) -> list[Namespace]:
        """The namespaces with a share of their own."""
        return list(self._shares)

    def limit(self, namespace: Namespace) -> int:
        """Return the blocks of a namespace's share."""
        return int(self._shares.get(namespace, self._default) * self._num_blocks)

    def excess(self, root: Root, more: int = 0) -> int:
        """Return by how many blocks a namespace is over its share, once it has `more`."""
        return root.num_blocks + root.num_held + more - self.limit(root.namespace)

    def update(self, root: Root) -> None:
        """Note that a namespace's use has changed. Cost: O(log namespaces over their shares)."""
        excess, before = self.excess(root), self._excess.get(root.namespace, 0)
        if max(excess, 0) == before:
            return
        if before:
            del self._over[-before, root.namespace]
            del self._excess[root.namespace]
        if excess > 0:
            self._over[-excess, root.namespace] = root
            self._excess[root.namespace] = excess

    def over(self) -> Iterator[Root]:
        """Yield the namespaces over their shares, the one with most excess first."""
        return iter(self._over.values())
