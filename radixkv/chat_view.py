"""What `radixkv chat` shows: answers on standard output, all else on standard error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["ChatView", "TurnStats", "clean", "numbered_turns"]

# No text of a model moves the cursor, rings, or writes over what is there.
CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
MAX_LINE = 60


@dataclass(frozen=True, slots=True)
class TurnStats:
    """What an answer took, as the client saw it.

    Attributes:
        prompt, cached, generated: tokens; the first two of the whole prompt.
        first_s: seconds from the request to the first text.
        rate: tokens a second after the first one; None if there was only one.
    """

    prompt: int
    cached: int
    generated: int
    first_s: float
    rate: float | None


class ChatView:
    """Writes to two consoles."""

    def __init__(self, out: Console | None = None, notes: Console | None = None) -> None:
        self.out = out or Console(highlight=False)
        self.notes = notes or Console(stderr=True, highlight=False)

    def piece(self, text: str) -> None:
        """Write a piece of an answer at once, tabs and all."""
        self.out.file.write(clean(text))
        self.out.file.flush()

    def end_of_answer(self) -> None:
        """End the last line of an answer."""
        self.piece("\n")

    def stats(self, stats: TurnStats) -> None:
        """Show what an answer took."""
        facts = [
            f"{stats.cached:,} cached",
            f"{stats.prompt - stats.cached:,} computed",
            f"{stats.generated:,} generated",
            f"TTFT {stats.first_s:.2f} s",
        ]
        if stats.rate is not None:
            facts.append(f"{stats.rate:.1f} tokens/s")
        self.note(" · ".join(facts))

    def note(self, text: str, style: str = "dim") -> None:
        """Show a line that is no part of the conversation."""
        self.notes.print(Text(clean(text), style=style), soft_wrap=True)

    def error(self, text: str) -> None:
        """Show what went wrong."""
        self.note(f"error: {text}", "red")

    def history(self, messages: Sequence[dict[str, Any]]) -> None:
        """Show a conversation, each answered turn with its number."""
        if not messages:
            self.note("There is nothing yet.")
        for turn, message in numbered_turns(messages):
            style = "bold" if message["role"] == "user" else ""
            head = f"[{turn}] {message['role']}: "
            self.notes.print(Text(head, "cyan") + Text(_shown(message), style), soft_wrap=True)

    def sessions(self, sessions: Sequence[dict[str, Any]], current: str) -> None:
        """Show sessions as a table; the current one is marked."""
        table = Table("", "session", "turns", "tokens", "forked of", box=None, pad_edge=False)
        for session in sessions:
            table.add_row(
                "*" if session["id"] == current else "",
                session["id"],
                f"{session['num_turns']:,}",
                f"{session['num_tokens']:,}",
                (session["parent"] or "")[:13],
            )
        self.notes.print(table)

    def why(self, entry: dict[str, Any]) -> None:
        """Show what a request found in the cache, and why no more."""
        self.note(
            f"{entry['cached_tokens']:,} of {entry['prompt_tokens']:,} prompt tokens were cached "
            f"({entry['reason']}). {entry['message']}",
            "",
        )
        window = entry.get("window")
        if window is not None:
            for side in ("prompt", "cached"):
                before, after = window[side]["before"], window[side]["after"]
                line = Text(f"  {side:>6}: ", "cyan") + Text(_quoted(before[-MAX_LINE:]), "dim")
                self.notes.print(line + Text(_quoted(after[:MAX_LINE]), "bold red"), soft_wrap=True)
        rewritten = entry.get("history", {}).get("message")
        if rewritten:
            self.note(rewritten, "")


def clean(text: str) -> str:
    """Return a text without control characters, line breaks and tabs excepted.

    >>> clean("a\\n\\x1b[2Jb")
    'a\\n\ufffd[2Jb'
    """
    return text.translate(CONTROLS)


def numbered_turns(messages: Sequence[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """Return each message with the number of its turn; an answer ends one.

    >>> [turn for turn, _ in numbered_turns([{"role": r} for r in ("user", "assistant", "user")])]
    [1, 1, 2]
    """
    numbered, turn = [], 1
    for message in messages:
        numbered.append((turn, message))
        turn += message["role"] == "assistant"
    return numbered


def _shown(message: dict[str, Any]) -> str:
    calls = [call["function"]["name"] + "(…)" for call in message.get("tool_calls", ())]
    return clean(" ".join([message.get("content") or "", *calls]).strip())


def _quoted(text: str) -> str:
    return clean(text.replace("\n", "⏎"))
