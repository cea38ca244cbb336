"""`radixkv chat`: a conversation with a running server, in a session of it."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from radixkv.chat_client import ChatClient, ServerError
from radixkv.chat_input import MessageReader
from radixkv.chat_view import ChatView, TurnStats, numbered_turns
from radixkv.errors import RadixKVError

__all__ = ["Chat", "ChatSettings"]

HELP = """\
/new           begin a new session with the same system prompt
/fork [TURN]   go on in a copy of this session, as it was after that turn
/back [TURNS]  take back the last turn, or the last few
/history       show the conversation
/why           tell what the last turn found in the cache, and why no more
/pin [TTL]     keep this conversation cached: 90, 90s, 10m, 2h
/sessions [ID] list the sessions, or go on with one of them
/save FILE     write the conversation as Markdown, or as JSON to a name in .json
/quit          leave, as Ctrl-D does
Ctrl-C stops an answer; the turn is then as if it had not been asked. A line that ends in a
backslash goes on in the next one. // begins a message with a slash."""
TTL = re.compile(r"(\d+)([smh]?)")
TTL_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}
DEFAULT_TTL = "1h"
# A server needs a moment to notice that a stopped answer has no reader.
FREE_AGAIN_S = 5.0
RETRY_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """What a conversation begins with; None leaves it to the server.

    Attributes:
        model: refused by the server unless it is the one it serves.
        system: the system prompt of new sessions.
        session: the session to go on with.
        temperature, max_tokens: of every answer.
    """

    model: str | None = None
    system: str | None = None
    session: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None


class Chat:
    """One conversation: reads messages, shows answers, and obeys commands.

    Attributes:
        session: the session that it goes on in.
    """

    def __init__(
        self, client: ChatClient, reader: MessageReader, view: ChatView, settings: ChatSettings
    ) -> None:
        self._client = client
        self._reader = reader
        self._view = view
        self._settings = settings
        self._stopped = False
        self.session = ""
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: view.note(HELP, ""),
            "new": self._new,
            "fork": self._fork,
            "back": self._back,
            "history": self._history,
            "why": self._why,
            "pin": self._pin,
            "sessions": self._sessions,
            "save": self._save,
        }

    def run(self) -> int:
        """Converse until the input ends; return the exit code.

        Without a terminal, the first failure ends it, with 1.

        Raises:
            RadixKVError: the conversation can't begin.
        """
        self._begin()
        try:
            while True:
                try:
                    message = self._reader.read()
                    if message is None or message == "/quit":
                        return 0
                    if message:
                        self._obey_or_ask(message)
                except KeyboardInterrupt:
                    self._view.note("")
                except RadixKVError as error:
                    self._view.error(str(error))
                    if not self._reader.interactive:
                        return 1
        finally:
            self._reader.close()

    def _begin(self) -> None:
        (model, *_) = self._client.call("GET", "/v1/models")["data"]
        if self._settings.session is None:
            self._new("")
        else:
            self._go_to(self._settings.session)
        if self._reader.interactive:
            self._view.note(
                f"{model['id']}, up to {model['max_model_len']:,} tokens. /help lists commands."
            )

    def _obey_or_ask(self, message: str) -> None:
        if not message.startswith("/") or message.startswith("//"):
            self._ask(message[1:] if message.startswith("//") else message)
            return
        name, _, argument = message[1:].partition(" ")
        command = self._commands.get(name)
        if command is None:
            raise RadixKVError(
                f"there is no command /{name}; /help lists them, // begins a message with a slash"
            )
        command(argument.strip())

    def _ask(self, message: str) -> None:
        """Send a message and show the answer as it comes."""
        began = time.monotonic()
        first = last = None
        usage: dict[str, Any] = {}
        try:
            with contextlib.closing(self._answer(message)) as events:
                for event in events:
                    usage = event.get("usage") or usage
                    for choice in event["choices"]:
                        if text := choice["delta"].get("content"):
                            last = time.monotonic()
                            first = first or last
                            self._view.piece(text)
        except KeyboardInterrupt:
            self._stopped = True
            self._view.end_of_answer()
            self._view.note("stopped; the turn is not kept")
            return
        except RadixKVError:
            if first is not None:
                self._view.end_of_answer()
            raise
        self._view.end_of_answer()
        last = last or time.monotonic()
        first = first or last
        generated = usage["completion_tokens"]
        spent = last - first
        self._view.stats(
            TurnStats(
                prompt=usage["prompt_tokens"],
                cached=usage["prompt_tokens_details"]["cached_tokens"],
                generated=generated,
                first_s=first - began,
                rate=(generated - 1) / spent if generated > 1 and spent > 0 else None,
            )
        )

    def _answer(self, message: str) -> Generator[dict[str, Any], None, None]:
        """Yield the events of the answer to a message."""
        body = {
            "content": message,
            "stream": True,
            "stream_options": {"include_usage": True},
            "model": self._settings.model,
            "temperature": self._settings.temperature,
            "max_tokens": self._settings.max_tokens,
        }
        deadline = time.monotonic() + FREE_AGAIN_S
        while True:
            events = self._client.stream(self._path("/messages"), body)
            try:
                yield from events
            except ServerError as error:
                waits = self._stopped and error.code == "session_busy"
                if not waits or time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_S)
            else:
                self._stopped = False
                return
            finally:
                events.close()

    # --- commands -------------------------------------------------------------------------------

    def _new(self, _: str) -> None:
        settings = self._settings
        body = {"system": settings.system, "model": settings.model}
        self.session = self._client.call("POST", "/v1/sessions", body)["id"]

    def _fork(self, argument: str) -> None:
        body = {"at_turn": _number(argument, "/fork takes the number of a turn")}
        child = self._client.call("POST", self._path("/fork"), body)
        self._go_to(child["id"])

    def _back(self, argument: str) -> None:
        count = _number(argument, "/back takes the number of turns to take back")
        turns = self._client.call("GET", self._path())["num_turns"]
        body = {"to_turn": turns - (1 if count is None else count)}
        if body["to_turn"] < 0:
            raise RadixKVError(f"there are only {turns:,} turns to take back")
        after = self._client.call("POST", self._path("/rollback"), body)
        self._view.note(f"{after['num_turns']:,} turns are left")

    def _history(self, _: str) -> None:
        self._view.history(self._messages())

    def _why(self, _: str) -> None:
        path = f"/admin/cache/explain/{quote(self.session, safe='')}"
        self._view.why(self._client.call("GET", path))

    def _pin(self, argument: str) -> None:
        found = TTL.fullmatch(argument or DEFAULT_TTL)
        if found is None:
            raise RadixKVError("/pin takes a time, such as 90, 90s, 10m or 2h")
        seconds = int(found[1]) * TTL_SECONDS[found[2]]
        pin = self._client.call("POST", self._path("/pin"), {"ttl_seconds": seconds})
        self._view.note(
            f"{pin['pinned_tokens']:,} of {pin['prompt_tokens']:,} tokens are pinned for "
            f"{pin['ttl_seconds']:g} s after their last use"
        )

    def _sessions(self, argument: str) -> None:
        if argument:
            self._go_to(argument)
        else:
            self._view.sessions(self._client.call("GET", "/v1/sessions")["data"], self.session)

    def _save(self, argument: str) -> None:
        if not argument:
            raise RadixKVError("/save takes the name of a file")
        path = Path(argument).expanduser()
        session = self._client.call("GET", self._path())
        try:
            path.write_text(_transcript(session, as_json=path.suffix == ".json"), "utf-8")
        except OSError as error:
            raise RadixKVError(f"{path} can't be written: {error.strerror}") from None
        self._view.note(f"saved to {path}")

    # --- helpers --------------------------------------------------------------------------------

    def _go_to(self, session: str) -> None:
        found = self._client.call("GET", f"/v1/sessions/{quote(session, safe='')}")
        self.session = found["id"]
        self._view.note(f"session {self.session}, {found['num_turns']:,} turns")

    def _messages(self) -> list[dict[str, Any]]:
        return list(self._client.call("GET", self._path("/messages"))["data"])

    def _path(self, rest: str = "") -> str:
        return f"/v1/sessions/{quote(self.session, safe='')}{rest}"


def _number(text: str, message: str) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()):
        raise RadixKVError(message)
    return int(text)


def _transcript(session: dict[str, Any], *, as_json: bool) -> str:
    if as_json:
        return json.dumps(session, indent=2, ensure_ascii=False) + "\n"
    system = [f"## system\n\n{session['system']}\n"] if session["system"] else []
    parts = [
        f"## {message['role']} ({turn})\n\n{message.get('content') or ''}\n"
        for turn, message in numbered_turns(session["messages"])
    ]
    return "\n".join([*system, *parts])
