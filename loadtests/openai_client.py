"""One streamed request to an OpenAI-compatible server, with its times."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

__all__ = ["CHAT", "Sample", "finish_sample", "read_event", "stream_chat"]

CHAT = "/v1/chat/completions"


@dataclass(slots=True)
class Sample:
    """What one request cost. Times are in seconds since it was sent.

    Attributes:
        arrivals: when each chunk that carried tokens came. A server may put several tokens into one
            chunk, and a token whose characters aren't complete into the next one.
        streamed: tokens that had come with each of these; empty if the server doesn't tell
            (`stream_options.continuous_usage_stats`).
        latency: when the stream ended.
        prompt_tokens, completion_tokens: as the server counts them.
        cached_tokens: tokens of the prompt that were reused.
        tells_cached: whether the server said how many.
        finish_reason: why the answer ended.
        error: what went wrong; None if nothing did.
    """

    arrivals: list[float] = field(default_factory=list)
    streamed: list[int] = field(default_factory=list)
    latency: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tells_cached: bool = False
    completion_tokens: int = 0
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Time to the first token; 0 if there was none."""
        return self.arrivals[0] if self.arrivals else 0.0

    @property
    def inter_token(self) -> float | None:
        """Mean time a token after the first; None with fewer than two.

        Bursts don't shorten it: it is the same whether tokens come one by one or many at a time.
        """
        if self.completion_tokens < 2 or not self.arrivals:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.completion_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Times between chunks that carried tokens: the pauses a reader sees."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


async def stream_chat(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], route: str = CHAT
) -> Sample:
    """Send a request with `stream` and read the answer to its end; failures are in `error`.

    Args:
        session: of the connections.
        url: of the server.
        body: `stream_options` are asked for as far as it doesn't set them.
        route: of chat completions, or of completions.
    """
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"stream_options": options, **body, "stream": True}
    sample = Sample()
    begin = time.perf_counter()
    try:
        async with session.post(f"{url}{route}", json=body) as response:
            if response.status != 200:
                sample.error = f"{response.status}: {(await response.text())[:300]}"
                return sample
            async for line in response.content:
                now = time.perf_counter() - begin
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    read_event(sample, json.loads(line[6:]), now)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    sample.latency = time.perf_counter() - begin
    finish_sample(sample)
    return sample


def finish_sample(sample: Sample) -> None:
    """Note in a sample whose stream has ended what was wrong with it as a whole."""
    if sample.error is None and sample.finish_reason is None:
        sample.error = "the stream ended early"
    if sample.streamed and sample.error is None and sample.streamed[-1] != sample.completion_tokens:
        sample.error = f"{sample.streamed[-1]} tokens came, {sample.completion_tokens} are counted"


def read_event(sample: Sample, event: dict[str, Any], now: float) -> None:
    """Add what one event of a stream tells, `now` seconds after the request was sent."""
    if "error" in event:
        sample.error = str(event["error"])
        return
    usage, has_tokens = event.get("usage"), False
    choices = event.get("choices") or ()
    # Completions have their text beside the index, chats in a delta.
    delta = (choices[0].get("delta") or choices[0]) if choices else {}
    text = delta.get("content") or delta.get("text")
    if choices:
        sample.finish_reason = choices[0].get("finish_reason") or sample.finish_reason
        sample.text += text or ""
    if usage:
        count = usage["completion_tokens"]
        # Usage in a chunk that ends the answer needn't mean that the others have it.
        if choices and (sample.streamed or not sample.arrivals):
            has_tokens = count > sample.completion_tokens
            if has_tokens:
                sample.streamed.append(count)
        sample.prompt_tokens, sample.completion_tokens = usage["prompt_tokens"], count
        details = usage.get("prompt_tokens_details") or {}
        if details.get("cached_tokens") is not None:
            sample.cached_tokens, sample.tells_cached = details["cached_tokens"], True
    elif text and not sample.streamed:
        has_tokens = True
    if has_tokens:
        sample.arrivals.append(now)
