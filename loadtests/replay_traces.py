"""Recorded traffic as sessions of requests: Mooncake's traces, and conversations."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loadtests.airline import read_conversations
from loadtests.openai_client import CHAT
from loadtests.replay_text import BlockText, TokenCounter, single_token_words
from radixkv.simulate.traffic import Request, load_trace

__all__ = [
    "COMPLETIONS",
    "Session",
    "Trace",
    "Turn",
    "is_mooncake",
    "load_blocks",
    "load_recorded",
    "write_blocks",
]

COMPLETIONS = "/v1/completions"
NUM_CHECKED = 8  # prompts whose length is counted before the run


@dataclass(frozen=True, slots=True)
class Turn:
    """One request.

    Attributes:
        index: in the trace.
        delay: seconds after the turn before it; of the first one, none.
        prompt_len: tokens it should have; None if that isn't known.
        output_len: tokens of the answer.
        prompt: makes `messages` or `prompt` of its body.
        blocks: `[n]` ids of the whole blocks of its prompt, where the trace has some.
    """

    index: int
    delay: float
    prompt_len: int | None
    output_len: int
    prompt: Callable[[], dict[str, Any]]
    blocks: npt.NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """Turns one after the other; the first comes `arrival` seconds after the beginning."""

    name: str
    arrival: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """What is replayed.

    Attributes:
        route: where the requests go.
        num_skipped: requests that were left out as too long.
        unit: tokens of a block, where the trace has some.
    """

    name: str
    route: str
    sessions: tuple[Session, ...]
    num_skipped: int = 0
    unit: int | None = None

    @property
    def num_requests(self) -> int:
        """Requests in all."""
        return sum(len(session.turns) for session in self.sessions)


def is_mooncake(path: Path) -> bool:
    """Whether a file is a trace in Mooncake's form; else it has conversations.

    Raises:
        ValueError: it is neither.
    """
    with path.open(encoding="utf-8") as lines:
        try:
            row = json.loads(next(lines, ""))
        except ValueError:
            row = None
    if isinstance(row, dict) and ("hash_ids" in row or "messages" in row):
        return "hash_ids" in row
    raise ValueError(f"{path}: its first line has neither hash_ids nor messages")


async def load_blocks(
    path: Path,
    counter: TokenCounter,
    *,
    limit: int | None = None,
    unit: int = 512,
    scale: float = 1.0,
    max_output: int | None = None,
    max_input: int | None = None,
    as_chat: bool = False,
) -> Trace:
    """Read a trace in Mooncake's form and give its blocks a text.

    Args:
        path: the file.
        counter: of tokens.
        limit: so many requests at most.
        unit: tokens that an id stands for.
        scale: of all lengths; a block becomes `round(unit * scale)` tokens.
        max_output: longer answers are cut.
        max_input: requests with longer prompts are left out.
        as_chat: send the prompt as a user's message.

    Raises:
        ConfigError: the file is not of that form.
        ValueError: lengths can't be met exactly.
    """
    requests = load_trace(path, unit, limit)
    words, beside = await single_token_words(counter)
    if as_chat:
        message = {"role": "user", "content": " ".join(words)}
        beside = await counter.count_chat([message]) - len(words)
    num_blocks = 1 + max(int(r.keys.max(initial=0)) for r in requests)
    text = BlockText(words, max(1, round(unit * scale)), num_blocks)

    def turn(index: int, request: Request) -> Turn:
        rest = round((request.prompt_len - len(request.keys) * unit) * scale)
        length = max(len(request.keys) * text.unit + rest, beside + 1)
        output = max(1, round(request.output_len * scale))

        def prompt() -> dict[str, Any]:
            content = text.prompt(request.keys, length - beside, f"{path.name} {index}")
            if as_chat:
                return {"messages": [{"role": "user", "content": content}]}
            return {"prompt": content}

        delay = request.arrival if request.after is not None else 0.0
        output = min(output, max_output or output)
        return Turn(index, delay, length, output, prompt, request.keys)

    turns = [turn(index, request) for index, request in enumerate(requests)]
    for checked in turns[:: max(1, len(turns) // NUM_CHECKED)]:
        body = checked.prompt()
        got = await (
            counter.count_chat(body["messages"]) if as_chat else counter.count(body["prompt"])
        )
        if got != checked.prompt_len:
            raise ValueError(
                f"request {checked.index} should have {checked.prompt_len} tokens, its text has "
                f"{got}: this tokenizer joins words"
            )
    kept = [t.prompt_len is None or max_input is None or t.prompt_len <= max_input for t in turns]
    sessions = _sessions(requests, turns, kept)
    route = CHAT if as_chat else COMPLETIONS
    return Trace(path.name, route, sessions, kept.count(False), text.unit)


def write_blocks(trace: Trace, path: Path) -> None:
    """Write a trace of blocks, scaled and cut as it is, in Mooncake's form for other programs.

    Raises:
        ValueError: it has no blocks.
    """
    unit = trace.unit
    if unit is None:
        raise ValueError(f"{trace.name} has no blocks")
    turns = [(session, turn) for session in trace.sessions for turn in session.turns]
    # What is left of a prompt behind its blocks is a block that no other prompt has.
    fresh = 1 + max(int(t.blocks.max(initial=0)) for _, t in turns if t.blocks is not None)
    with path.open("w", encoding="utf-8") as lines:
        for session, turn in sorted(turns, key=lambda pair: pair[1].index):
            assert turn.blocks is not None
            assert turn.prompt_len is not None
            whole = turn.blocks.tolist()[: turn.prompt_len // unit]
            missing = -(-turn.prompt_len // unit) - len(whole)
            own = list(range(fresh, fresh + missing))
            fresh += missing
            row = {
                "timestamp": round(1e3 * session.arrival),
                "input_length": turn.prompt_len,
                "output_length": turn.output_len,
                "hash_ids": [*whole, *own],
            }
            if len(session.turns) > 1:
                row |= {"session_id": session.name}
            if turn is not session.turns[0]:
                row |= {"delay": round(1e3 * turn.delay)}
            lines.write(json.dumps(row) + "\n")


def load_recorded(
    path: Path,
    *,
    limit: int | None = None,
    turns: int | None = None,
    output: int = 64,
    delay: float = 0,
) -> Trace:
    """Read recorded conversations; the recorded answers are the history.

    Args:
        path: a file with `{"messages": [...]}` a line, its tools in `airline_tools.json` beside it.
        limit: so many requests at most.
        turns: so many of each conversation at most.
        output: tokens of each answer.
        delay: seconds from an answer to the next turn.

    Raises:
        ValueError: a line is of another form.
    """
    sessions, index = [], 0
    beside = path.with_name("airline_tools.json")
    tools = beside if beside.exists() else None
    conversations = read_conversations(path, sys.maxsize, turns or sys.maxsize, tools)
    for number, conversation in enumerate(conversations):
        room = len(conversation) if limit is None else min(limit - index, len(conversation))
        if room <= 0:
            break
        made = [
            Turn(index + n, delay if n else 0.0, None, output, _chat(messages))
            for n, messages in enumerate(conversation[:room])
        ]
        index += room
        sessions.append(Session(f"{path.stem}-{number}", 0.0, tuple(made)))
    return Trace(path.name, CHAT, tuple(sessions))


def _chat(messages: list[dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    return lambda: {"messages": messages}


def _sessions(
    requests: Sequence[Request], turns: Sequence[Turn], kept: Sequence[bool]
) -> tuple[Session, ...]:
    """Chain turns; one that is left out, and what follows it, is missing."""
    chains: dict[int, list[Turn]] = {}
    heads: dict[int, int] = {}
    for index, request in enumerate(requests):
        head = index if request.after is None else heads.get(request.after, -1)
        if not kept[index] or head < 0:
            continue
        heads[index] = head
        chains.setdefault(head, []).append(turns[index])
    return tuple(
        Session(f"request-{head}", requests[head].arrival, tuple(chain))
        for head, chain in chains.items()
    )
