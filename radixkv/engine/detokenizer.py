"""Turns generated ids into text as they come, and notices stop strings on the way."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Protocol

__all__ = ["Decoder", "IncrementalDetokenizer", "StopMatcher"]

REPLACEMENT = "\ufffd"
MAX_CHARACTER_BYTES = 4  # of UTF-8


class Decoder(Protocol):
    """The part of a tokenizer that turns ids into text."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`."""
        ...


class IncrementalDetokenizer:
    """Decodes a growing list of ids without ever splitting a character.

    The texts returned by `push` and `flush` join to `decode(all ids)`. Ids are decoded together
    with the few before them, since a token's text can depend on its neighbours.
    """

    def __init__(self, tokenizer: Decoder, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._context = 0  # ids from here on are decoded
        self._emitted = 0  # ids before here are out as text
        self._sent = 0  # characters of the text of the ids from `_context` on that are out

    def push(self, token_id: int) -> str:
        """Add an id; return the text that is complete now, "" while a character is open."""
        self._ids.append(token_id)
        text = self._decode()
        # An unfinished character decodes to U+FFFD at the end, with some tokenizers to one per
        # byte. One that is really invalid does too: after as many ids as a character can have
        # bytes it shows, and only the last may still be open.
        is_open = text.endswith(REPLACEMENT)
        if is_open and len(self._ids) - self._emitted < MAX_CHARACTER_BYTES:
            return ""
        end = len(text) - is_open
        if end <= self._sent:
            self._emitted = self._emitted if is_open else len(self._ids)
            return ""
        new = text[self._sent : end]
        self._context, self._emitted = self._emitted, len(self._ids)
        self._sent = len(self._decode()) - is_open
        return new

    def copy(self) -> IncrementalDetokenizer:
        """Return one with the same ids, for a fork."""
        copied = copy.copy(self)
        copied._ids = list(self._ids)
        return copied

    def flush(self) -> str:
        """Return what is left, an unfinished character as U+FFFD; call once, at the end."""
        new = self._decode()[self._sent :]
        self._sent += len(new)
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(
            self._ids[self._context :], skip_special_tokens=self._skip_special_tokens
        )


class StopMatcher:
    """Holds back just enough text that no part of a stop string is ever sent.

    What is held is the longest end of the text that a stop string begins with.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; return (text to send, the stop string that ends the answer or None).

        Of several matches the one that begins first in the text counts, the longest of those that
        begin there. After a match nothing more is to be pushed.
        """
        if not self._stops:
            return text, None
        held = self._held + text
        found = [(at, -len(s), s) for s in self._stops if (at := held.find(s)) >= 0]
        if found:
            at, _, stop = min(found)
            self._held = ""
            return held[:at], stop
        keep = max((_overlap(held, s) for s in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], None

    def copy(self) -> StopMatcher:
        """Return one that holds back the same text, for a fork."""
        return copy.copy(self)

    def flush(self) -> str:
        """Return the text still held back, when the answer ends for another reason."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
