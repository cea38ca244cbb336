"""The requests that a soak's scenarios are made of."""

from __future__ import annotations

import random
from typing import Any, Protocol

from loadtests.soak_client import Reply, Step

__all__ = [
    "BAD",
    "COMPLETION",
    "CONSTRAINTS",
    "SALTS",
    "TOOLS",
    "Run",
    "chat_step",
    "compared",
    "control",
    "drawn",
    "extras",
    "hang_up",
    "question",
    "sampling",
    "streaming",
    "turn_step",
]

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
SALTS = ("alice", "bob")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Tells the {name} of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Lima", "Oslo", "Paris"]}},
                "required": ["city"],
            },
        },
    }
    for name in ("weather", "time")
]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Lima", "Oslo", "Paris"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 30},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    {"guided_regex": "[A-Z][a-z]{2,8}( [a-z]{1,8}){1,3}"},
    {"guided_choice": ["red", "green", "blue", "reddish"]},
    {"structured_outputs": {"grammar": 'start: "a"+ "b"'}},
)
# (path, body, status that is right)
BAD: tuple[tuple[str, Any, int], ...] = (
    (CHAT, {"messages": "hello"}, 400),
    (CHAT, {"messages": []}, 400),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "temperature": -1}, 400),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}, 400),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "n": 1.5}, 400),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "guided_regex": "("}, 400),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "model": "another"}, 404),
    (CHAT, {"messages": [{"role": "user", "content": "a " * 200_000}]}, 400),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "cache_salt": ""}, 400),
    (COMPLETION, {"prompt": []}, 400),
    (COMPLETION, {"prompt": [-1, 2]}, 400),
    (COMPLETION, {"prompt": "a", "use_beam_search": True, "temperature": 1}, 400),
    (COMPLETION, [1, 2, 3], 400),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}]}, 400),
    ("/v1/responses", {"input": "a", "background": True}, 400),
    ("/v1/sessions/sess_none/messages", {"content": "a"}, 404),
    ("/admin/cache/pin", {"prompt": "a prompt that nobody has ever computed"}, 404),
    ("/v1/nothing", {}, 404),
)


class Run(Protocol):
    """One run of a scenario; see `soak_traffic.ScenarioRun`.

    Attributes:
        name: of this run alone.
        rng: decides all that is left to chance.
        is_exact: drawn answers can be repeated to the token, too.
    """

    name: str
    rng: random.Random
    is_exact: bool

    def document(self) -> str:
        """Return one of the working set's texts; a few come up often, the others rarely."""

    async def send(self, step: Step) -> Reply:
        """Send a request and check its status; the scenario ends if it is wrong."""

    def fail(self, message: str) -> None:
        """Note what was wrong."""


def question(run: Run, about: str | None = None) -> list[dict[str, str]]:
    """Return a document as system prompt, and a question; a new one if it is `about` something."""
    number = about or f"number {run.rng.randrange(20)}"
    return [
        {"role": "system", "content": run.document()},
        {"role": "user", "content": f"Question {number}: what follows?"},
    ]


def sampling(run: Run) -> dict[str, Any]:
    """Return how to answer: greedily or drawn with a seed, and how long."""
    if run.rng.random() < 0.4:
        return drawn(run)
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": run.rng.randint(2, 24)}
    return greedy | run.rng.choice(({}, {"ignore_eos": True}))


def drawn(run: Run) -> dict[str, Any]:
    """Return how to draw an answer that can be drawn again."""
    filters: Any = ({}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.02})
    return {
        "temperature": run.rng.choice((0.7, 1.0)),
        "seed": run.rng.randrange(1000),
        "max_tokens": run.rng.randint(2, 24),
        **run.rng.choice(filters),
    }


def streaming(run: Run) -> dict[str, Any]:
    """Return the fields of a stream, or none."""
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return stream if run.rng.random() < 0.5 else {}


def extras(run: Run, salts: tuple[str, ...] = SALTS) -> dict[str, Any]:
    """Return fields that must not change the answer."""
    rng, fields = run.rng, streaming(run)
    if salts and rng.random() < 0.2:
        fields["cache_salt"] = rng.choice(salts)
    if rng.random() < 0.3:
        fields["priority"] = rng.randint(-2, 2)
    if rng.random() < 0.2:
        fields["cache_priority"] = rng.randint(0, 9)
    if rng.random() < 0.15:
        fields["cache_pin_ttl"] = rng.choice((1, 30))
    if rng.random() < 0.2:
        fields["timeout"] = 300
    return fields


def chat_step(run: Run, body: dict[str, Any]) -> Step:
    """Return a chat, with logprobs sometimes."""
    if run.rng.random() < 0.3:
        body = {**body, "logprobs": True, "top_logprobs": 2}
    return compared(run, Step("chat", CHAT, body))


def turn_step(run: Run, name: str, content: str) -> Step:
    """Return a turn of the session that was saved under a name."""
    body = {"content": content, **sampling(run), **streaming(run)}
    path = f"/v1/sessions/{{{name}}}/messages"
    return compared(run, Step("chat", path, body, is_replayed=True))


def control(path: str, body: dict[str, Any], *, saves: str) -> Step:
    """Return a step whose answer is an id that later ones need."""
    return Step("json", path, body, saves=saves, is_replayed=True)


def compared(run: Run, step: Step, *, exact_only: bool = False) -> Step:
    """Mark a step as one to be compared, unless it was drawn and can't be repeated exactly."""
    greedy = (step.body or {}).get("temperature", 1) == 0 and not exact_only
    step.is_compared = greedy or run.is_exact
    return step


def hang_up(run: Run, step: Step) -> None:
    """Let the client hang up on a step."""
    if step.is_stream and run.rng.random() < 0.7:
        step.hang_up_events = run.rng.randint(1, 8)
    else:
        step.hang_up_s = run.rng.choice((0.001, 0.05, 0.2, 0.6))
