"""What agents do: chat, hold sessions, call tools, fork plans, sample, and read long documents.

Each kind is a function that lives through one task with a `Client`, which knows how to send and how
to wait; a load generator brings its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from loadtests.airline import Conversation, data_dir, load_conversations
from loadtests.openai_client import CHAT, Sample
from loadtests.serving_workloads import WORDS

__all__ = [
    "KINDS",
    "AgentOptions",
    "Call",
    "Client",
    "Kind",
    "parse_mix",
    "recordings",
    "system_prompt",
]

Message = dict[str, Any]

MAX_RECORDINGS = 100
MAX_TURNS = 1000
MIN_CHARACTERS = 2  # of a token: JSON has hardly fewer


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """How agents live.

    Attributes:
        think_s: mean pause of a person between an answer and the next message.
        tool_s: mean time that a tool takes.
        max_tokens: of each answer.
        turns: messages of a chat, a session, or questions about a document.
        branches: that a plan is forked into.
        samples: answers drawn from one prompt.
        system_words: length of the system prompt that all agents of a kind share.
        document_words: length of a document.
        documents: how many different ones there are.
    """

    think_s: float = 5.0
    tool_s: float = 1.0
    max_tokens: int = 64
    turns: int = 6
    branches: int = 4
    samples: int = 4
    system_words: int = 600
    document_words: int = 2500
    documents: int = 8


@dataclass(frozen=True, slots=True)
class Call:
    """One request for an answer.

    Attributes:
        body: without the model's name and how the stream is read.
        route: where it goes.
        answers: how many it asks for.
    """

    body: dict[str, Any]
    route: str = CHAT
    answers: int = 1


class Client(Protocol):
    """How an agent acts.

    Attributes:
        context: tokens of prompt and answer that the model takes; None if the server doesn't tell.
    """

    context: int | None

    def ask(self, kind: str, calls: Sequence[Call]) -> list[Sample]:
        """Send calls at once, wait for all, and count them under a kind of user."""

    def post(self, route: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Send a request that computes nothing; None if the server refuses or doesn't know it."""

    def delete(self, route: str) -> None:
        """Give something up."""

    def pause(self, seconds: float) -> None:
        """Wait."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of agent: what it does, and how many there are relative to others."""

    live: Callable[[Client, AgentOptions, random.Random], None]
    weight: int
    summary: str


def system_prompt(name: str, words: int) -> Message:
    """Return the system message that all agents of one kind begin with; the same at every call."""
    return {"role": "system", "content": _text(random.Random(f"system {name}"), words)}


@cache
def recordings(folder: Path | None = None) -> tuple[Conversation, ...]:
    """Return the recorded conversations of the airline agent.

    Raises:
        FileNotFoundError: RADIXKV_DATA doesn't have them.
    """
    return tuple(load_conversations(MAX_RECORDINGS, MAX_TURNS, folder or data_dir()))


def chat(client: Client, options: AgentOptions, rng: random.Random) -> None:
    """Chat on a shared system prompt, the history sent each time; a person thinks in between."""
    history = [system_prompt("chat", options.system_words)]
    for turn in range(options.turns):
        if turn:
            client.pause(_about(rng, options.think_s))
        history.append(_question(rng))
        (sample,) = client.ask("chat", [Call(_body(history, options))])
        if sample.error is not None:
            return
        history.append({"role": "assistant", "content": sample.text})


def session(client: Client, options: AgentOptions, rng: random.Random) -> None:
    """Hold a session: the server keeps the history. Where there are none, chat."""
    system = system_prompt("chat", options.system_words)["content"]
    created = client.post("/v1/sessions", {"system": system})
    if created is None:
        chat(client, options, rng)
        return
    route = f"/v1/sessions/{created['id']}"
    try:
        for turn in range(options.turns):
            if turn:
                client.pause(_about(rng, options.think_s))
            body = {"content": _question(rng)["content"], "max_tokens": options.max_tokens}
            (sample,) = client.ask("sessions", [Call(body, f"{route}/messages")])
            if sample.error is not None:
                return
    finally:
        client.delete(route)


def tools(client: Client, options: AgentOptions, rng: random.Random) -> None:
    """Replay a recorded agent: answers of tools come quickly, those of people after a thought."""
    conversation = rng.choice(recordings())
    for turn, messages in enumerate(conversation):
        if turn:
            # A recorded tool's answer follows a call, which is JSON.
            called = messages[-2]["content"].rstrip().endswith("}")
            client.pause(_about(rng, options.tool_s if called else options.think_s))
        (sample,) = client.ask("tools", [Call(_body(messages, options))])
        if sample.error is not None or turn + 1 == len(conversation):
            return
        # Recorded conversations may be longer than the model's context: then this one ends here.
        more = sum(len(m["content"]) for m in conversation[turn + 1][len(messages) :])
        end = sample.prompt_tokens + more / MIN_CHARACTERS + options.max_tokens
        if client.context is not None and end > client.context:
            return


def forks(client: Client, options: AgentOptions, rng: random.Random) -> None:
    """Make one plan and follow several branches of it at once, which share all before them."""
    history = [system_prompt("forks", options.system_words), _question(rng)]
    (plan,) = client.ask("forks", [Call(_body(history, options))])
    if plan.error is not None:
        return
    history.append({"role": "assistant", "content": plan.text})
    branches = [[*history, _question(rng)] for _ in range(options.branches)]
    for turn in range(2):
        samples = client.ask("forks", [Call(_body(branch, options)) for branch in branches])
        if any(sample.error is not None for sample in samples):
            return
        if not turn:
            client.pause(_about(rng, options.tool_s))
            branches = [
                [*branch, {"role": "assistant", "content": sample.text}, _question(rng)]
                for branch, sample in zip(branches, samples, strict=True)
            ]


def samplers(client: Client, options: AgentOptions, rng: random.Random) -> None:
    """Draw several answers from one prompt."""
    history = [system_prompt("samplers", options.system_words), _question(rng)]
    body = {**_body(history, options), "n": options.samples, "temperature": 1.0}
    client.ask("samplers", [Call(body, answers=options.samples)])


def documents(client: Client, options: AgentOptions, rng: random.Random) -> None:
    """Ask several questions about one long document, which others read too."""
    number = rng.randrange(options.documents)
    text = _text(random.Random(f"document {number}"), options.document_words)
    for turn in range(options.turns):
        if turn:
            client.pause(_about(rng, options.think_s))
        question = _question(rng)["content"]
        messages = [{"role": "system", "content": text}, {"role": "user", "content": question}]
        (sample,) = client.ask("documents", [Call(_body(messages, options))])
        if sample.error is not None:
            return


KINDS = {
    "chat": Kind(chat, 4, "chats on a shared system prompt, history sent each time"),
    "sessions": Kind(session, 4, "the same with the sessions API"),
    "tools": Kind(tools, 3, "recorded tool loops of an airline agent (RADIXKV_DATA)"),
    "forks": Kind(forks, 1, "one plan, several branches at once"),
    "samplers": Kind(samplers, 1, "several answers from one prompt"),
    "documents": Kind(documents, 1, "questions about a long document"),
}
"""All kinds by name, with the weights they have unless others are asked for."""


def parse_mix(text: str) -> dict[str, int]:
    """Read `KIND=WEIGHT,KIND`; return the kinds that have a weight.

    Raises:
        ValueError: there is no such kind, or no weight at all.
    """
    weights = {}
    for part in text.split(","):
        name, _, weight = part.strip().partition("=")
        if name not in KINDS or not (weight or "1").isdecimal():
            raise ValueError(f"--mix must be KIND=WEIGHT of {', '.join(KINDS)}, got {part!r}")
        weights[name] = int(weight or 1)
    if not any(weights.values()):
        raise ValueError(f"--mix leaves nobody: {text!r}")
    return {name: weight for name, weight in weights.items() if weight}


def _body(messages: Sequence[Message], options: AgentOptions) -> dict[str, Any]:
    return {"messages": list(messages), "max_tokens": options.max_tokens, "temperature": 0}


def _question(rng: random.Random) -> Message:
    return {"role": "user", "content": f"Tell me about {_text(rng, rng.randint(8, 24))}."}


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS.split(), k=words))


def _about(rng: random.Random, mean: float) -> float:
    """Draw a pause: exponential, as people and tools are, but cut at five times the mean."""
    return min(rng.expovariate(1 / mean), 5 * mean) if mean > 0 else 0.0
