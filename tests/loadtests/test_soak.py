"""A soak of a tiny model in this process, and what it finds when something is wrong."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from loadtests.serving_servers import ServerCommand
from loadtests.soak_client import Choice, Reply, Step, Token
from loadtests.soak_process import add_route
from loadtests.soak_replay import TIE, compare, tie_gap
from loadtests.soak_report import Findings, Outcome
from loadtests.soak_run import SoakSettings, replay, soak
from loadtests.soak_scenarios import SCENARIOS
from loadtests.soak_server import GivenServer, SoakServer, write_tiny_model
from loadtests.soak_traffic import Traffic, make_documents
from loadtests.soak_watch import Reading, growth
from radixkv.config import ServeConfig
from radixkv.engine.factory import build_engine
from radixkv.server import create_app

Start = Callable[..., Awaitable[GivenServer]]
MIB = 1024 * 1024
TINY = TIE["float32"]
SETTINGS = SoakSettings(seconds=60.0, scenarios=3, clients=5)
FEW = SoakSettings(seconds=60.0, scenarios=0)


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Serve a tiny model; keyword arguments are options of `ServeConfig`."""
    servers: list[TestServer] = []

    async def start(
        spoil: Callable[[web.Response], web.Response] | None = None, **options: Any
    ) -> GivenServer:
        config = ServeConfig(
            model=write_tiny_model(tmp_path),
            load_format="dummy",
            dtype="float32",
            max_num_seqs=16,
            **{"kv_cache_memory": 2 * MIB, **options},
        )
        engine = build_engine(config, console=Console(quiet=True)).engine
        app = create_app(engine)
        add_route(app)
        if spoil is not None:
            app.middlewares.append(spoiling(spoil))
        server = TestServer(app)
        await server.start_server()
        servers.append(server)
        return GivenServer(str(server.make_url("")))

    yield start
    for server in servers:
        await server.close()


def spoiling(spoil: Callable[[web.Response], web.Response]) -> Any:
    @web.middleware
    async def middleware(request: web.Request, handler: Any) -> web.StreamResponse:
        response: web.StreamResponse = await handler(request)
        is_answer = request.path.endswith("/completions") and response.status == 200
        return spoil(response) if is_answer and isinstance(response, web.Response) else response

    return middleware


async def judged(
    start: Start, variant: str, settings: SoakSettings = SETTINGS, **options: Any
) -> tuple[Outcome, Traffic, Findings]:
    driven = await start(**options)
    traffic, findings = await soak(variant, driven, settings, pid=os.getpid())
    alone = await start(prefix_caching=False, kv_cache_memory=8 * MIB)
    repeated = await replay(traffic, alone.url, tie=TINY, flush=False, show=lambda text: None)
    findings.verdicts = repeated.verdicts
    outcome = Outcome.of(variant, traffic, findings, max_growth=1e9, is_long=False)
    return outcome, traffic, findings


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("plain", {"scheduling_policy": "priority"}),
        ("tiers", {"host_cache_memory": MIB, "tier_policy": "always"}),
        (
            "swap",
            {"preemption_mode": "swap", "swap_space": 2 * MIB, "speculative_tokens": 4},
        ),
    ],
)
async def test_soak_finds_nothing_wrong_under_pressure(
    start: Start, variant: str, options: dict[str, Any]
) -> None:
    outcome, traffic, findings = await judged(start, variant, **options)
    assert outcome.problems == [], (traffic.failures, findings.verdicts)
    assert findings.verdicts is not None
    assert findings.verdicts.counts["equal"] > 12
    assert findings.report["evicted_blocks"] > 0
    assert findings.start.tasks == findings.end.tasks


async def test_soak_finds_an_answer_that_was_changed(start: Start) -> None:
    def spoil(response: web.Response) -> web.Response:
        assert isinstance(response.body, bytes)
        body = response.body.replace(b'"content":"', b'"content":"~', 1)
        return web.Response(body=body, content_type="application/json")

    outcome, _, findings = await judged(start, "plain", FEW, spoil=spoil)
    assert findings.verdicts is not None
    assert findings.verdicts.counts["different"] > 0
    assert any("differ from those alone" in problem for problem in outcome.problems)
    assert findings.verdicts.different[0]["then"] != findings.verdicts.different[0]["alone"]


async def test_soak_finds_a_status_that_is_wrong(start: Start) -> None:
    def spoil(response: web.Response) -> web.Response:
        return web.json_response({"error": {"message": "no"}}, status=500)

    server = await start(spoil=spoil)
    async with aiohttp.ClientSession() as http:
        documents = await make_documents(http, server.url, pool_tokens=600, ratio=2, seed=0)
        traffic = Traffic(http, documents, seed=0, is_exact=True)
        await traffic.run_each(server)
    assert traffic.num_failures > 5
    assert all("status 500" in failure for failure in traffic.failures)


async def test_documents_have_as_many_tokens_as_asked(start: Start) -> None:
    server = await start()
    async with aiohttp.ClientSession() as http:
        documents = await make_documents(http, server.url, pool_tokens=2400, ratio=3, seed=1)
        again = await make_documents(http, server.url, pool_tokens=2400, ratio=3, seed=1)
    tokens = sum(len(document.encode()) for document in documents)  # a token is a byte
    assert documents == again
    assert len(set(documents)) == len(documents)
    assert 0.8 * 7200 < tokens < 1.4 * 7200


class RecordingRun:
    """Answers every step with the same reply."""

    is_exact = True

    def __init__(self, seed: str) -> None:
        self.name, self.rng = "0-0", random.Random(seed)
        self.steps: list[Step] = []

    def document(self) -> str:
        return f"Document {self.rng.randrange(100)}."

    async def send(self, step: Step) -> Reply:
        self.steps.append(step)
        body = {"id": "x", "busy": False, "num_turns": 1}
        return Reply(200, {0: Choice("{}", [["weather", "{}"]], finish="stop")}, body)

    def fail(self, message: str) -> None:
        raise AssertionError(message)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
async def test_scenario_depends_on_its_seed_only(scenario: Any) -> None:
    async def steps(seed: str) -> list[Step]:
        run = RecordingRun(seed)
        await scenario(run)
        return run.steps

    assert await steps("a") == await steps("a")
    assert any([await steps(str(seed)) != await steps("a") for seed in range(9)])


def reply(text: str, *tokens: Token, **fields: Any) -> Reply:
    return Reply(200, {0: Choice(text, tokens=list(tokens), finish="stop")}, **fields)


def token(data: str, logprob: float = -0.5, **others: float) -> Token:
    return Token(
        data.encode(), {data.encode(): logprob, **{k.encode(): v for k, v in others.items()}}
    )


@pytest.mark.parametrize(
    ("then", "alone", "what"),
    [
        (reply("ab"), reply("ab"), None),
        (reply("ab"), reply("ac"), "text"),
        (reply("ab", completion_tokens=2), reply("ab", completion_tokens=3), "completion_tokens"),
        (reply("ab", prompt_tokens=2), reply("ab", prompt_tokens=3), "prompt_tokens"),
        (reply("ab", token("ab")), reply("ab", token("a"), token("b")), "tokens"),
        (reply("a", error="hung up"), reply("ab"), None),
        (reply("b", error="hung up"), reply("ab"), "beginning"),
        (reply("a"), Reply(500, error="broken"), "500"),
        (Reply(200, {0: Choice("a"), 1: Choice("b")}), reply("a"), "choices"),
        (
            Reply(200, {0: Choice("", [["f", '{"a": 1}']])}),
            Reply(200, {0: Choice("", [["f", '{"a": 2}']])}),
            "calls",
        ),
        (
            Reply(200, {0: Choice("", [["f", '{"a": 1}']])}),
            Reply(200, {0: Choice("", [["f", '{"a":1}']])}),
            None,
        ),
    ],
)
def test_compare_tells_what_differs(then: Reply, alone: Reply, what: str | None) -> None:
    found = compare(then, alone)
    assert found is None if what is None else what in (found or "")


def test_tie_gap_is_that_of_the_first_other_token() -> None:
    alone = Choice("abd", tokens=[token("a"), token("b", -0.50, c=-0.75), token("d")])
    assert tie_gap(Choice("acx"), alone) == pytest.approx(0.25)
    ended = Choice("a", finish="stop")
    assert tie_gap(ended, alone) == pytest.approx(0.25)  # at most: its end was not that likely
    with_tokens = Choice("acx", tokens=[token("a"), token("c"), token("x")])
    assert tie_gap(with_tokens, alone) == pytest.approx(0.25)


def test_tie_gap_is_unknown_for_a_token_that_was_not_likely() -> None:
    alone = Choice("ab", tokens=[token("a"), token("b", c=-0.6)])
    assert tie_gap(Choice("az"), alone) is None
    assert tie_gap(Choice("abc"), alone) is None


def readings(values: list[float], life: int = 1) -> list[Reading]:
    return [
        Reading(30.0 * i, life, rss, threads=4, files=9, tasks=2) for i, rss in enumerate(values)
    ]


def test_growth_is_the_slope_of_the_second_half() -> None:
    warming = [100.0 + 10 * i for i in range(20)]
    level = [300.0 + (i % 3) for i in range(21)]
    rising = [300.0 + 0.5 * i for i in range(21)]
    assert growth(readings(warming + level)) == pytest.approx(0, abs=0.2)
    assert growth(readings(warming + rising)) == pytest.approx(1.0)


def test_growth_is_not_moved_by_a_few_odd_readings() -> None:
    values = [300.0] * 40
    values[25] = values[33] = 900.0
    assert growth(readings(values)) == 0.0


def test_growth_is_unknown_with_few_readings_of_the_last_life() -> None:
    assert growth(readings([300.0] * 40)[:-2] + readings([1.0] * 40, life=2)[-2:]) is None
    assert growth([]) is None
    assert growth(readings([300.0 + i for i in range(7)])) is None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"threads": 9}, "threads"),
        ({"files": 15}, "files"),
        ({"tasks": 3}, "tasks"),
        ({"blocks": {"total": 8, "free": 7, "cached": 0, "referenced": 1}}, "blocks"),
        ({"blocks": {"total": 8, "free": 7, "cached": 0, "referenced": 0}}, "blocks"),
    ],
)
def test_outcome_names_what_leaked(change: dict[str, Any], problem: str | None) -> None:
    free = {"total": 8, "free": 8, "cached": 0, "referenced": 0}
    same: dict[str, Any] = {"threads": 4, "files": 9, "tasks": 2, "blocks": free}
    start = Reading(0.0, 1, 100.0, **same)
    end = Reading(60.0, 1, 100.0, **{**same, **change})
    traffic = Traffic(None, [], seed=0, is_exact=True)  # type: ignore[arg-type]
    outcome = Outcome.of("plain", traffic, findings(start, end), max_growth=1, is_long=False)
    assert len(outcome.problems) == (problem is not None)
    assert problem is None or problem in outcome.problems[0]


def findings(start: Reading, end: Reading) -> Findings:
    class Watched:
        readings: tuple[Reading, ...] = ()

        def as_json(self) -> list[Any]:
            return []

    tokens = {"hit_by_tier": {"device": 1}, "looked_up": 2}
    report = {
        "tokens": tokens, "evicted_blocks": 0, "copied_blocks": 0, "pins": {}, "tiers": {},
    }  # fmt: skip
    engine = {"preemptions": {"swap": 0}, "swap_bytes": {}}
    return Findings(start, end, Watched(), {"ok": True}, report, engine, [])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("variant", "missing"),
    [("plain", "evicted"), ("swap", "swapped out"), ("tiers", "no hit in disk")],
)
def test_a_long_soak_that_stressed_nothing_fails(variant: str, missing: str) -> None:
    free = {"total": 8, "free": 8, "cached": 0, "referenced": 0}
    at_rest = Reading(0.0, 1, 100.0, threads=4, files=9, tasks=2, blocks=free)
    traffic = Traffic(None, [], seed=0, is_exact=True)  # type: ignore[arg-type]
    outcome = Outcome.of(variant, traffic, findings(at_rest, at_rest), max_growth=1, is_long=True)
    assert any(missing in problem for problem in outcome.problems)


HEALTHY = """
import sys
from aiohttp import web
async def health(request):
    return web.json_response({})
app = web.Application()
app.router.add_get("/health", health)
print("ERROR one line that matters", file=sys.stderr, flush=True)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
"""


async def test_killed_server_comes_back_in_another_life(
    tmp_path: Path, unused_tcp_port_factory: Callable[[], int]
) -> None:
    port = unused_tcp_port_factory()
    command = ServerCommand(
        "fake", (sys.executable, "-c", HEALTHY, str(port)), f"http://127.0.0.1:{port}"
    )
    async with SoakServer(command, tmp_path / "log") as server:
        first = server.pid
        assert (server.life, server.is_up) == (1, True)
        killing = asyncio.ensure_future(server.kill_and_restart())
        await asyncio.sleep(0)
        assert not server.is_up
        await killing
        assert (server.life, server.is_up) == (2, True)
        assert server.pid != first
    assert server.ended_in_order
    assert len(server.logged_errors()) == 2
