"""Measures what requests wait for and what steps consist of."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from radixkv.engine.histogram import Histogram, HistogramData
from radixkv.engine.request import EngineRequest
from radixkv.engine.scheduler import ScheduledChunk
from radixkv.request import FinishReason, Namespace

__all__ = ["STEP_TOKEN_KINDS", "Meter", "StepTokens"]

# Of vLLM's dashboards: what a request takes, and what a token takes.
REQUEST_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_BOUNDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
STEP_BOUNDS = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
)  # fmt: skip
COUNT_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

STEP_TOKEN_KINDS = ("decode", "prefill", "speculated")


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The query rows of a step: last tokens of decoding branches, chunks of prompts, drafts."""

    decode: int
    prefill: int
    speculated: int


class Meter:
    """Owns the histograms of an engine, and the counts by which its tokens add up.

    A prompt token of an admitted request is found cached, computed, found cached later (the request
    was preempted before it came to it, and somebody else has computed it since), still to be
    computed, or dropped, if the request ended before.

    Attributes:
        model_time_s: seconds the model took, of all steps.
        step_tokens: query rows of all steps by kind.
        answer_tokens_computed: answer tokens whose KV a step computed for the first time, those
            that were accepted drafts excepted.
        prompt_tokens_found_late, prompt_tokens_dropped: see above.
        waits: (requests, seconds in the queue) by namespace, of the named ones.
    """

    def __init__(self, named: Collection[Namespace]) -> None:
        """Make an empty meter.

        Args:
            named: namespaces whose waiting times are kept apart. Clients make up others at will.
        """
        self.model_time_s = 0.0
        self.step_tokens = dict.fromkeys(STEP_TOKEN_KINDS, 0)
        self.answer_tokens_computed = 0
        self.prompt_tokens_found_late = 0
        self.prompt_tokens_dropped = 0
        self.waits = dict.fromkeys(((), *named), (0, 0.0))
        self._time_to_first_token = Histogram(REQUEST_BOUNDS)
        self._inter_token = Histogram(TOKEN_BOUNDS)
        self._requests = {
            name: Histogram(REQUEST_BOUNDS) for name in ("queue", "prefill", "decode", "e2e")
        }
        self._model_time = Histogram(STEP_BOUNDS)
        self._host_time = Histogram(STEP_BOUNDS)
        self._sequences = Histogram(COUNT_BOUNDS)
        self._kinds = {kind: Histogram(COUNT_BOUNDS) for kind in STEP_TOKEN_KINDS}

    def count_chunk(self, chunk: ScheduledChunk) -> tuple[int, int]:
        """Count the tokens of a computed chunk, once; note what its branch has computed.

        Returns:
            Of these tokens, how many are of the prompt and new, and how many were computed before.
        """
        branch, start, end = chunk.branch, chunk.start, chunk.start + chunk.count
        request = branch.request
        prompt = request.num_prompt_tokens
        known = max(branch.num_ever_computed, request.num_cached_tokens or 0)
        new = max(start, known)
        self.prompt_tokens_found_late += max(0, min(start, prompt) - known)
        self.answer_tokens_computed += max(0, end - max(new, prompt))
        branch.num_ever_computed = max(end, branch.num_ever_computed)
        return max(0, min(end, prompt) - new), max(0, min(end, new) - start)

    def record_first_token(self, seconds: float) -> None:
        """Record how long after its arrival a request got its first token."""
        self._time_to_first_token.add(seconds)

    def record_request(self, request: EngineRequest, reason: FinishReason) -> None:
        """Record the times of a request that has ended, as far as it got."""
        self.prompt_tokens_dropped += _num_left(request)
        timings = request.timings
        scheduled, first, last = timings.first_scheduled, timings.first_token, timings.last_token
        if scheduled is None:
            return
        wait = scheduled - timings.arrival
        self._requests["queue"].add(wait)
        if request.namespace in self.waits:
            count, seconds = self.waits[request.namespace]
            self.waits[request.namespace] = count + 1, seconds + wait
        if first is None or last is None:
            return
        self._requests["prefill"].add(first - scheduled)
        self._requests["decode"].add(last - first)
        self._inter_token.add_all(timings.inter_token)
        if timings.finished is not None and reason in ("stop", "length"):
            self._requests["e2e"].add(timings.finished - timings.arrival)

    def record_step(
        self, seconds: float, model_s: float, num_sequences: int, tokens: StepTokens
    ) -> None:
        """Record a step.

        Args:
            seconds: from its begin to its end.
            model_s: of them, those in which the model ran.
            num_sequences: that it computed tokens of.
            tokens: what it computed.
        """
        self.model_time_s += model_s
        self._model_time.add(model_s)
        self._host_time.add(seconds - model_s)
        self._sequences.add(num_sequences)
        for kind in STEP_TOKEN_KINDS:
            count = getattr(tokens, kind)
            self.step_tokens[kind] += count
            self._kinds[kind].add(count)

    def histograms(self) -> dict[str, HistogramData]:
        """Return the latencies of requests and the times of steps, in seconds, and their sizes."""
        return {
            "time_to_first_token_seconds": self._time_to_first_token.data(),
            "inter_token_latency_seconds": self._inter_token.data(),
            "request_queue_time_seconds": self._requests["queue"].data(),
            "request_prefill_time_seconds": self._requests["prefill"].data(),
            "request_decode_time_seconds": self._requests["decode"].data(),
            "e2e_request_latency_seconds": self._requests["e2e"].data(),
            "step_model_time_seconds": self._model_time.data(),
            "step_host_time_seconds": self._host_time.data(),
            "step_sequences": self._sequences.data(),
        }

    def step_sizes(self) -> dict[str, HistogramData]:
        """Return the tokens of a step by kind."""
        return {kind: histogram.data() for kind, histogram in self._kinds.items()}

    @staticmethod
    def num_pending(requests: Iterable[EngineRequest]) -> int:
        """Return the prompt tokens that admitted requests still have to compute or find."""
        return sum(map(_num_left, requests))


def _num_left(request: EngineRequest) -> int:
    cached = request.num_cached_tokens
    if cached is None:
        return 0
    known = max(cached, request.branches[0].num_ever_computed)
    return max(0, request.num_prompt_tokens - known)
