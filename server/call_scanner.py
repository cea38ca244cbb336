"""Reads the JSON object of one tool call while it is still being written."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["CallScanner"]

WHITESPACE = " \t\r\n"
ARGUMENT_KEYS = ("arguments", "parameters")
NAME_KEY = "name"
# Some models put name and arguments into an object under this key, or the name alone.
FUNCTION_KEY = "function"


class CallScanner:
    """Finds the name and the arguments in `{"name": …, "arguments": {…}}`, in any order.

    Strings and nesting are followed, nothing else is checked: what the model writes as arguments
    is passed on as it is. Arguments given as JSON in a string are unpacked.

    Attributes:
        name: once it is known.
        done: the object is complete.
        failed: it is no object of a call.
    """

    def __init__(self, name: str | None = None) -> None:
        """Read an object; with a `name`, the object is the arguments of that function."""
        self.name = name
        self.done = self.failed = False
        self._alone = name is not None
        self._phase = "value" if self._alone else "open"
        self._key = ARGUMENT_KEYS[0]
        self._token: list[str] = []
        self._depth = 0
        self._in_string = self._escaped = False
        self._arguments: list[str] = []
        self._has_arguments = False

    def feed(self, text: str) -> int:
        """Read on; return how many characters belonged to the object."""
        for i, char in enumerate(text):
            if self.done or self.failed:
                return i
            self._read(char)
        return len(text)

    def take_arguments(self) -> str:
        """Return the arguments read since the last call; "{}" at the end of a call without any."""
        fragment = "".join(self._arguments)
        self._arguments.clear()
        if self.done and not self._has_arguments:
            self._has_arguments = True
            return "{}"
        return fragment

    def _read(self, char: str) -> None:
        phase = self._phase
        if phase == "in_key":
            self._token.append(char)
            if self._string_ended(char):
                key = _loads(self._token)
                self._key = key if isinstance(key, str) else ""
                self._phase = "colon"
        elif phase == "in_value":
            self._read_value(char)
        elif char in WHITESPACE:
            return
        elif phase == "value":
            self._token = []
            self._phase = "in_value"
            self._read_value(char)
        elif phase == "open" and char == "{":
            self._phase = "first_key"
        elif phase in ("key", "first_key") and char == '"':
            self._token, self._in_string, self._phase = [char], True, "in_key"
        elif phase == "colon" and char == ":":
            self._phase = "value"
        elif phase == "after" and char == ",":
            self._phase = "key"
        elif phase in ("after", "first_key") and char == "}":
            self._end()
        else:
            self.failed = True

    def _read_value(self, char: str) -> None:
        first = self._token[0] if self._token else char
        if first == '"':
            self._token.append(char)
            if len(self._token) == 1:
                self._in_string = True
            elif self._string_ended(char):
                self._end_value()
        elif first in "{[":
            self._token.append(char)
            if self._key in ARGUMENT_KEYS:
                self._has_arguments = True
                self._arguments.append(char)
            if self._in_string:
                self._string_ended(char)
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._end_value()
        elif char in ",}" or char in WHITESPACE:
            self._end_value()
            if not self.failed and char not in WHITESPACE:
                self._read(char)
        else:
            self._token.append(char)

    def _string_ended(self, char: str) -> bool:
        """Follow a string by one character; whether it ended."""
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            return True
        return False

    def _end_value(self) -> None:
        self._phase = "after"
        if self._alone:
            self.done = True
            return
        if self._key not in (NAME_KEY, FUNCTION_KEY, *ARGUMENT_KEYS):
            return
        if self._key in ARGUMENT_KEYS and self._token[:1] in (["{"], ["["]):
            return
        value = _loads(self._token)
        if self._key in ARGUMENT_KEYS:
            if isinstance(value, str):
                self._give(value)
            elif value is not None:
                self.failed = True
        elif isinstance(value, str):
            self.name = value
        elif self._key == FUNCTION_KEY and isinstance(value, dict):
            if isinstance(value.get(NAME_KEY), str):
                self.name = value[NAME_KEY]
            inner = next((value[k] for k in ARGUMENT_KEYS if k in value), None)
            if inner is not None:
                self._give(inner if isinstance(inner, str) else json.dumps(inner))
        else:
            self.failed = True

    def _give(self, arguments: str) -> None:
        if not self._has_arguments:
            self._has_arguments = True
            self._arguments.append(arguments)

    def _end(self) -> None:
        if self.name is None:
            self.failed = True
        else:
            self.done = True


def _loads(characters: list[str]) -> Any:
    try:
        return json.loads("".join(characters))
    except (ValueError, RecursionError):
        return None
