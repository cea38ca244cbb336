"""The stream of a request with several answers, without an engine."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import CharTokenizer, cold_all, make_engine, prompt_of

from radixkv.engine import AsyncEngine, RequestOutput, RequestStream, SamplingParams


def stream_of(n: int) -> tuple[RequestStream, list[str]]:
    aborted: list[str] = []
    return RequestStream("a", aborted.append, n), aborted


def piece(index: int, text: str = "", end: Any = None) -> RequestOutput:
    return RequestOutput(index=index, text=text, finish_reason=end)


async def drain(stream: RequestStream) -> list[tuple[int, str, str | None]]:
    return [(o.index, o.text, o.finish_reason) async for o in stream]


async def test_stream_ends_with_the_last_of_all_answers() -> None:
    stream, _ = stream_of(2)
    for output in (piece(0, "x"), piece(1, "y", "stop"), piece(0, "z"), piece(0, "", "length")):
        assert stream.is_open
        stream._deliver(output)
    assert not stream.is_open
    assert await drain(stream) == [
        (0, "x", None), (1, "y", "stop"), (0, "z", None), (0, "", "length"),
    ]  # fmt: skip


async def test_abort_owes_one_end_to_each_answer() -> None:
    """An end that nobody had read was lost, or a second one followed it."""
    stream, aborted = stream_of(3)
    stream._deliver(piece(0, "x", "stop"))
    assert (await anext(stream)).finish_reason == "stop"
    for output in (piece(1, "y", "stop"), piece(2, "z")):
        stream._deliver(output)
    stream.abort()
    stream.abort()
    assert aborted == ["a"]
    stream._deliver(piece(2, "late"))
    stream._deliver(piece(2, "late", "length"))
    assert await drain(stream) == [(1, "", "abort"), (2, "", "abort")]


async def test_abort_after_all_unread_ends_does_not_reach_the_engine() -> None:
    stream, aborted = stream_of(2)
    stream._deliver(piece(1, "x", "stop"))
    stream._deliver(piece(0, "y", "stop"))
    stream.abort()
    assert aborted == []
    assert await drain(stream) == [(1, "", "abort"), (0, "", "abort")]


async def test_failure_reaches_only_answers_that_have_not_ended() -> None:
    stream, _ = stream_of(2)
    stream._deliver(piece(0, "x", "stop"))
    for index in range(2):
        stream._deliver(piece(index, end="error"))
    assert await drain(stream) == [(0, "x", "stop"), (1, "", "error")]


@pytest.mark.parametrize("kind", [{"n": 3}, {"n": 2, "best_of": 4}, {"n": 2, "use_beam_search": 1}])
async def test_answers_come_through_the_thread(kind: dict[str, Any]) -> None:
    params = {**kind, "temperature": 0.9, "seed": 3, "max_tokens": 8}
    wanted = [a.token_ids for a in cold_all(prompt_of(9), **params)]
    front = AsyncEngine(make_engine(), CharTokenizer(), model_name="fake")  # type: ignore[arg-type]
    await front.start()
    stream = front.submit(prompt_of(9), SamplingParams(**params))
    got: list[list[int]] = [[] for _ in wanted]
    async for output in stream:
        got[output.index].extend(output.token_ids)
    assert got == wanted
    assert stream.timings.finished is not None
    second = front.submit(prompt_of(9), SamplingParams(**params))
    second.abort()
    assert [end for _, _, end in await drain(second)] == ["abort"] * kind["n"]
    await front.shutdown()
    assert not front.engine.cache.sequences
