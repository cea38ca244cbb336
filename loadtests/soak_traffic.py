"""Clients that run scenarios at a server until the time is up, and what they found."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp

from loadtests.soak_client import HUNG_UP, Reply, Step, perform
from loadtests.soak_scenarios import SCENARIOS, Scenario

__all__ = ["Endpoint", "Record", "ScenarioRun", "Traffic", "make_documents"]

MAX_FAILURES = 200
RECONNECT_S = 0.2
WORDS = (
    "the", "a", "of", "in", "to", "and", "harbour", "winter", "letter", "engine", "copper", "river",
    "seven", "morning", "garden", "north", "quiet", "signal", "paper", "window", "stone", "clock",
    "bridge", "carried", "found", "opened", "between", "under", "slowly", "many", "bright", "empty",
    "seldom", "table", "number", "green", "market", "train", "evening", "ocean", "lamp",
)  # fmt: skip


class Endpoint(Protocol):
    """A server that may be killed and started again.

    Attributes:
        life: how often it was started; sessions and responses don't outlive it.
        is_up: whether it can be expected to answer.
    """

    url: str
    life: int
    is_up: bool


@dataclass(slots=True)
class Record:
    """A scenario that was run, with what its steps brought."""

    name: str
    kind: str
    steps: list[tuple[Step, Reply]] = field(default_factory=list)


class EndedError(Exception):
    """The scenario can't go on."""


class ScenarioRun:
    """One run of a scenario: sends its steps, checks statuses, and remembers both."""

    def __init__(
        self, traffic: Traffic, endpoint: Endpoint, name: str, kind: str, rng: random.Random
    ) -> None:
        self.name, self.rng, self.is_exact = name, rng, traffic.is_exact
        self.record = Record(name, kind)
        self._traffic, self._endpoint, self._life = traffic, endpoint, endpoint.life
        self._ids: dict[str, str] = {}

    def document(self) -> str:
        """Return one of the working set's texts; a few come up often, the others rarely."""
        documents = self._traffic.documents
        skewed = self.rng.random() ** 2 if self.rng.random() < 0.5 else self.rng.random()
        return documents[int(skewed * len(documents))]

    async def send(self, step: Step) -> Reply:
        """Send a request and check what comes back.

        Raises:
            EndedError: it can't be gone on from there.
        """
        traffic = self._traffic
        try:
            reply = await perform(traffic.http, self._endpoint.url, step, self._ids)
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            if self._was_killed():
                traffic.cut_by_restart += 1
            else:
                self.fail(f"{step.method} {step.path}: {type(error).__name__}: {error}")
            raise EndedError from error
        traffic.statuses[reply.status] += 1
        if reply.is_whole and step.is_compared:
            traffic.seconds[self.record.kind].append(reply.seconds)
        self.record.steps.append((step, reply))
        hung_up = reply.error == HUNG_UP
        if not hung_up and reply.status not in step.accepts:
            said = reply.error or str(reply.body.get("error", ""))[:200]
            self.fail(f"{step.method} {step.path}: status {reply.status}: {said}")
            raise EndedError
        if self._was_killed():
            raise EndedError
        if reply.error and not hung_up and reply.status == 200:
            self.fail(f"{step.method} {step.path}: {reply.error}")
            raise EndedError
        return reply

    def fail(self, message: str) -> None:
        """Note what was wrong."""
        self._traffic.fail(f"{self.record.kind} {self.name}: {message}")

    def _was_killed(self) -> bool:
        return self._life != self._endpoint.life or not self._endpoint.is_up


class Traffic:
    """Clients of one server, and what they found.

    The scenarios of a client depend on the seed, its number and how many it has run; how many that
    are depends on the server's speed.

    Attributes:
        is_exact: drawn answers are to be compared, too.
        records: of all scenarios that ended, in no order.
        failures: messages, the first 200.
        num_failures: of all.
        done: scenarios that ended, by kind.
        statuses: of all answers.
        seconds: times of whole answers, by kind.
        cut_by_restart: requests that were lost with the server.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        documents: Sequence[str],
        *,
        seed: int,
        is_exact: bool,
        scenarios: dict[Scenario, float] | None = None,
    ) -> None:
        self.http, self.documents, self.is_exact = http, documents, is_exact
        self.records: list[Record] = []
        self.failures: list[str] = []
        self.num_failures = 0
        self.done: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.cut_by_restart = 0
        self._seed = seed
        self._scenarios = scenarios or SCENARIOS

    async def run(
        self, endpoint: Endpoint, num_clients: int, seconds: float, limit: int | None = None
    ) -> None:
        """Run clients for so many seconds, or `limit` scenarios each; a scenario is never cut."""
        deadline = time.monotonic() + seconds
        await asyncio.gather(
            *(self._client(endpoint, number, deadline, limit) for number in range(num_clients))
        )

    async def run_each(self, endpoint: Endpoint) -> None:
        """Run every scenario once, all at once."""
        await asyncio.gather(
            *(self._scenario(endpoint, "first", scenario) for scenario in self._scenarios)
        )

    def fail(self, message: str) -> None:
        """Note what was wrong."""
        self.num_failures += 1
        if len(self.failures) < MAX_FAILURES:
            self.failures.append(message)

    async def _client(
        self, endpoint: Endpoint, number: int, deadline: float, limit: int | None
    ) -> None:
        kinds, weights = list(self._scenarios), list(self._scenarios.values())
        count = 0
        while time.monotonic() < deadline and count != limit:
            if not endpoint.is_up:
                await asyncio.sleep(RECONNECT_S)
                continue
            name = f"{number}-{count}"
            (scenario,) = random.Random(f"{self._seed} {name}").choices(kinds, weights)
            await self._scenario(endpoint, name, scenario)
            count += 1

    async def _scenario(self, endpoint: Endpoint, name: str, scenario: Scenario) -> None:
        kind = scenario.__name__
        rng = random.Random(f"{self._seed} {name} {kind}")
        run = ScenarioRun(self, endpoint, name, kind, rng)
        try:
            await scenario(run)
        except EndedError:
            pass
        except Exception as error:
            # A scenario trips over an answer of an unexpected form: that is a finding, too.
            run.fail(f"{type(error).__name__}: {error}")
        self.records.append(run.record)
        self.done[kind] += 1


async def make_documents(
    http: aiohttp.ClientSession, url: str, *, pool_tokens: int, ratio: float, seed: int
) -> list[str]:
    """Return texts that have `ratio` times the tokens that the pool holds, all together.

    Each takes from a twenty-fourth to a sixth of the pool.
    """
    rng = random.Random(seed)
    async with http.post(f"{url}/tokenize", json={"prompt": " ".join(WORDS)}) as response:
        response.raise_for_status()
        answer: dict[str, Any] = await response.json()
    per_word = answer["count"] / len(WORDS)
    documents: list[str] = []
    tokens = 0.0
    while tokens < ratio * pool_tokens:
        wanted = rng.uniform(pool_tokens / 24, pool_tokens / 6)
        words = rng.choices(WORDS, k=max(1, int(wanted / per_word)))
        documents.append(f"Document {len(documents)}. {' '.join(words)}.")
        tokens += wanted
    return documents
