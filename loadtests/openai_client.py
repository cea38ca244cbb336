"""One streamed request to an OpenAI-compatible server, with its times."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

__all__ = ["Sample", "stream_chat"]


@dataclass(slots=True)
class Sample:
    """What one request cost. Times are in seconds.

    Attributes:
        ttft: from sending to the first token.
        inter_token: gaps between the chunks that carried text.
    """

    ttft: float = 0.0
    latency: float = 0.0
    inter_token: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    text: str = ""
    error: str | None = None


async def stream_chat(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Sample:
    """Send a chat completion with `stream` and read it to its end; failures are in `error`."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    sample = Sample()
    begin = last = time.perf_counter()
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                sample.error = f"{response.status}: {(await response.text())[:300]}"
                return sample
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    sample.error = str(event["error"])
                    return sample
                if usage := event.get("usage"):
                    sample.prompt_tokens = usage["prompt_tokens"]
                    sample.completion_tokens = usage["completion_tokens"]
                    details = usage.get("prompt_tokens_details") or {}
                    sample.cached_tokens = details.get("cached_tokens") or 0
                if not event["choices"]:
                    continue
                content = event["choices"][0]["delta"].get("content")
                if not content:
                    continue
                now = time.perf_counter()
                if sample.text:
                    sample.inter_token.append(now - last)
                else:
                    sample.ttft = now - begin
                last = now
                sample.text += content
    except (aiohttp.ClientError, TimeoutError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    sample.latency = time.perf_counter() - begin
    return sample
