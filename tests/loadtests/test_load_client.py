from __future__ import annotations

import aiohttp
import pytest
from loadtest_fakes import REUSED, FakeServer, Serve

from loadtests.openai_client import Sample, stream_chat


async def ask(session: aiohttp.ClientSession, url: str, max_tokens: int = 6) -> Sample:
    body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": max_tokens}
    return await stream_chat(session, url, body)


def test_inter_token_is_the_same_for_bursts_and_single_tokens() -> None:
    single = Sample(arrivals=[1.0, 1.5, 2.0, 2.5, 3.0], completion_tokens=5)
    bursts = Sample(arrivals=[1.0, 3.0], completion_tokens=5)
    assert single.inter_token == bursts.inter_token == 0.5
    assert (single.gaps, bursts.gaps) == ([0.5] * 4, [2.0])
    assert single.ttft == bursts.ttft == 1.0


def test_inter_token_is_none_of_one_token() -> None:
    assert Sample(arrivals=[1.0], completion_tokens=1).inter_token is None
    assert Sample().inter_token is None


@pytest.mark.parametrize(("burst", "streamed"), [(1, [1, 2, 3, 4, 5, 6]), (4, [4, 6])])
async def test_stream_chat_counts_the_tokens_of_each_chunk(
    session: aiohttp.ClientSession, serve: Serve, burst: int, streamed: list[int]
) -> None:
    sample = await ask(session, await serve(FakeServer(burst=burst)))
    assert sample.error is None
    assert sample.streamed == streamed
    assert len(sample.arrivals) == len(streamed)
    assert sample.arrivals == sorted(sample.arrivals)
    assert 0 < sample.ttft <= sample.arrivals[-1] <= sample.latency
    assert (sample.prompt_tokens, sample.completion_tokens) == (10, 6)
    assert (sample.tells_cached, sample.cached_tokens) == (True, REUSED)


async def test_stream_chat_takes_chunks_with_text_where_usage_comes_at_the_end(
    session: aiohttp.ClientSession, serve: Serve
) -> None:
    sample = await ask(session, await serve(FakeServer(burst=2, counts=False)))
    assert sample.error is None
    assert (len(sample.arrivals), sample.streamed, sample.completion_tokens) == (3, [], 6)
    assert sample.text == "ababab"


@pytest.mark.parametrize(
    ("fake", "error"),
    [
        (FakeServer(loses=1), "5 tokens came, 6 are counted"),
        (FakeServer(cuts=True), "ended early"),
    ],
)
async def test_stream_chat_reports_answers_that_are_not_whole(
    session: aiohttp.ClientSession, serve: Serve, fake: FakeServer, error: str
) -> None:
    sample = await ask(session, await serve(fake))
    assert sample.error is not None
    assert error in sample.error


async def test_stream_chat_reports_a_refusal_and_a_server_that_is_not_there(
    session: aiohttp.ClientSession, serve: Serve
) -> None:
    url = await serve(FakeServer(knows_ignore_eos=False))
    refused = await stream_chat(session, url, {"messages": [], "max_tokens": 1, "ignore_eos": True})
    assert refused.error is not None
    assert refused.error.startswith("422: ")
    gone = await ask(session, "http://127.0.0.1:9")
    assert gone.error is not None
    assert gone.error.startswith("ClientConnectorError")
