"""Evicts first what is least likely to come back soon, as learned from the sessions seen so far."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

import numpy as np
import numpy.typing as npt
from sortedcontainers import SortedDict

from radixkv.cache.eviction import EvictionPolicy, Key
from radixkv.cache.hashing import HASH_BYTES
from radixkv.cache.radix_tree import Node

__all__ = ["SessionPolicy"]

Counts = npt.NDArray[np.float64]  # [class, age bin]

LEFT_BEHIND = -1.0
TURNS = (0, 1, 2, 4, 8)  # a class of paths ends at each of these numbers of turns; the last is open
NUM_CLASSES = len(TURNS) + 2

# Ages are told apart by a factor of sqrt(2), from a quarter of a second to a month.
SHORTEST_S = 0.25
BINS_PER_OCTAVE = 2
NUM_BINS = 48
EDGES_S = np.concatenate(([0.0], SHORTEST_S * 2 ** (np.arange(NUM_BINS) / BINS_PER_OCTAVE)))
WIDTHS_S = np.diff(EDGES_S)
IS_LATER = np.triu(np.ones((NUM_BINS, NUM_BINS), dtype=bool))  # [age bin, later bin]

# What is assumed of an age nobody has reached: that a path comes back within it this likely. The
# same for every bin, so that the chance per second falls with age and the order is that of LRU.
PRIOR_CHANCE = 0.02
PRIOR_WEIGHT = 64

MAX_GHOSTS = 16_384
MAX_SAMPLES = 512
MAX_LEARN_INTERVAL = 128
HALF_LIFE = 8192


class SessionPolicy(EvictionPolicy):
    """Learns how likely a path comes back, by its turns so far and its age, and keeps the best.

    A path that was continued once is likelier to be continued again, and more so with every turn;
    a person's or a tool's answer takes its time; and what a continuation left behind (a rewritten
    end) is hardly ever asked for. So leaves are put into a few classes: left behind, or by the
    number of times that their path came back. Per class the policy counts at which age leaves came
    back. Evicted leaves are remembered for a while by the hash of their first block, so that
    a return that comes too late is learned from too, and its turns aren't forgotten; what hasn't
    come back yet counts as not back until its present age (the Kaplan-Meier estimate).

    The value of a leaf is its Gittins index: the most returns per second of cache time that keeping
    it for any length of time is expected to bring. The least valuable goes first. In a class it is
    the oldest or the youngest, since the chance to come back first rises and then falls with age.

    It sees no more than the cache does: hits, times and hashes.

    Source: the value is that of LHD (Beckmann, Chen, Cidon, NSDI 2018) with Gittins' horizon; that
    turns and gaps predict a conversation's return is from T-LRU (arXiv:2510.15152).
    """

    name = "session"

    def __init__(self, clock: Callable[[], float], *, by_namespace: bool = False) -> None:
        super().__init__(clock, by_namespace=by_namespace)
        self._returned: Counts = np.zeros((NUM_CLASSES, NUM_BINS))
        self._lost: Counts = np.zeros((NUM_CLASSES, NUM_BINS))
        self._ghosts: OrderedDict[bytes, tuple[float, float]] = OrderedDict()  # rank, last access
        self._num_events = 0
        self._next_learning = 1
        self._values = return_values(self._returned, self._lost)

    @property
    def num_returns(self) -> float:
        """Returns learned from, older ones at less than full weight."""
        return float(self._returned.sum())

    def key(self, node: Node) -> Key:
        """Order by class, then last access."""
        return _class(node.rank), node.last_access, node.node_id

    def choose(self, leaves: SortedDict) -> Node:
        """Return the least valuable of the oldest and youngest of each class."""
        now = self._clock()
        best: Node | None = None
        lowest = math.inf
        key = leaves.peekitem(0)[0]
        while key is not None:
            values, after = self._values[key[0]], (key[0] + 1,)
            for end in (key, next(leaves.irange(None, after, reverse=True))):
                node: Node = leaves[end]
                value = values[_bin(now - node.accessed_at)]
                if value < lowest:
                    best, lowest = node, value
            key = next(leaves.irange(after), None)
        assert best is not None
        return best

    def on_created(self, node: Node) -> None:
        """Count the turns on: of the path that is continued, or of one that was evicted."""
        parent = node.parent
        assert parent is not None
        # With more edges than this and what it left behind, it is a prefix that sessions share.
        if not parent.is_root and len(parent.children) + len(parent.tails) <= 2:
            node.rank = max(parent.rank, 0)
        if not self._ghosts:
            return
        for at in range(0, len(node.hashes), HASH_BYTES):
            ghost = self._ghosts.pop(node.hashes[at : at + HASH_BYTES], None)
            if ghost is not None:
                self._count(self._returned, *ghost)
                node.rank = max(node.rank, max(ghost[0], 0) + 1)

    def on_hit(self, node: Node) -> None:
        """Count a turn, and learn from the return of a path's end that could have been evicted."""
        # A tail isn't hit itself: it is copied, and dropped once a longer block replaces it.
        if node.ref_count == 0 and not node.children and not node.is_root:
            self._count(self._returned, node.rank, node.accessed_at)
        node.rank = max(node.rank, 0) + 1

    def on_split(self, upper: Node, lower: Node) -> None:
        """Learn from the return of the upper part; the lower one is left behind if it is an end."""
        if lower.children:
            return
        if lower.ref_count == 0:
            self._count(self._returned, lower.rank, lower.accessed_at)
        lower.rank = LEFT_BEHIND
        for tail in lower.tails:
            self.discard(tail)
            tail.rank = LEFT_BEHIND
            self.add(tail)

    def on_evicted(self, node: Node, num_blocks: int) -> None:
        """Remember a run that is gone as a whole."""
        if num_blocks < node.num_blocks or node.is_tail:
            return
        self._ghosts[node.hashes[:HASH_BYTES]] = (node.rank, node.accessed_at)
        if len(self._ghosts) > MAX_GHOSTS:
            self._count(self._lost, *self._ghosts.popitem(last=False)[1])

    def _count(self, counts: Counts, rank: float, since: float) -> None:
        """Add an event of a leaf last accessed at `since`. Cost: O(1) amortised."""
        counts[_class(rank), _bin(self._clock() - since)] += 1
        self._num_events += 1
        if self._num_events >= self._next_learning:
            self._learn()

    def _learn(self) -> None:
        """Recompute the values; often at first, then every `MAX_LEARN_INTERVAL` events."""
        now = self._clock()
        waiting = [[0] * NUM_BINS for _ in range(NUM_CLASSES)]  # faster than an array, item by item
        step = 1 + len(self._ghosts) // MAX_SAMPLES
        for rank, since in islice(self._ghosts.values(), 0, None, step):
            waiting[_class(rank)][_bin(now - since)] += step
        step = 1 + len(self._leaves) // MAX_SAMPLES
        leaves = self._leaves.values()
        for index in range(0, len(leaves), step):
            leaf = leaves[index]
            waiting[_class(leaf.rank)][_bin(now - leaf.accessed_at)] += step
        self._values = return_values(self._returned, self._lost + np.array(waiting))
        if self._num_events >= HALF_LIFE:
            self._returned *= 0.5
            self._lost *= 0.5
            self._num_events //= 2
        interval = min(MAX_LEARN_INTERVAL, max(16, self._num_events // 8))
        self._next_learning = self._num_events + interval


def return_values(returned: Counts, not_returned: Counts) -> list[list[float]]:
    """Return the Gittins index of each class at each age, in returns per second.

    Args:
        returned: leaves that came back at that age.
        not_returned: leaves last seen at that age, not back until then.
    """
    returned, not_returned = _smooth(returned), _smooth(not_returned)
    at_risk = _reverse_cumsum(returned + not_returned)
    # A class that is little known is taken to be like all together, and those to be like the prior.
    pooled = (returned.sum(0) + PRIOR_WEIGHT * PRIOR_CHANCE) / (at_risk.sum(0) + PRIOR_WEIGHT)
    chance = (returned + PRIOR_WEIGHT * pooled) / (at_risk + PRIOR_WEIGHT)
    # Up to each edge: how many of the class's leaves come back, and the seconds they take.
    reached = np.cumprod(np.hstack((np.ones((NUM_CLASSES, 1)), 1 - chance[:, :-1])), axis=1)
    returns = np.pad(np.cumsum(reached * chance, axis=1), ((0, 0), (1, 0)))
    seconds = np.pad(np.cumsum(reached * (1 - chance / 2) * WIDTHS_S, axis=1), ((0, 0), (1, 0)))
    # From each age to each later edge; the share that reaches the age is in both and cancels.
    gained = returns[:, None, 1:] - returns[:, :-1, None]
    spent = seconds[:, None, 1:] - seconds[:, :-1, None]
    rates = np.where(IS_LATER, gained / np.where(IS_LATER, spent, 1), 0)
    values: list[list[float]] = rates.max(axis=2).tolist()
    return values


def _class(rank: float) -> int:
    if rank < 0:
        return 0
    return 1 + bisect_left(TURNS, rank)


def _bin(age_s: float) -> int:
    if age_s < SHORTEST_S:
        return 0
    octaves = math.log2(age_s / SHORTEST_S)
    return min(NUM_BINS - 1, int(BINS_PER_OCTAVE * octaves) + 1)


def _smooth(counts: Counts) -> Counts:
    """Share counts with the neighbouring ages, since an age of few leaves says little."""
    padded = np.pad(counts, ((0, 0), (1, 1)), mode="edge")
    return (padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]) / 4


def _reverse_cumsum(counts: Counts) -> Counts:
    return counts[:, ::-1].cumsum(axis=1)[:, ::-1]
