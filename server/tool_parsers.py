"""Finds tool calls in an answer as it comes, in the syntax of the model's family.

Rules, the same for every family:

- A marker is never sent as content, nor is a part of one while it may still become one.
- A call's name is told once it is known; its arguments follow as the model writes them.
- White space at the end of a text is held back until more text comes: before a call it is dropped.
- What begins like a call and turns out to be none is content, without the markers around it.
- Without a marker only a call of a tool that the request knows counts, so that an answer that
  happens to be JSON stays an answer.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from radixkv.server.call_scanner import CallScanner

__all__ = [
    "FAMILIES",
    "CallArguments",
    "CallStart",
    "TextPart",
    "ToolEvent",
    "ToolFamily",
    "ToolParser",
    "family_of_template",
]

WHITESPACE = " \t\r\n"
BETWEEN_CALLS = WHITESPACE + "[],;"
# Mistral's templates refuse ids of another length.
SHORT_ID_CHARS = 9
ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class TextPart:
    """Content of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of the `index`-th call of an answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments; the fragments join to JSON text."""

    index: int
    text: str


ToolEvent = TextPart | CallStart | CallArguments


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """How the models of one family write tool calls.

    Attributes:
        name: as `--tool-parser` spells it.
        begins, ends: markers around calls; may be special tokens of the model.
        bare: whether a call may stand without a marker, at the beginning of a line.
        named: whether a function's name may stand before an object that is its arguments alone.
        name_end: what the family writes between such a name and the arguments; None: it writes
            objects that hold both.
        array: whether it writes all calls as one array.
        separator: what it writes between calls otherwise.
        arguments_key: what the object of a call has its arguments under.
        short_ids: whether ids have nine letters and digits.
    """

    name: str
    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    bare: bool = False
    named: bool = False
    name_end: str | None = None
    array: bool = False
    separator: str = "\n"
    arguments_key: Literal["arguments", "parameters"] = "arguments"
    short_ids: bool = False

    def new_id(self) -> str:
        """Return a new unique id for a call."""
        if self.short_ids:
            return "".join(secrets.choice(ALPHABET) for _ in range(SHORT_ID_CHARS))
        return f"call_{secrets.token_hex(12)}"


FAMILIES = {
    family.name: family
    for family in (
        ToolFamily("hermes", begins=("<tool_call>",), ends=("</tool_call>",)),
        ToolFamily(
            "llama3",
            begins=("<|python_tag|>",),
            bare=True,
            separator="; ",
            arguments_key="parameters",
        ),
        ToolFamily("mistral", begins=("[TOOL_CALLS]",), named=True, array=True, short_ids=True),
        ToolFamily(
            "mistral-args",
            begins=("[TOOL_CALLS]",),
            named=True,
            name_end="[ARGS]",
            separator="",
            short_ids=True,
        ),
        ToolFamily("generic", bare=True),
    )
}


def family_of_template(template: str | None) -> ToolFamily:
    """Return the family whose syntax a chat template teaches; generic JSON if none.

    >>> family_of_template("... <tool_call>\\n{...}").name, family_of_template(None).name
    ('hermes', 'generic')
    """
    template = template or ""
    if "<tool_call>" in template:
        return FAMILIES["hermes"]
    if "[TOOL_CALLS]" in template:
        return FAMILIES["mistral-args" if "[ARGS]" in template else "mistral"]
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and "tools" in template):
        return FAMILIES["llama3"]
    return FAMILIES["generic"]


class ToolParser:
    """Splits one answer into content and calls. `push` every text, then `finish` once.

    Invariant: `_held` is what came and is neither told nor known to be white space to drop.
    """

    def __init__(
        self,
        family: ToolFamily,
        names: Collection[str],
        *,
        max_calls: int | None = None,
        only_named: bool = False,
    ) -> None:
        """Parse an answer.

        Args:
            family: the syntax.
            names: of the request's tools.
            max_calls: calls after so many are dropped; None is no limit.
            only_named: calls of other tools are content, behind a marker, too.
        """
        self._family = family
        self._names = names
        self._max_calls = max_calls
        self._only_named = only_named
        self._markers = (*family.begins, *family.ends)
        self._state: Callable[[list[ToolEvent]], bool] = self._in_text
        self._held = ""
        self._line_start = True
        self._num_calls = 0
        self._scanner = CallScanner()
        self._marked = False  # behind a marker, where anything is meant as a call
        self._raw = ""  # of a call that may turn out to be none
        self._told = False  # the start of the call being read was told

    def push(self, text: str) -> list[ToolEvent]:
        """Add text; return what is certain now."""
        self._held += text
        events: list[ToolEvent] = []
        while self._held and self._state(events):
            pass
        return self._limited(events)

    def finish(self) -> list[ToolEvent]:
        """Return what was held back, at the end of the answer."""
        events: list[ToolEvent] = []
        if self._state == self._in_call and not self._told:
            self._add_text(events, self._raw)
        elif self._state in (self._in_text, self._in_name):
            self._add_text(events, self._held)
        elif self._state == self._between and not self._num_calls:
            self._add_text(events, self._raw + self._held)
        self._held = self._raw = ""
        return self._limited(events)

    def _in_text(self, events: list[ToolEvent]) -> bool:
        """Tell content up to the next marker or call; whether there is more to do."""
        held, at, marker = self._held, *self._find_begin()
        if marker in self._family.ends:  # left over from what was no call
            self._add_text(events, held[:at])
            self._held = held[at + len(marker) :]
            return True
        if at >= 0:
            text = held[:at].rstrip(WHITESPACE)
            self._add_text(events, text)
            self._held = held[at + len(marker) :]
            self._marked = bool(marker)
            self._raw = held[len(text) : at]
            self._state = self._between
            return True
        # Held: the beginning of a marker, and white space that a call may follow.
        keep = max((_overlap(held, m) for m in self._markers), default=0)
        end = len(held[: len(held) - keep].rstrip(WHITESPACE))
        self._add_text(events, held[:end])
        self._held = held[end:]
        return False

    def _find_begin(self) -> tuple[int, str]:
        """Return where a call begins in what is held, and its marker ("" for none); -1 if not."""
        held = self._held
        found = [(at, m) for m in self._markers if (at := held.find(m)) >= 0]
        if self._family.bare:
            at = 0
            line_start = self._line_start
            while at < len(held):
                stripped = at + len(held[at:]) - len(held[at:].lstrip(WHITESPACE))
                if "\n" in held[at:stripped]:
                    line_start = True
                if line_start and held[stripped : stripped + 1] in ("{", "["):
                    found.append((stripped, ""))
                    break
                next_line = held.find("\n", stripped)
                if next_line < 0:
                    break
                at, line_start = next_line, False
        return min(found, default=(-1, ""))

    def _between(self, events: list[ToolEvent]) -> bool:
        """Skip what stands between calls; whether there is more to do."""
        held = self._held
        for i, char in enumerate(held):
            rest = held[i:]
            for marker in self._markers:  # first, since one begins with a bracket
                if rest.startswith(marker):
                    self._held, self._raw = rest[len(marker) :], ""
                    self._marked = True
                    return True
                if marker.startswith(rest):
                    self._held = rest
                    return False
            if char in BETWEEN_CALLS:
                self._raw += char
                continue
            if char == "{":
                self._held = rest
                self._begin_call()
                return True
            self._held = rest
            if self._marked and self._family.named and not self._raw.strip(WHITESPACE):
                self._state = self._in_name
            elif self._num_calls:
                self._state, self._line_start = self._in_text, True
            else:
                # It was no call after all, and neither is anything else in its line.
                self._add_text(events, self._raw)
                self._state, self._line_start = self._in_text, False
            self._raw = ""
            return True
        self._held = ""
        return False

    def _in_name(self, events: list[ToolEvent]) -> bool:
        """Read a name that stands before its arguments; whether there is more to do."""
        name, brace, _ = self._held.partition("{")
        if not brace:
            return False
        self._held = self._held[len(name) :]
        name = name.partition("[")[0].strip()
        self._begin_call(name or None)
        return True

    def _begin_call(self, name: str | None = None) -> None:
        self._scanner = CallScanner(name)
        self._told = False
        self._state = self._in_call

    def _in_call(self, events: list[ToolEvent]) -> bool:
        """Read the object of a call; whether there is more to do."""
        held = self._held
        used = self._scanner.feed(held)
        self._raw += held[:used]
        self._held = held[used:]
        scanner = self._scanner
        if scanner.name is not None and not self._told and not scanner.failed:
            known = scanner.name in self._names
            if known or (not self._only_named and (self._marked or self._num_calls)):
                self._told = True
                events.append(CallStart(self._num_calls, self._family.new_id(), scanner.name))
            else:
                scanner.failed = True
        if self._told and (fragment := scanner.take_arguments()):
            events.append(CallArguments(self._num_calls, fragment))
        if not (scanner.done or scanner.failed):
            return False
        if self._told:
            self._num_calls += 1
            self._state = self._between
        else:
            self._add_text(events, self._raw)
            self._state, self._line_start = self._in_text, False
        self._raw = ""
        return True

    def _add_text(self, events: list[ToolEvent], text: str) -> None:
        if text:
            events.append(TextPart(text))
            self._line_start = text.endswith("\n")

    def _limited(self, events: list[ToolEvent]) -> list[ToolEvent]:
        """Return `events` without calls beyond the limit."""
        limit = self._max_calls
        if limit is None:
            return events
        return [e for e in events if isinstance(e, TextPart) or e.index < limit]


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `marker`."""
    lengths = range(min(len(text), len(marker) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(marker[:n])), 0)
