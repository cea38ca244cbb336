"""How far a live request has come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from radixkv.engine.request import EngineRequest, Status

__all__ = ["RequestProgress"]


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """A live request at one moment.

    Attributes:
        state: "waiting" to start, or to go on after a preemption; "prefill" while tokens of its
            prompt, or what a preemption lost, are computed; else "decode".
        num_cached_tokens: prompt tokens reused; None before it was admitted.
        num_output_tokens: tokens of all answers so far, those that are held back included.
    """

    state: Literal["waiting", "prefill", "decode"]
    num_cached_tokens: int | None
    num_output_tokens: int

    @classmethod
    def of(cls, request: EngineRequest) -> RequestProgress:
        """Look at a request between two steps. Cost: O(branches)."""
        num_output_tokens = sum(branch.num_output_tokens for branch in request.branches)
        state: Literal["waiting", "prefill", "decode"] = "decode"
        if request.status is Status.WAITING:
            state = "waiting"
        elif request.timings.first_token is None or request.is_prefilling:
            state = "prefill"
        return cls(state, request.num_cached_tokens, num_output_tokens)
