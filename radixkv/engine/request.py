"""A request while the engine works on it."""

from __future__ import annotations

import enum

from radixkv.cache import Sequence
from radixkv.engine.detokenizer import Decoder, IncrementalDetokenizer, StopMatcher
from radixkv.engine.penalties import Penalties
from radixkv.request import FinishReason, RequestTimings, SamplingParams

__all__ = ["EngineRequest", "Status"]


class Status(enum.Enum):
    """Where a request is. Preempted requests are WAITING again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class EngineRequest:
    """Owns the state of one request from submission to its last output.

    Attributes:
        order: position in the order of arrival; lower goes first, the highest is preempted first.
        sequence: prompt and answer so far; it holds blocks only while the request runs.
        num_prompt_tokens: tokens before the answer.
        max_total_tokens: prompt and answer may not grow past this.
        num_cached_tokens: prompt tokens reused, fixed at the first admission; None before.
        num_cached_by_tier: the same by where they were: device, host, disk.
        leader: a running request that is computing the next block of this prompt; this one waits
            for it instead of computing the block a second time.
        num_matched_blocks: whole blocks the tree held of this prompt when `leader` was chosen.
        num_ever_computed: tokens from the start that were computed (or reused) at some time,
            whatever a preemption gave back since.
    """

    def __init__(
        self,
        request_id: str,
        sequence: Sequence,
        params: SamplingParams,
        *,
        order: int,
        seed: int,
        max_total_tokens: int,
        arrival: float,
        tokenizer: Decoder,
    ) -> None:
        self.request_id = request_id
        self.sequence = sequence
        self.params = params
        self.order = order
        self.seed = seed
        self.max_total_tokens = max_total_tokens
        self.num_prompt_tokens = len(sequence)
        self.status = Status.WAITING
        self.num_cached_tokens: int | None = None
        self.num_cached_by_tier: dict[str, int] = {}
        self.num_preemptions = 0
        self.leader: EngineRequest | None = None
        self.num_matched_blocks = 0
        self.num_ever_computed = 0
        self.finish_reason: FinishReason | None = None
        self.timings = RequestTimings(arrival=arrival)
        self.detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=params.skip_special_tokens
        )
        self.stop_matcher = StopMatcher(params.stop)
        self.penalties = Penalties(self.sequence.token_ids) if params.has_penalties else None

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.sequence) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is still to be computed; 1 while decoding."""
        return len(self.sequence) - self.sequence.num_computed

    @property
    def is_prefilling(self) -> bool:
        """Whether prompt tokens (or, after preemption, earlier answer tokens) are still to go."""
        return self.status is Status.RUNNING and self.num_uncomputed_tokens > 1
