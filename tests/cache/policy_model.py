"""Each order of eviction by its definition, for the brute-force model: every question is a sort."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from radixkv.cache import session_policy

if TYPE_CHECKING:
    from cache_model import CacheModel, Run

Key = tuple[float, ...]
Values = Callable[[], list[list[float]]]


class LRUModel:
    """Least recently used first; also what the others are made of."""

    def __init__(self, model: CacheModel) -> None:
        self.model = model

    def key(self, run: Run) -> Key:
        return (run.used,)

    def victim(self, leaves: list[Run]) -> Run:
        return min(leaves, key=self.key)

    def created(self, run: Run) -> None:
        """A run or tail was filed."""

    def hit(self, run: Run) -> None:
        """A lookup is about to lock the whole run; `hits` counts it."""

    def split(self, upper: Run, lower: Run) -> None:
        """A lookup agreed with `upper` only."""

    def evicted(self, run: Run, count: int) -> None:
        """The last `count` blocks of the run go."""

    def added(self) -> None:
        """A leaf has become evictable."""


class LFUModel(LRUModel):
    """Fewest uses first, each counted from the rank of the last victim before it."""

    age = 0.0

    def key(self, run: Run) -> Key:
        return run.rank, run.used

    def created(self, run: Run) -> None:
        run.rank = self.age + 1

    def hit(self, run: Run) -> None:
        run.rank = self.age + 1 + run.hits

    def evicted(self, run: Run, count: int) -> None:
        self.age = max(self.age, run.rank)


class SLRUModel(LRUModel):
    """Unprotected first; a hit protects; four fifths of the leaves are protected at most."""

    def key(self, run: Run) -> Key:
        return run.rank, run.used

    def hit(self, run: Run) -> None:
        run.rank = 1

    def split(self, upper: Run, lower: Run) -> None:
        lower.rank = 0

    def added(self) -> None:
        leaves = self.model.leaves()
        protected = sorted((r for r in leaves if r.rank), key=lambda r: r.used)
        while len(protected) > 0.8 * len(leaves):
            protected.pop(0).rank = 0


class PriorityModel(LRUModel):
    """Lowest priority first."""

    def key(self, run: Run) -> Key:
        return run.priority, run.used


class SessionModel(LRUModel):
    """Least valuable first, of the oldest and the youngest of each class.

    The rank is the number of turns, or -1 for what was left behind. The values are the policy's
    own; what it learned them from is counted here.
    """

    def __init__(self, model: CacheModel) -> None:
        super().__init__(model)
        self.returned: Counter[tuple[int, int]] = Counter()  # (class, age bin)
        self.ghosts: dict[bytes, tuple[float, float]] = {}
        self.values: Values = list

    def key(self, run: Run) -> Key:
        return class_of(run.rank), run.used

    def victim(self, leaves: list[Run]) -> Run:
        ends = []
        for number in range(7):
            own = sorted((r for r in leaves if class_of(r.rank) == number), key=self.key)
            ends += [own[0], own[-1]] if own else []
        return min(ends, key=lambda r: self.values()[class_of(r.rank)][self.bin_of(r.used_at)])

    def created(self, run: Run) -> None:
        parent = self.model.parent(run)
        if parent is not None and len(self.model.below(parent)) <= 2:
            run.rank = max(parent.rank, 0)
        for digest in self.model.block_hashes(run):
            if (ghost := self.ghosts.pop(digest, None)) is not None:
                self.learn(*ghost)
                run.rank = max(run.rank, max(ghost[0], 0) + 1)

    def hit(self, run: Run) -> None:
        if not self.model.is_locked(run) and all(r.is_tail for r in self.model.below(run)):
            self.learn(run.rank, run.used_at)
        run.rank = max(run.rank, 0) + 1

    def split(self, upper: Run, lower: Run) -> None:
        tails = self.model.below(lower)
        if not all(r.is_tail for r in tails):
            return
        if not self.model.is_locked(lower):
            self.learn(lower.rank, lower.used_at)
        for run in [lower, *tails]:
            run.rank = -1

    def evicted(self, run: Run, count: int) -> None:
        if not run.is_tail and count == self.model.num_blocks_of(run):
            self.ghosts[self.model.block_hashes(run)[0]] = run.rank, run.used_at

    def learn(self, rank: float, since: float) -> None:
        self.returned[class_of(rank), self.bin_of(since)] += 1

    def bin_of(self, since: float) -> int:
        age = self.model.now - since
        return sum(age >= edge for edge in session_policy.EDGES_S[1:-1])


def class_of(rank: float) -> int:
    """Left behind; 0, 1, 2, 3 to 4, 5 to 8, and more turns."""
    return sum(rank >= least for least in (0, 1, 2, 3, 5, 9))


POLICY_MODELS: dict[str, type[LRUModel]] = {
    "lru": LRUModel,
    "lfu": LFUModel,
    "slru": SLRUModel,
    "priority": PriorityModel,
    "session": SessionModel,
}
