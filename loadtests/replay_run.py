"""Plays a trace against a server: at its own times, or turn after turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import aiohttp

from loadtests.openai_client import Sample, stream_chat
from loadtests.replay_traces import Session, Trace, Turn
from loadtests.serving_run import Endpoint

__all__ = ["Answer", "play_trace"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one request.

    Attributes:
        session: its name.
        turn_index: of the request in its session.
        turn: what was asked.
        start: when it was sent, seconds since the epoch.
        lag: seconds that it was sent after its time, since others had to end first.
        sample: what it cost.
    """

    session: str
    turn_index: int
    turn: Turn
    start: float
    lag: float
    sample: Sample

    @property
    def end(self) -> float:
        """When it ended, seconds since the epoch."""
        return self.start + self.sample.latency


async def play_trace(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    trace: Trace,
    *,
    speed: float = 1.0,
    concurrency: int | None = None,
    on_answer: Callable[[Answer], object] = lambda answer: None,
) -> tuple[list[Answer], float]:
    """Play all sessions once; return an answer per request, and the seconds it took in all.

    A session whose request fails goes on, as the recorded client did.

    Args:
        session: without a limit to its connections or its time.
        endpoint: the server.
        trace: what is sent.
        speed: times as fast as recorded; infinite sends everything at once.
        concurrency: sessions open at once at most; the next one waits, and its lag tells.
        on_answer: called after each request.
    """
    answers: list[Answer] = []
    gate = asyncio.Semaphore(concurrency or len(trace.sessions) or 1)
    begin = time.perf_counter()

    async def ask(due: float, opened: Session, number: int) -> Sample:
        turn = opened.turns[number]
        body = {**endpoint.body([], turn.output_len), **turn.prompt()}
        if "prompt" in body:
            del body["messages"]
        await asyncio.sleep(max(0.0, due - (time.perf_counter() - begin)))
        lag, start = time.perf_counter() - begin - due, time.time()
        sample = await stream_chat(session, endpoint.url, body, trace.route)
        answer = Answer(opened.name, number, turn, start, lag, _judged(sample, turn))
        answers.append(answer)
        on_answer(answer)
        return sample

    async def live(opened: Session) -> None:
        due = opened.arrival / speed
        async with gate:
            for number, turn in enumerate(opened.turns):
                if number:
                    due = time.perf_counter() - begin + turn.delay / speed
                await ask(due, opened, number)

    # In order of arrival, so that the gate lets them in in that order. A task is made only when
    # its time has come: a trace may have more sessions than should be held in memory.
    tasks: set[asyncio.Task[None]] = set()
    for opened in sorted(trace.sessions, key=lambda s: s.arrival):
        await asyncio.sleep(max(0.0, opened.arrival / speed - (time.perf_counter() - begin)))
        task = asyncio.create_task(live(opened))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    return answers, time.perf_counter() - begin


def _judged(sample: Sample, turn: Turn) -> Sample:
    """Return the sample, failed if its lengths are not those of the trace."""
    if sample.error is not None:
        return sample
    if sample.completion_tokens != turn.output_len:
        wrong = f"{sample.completion_tokens} tokens instead of {turn.output_len}"
        return replace(sample, error=wrong)
    if turn.prompt_len is not None and sample.prompt_tokens != turn.prompt_len:
        wrong = f"a prompt of {sample.prompt_tokens} tokens instead of {turn.prompt_len}"
        return replace(sample, error=wrong)
    return sample
