"""How long a step takes, learned from the steps that were run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixkv.model.attention import AttentionMetadata

__all__ = ["StepCost", "StepLoad", "StepRoom", "load_of"]

SAMPLES_PER_BUCKET = 12
MAX_BUCKETS = 96
MIN_SAMPLES = 8  # before that nothing is predicted
MAX_STEPS_BETWEEN_FITS = 32
ROUNDS = 5  # of reweighting
MIN_RESIDUAL = 0.02  # relative; what is closer than that to the fit counts alike
HALF_LIFE = 4096.0  # steps after which a sample counts half
HIGH = 0.97  # the quantile that `predict_high` aims at, so that 0.95 is met with a margin
HIGH_GAIN = 0.05
MAX_HIGH = 3.0  # times the prediction
MEAN_GAIN = 1 / 256  # weight of a step in the mean of actual over predicted
MAX_GROWTH = 2  # a chunk makes a step no longer than this many times the longest one seen


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step has to do.

    Attributes:
        tokens: query rows.
        attended: (query row, token it attends to) pairs.
        samples: rows whose logits are wanted.
    """

    tokens: int = 0
    attended: int = 0
    samples: int = 0

    def plus(self, start: int, count: int, samples: int = 0) -> StepLoad:
        """Return the load with tokens `start` to `start + count` of a sequence added."""
        attended = self.attended + count * start + count * (count + 1) // 2
        return StepLoad(self.tokens + count, attended, self.samples + samples)

    def minus(self, start: int, count: int) -> StepLoad:
        """Return the load without `count` drafted tokens behind the first `start`, all sampled."""
        attended = self.attended - count * start - count * (count + 1) // 2
        return StepLoad(self.tokens - count, attended, self.samples - count)


class StepCost:
    """Owns a linear model of the seconds of a step: constant, tokens, attended pairs, samples.

    The samples are kept in buckets by size, so that thousands of decode steps don't push out the
    few prefills. The fit minimizes relative absolute errors, which a pause of the machine or the
    first slow steps hardly move; no coefficient is negative.
    """

    def __init__(self) -> None:
        rows = MAX_BUCKETS * SAMPLES_PER_BUCKET
        self._loads = np.zeros((rows, 4))
        self._seconds = np.ones(rows)
        self._steps = np.full(rows, -math.inf)
        self._buckets: dict[tuple[int, int], int] = {}
        self._next_in_bucket = [0] * MAX_BUCKETS
        self._coefficients: npt.NDArray[np.float64] | None = None
        self._high = 1.0
        self._actual_s = self._predicted_s = 0.0  # decaying sums
        self._longest = 0
        self._since_fit = 0
        self.num_recorded = 0

    @property
    def coefficients(self) -> tuple[float, float, float, float] | None:
        """Seconds per step, token, attended pair, and sample; None while too little is known."""
        if self._coefficients is None:
            return None
        a, b, c, d = self._coefficients.tolist()
        return a, b, c, d

    @property
    def mean_ratio(self) -> float:
        """Time that late steps took over what was predicted: outliers move it, but not the fit."""
        return self._actual_s / self._predicted_s if self._predicted_s else 1.0

    def record(self, load: StepLoad, seconds: float) -> None:
        """Learn from a step. Cost: O(1), and a fit of a few hundred rows now and then."""
        if load.tokens < 1 or not seconds > 0:
            return
        predicted = self.predict(load)
        if predicted is not None:
            # Stochastic approximation of the quantile of actual over predicted.
            above = seconds > predicted * self._high
            self._high += HIGH_GAIN * (HIGH - 1.0 + above)
            self._high = min(max(self._high, 1.0), MAX_HIGH)
            self._actual_s += MEAN_GAIN * (seconds - self._actual_s)
            self._predicted_s += MEAN_GAIN * (predicted - self._predicted_s)
        row = self._row(load)
        self._loads[row] = 1.0, load.tokens, load.attended, load.samples
        self._seconds[row] = seconds
        self._steps[row] = self.num_recorded
        self.num_recorded += 1
        self._longest = max(self._longest, load.tokens)
        self._since_fit += 1
        if self.num_recorded >= MIN_SAMPLES and self._since_fit >= min(
            MAX_STEPS_BETWEEN_FITS, 1 + self.num_recorded // 8
        ):
            self._since_fit = 0
            self._fit()

    def predict(self, load: StepLoad) -> float | None:
        """Return the seconds such a step usually takes; None while too little is known."""
        if self._coefficients is None:
            return None
        a, b, c, d = self._coefficients.tolist()
        return float(a + b * load.tokens + c * load.attended + d * load.samples)

    def predict_high(self, load: StepLoad) -> float | None:
        """Return the seconds that hardly any such step exceeds; None as `predict`."""
        predicted = self.predict(load)
        return None if predicted is None else predicted * self._high

    def prefill_seconds(self, start: int, count: int) -> float | None:
        """Return what computing tokens `start` to `start + count` adds to steps; None as above."""
        if self._coefficients is None:
            return None
        _, b, c, _ = self._coefficients.tolist()
        load = StepLoad().plus(start, count)
        return float(b * load.tokens + c * load.attended)

    def largest_chunk(self, load: StepLoad, start: int, limit: int, target_s: float) -> int:
        """Return how many tokens from `start` on a step can take beside `load`.

        Args:
            load: what the step does anyway.
            start: position of the first token.
            limit: no more than this.
            target_s: the step should take no longer, all but rarely.

        Returns:
            0 to `limit`; 0 too while too little is known. A size far beyond what was tried is
            approached by doubling.
        """
        if self._coefficients is None:
            return 0
        limit = min(limit, max(0, MAX_GROWTH * self._longest - load.tokens))
        a, b, c, d = (self._coefficients * self._high).tolist()
        room = target_s - (a + b * load.tokens + c * load.attended + d * load.samples)
        if room <= 0:
            return 0
        # c / 2 * count ** 2 + linear * count = room
        linear = b + c * (start + 0.5)
        root = linear + math.sqrt(linear * linear + 2.0 * c * room)
        return limit if root * limit <= 2.0 * room else int(2.0 * room / root)

    def _row(self, load: StepLoad) -> int:
        context = load.attended // load.tokens
        key = load.tokens.bit_length(), context.bit_length() // 2
        bucket = self._buckets.get(key)
        if bucket is None:
            # More sizes than there should ever be share the last bucket.
            bucket = self._buckets[key] = min(len(self._buckets), MAX_BUCKETS - 1)
        index = self._next_in_bucket[bucket]
        self._next_in_bucket[bucket] = (index + 1) % SAMPLES_PER_BUCKET
        return bucket * SAMPLES_PER_BUCKET + index

    def _fit(self) -> None:
        rows = np.flatnonzero(self._steps >= 0)
        seconds = self._seconds[rows]
        x = self._loads[rows] / seconds[:, None]  # so that every residual is relative
        scale = np.maximum(x.max(axis=0), 1e-12)
        x = x / scale
        age = 0.5 ** ((self.num_recorded - self._steps[rows]) / HALF_LIFE)
        weights = age
        solution = np.zeros(4)
        for _ in range(ROUNDS):
            solution = _solve_non_negative(x, weights)
            weights = age / np.maximum(np.abs(x @ solution - 1.0), MIN_RESIDUAL)
        self._coefficients = solution / scale


class StepRoom:
    """Owns what a step can still take: a number of tokens and, beside decodes, a time.

    Attributes:
        num_tokens: that may still be added.
    """

    def __init__(
        self,
        num_tokens: int,
        *,
        cost: StepCost | None = None,
        target_s: float | None = None,
        floor: int = 1,
    ) -> None:
        """Make the room of an empty step.

        Args:
            num_tokens: the step's budget.
            cost: what is known of steps; needed with `target_s`.
            target_s: how long a step with decodes should take; None is no limit.
            floor: tokens that the first prefill gets whatever the target, so that it goes on.
        """
        self.num_tokens = num_tokens
        self._cost = cost
        self._target_s = target_s
        self._floor = floor
        self._load = StepLoad()
        self._num_decodes = 0
        self._has_prefill = False

    def add_decodes(self, seq_lens: Sequence[int]) -> None:
        """Take one token for each sequence of these lengths, the new token included."""
        self._num_decodes += len(seq_lens)
        self.num_tokens -= len(seq_lens)
        self._load = StepLoad(
            self._load.tokens + len(seq_lens),
            self._load.attended + sum(seq_lens),
            self._load.samples + len(seq_lens),
        )

    def add_draft(self, start: int, count: int) -> None:
        """Take `count` drafted tokens that follow the first `start` of a sequence."""
        self.num_tokens -= count
        self._load = self._load.plus(start, count, samples=count)

    def fit(self, start: int, wanted: int) -> int:
        """Return how many of the `wanted` tokens from `start` on the step can take; 0 if none."""
        count = min(wanted, self.num_tokens)
        if count <= 0 or self._target_s is None or self._cost is None or not self._num_decodes:
            return max(count, 0)
        floor = min(self._floor, count)
        most = self._cost.largest_chunk(self._load, start, count, self._target_s)
        if most < floor:
            return 0 if self._has_prefill else floor
        return most

    def take(self, start: int, count: int) -> None:
        """Take what `fit` returned."""
        self.num_tokens -= count
        self._has_prefill = True
        self._load = self._load.plus(start, count)


def load_of(meta: AttentionMetadata, num_samples: int) -> StepLoad:
    """Return what a step does that computes these logits. Cost: O(sequences), vectorized."""
    lengths = meta.seq_lens.astype(np.int64)
    counts = np.diff(meta.query_start_loc).astype(np.int64)
    attended = counts * (lengths - counts) + counts * (counts + 1) // 2
    return StepLoad(int(meta.query_start_loc[-1]), int(attended.sum()), num_samples)


def _solve_non_negative(
    x: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return the least-squares solution of x @ s = 1 with no negative part (by dropping those)."""
    weighted = x * weights[:, None]
    gram, right = weighted.T @ x, weighted.sum(axis=0)
    gram[np.diag_indices(len(gram))] += 1e-6 * np.trace(gram)
    active = np.arange(len(gram))
    solution = np.zeros(len(gram))
    while len(active):
        part = np.linalg.solve(gram[np.ix_(active, active)], right[active])
        if (part >= 0).all():
            solution[active] = part
            break
        active = np.delete(active, int(part.argmin()))
    return solution
