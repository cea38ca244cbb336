from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from loadtest_fakes import FakeServer, Serve

from loadtests.serving_run import Endpoint, connect, play, reset_cache, warm_up
from loadtests.serving_workloads import Dialogue, Workload


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def workload(count: int = 3, *, keeps_answers: bool = True, concurrency: int = 2) -> Workload:
    dialogues = tuple(
        Dialogue(((user(f"first {i}"),), (user(f"second {i}"),)), keeps_answers)
        for i in range(count)
    )
    return Workload("test", dialogues, concurrency, 4, ())


def contents(bodies: list[dict[str, Any]]) -> list[list[str]]:
    return sorted([m["content"] for m in body["messages"]] for body in bodies)


@pytest.mark.parametrize(
    ("keeps_answers", "second"),
    [(True, ["x first 0", "abab", "second 0"]), (False, ["x first 0", "second 0"])],
)
async def test_play_sends_the_history_with_the_salt_at_its_start(
    session: aiohttp.ClientSession, serve: Serve, keeps_answers: bool, second: list[str]
) -> None:
    fake = FakeServer(burst=2)
    endpoint = Endpoint(await serve(fake), "m")
    samples, wall_s = await play(
        session, endpoint, workload(1, keeps_answers=keeps_answers), salt="x"
    )
    assert contents(fake.bodies) == sorted([["x first 0"], second])
    assert [s.error for s in samples] == [None, None]
    assert wall_s >= max(s.latency for s in samples)


async def test_play_runs_as_many_at_once_as_it_should(
    session: aiohttp.ClientSession, serve: Serve
) -> None:
    fake, answered = FakeServer(), []
    endpoint = Endpoint(await serve(fake), "m")
    samples, _ = await play(
        session, endpoint, workload(5), salt="x", on_answer=lambda: answered.append(1)
    )
    assert fake.most_running == 2
    assert len(samples) == len(answered) == len(fake.bodies) == 10


async def test_play_reports_answers_of_another_length(
    session: aiohttp.ClientSession, serve: Serve
) -> None:
    endpoint = Endpoint(await serve(FakeServer(stops_after=3)), "m")
    samples, _ = await play(session, endpoint, workload(1), salt="x")
    assert [s.error for s in samples] == ["3 tokens instead of 4"] * 2


async def test_warm_up_plays_first_turns_under_another_salt(
    session: aiohttp.ClientSession, serve: Serve
) -> None:
    fake = FakeServer()
    await warm_up(session, Endpoint(await serve(fake), "m"), workload(5), salt="w")
    assert contents(fake.bodies) == [["w first 0"], ["w first 1"]]


async def test_connect_finds_the_model_and_how_lengths_are_fixed(
    session: aiohttp.ClientSession, serve: Serve
) -> None:
    url = await serve(FakeServer())
    assert await connect(session, f"{url}/") == Endpoint(url, "letters", True)
    url = await serve(FakeServer(knows_ignore_eos=False))
    assert await connect(session, url, "mine") == Endpoint(url, "mine", False)


async def test_connect_refuses_a_server_that_stops_where_it_likes(
    session: aiohttp.ClientSession, serve: Serve
) -> None:
    url = await serve(FakeServer(stops_after=2))
    with pytest.raises(RuntimeError, match="doesn't give 4 tokens when asked: 2 tokens"):
        await connect(session, url)


@pytest.mark.parametrize("route", ["/flush_cache", "/reset_prefix_cache", None])
async def test_reset_cache_finds_the_route(
    session: aiohttp.ClientSession, serve: Serve, route: str | None
) -> None:
    fake = FakeServer(reset_route=route)
    assert await reset_cache(session, await serve(fake)) == (route or "none")
    assert fake.resets == (1 if route else 0)
