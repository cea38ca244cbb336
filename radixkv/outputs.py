"""Whole answers, in the shape of vLLM's `RequestOutput`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from radixkv import request

__all__ = ["AnswerCollector", "CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Of one token at one place.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: 1 for the likeliest; None for a chosen token that isn't among those asked for.
        decoded_token: its text.
    """

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt.

    Attributes:
        index: which of the prompt's answers it is.
        text: without what ended it.
        token_ids: all generated ids, an end token included.
        cumulative_logprob: sum over the tokens, if `logprobs` were asked for.
        logprobs: for each token, the chosen and the likeliest ones by id.
        finish_reason: "stop", "length", "abort", "timeout" or "error".
        stop_reason: the stop string or token id that ended it, if one did.
        error: what went wrong, if the reason is "timeout" or "error".
        score: of an answer chosen among others: its mean log-probability, or that as a beam.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: request.FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    score: float | None = None

    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When things happened, in seconds of `time.monotonic`; None if they did not.

    Attributes:
        time_in_queue: from arrival to the first step.
    """

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    last_token_time: float | None
    finished_time: float | None
    time_in_queue: float | None


@dataclass(slots=True)
class RequestOutput:
    """All answers to one prompt.

    Attributes:
        request_id: unique in the engine.
        prompt: its text; None if token ids were given.
        prompt_token_ids: what the model read.
        outputs: one per answer asked for, by index; those of a beam search best first.
        num_cached_tokens: prompt tokens whose KV was reused.
        metrics: of the request as a whole.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None

    @property
    def finished(self) -> bool:
        """Whether all answers have ended."""
        return all(output.finished() for output in self.outputs)


class AnswerCollector:
    """Owns the output of one request while its increments come."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: request.SamplingParams,
        token_str: Callable[[int], str],
    ) -> None:
        wants = params.logprobs is not None
        self._token_str = token_str
        self._texts: list[list[str]] = [[] for _ in range(params.n)]
        self._output = RequestOutput(
            request_id,
            prompt,
            prompt_token_ids,
            [
                CompletionOutput(
                    index,
                    cumulative_logprob=0.0 if wants else None,
                    logprobs=[] if wants else None,
                )
                for index in range(params.n)
            ],
        )

    def add(self, increment: request.RequestOutput) -> None:
        """Add what is new of one answer."""
        answer = self._output.outputs[increment.index]
        self._texts[increment.index].append(increment.text)
        answer.token_ids.extend(increment.token_ids)
        if answer.logprobs is not None and answer.cumulative_logprob is not None:
            for token in increment.logprobs or ():
                answer.logprobs.append(self._entry(token))
                answer.cumulative_logprob += token.logprob
        answer.finish_reason = increment.finish_reason
        answer.stop_reason = increment.stop_reason
        answer.error = increment.error
        answer.score = increment.score
        self._output.num_cached_tokens = increment.num_cached_tokens
        if increment.timings is not None:
            self._output.metrics = _metrics(increment.timings)

    def result(self) -> RequestOutput:
        """Return the output as it stands."""
        for answer, parts in zip(self._output.outputs, self._texts, strict=True):
            answer.text = "".join(parts)
        return self._output

    def _entry(self, token: request.TokenLogprob) -> dict[int, Logprob]:
        entry = {
            token_id: Logprob(logprob, rank, self._token_str(token_id))
            for rank, (token_id, logprob) in enumerate(token.top, 1)
        }
        if token.token_id not in entry:
            entry[token.token_id] = Logprob(token.logprob, None, self._token_str(token.token_id))
        return entry


def _metrics(timings: request.RequestTimings) -> RequestMetrics:
    scheduled = timings.first_scheduled
    return RequestMetrics(
        arrival_time=timings.arrival,
        first_scheduled_time=scheduled,
        first_token_time=timings.first_token,
        last_token_time=timings.last_token,
        finished_time=timings.finished,
        time_in_queue=None if scheduled is None else scheduled - timings.arrival,
    )
