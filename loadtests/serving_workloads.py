"""What the serving benchmark sends, and how much better than a peer each figure should be."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from loadtests.airline import Message, load_conversations

__all__ = ["WORKLOADS", "Dialogue", "Target", "Workload", "make_workload"]

WORKLOADS = ("airline", "sessions", "single", "unshared")

# Each is one token, with a space before it, in the vocabularies of GPT-2's descendants.
WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea kid body information back "
    "parent face others level office door health person art war history party result change "
    "morning reason research girl guy moment air teacher force education"
)


@dataclass(frozen=True, slots=True)
class Dialogue:
    """What one client says.

    Attributes:
        turns: the messages that each turn adds to the history.
        keeps_answers: whether the model's answers go into the history; else `turns` have what
            stands in their place, so that every server gets the same prompts.
    """

    turns: tuple[tuple[Message, ...], ...]
    keeps_answers: bool


@dataclass(frozen=True, slots=True)
class Target:
    """What the first server's figure should be, as a multiple of the second's.

    Attributes:
        figure: its name in the result of a run.
        at_least, at_most: the bounds of the ratio; None is no bound.
        when: for which server the target is, if not for all.
    """

    figure: str
    at_least: float | None = None
    at_most: float | None = None
    when: str = ""

    def is_met(self, ratio: float) -> bool:
        """Whether a ratio is within the bounds."""
        return (self.at_least is None or ratio >= self.at_least) and (
            self.at_most is None or ratio <= self.at_most
        )

    def __str__(self) -> str:
        bounds = [f">= {self.at_least:.3g}"] if self.at_least is not None else []
        bounds += [f"<= {self.at_most:.3g}"] if self.at_most is not None else []
        return " ".join([*bounds, *([f"({self.when})"] if self.when else [])])


@dataclass(frozen=True, slots=True)
class Workload:
    """Traffic of a fixed size.

    Attributes:
        concurrency: dialogues at a time; the next one begins when one has ended.
        max_tokens: length of every answer.
    """

    name: str
    dialogues: tuple[Dialogue, ...]
    concurrency: int
    max_tokens: int
    targets: tuple[Target, ...]

    @property
    def num_requests(self) -> int:
        """Requests in all."""
        return sum(len(dialogue.turns) for dialogue in self.dialogues)


def make_workload(name: str, *, tiny: bool = False) -> Workload:
    """Return one of `WORKLOADS`; the same at every call.

    Args:
        name: which one.
        tiny: a few short requests, to try things out.

    Raises:
        FileNotFoundError: the recordings of "airline" are not there.
    """
    rng = random.Random(name)
    if name == "airline":
        conversations = load_conversations(*((2, 2) if tiny else (24, 6)))
        return Workload(
            name,
            tuple(_recorded(conversation) for conversation in conversations),
            concurrency=8,
            max_tokens=4 if tiny else 32,
            targets=(
                Target("output_tokens_per_s", at_least=2.5),
                Target("ttft_p50_s", at_most=1 / 3),
                Target("itl_p50_ms", at_most=0.6),
            ),
        )
    if name == "sessions":
        count, num_turns, length = (3, 2, 50) if tiny else (32, 3, 1000)
        system = {"role": "system", "content": _words(rng, length)}

        def turns() -> Iterator[tuple[Message, ...]]:
            for turn in range(num_turns):
                user = {"role": "user", "content": _words(rng, 12)}
                yield (user,) if turn else (system, user)

        return Workload(
            name,
            tuple(Dialogue(tuple(turns()), keeps_answers=True) for _ in range(count)),
            concurrency=count,
            max_tokens=4 if tiny else 32,
            targets=(Target("output_tokens_per_s", at_least=2.0),),
        )
    if name == "single":
        return Workload(
            name,
            (_one_prompt(rng, 50 if tiny else 1000),),
            concurrency=1,
            max_tokens=8 if tiny else 64,
            targets=(
                Target("itl_p50_ms", at_most=0.75, when="bf16"),
                Target("itl_p50_ms", at_most=0.4, when="int8"),
            ),
        )
    if name == "unshared":
        count, length = (3, 40) if tiny else (32, 500)
        return Workload(
            name,
            tuple(_one_prompt(rng, length) for _ in range(count)),
            concurrency=count,
            max_tokens=4 if tiny else 32,
            targets=(Target("output_tokens_per_s", at_least=1.0),),
        )
    raise ValueError(f"workload must be one of {', '.join(WORKLOADS)}, got {name!r}")


def _recorded(conversation: Iterable[list[Message]]) -> Dialogue:
    turns, known = [], 0
    for messages in conversation:
        turns.append(tuple(messages[known:]))
        known = len(messages)
    return Dialogue(tuple(turns), keeps_answers=False)


def _one_prompt(rng: random.Random, length: int) -> Dialogue:
    # As the system prompt: templates put one of their own before a lone user message, which all
    # prompts would share.
    system = {"role": "system", "content": _words(rng, length)}
    user = {"role": "user", "content": "Go on."}
    return Dialogue(((system, user),), keeps_answers=False)


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS.split(), k=count))
