"""Repeats what a soak asked, one request at a time, and compares the answers token by token.

The law is that of `tests/e2e/test_exactness.py`: sums are taken in another order in a batch, in
chunks, or on reused KV, so that two tokens whose log-probabilities are nearly equal may change
places, and nothing else may change. What comes after a changed token is another text, and isn't
compared. Drawn answers and beams, whose choices depend on more than two log-probabilities, are
compared in float32 only, where the differences are too small to be met.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from loadtests.soak_client import Choice, Reply, Step, Token, perform
from loadtests.soak_traffic import Record

__all__ = ["TIE", "Replay", "Verdicts", "compare", "tie_gap"]

TIE = {"float32": 1e-3, "bfloat16": 0.5}
"""Differences of log-probabilities below which a token may change, by the type of the model."""

TOP_LOGPROBS = 20
# Fields that say when and how an answer comes, not what it is.
MANNER = (
    "stream", "stream_options", "priority", "timeout", "cache_priority", "cache_pin_ttl",
)  # fmt: skip
CHAT = "/v1/chat/completions"


@dataclass(slots=True)
class Verdicts:
    """What the comparisons brought.

    Attributes:
        counts: answers that were `equal`, cut off but equal as far as they went (`prefix`),
            different at a `tie`, `different`; `skipped` because something before them differed;
            `unrepeatable` drawn answers of a model that isn't in float32.
        ties: gaps of the ties.
        different: what differed, one entry for each answer.
    """

    counts: Counter[str] = field(default_factory=Counter)
    ties: list[float] = field(default_factory=list)
    different: list[dict[str, Any]] = field(default_factory=list)


class Replay:
    """Repeats scenarios at an idle server.

    Args:
        flush: empty the cache before each request, at a server that has one.
        tie: the gap below which a difference is explained.
    """

    def __init__(
        self, http: aiohttp.ClientSession, url: str, *, tie: float, flush: bool = False
    ) -> None:
        self.verdicts = Verdicts()
        self._http, self._url, self._tie, self._flush = http, url, tie, flush
        self._known: dict[str, Reply] = {}

    async def judge(self, record: Record) -> None:
        """Repeat the steps of a scenario and compare their answers."""
        counts = self.verdicts.counts
        ids: dict[str, str] = {}
        differs = False
        for step, reply in record.steps:
            if not (step.is_compared or step.is_replayed):
                counts["unrepeatable"] += step.shape != "json" and reply.is_whole
                continue
            if differs:
                counts["skipped"] += step.is_compared
                continue
            if (
                not step.is_replayed
                and not any(choice.text or choice.calls for choice in reply.choices.values())
                and not reply.is_whole
            ):
                continue  # it was cut off before anything came
            alone = await self._repeat(step, ids)
            if step.is_compared:
                differs = self._compare(record, step, reply, alone)
            elif not alone.is_whole:
                differs = True
                self._differ(record, step, f"status {alone.status} {alone.error}", reply, alone)

    async def _repeat(self, step: Step, ids: dict[str, str]) -> Reply:
        again = alone(step)
        key = None if step.is_replayed else json.dumps([again.path, again.body], sort_keys=True)
        if key is not None and key in self._known:
            return self._known[key]
        if self._flush:
            await perform(self._http, self._url, Step("json", "/flush_cache"), {})
        reply = await perform(self._http, self._url, again, ids)
        if key is not None:
            self._known[key] = reply
        return reply

    def _compare(self, record: Record, step: Step, reply: Reply, alone: Reply) -> bool:
        """Compare two replies; whether they differ."""
        counts = self.verdicts.counts
        what = compare(reply, alone)
        if what is None:
            counts["equal" if reply.is_whole else "prefix"] += 1
            return False
        gaps = [
            tie_gap(choice, alone.choices[index])
            for index, choice in reply.choices.items()
            if index in alone.choices and choice.text != alone.choices[index].text
        ]
        is_greedy = (step.body or {}).get("temperature") == 0
        if gaps and is_greedy and all(gap is not None and gap < self._tie for gap in gaps):
            counts["tie"] += 1
            self.verdicts.ties += [gap for gap in gaps if gap is not None]
        else:
            self._differ(record, step, what, reply, alone)
        return True

    def _differ(self, record: Record, step: Step, what: str, reply: Reply, alone: Reply) -> None:
        self.verdicts.counts["different"] += 1
        self.verdicts.different.append(
            {
                "scenario": f"{record.kind} {record.name}",
                "path": step.path,
                "what": what,
                "body": step.body,
                "then": {i: [c.text, c.calls] for i, c in sorted(reply.choices.items())},
                "alone": {i: [c.text, c.calls] for i, c in sorted(alone.choices.items())},
                "cached_tokens": reply.cached_tokens,
            }
        )


def alone(step: Step) -> Step:
    """Return the step as it is repeated: whole, in no hurry, and with logprobs where they are."""
    body, path, shape = dict(step.body or {}), step.path, step.shape
    if step.twin is not None:
        body, path, shape = dict(step.twin), CHAT, "chat"
    for name in MANNER:
        body.pop(name, None)
    if shape == "chat":
        body |= {"logprobs": True, "top_logprobs": TOP_LOGPROBS}
    elif shape == "completion":
        body["logprobs"] = TOP_LOGPROBS
    return Step(shape, path, body if step.body is not None else None, step.method, saves=step.saves)


def compare(reply: Reply, alone: Reply) -> str | None:
    """Return what differs in an answer that came among others, None if nothing does."""
    if not alone.is_whole:
        return f"alone it got status {alone.status} {alone.error}"
    if not reply.is_whole:
        cut = [i for i, c in reply.choices.items() if not _begins(c, alone.choices.get(i))]
        return f"choice {cut[0]} is not the beginning of it" if cut else None
    if reply.choices.keys() != alone.choices.keys():
        return f"{len(reply.choices)} choices, {len(alone.choices)} alone"
    for index, choice in sorted(reply.choices.items()):
        other = alone.choices[index]
        if choice.text != other.text:
            return f"the text of choice {index}"
        if _parsed(choice.calls) != _parsed(other.calls):
            return f"the calls of choice {index}"
        if choice.tokens and _data(choice.tokens) != _data(other.tokens):
            return f"the tokens of choice {index}"
    for name in ("prompt_tokens", "completion_tokens"):
        mine, others = getattr(reply, name), getattr(alone, name)
        if mine is not None and mine != others:
            return f"{mine} {name}, {others} alone"
    return None


def tie_gap(choice: Choice, alone: Choice) -> float | None:
    """Return by how much the token chosen alone led the one chosen among others, where they part.

    None if that can't be told: the other token isn't among the most likely ones, or came where the
    answer alone had ended.
    """
    if choice.tokens:
        for mine, other in zip(choice.tokens, alone.tokens, strict=False):
            if mine.data != other.data:
                return _gap(other, (mine.data,))
        return None
    rest = choice.text.encode()
    for token in alone.tokens:
        if not rest.startswith(token.data) or (not rest and token.data):
            # Of the tokens that the text can go on with, the likeliest; if it ends here, any.
            return _gap(token, [d for d in token.top if rest.startswith(d) or not rest])
        rest = rest[len(token.data) :]
    return None


def _gap(token: Token, others: Iterable[bytes]) -> float | None:
    values = [token.top[data] for data in others if data in token.top and data != token.data]
    return abs(token.top[token.data] - max(values)) if values else None


def _begins(choice: Choice, whole: Choice | None) -> bool:
    return whole is not None and whole.text.startswith(choice.text)


def _parsed(calls: list[list[str]]) -> list[tuple[str, Any]]:
    parsed: list[tuple[str, Any]] = []
    for name, arguments in calls:
        try:
            parsed.append((name, json.loads(arguments)))
        except ValueError:
            parsed.append((name, arguments))
    return parsed


def _data(tokens: list[Token]) -> list[bytes]:
    return [token.data for token in tokens]
