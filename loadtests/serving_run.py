"""Plays a workload against one server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from loadtests.airline import Message
from loadtests.openai_client import Sample, stream_chat
from loadtests.serving_workloads import Dialogue, Workload

__all__ = ["Endpoint", "connect", "play", "reset_cache", "salted", "warm_up"]

RESETS = ("/flush_cache", "/reset_prefix_cache")
PROBE_TOKENS = 4
WARM_UP_DIALOGUES = 8


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server and how to ask it for an answer of fixed length.

    Attributes:
        url: without a slash at its end.
        model: what it calls its model.
        ignores_eos: whether it takes `ignore_eos`; one that doesn't is told as transformers is.
    """

    url: str
    model: str
    ignores_eos: bool = True

    def body(self, messages: list[Message], max_tokens: int) -> dict[str, Any]:
        """Return a request for `max_tokens` greedy tokens."""
        body = {"model": self.model, "messages": messages, "temperature": 0}
        if self.ignores_eos:
            return {**body, "max_tokens": max_tokens, "ignore_eos": True}
        settings = f'{{"max_new_tokens": {max_tokens}, "do_sample": false, "eos_token_id": -1}}'
        return {**body, "generation_config": settings}


async def connect(session: aiohttp.ClientSession, url: str, model: str | None = None) -> Endpoint:
    """Find out what a server's model is called and how it is asked.

    Args:
        session: without a time limit.
        url: of the server.
        model: its model's name; None takes the first that the server lists.

    Raises:
        RuntimeError: it doesn't give an answer of the length asked for.
    """
    url = url.rstrip("/")
    if model is None:
        async with session.get(f"{url}/v1/models") as response:
            model = str((await response.json())["data"][0]["id"])
    message = {"role": "user", "content": "Hello!"}
    errors = []
    for ignores_eos in (True, False):
        endpoint = Endpoint(url, model, ignores_eos)
        sample = await stream_chat(session, url, endpoint.body([message], PROBE_TOKENS))
        if sample.error is None and sample.completion_tokens == PROBE_TOKENS:
            return endpoint
        errors.append(sample.error or f"{sample.completion_tokens} tokens")
    raise RuntimeError(f"{url} doesn't give {PROBE_TOKENS} tokens when asked: {'; '.join(errors)}")


async def reset_cache(session: aiohttp.ClientSession, url: str) -> str:
    """Empty a server's prefix cache; return the route that did it, or "none"."""
    for route in RESETS:
        async with session.post(f"{url}{route}") as response:
            if response.status == 200:
                return route
    return "none"


async def play(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    workload: Workload,
    *,
    salt: str,
    on_answer: Callable[[], object] = lambda: None,
) -> tuple[list[Sample], float]:
    """Play all dialogues once; return a sample per request, and the seconds it took in all.

    Args:
        session: without a limit to its connections or its time.
        endpoint: the server.
        workload: what is sent.
        salt: begins every prompt, so that nothing is cached from an earlier call with another one.
        on_answer: called after each request.
    """
    samples: list[Sample] = []
    queue = list(reversed(workload.dialogues))

    async def worker() -> None:
        while queue:
            history: list[Message] = []
            dialogue = salted(queue.pop(), salt)
            for messages in dialogue.turns:
                history += messages
                body = endpoint.body(history, workload.max_tokens)
                sample = await stream_chat(session, endpoint.url, body)
                if sample.error is None and sample.completion_tokens != workload.max_tokens:
                    sample.error = (
                        f"{sample.completion_tokens} tokens instead of {workload.max_tokens}"
                    )
                samples.append(sample)
                on_answer()
                if dialogue.keeps_answers:
                    history.append({"role": "assistant", "content": sample.text})

    begin = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(workload.concurrency)))
    return samples, time.perf_counter() - begin


async def warm_up(
    session: aiohttp.ClientSession, endpoint: Endpoint, workload: Workload, *, salt: str
) -> None:
    """Play the first turns of a few dialogues at once, with answers of a few tokens."""
    count = min(workload.concurrency, WARM_UP_DIALOGUES)
    first = tuple(Dialogue(d.turns[:1], d.keeps_answers) for d in workload.dialogues[:count])
    short = replace(workload, dialogues=first, max_tokens=PROBE_TOKENS)
    await play(session, endpoint, short, salt=salt)


def salted(dialogue: Dialogue, salt: str) -> Dialogue:
    """Return the dialogue with `salt` at the very start of its first message."""
    (first, *others), *turns = dialogue.turns
    first = {**first, "content": f"{salt} {first['content']}"}
    return Dialogue(((first, *others), *turns), dialogue.keeps_answers)
