"""What the latest requests found in the cache, and why no more."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from radixkv.cache.explain import Explanation
from radixkv.engine.request import EngineRequest
from radixkv.request import Namespace

__all__ = ["ExplanationLog", "RequestExplanation"]

MAX_REQUESTS = 1000


@dataclass(frozen=True, slots=True)
class RequestExplanation:
    """One request's lookup, as it was at its first admission.

    Attributes:
        created: seconds since 1970.
        num_cached_tokens: tokens reused, from all tiers. Less than `explanation.num_hit_tokens`
            when the pool had no block to copy a partly matching one into.
        cached_by_tier: the same by tier: "device" (the pool), "host", "disk".
        explanation: taken just before the lookup, or just after blocks were brought back for it.
            It holds the token ids around the first miss, and no more of the prompt.
    """

    request_id: str
    namespace: Namespace
    created: float
    num_prompt_tokens: int
    num_cached_tokens: int
    cached_by_tier: dict[str, int]
    explanation: Explanation

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens that had to be computed."""
        return self.num_prompt_tokens - self.num_cached_tokens


class ExplanationLog:
    """Owns the explanations of the last `capacity` requests."""

    def __init__(
        self, capacity: int = MAX_REQUESTS, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self.capacity = capacity
        self._wall_clock = wall_clock
        self._entries: OrderedDict[str, RequestExplanation] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._entries)

    def record(self, request: EngineRequest, explanation: Explanation, num_cached: int) -> None:
        """Keep the explanation of a request that is admitted for the first time."""
        self._entries[request.request_id] = RequestExplanation(
            request.request_id,
            request.namespace,
            self._wall_clock(),
            request.num_prompt_tokens,
            num_cached,
            request.num_cached_by_tier or {"device": num_cached},
            explanation,
        )
        self._entries.move_to_end(request.request_id)
        if len(self._entries) > self.capacity:
            self._entries.popitem(last=False)

    def get(self, request_id: str) -> RequestExplanation | None:
        """Return a request's explanation; None if it was never admitted or is forgotten."""
        return self._entries.get(request_id)

    def recent(self, limit: int, *, misses_only: bool = False) -> list[RequestExplanation]:
        """Return the latest explanations, latest first.

        Args:
            limit: how many at most.
            misses_only: leave out requests that found all they could.
        """
        entries = (
            entry
            for entry in reversed(self._entries.values())
            if not (misses_only and entry.explanation.reason == "complete")
        )
        return list(islice(entries, limit))
