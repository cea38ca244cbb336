"""Where the lines of `radixkv chat` come from: a terminal with editing and history, or a pipe."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

__all__ = ["MessageReader", "history_file"]

PROMPT, MORE = "> ", "… "
# Lines of a paste follow each other faster than anyone types.
PASTE_S = 0.03
MAX_HISTORY = 1000


class MessageReader:
    """Reads messages. A line that ends in a backslash goes on in the next one.

    On a terminal, lines that arrive at once (a paste) are one message, and Ctrl-C drops what was
    typed so far.
    """

    def __init__(self, stdin: TextIO | None = None, *, history: Path | None = None) -> None:
        """Read from `stdin`, a terminal or not; `history` is kept for one on a terminal."""
        self._stdin = stdin or sys.stdin
        self.interactive = self._stdin.isatty()
        self._history = history if self.interactive else None
        edits = self.interactive and sys.stdout.isatty()
        self._line: Callable[[str], str] = input if edits else self._plain
        if edits:
            _load_history(self._history)

    def read(self) -> str | None:
        """Return the next message without space around it, or None at the end of the input.

        Raises:
            KeyboardInterrupt: Ctrl-C on a terminal; the message so far is dropped.
        """
        try:
            text = self._line(PROMPT)
        except EOFError:
            return None
        with contextlib.suppress(EOFError):
            while True:
                if text.endswith("\\"):
                    text = text[:-1] + "\n" + self._line(MORE)
                elif self.interactive and self._more_waits():
                    text += "\n" + self._line("")
                else:
                    break
        return text.strip()

    def close(self) -> None:
        """Keep the history."""
        _save_history(self._history)

    def _plain(self, prompt: str) -> str:
        if self.interactive:
            print(prompt, end="", file=sys.stderr, flush=True)
        line = self._stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def _more_waits(self) -> bool:
        ready, _, _ = select.select([self._stdin], [], [], PASTE_S)
        return bool(ready)


def history_file() -> Path:
    """Return `radixkv/chat_history` in `$XDG_STATE_HOME`, or else in `~/.local/state`."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "radixkv" / "chat_history"


def _load_history(path: Path | None) -> None:
    try:
        import readline  # not on every platform; input() then has no editing
    except ImportError:
        return
    # A paste then comes as one line with breaks inside, where readline knows how.
    readline.parse_and_bind("set enable-bracketed-paste on")
    readline.set_history_length(MAX_HISTORY)
    if path is not None:
        with contextlib.suppress(OSError):
            readline.read_history_file(path)


def _save_history(path: Path | None) -> None:
    if path is None:
        return
    with contextlib.suppress(ImportError, OSError):
        import readline

        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # What was asked is nobody else's business, also where the library does not see to it.
        path.touch(mode=0o600)
        readline.write_history_file(path)
