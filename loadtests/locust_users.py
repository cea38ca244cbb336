"""Locust's users: one class for each kind of agent, and the shape of the load."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from dataclasses import fields
from itertools import count
from typing import Any, ClassVar

import gevent
from locust import LoadTestShape, User, constant, task
from locust.util.timespan import parse_timespan

from loadtests.agents import KINDS, AgentOptions, Call
from loadtests.agents_shapes import users_at
from loadtests.locust_client import StreamClient
from loadtests.locust_stats import inter_token
from loadtests.openai_client import Sample

__all__ = [
    "Agent",
    "AgentShape",
    "ChatAgent",
    "DocumentAgent",
    "ForkAgent",
    "SamplerAgent",
    "SessionAgent",
    "ToolAgent",
]

DEFAULT_DURATION_S = 600.0
log = logging.getLogger("loadtests")


class Agent(User):  # type: ignore[misc]
    """A user that lives one task after the other, and is the `Client` of each.

    Its requests are counted in `environment.agents`, a `LoadStats`, beside Locust's own statistics.

    Attributes:
        kind: of agent; a class of its own for each, so that Locust can weigh them.
    """

    abstract = True
    kind = ""
    wait_time = constant(0)
    _numbers = count()
    _warned: ClassVar[set[str]] = set()

    def on_start(self) -> None:
        """Open the client, and wait a moment so that not all begin at once."""
        options = self.environment.parsed_options
        self.options = AgentOptions(
            **{option.name: getattr(options, option.name) for option in fields(AgentOptions)}
        )
        self.rng = random.Random(f"{options.seed} {self.kind} {next(self._numbers)}")
        self.http = StreamClient(
            self.host or "", api_key=options.api_key, timeout_s=options.silence_limit
        )
        models = {str(m["id"]): m for m in self.http.request("GET", "/v1/models")["data"]}
        self.model = options.model or next(iter(models))
        self.context: int | None = models.get(self.model, {}).get("max_model_len")
        self.pause(self.rng.uniform(0, self.options.think_s))

    def on_stop(self) -> None:
        """Close the client."""
        self.http.close()

    @task  # type: ignore[untyped-decorator]
    def live(self) -> None:
        """Live through one task, and think."""
        KINDS[self.kind].live(self, self.options, self.rng)
        self.pause(self.rng.expovariate(1 / max(self.options.think_s, 1e-3)))

    def ask(self, kind: str, calls: Sequence[Call]) -> list[Sample]:
        """See `Client.ask`."""
        if len(calls) == 1:
            return [self._stream(kind, calls[0])]
        jobs = [gevent.spawn(self._stream, kind, call) for call in calls]
        try:
            gevent.joinall(jobs, raise_error=True)
        finally:
            gevent.killall(jobs, block=False)
        return [job.value for job in jobs]

    def post(self, route: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """See `Client.post`."""
        try:
            return dict(self.http.request("POST", route, body))
        except ConnectionError as error:
            if route not in self._warned:
                self._warned.add(route)
                log.warning("the server doesn't take %s", error)
            return None

    def delete(self, route: str) -> None:
        """See `Client.delete`; a server that is gone has given it up already."""
        try:
            self.http.request("DELETE", route)
        except ConnectionError as error:
            log.debug("%s", error)

    def pause(self, seconds: float) -> None:
        """See `Client.pause`."""
        gevent.sleep(seconds)

    def _stream(self, kind: str, call: Call) -> Sample:
        sample = self.http.stream(call.route, {"model": self.model, **call.body})
        environment = self.environment
        users = environment.runner.user_count if environment.runner is not None else 0
        environment.agents.record(kind, sample, time.time(), answers=call.answers, users=users)
        environment.events.request.fire(
            request_type="chat",
            name=kind,
            response_time=1e3 * sample.latency,
            response_length=len(sample.text),
            exception=None if sample.error is None else RuntimeError(sample.error),
            context={},
        )
        if sample.error is None and sample.arrivals:
            # Straight into the entries: they are no requests, so they stay out of the total.
            environment.stats.get(kind, "TTFT").log(round(1e3 * sample.ttft), 0)
            itl = inter_token(sample, call.answers)
            if itl is not None:
                environment.stats.get(kind, "ITL").log(round(1e3 * itl), 0)
        return sample


class ChatAgent(Agent):
    """See `agents.chat`."""

    kind, weight = "chat", KINDS["chat"].weight


class SessionAgent(Agent):
    """See `agents.session`."""

    kind, weight = "sessions", KINDS["sessions"].weight


class ToolAgent(Agent):
    """See `agents.tools`."""

    kind, weight = "tools", KINDS["tools"].weight


class ForkAgent(Agent):
    """See `agents.forks`."""

    kind, weight = "forks", KINDS["forks"].weight


class SamplerAgent(Agent):
    """See `agents.samplers`."""

    kind, weight = "samplers", KINDS["samplers"].weight


class DocumentAgent(Agent):
    """See `agents.documents`."""

    kind, weight = "documents", KINDS["documents"].weight


class AgentShape(LoadTestShape):  # type: ignore[misc]
    """The shape that `--load-shape` names, out of `--users` and `--run-time`."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        """Return the users there should be and how many come a second; None at the end."""
        options = self.runner.environment.parsed_options
        limit = options.run_time
        if isinstance(limit, str):  # the web page's
            limit = parse_timespan(limit) if limit else None
        elapsed = self.get_run_time()
        if limit and elapsed >= limit:
            return None
        users = int(options.num_users or 1)
        now = users_at(options.load_shape, elapsed, limit or DEFAULT_DURATION_S, users)
        return now, float(options.spawn_rate or users)
