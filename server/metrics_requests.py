"""Histograms of what requests took, filled by the HTTP server when a request ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram

from radixkv.request import RequestTimings

if TYPE_CHECKING:
    from radixkv.server.generation import Answer

__all__ = ["RequestHistograms", "is_warm"]

FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0,
    40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip

TIMES = {
    "time_to_first_token_seconds": ("Arrival to first token", FIRST_TOKEN_BUCKETS),
    "inter_token_latency_seconds": ("Time between two tokens", TOKEN_BUCKETS),
    "request_time_per_output_token_seconds": (
        "Mean time between the tokens of a request's longest answer",
        TOKEN_BUCKETS,
    ),
    "request_queue_time_seconds": ("Arrival to the first step", REQUEST_BUCKETS),
    "request_prefill_time_seconds": ("First step to first token", REQUEST_BUCKETS),
    "request_decode_time_seconds": ("First token to last token", REQUEST_BUCKETS),
    "request_inference_time_seconds": ("First step to last token", REQUEST_BUCKETS),
    "e2e_request_latency_seconds": ("Arrival to the end of the answer", REQUEST_BUCKETS),
}
SIZES = {
    "request_prompt_tokens": "Prompt tokens of a request",
    "request_generation_tokens": "Tokens of all answers of a request",
    "request_max_num_generation_tokens": "Tokens of the longest answer of a request",
    "request_prefill_kv_computed_tokens": "Prompt tokens of a request that were not cached",
}


class RequestHistograms:
    """Owns the histograms under vLLM's names, and that of first tokens by what was cached."""

    def __init__(self, registry: CollectorRegistry, model_name: str, max_model_len: int) -> None:
        """Register empty histograms.

        Args:
            registry: gets them.
            model_name: the value of that label.
            max_model_len: bounds the buckets of sizes.
        """
        sizes = tuple(_one_two_five(max_model_len))
        kinds = {name: (text, sizes) for name, text in SIZES.items()} | TIMES
        self._histograms = {
            name: Histogram(
                f"vllm:{name}", text, ("model_name",), buckets=buckets, registry=registry
            ).labels(model_name)
            for name, (text, buckets) in kinds.items()
        }
        by_cache = Histogram(
            "radixkv:time_to_first_token_by_cache_seconds",
            "Arrival to first token, of requests with at least half of their prompt cached (warm) "
            "and the others (cold)",
            ("model_name", "cache"),
            buckets=FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self._by_cache = {name: by_cache.labels(model_name, name) for name in ("cold", "warm")}

    def observe(self, timings: RequestTimings, answers: Sequence[Answer]) -> None:
        """Count one request; the times as far as it got, sizes and the whole only if complete.

        Args:
            timings: the engine's.
            answers: all of its choices; the prompt's tokens are those of the first.
        """
        into = self._histograms
        arrival, scheduled = timings.arrival, timings.first_scheduled
        first, last = timings.first_token, timings.last_token
        if scheduled is not None:
            into["request_queue_time_seconds"].observe(scheduled - arrival)
        if scheduled is None or first is None or last is None:
            return
        prompt, cached = answers[0].num_prompt_tokens, answers[0].num_cached_tokens
        counts = [answer.num_completion_tokens for answer in answers]
        into["time_to_first_token_seconds"].observe(first - arrival)
        if prompt:
            kind = "warm" if is_warm(prompt, cached) else "cold"
            self._by_cache[kind].observe(first - arrival)
        for gap in timings.inter_token:
            into["inter_token_latency_seconds"].observe(gap)
        if any(answer.finish_reason not in ("stop", "length") for answer in answers):
            return
        into["request_prefill_time_seconds"].observe(first - scheduled)
        into["request_decode_time_seconds"].observe(last - first)
        into["request_inference_time_seconds"].observe(last - scheduled)
        if max(counts) > 1:
            seconds = (last - first) / (max(counts) - 1)
            into["request_time_per_output_token_seconds"].observe(seconds)
        if timings.finished is not None:
            into["e2e_request_latency_seconds"].observe(timings.finished - arrival)
        into["request_prompt_tokens"].observe(prompt)
        into["request_generation_tokens"].observe(sum(counts))
        into["request_max_num_generation_tokens"].observe(max(counts))
        into["request_prefill_kv_computed_tokens"].observe(prompt - cached)


def is_warm(num_prompt_tokens: int, num_cached_tokens: int) -> bool:
    """Whether at least half of a prompt was cached."""
    return 2 * num_cached_tokens >= num_prompt_tokens


def _one_two_five(limit: int) -> Iterator[int]:
    """Yield 1, 2, 5, 10, 20, … up to the limit."""
    for exponent in count():
        for mantissa in (1, 2, 5):
            if (value := mantissa * 10**exponent) > limit:
                return
            yield value
