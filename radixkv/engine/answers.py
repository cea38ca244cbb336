"""What a request is told: increments, chosen answers, and ends before the time."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.engine.branch import Branch
from radixkv.engine.request import EngineRequest, Status
from radixkv.request import FinishReason, RequestOutput, TokenLogprob

__all__ = ["Output", "chosen", "ended_early", "increment"]


@dataclass(frozen=True, slots=True)
class Output:
    """An increment together with the request it belongs to."""

    request_id: str
    output: RequestOutput


def increment(
    branch: Branch,
    text: str = "",
    token_ids: tuple[int, ...] = (),
    logprobs: tuple[TokenLogprob, ...] | None = None,
    error: str | None = None,
) -> Output:
    """Return what is new of an answer; its last one if the branch has ended, which is noted."""
    request = branch.request
    if branch.finish_reason is not None:
        request.ended.add(branch.index)
    return Output(
        request.request_id,
        RequestOutput(
            index=branch.index,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=branch.finish_reason,
            stop_reason=branch.stop_reason,
            error=error,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens or 0,
            num_completion_tokens=branch.num_output_tokens,
            score=branch.score,
            timings=request.timings if request.status is Status.FINISHED else None,
        ),
    )


def chosen(request: EngineRequest) -> list[Output]:
    """Return the answers of a request that held them back, best first."""
    outputs = []
    ranked = request.ranked()
    for index in range(request.params.n):
        # A grammar can have fewer answers than were asked for; they are then given again.
        branch = ranked[index % len(ranked)]
        branch.index = index
        logprobs = tuple(branch.logprobs) if request.params.logprobs is not None else None
        ids = tuple(branch.output_token_ids)
        outputs.append(increment(branch, "".join(branch.text), ids, logprobs))
    return outputs


def ended_early(
    request: EngineRequest, reason: FinishReason, error: str | None = None
) -> list[Output]:
    """Return the ends of all answers that had none yet; what was held back of them is dropped."""
    outputs = []
    for index in range(request.params.n):
        if index not in request.ended:
            branch = request.last_of(index)
            branch.finish_reason, branch.stop_reason = reason, None
            outputs.append(increment(branch, error=error))
    return outputs
