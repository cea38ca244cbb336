"""`radixkv chat`: in a terminal, from a pipe, and command by command."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import make_engine
from live_server import LiveServer
from rich.console import Console
from server_fakes import END, STOP, FakeEngine, FakeTokenizer

from radixkv.chat import Chat, ChatSettings
from radixkv.chat_client import ChatClient, ServerGoneError
from radixkv.chat_input import MessageReader
from radixkv.chat_view import ChatView, clean
from radixkv.engine import AsyncEngine
from radixkv.errors import RadixKVError

# A terminal of its own, so that its Ctrl-C is a signal to the program.
IN_TERMINAL = (
    "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "from radixkv.cli import main; main()"
)
IN_PIPE = "from radixkv.cli import main; main()"
WAIT_S = 60.0
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PASTE = "\x1b[200~{}\x1b[201~"


def say(engine: FakeEngine, text: str) -> None:
    engine.script = [*text.encode(), STOP]


@pytest.fixture
def server() -> Iterator[LiveServer]:
    """A server whose model says what it is told to, a token every 5 ms."""
    with LiveServer(lambda: FakeEngine(step_s=0.005)) as server:
        say(server.engine, "Hi é there.")
        yield server


@pytest.fixture
def cached() -> Iterator[LiveServer]:
    """A server with a real cache."""

    def make() -> AsyncEngine:
        engine = make_engine(256, 16, eos_token_ids=(END, STOP), max_model_len=900)
        engine.cache.pins.max_blocks = 64
        engine.tokenizer = tokenizer = FakeTokenizer()
        return AsyncEngine(engine, tokenizer, model_name="real")

    with LiveServer(make) as server:
        yield server


class Terminal:
    """`radixkv chat` on a terminal that a test types into."""

    def __init__(self, url: str, home: Path, *options: str) -> None:
        self._fd, theirs = pty.openpty()
        env = {**os.environ, "TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "160"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, "chat", "--url", url, *options],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**env, "XDG_STATE_HOME": str(home)},
            start_new_session=True,
        )
        os.close(theirs)
        self._shown = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.see("> ")

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def see(self, text: str, wait_s: float = WAIT_S) -> str:
        """Wait for a text; return what was shown until it, since the last time."""
        deadline = time.monotonic() + wait_s
        while text not in self._shown:
            left = deadline - time.monotonic()
            assert left > 0, f"{text!r} is not shown, but {self._shown!r}"
            if select.select([self._fd], [], [], left)[0]:
                with contextlib.suppress(OSError):  # the program has ended
                    new = self._decoder.decode(os.read(self._fd, 65536))
                    self._shown = ESCAPES.sub("", self._shown + new)
        before, _, self._shown = self._shown.partition(text)
        return before

    def interrupt(self, text: str = "> ") -> None:
        """Press Ctrl-C until it shows, at the prompt by a new one."""
        # Python doesn't see a signal that comes just before it waits for a key, but the next one.
        for _ in range(30):
            self.type("\x03")
            with contextlib.suppress(AssertionError):
                self.see(text, wait_s=1)
                return
        raise AssertionError(f"Ctrl-C does not show {text!r}")

    def end(self) -> int:
        """Press Ctrl-D; return the exit code."""
        self.type("\x04")
        return self._process.wait(WAIT_S)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(WAIT_S)
        os.close(self._fd)


@pytest.fixture
def terminal(server: LiveServer, tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(server.url, tmp_path)
    yield terminal
    terminal.close()


def piped(url: str, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", IN_PIPE, "chat", "--url", url, *options],
        input=text,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


class Talk:
    """A conversation without a process: what is said goes in, what is shown comes out."""

    def __init__(self, url: str, text: str, **settings: Any) -> None:
        out, notes = io.StringIO(), io.StringIO()
        view = ChatView(Console(file=out, width=160), Console(file=notes, width=160))
        self.chat = Chat(
            ChatClient(url), MessageReader(io.StringIO(text)), view, ChatSettings(**settings)
        )
        self.code = self.chat.run()
        self.out, self.notes = out.getvalue(), notes.getvalue()


def session_of(server: LiveServer, chat: Chat) -> dict[str, Any]:
    return ChatClient(server.url).call("GET", f"/v1/sessions/{chat.session}")


# --- in a terminal ------------------------------------------------------------------------------


def test_answers_are_shown_with_what_they_took(terminal: Terminal) -> None:
    terminal.type("hello\r")
    assert "Hi é there." in terminal.see("0 cached")
    assert "tokens/s" in terminal.see("> ")
    terminal.type("and?\r")
    assert re.search(r"\s[1-9]\d+ cached", terminal.see("computed"))
    terminal.see("> ")
    assert terminal.end() == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(
    terminal: Terminal, server: LiveServer
) -> None:
    say(server.engine, "word " * 500)
    terminal.type("hello\r")
    terminal.see("word word")
    terminal.interrupt("the turn is not kept")
    terminal.see("> ")
    say(server.engine, "Short.")
    terminal.type("again\r")
    terminal.see("Short.")
    terminal.see("> ")
    terminal.type("/history\r")
    shown = terminal.see("Short.")
    assert "[1] user: again" in shown
    assert "user: hello" not in shown
    assert terminal.end() == 0


def test_ctrl_c_at_the_prompt_drops_the_line(terminal: Terminal) -> None:
    terminal.type("never sent")
    terminal.see("never sent")
    terminal.interrupt()
    terminal.type("/history\r")
    terminal.see("There is nothing yet.")
    assert terminal.end() == 0


def test_pasted_and_continued_lines_are_one_message(terminal: Terminal, server: LiveServer) -> None:
    terminal.type(PASTE.format("one\ntwo") + "\r")
    terminal.see("cached")
    terminal.see("> ")
    terminal.type("three\\\r")
    terminal.see("… ")
    terminal.type("four\r")
    terminal.see("cached")
    terminal.see("> ")
    prompts = [server.engine.tokenizer.decode(s.prompt) for s in server.engine.submitted]
    assert "one\ntwo" in prompts[0]
    assert "three\nfour" in prompts[1]


def test_lines_that_arrive_at_once_are_one_message(terminal: Terminal, server: LiveServer) -> None:
    terminal.type("one\rtwo\rthree\r")
    terminal.see("cached")
    terminal.see("> ")
    (asked,) = server.engine.submitted
    assert "one\ntwo\nthree" in server.engine.tokenizer.decode(asked.prompt)


def test_a_server_that_is_gone_is_told_and_waited_for(
    terminal: Terminal, server: LiveServer
) -> None:
    say(server.engine, "word " * 500)
    terminal.type("hello\r")
    terminal.see("word")
    server.stop()
    terminal.see("error: ")
    terminal.see("> ")
    terminal.type("anyone?\r")
    terminal.see("can't be reached")
    terminal.see("> ")
    assert terminal.end() == 0


def test_errors_are_told_and_the_program_goes_on(terminal: Terminal) -> None:
    terminal.type("/nonsense\r")
    terminal.see("there is no command /nonsense")
    terminal.see("> ")
    terminal.type("/fork 7\r")
    terminal.see("error: at_turn")
    terminal.see("> ")
    terminal.type("/help\r")
    terminal.see("/fork [TURN]")
    terminal.see("> ")
    assert terminal.end() == 0


def test_lines_are_remembered_for_the_next_time(server: LiveServer, tmp_path: Path) -> None:
    terminal = Terminal(server.url, tmp_path)
    terminal.type("/sessions\r")
    terminal.see("forked of")
    terminal.see("> ")
    assert terminal.end() == 0
    terminal.close()
    file = tmp_path / "radixkv" / "chat_history"
    assert file.read_text() == "/sessions\n"
    assert file.stat().st_mode & 0o077 == 0


# --- from a pipe --------------------------------------------------------------------------------


def test_a_pipe_gets_the_answers_and_nothing_else(server: LiveServer) -> None:
    done = piped(server.url, "hello\n\nand\\\nso on?\n")
    assert (done.returncode, done.stdout) == (0, "Hi é there.\n" * 2)
    assert done.stderr.count("tokens/s") == 2
    assert len(server.engine.submitted) == 2


def test_a_pipe_ends_with_the_first_failure(server: LiveServer) -> None:
    server.engine.fail_at = 3
    done = piped(server.url, "hello\nand?\n")
    assert (done.returncode, done.stdout) == (1, "Hi \n")
    assert "error: " in done.stderr
    assert len(server.engine.submitted) == 1


def test_a_server_that_never_was_is_told_at_once() -> None:
    done = piped("http://127.0.0.1:9", "hello\n")
    assert done.returncode == 2
    assert "http://127.0.0.1:9 can't be reached" in done.stderr
    assert "radixkv serve" in done.stderr


def test_options_go_into_the_session_and_the_requests(server: LiveServer) -> None:
    done = piped(
        server.url, "hello\n", "--system", "Be brief.", "--max-tokens", "2", "--temperature", "0"
    )
    assert (done.returncode, done.stdout) == (0, "Hi\n")
    (asked,) = server.engine.submitted
    assert "Be brief." in server.engine.tokenizer.decode(asked.prompt)
    assert asked.params.temperature == 0
    done = piped(server.url, "hello\n", "--model", "other")
    assert done.returncode == 2
    assert "other" in done.stderr


# --- command by command -------------------------------------------------------------------------


def test_a_fork_goes_on_from_a_turn(server: LiveServer) -> None:
    talk = Talk(server.url, "one\ntwo\n/fork 1\nthree\n/history\n")
    assert talk.code == 0
    session = session_of(server, talk.chat)
    assert [m["content"] for m in session["messages"]][::2] == ["one", "three"]
    assert session["parent"]
    assert "[2] user: three" in talk.notes


def test_turns_are_taken_back(server: LiveServer) -> None:
    talk = Talk(server.url, "one\ntwo\nthree\n/back\nfour\n/back 2\nfive\n")
    assert talk.code == 0
    asked = [m["content"] for m in session_of(server, talk.chat)["messages"]][::2]
    assert asked == ["one", "five"]
    assert "1 turns are left" in talk.notes


def test_no_more_turns_are_taken_back_than_there_are(server: LiveServer) -> None:
    talk = Talk(server.url, "one\n/back 2\n")
    assert (talk.code, session_of(server, talk.chat)["num_turns"]) == (1, 1)
    assert "only 1 turns" in talk.notes


def test_a_new_session_has_the_system_prompt_and_no_history(server: LiveServer) -> None:
    talk = Talk(server.url, "one\n/new\ntwo\n", system="Be brief.")
    session = session_of(server, talk.chat)
    assert (session["num_turns"], session["system"]) == (1, "Be brief.")


def test_sessions_are_listed_and_gone_to(server: LiveServer) -> None:
    first = Talk(server.url, "one\n").chat.session
    talk = Talk(server.url, f"/sessions\n/sessions {first}\n/sessions\n/history\n")
    assert talk.chat.session == first
    assert f"*  {first}" in talk.notes
    assert "[1] user: one" in talk.notes
    assert Talk(server.url, "", session=first).chat.session == first
    with pytest.raises(RadixKVError, match="sess_none"):
        Talk(server.url, "", session="sess_none")


@pytest.mark.parametrize(("name", "start"), [("a.md", "## system\n\nBe brief."), ("a.json", "{")])
def test_a_conversation_is_saved(server: LiveServer, tmp_path: Path, name: str, start: str) -> None:
    talk = Talk(server.url, f"one\n/save {tmp_path / name}\n", system="Be brief.")
    text = (tmp_path / name).read_text("utf-8")
    assert talk.code == 0
    assert text.startswith(start)
    assert "Hi é there." in text
    if name.endswith("json"):
        assert json.loads(text)["messages"][0]["content"] == "one"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("/save", "name of a file"),
        ("/save /nowhere/a.md", "can't be written"),
        ("/pin soon", "/pin takes a time"),
        ("/fork x", "number of a turn"),
        ("/fork 7", "at_turn"),
        ("/back x", "number of turns"),
        ("/why", "no explanation"),
    ],
)
def test_a_command_that_makes_no_sense_is_refused(
    cached: LiveServer, line: str, reason: str
) -> None:
    talk = Talk(cached.url, line + "\n")
    assert talk.code == 1
    assert reason in talk.notes


def test_a_miss_is_explained_and_a_conversation_pinned(cached: LiveServer) -> None:
    system = "s" * 60
    Talk(cached.url, "hello\n", system=system, max_tokens=4)
    talk = Talk(cached.url, "other\n/why\n/pin 2m\n", system=system, max_tokens=4)
    assert talk.code == 0, talk.notes
    assert "(diverged)" in talk.notes
    assert "prompt: " in talk.notes
    assert "pinned for 120 s" in talk.notes
    (pin,) = ChatClient(cached.url).call("GET", "/admin/cache/pins")["data"]
    assert pin["source"].endswith(talk.chat.session)


def test_a_slash_can_begin_a_message(server: LiveServer) -> None:
    talk = Talk(server.url, "//etc/hosts?\n")
    assert session_of(server, talk.chat)["messages"][0]["content"] == "/etc/hosts?"


def test_an_answer_does_not_reach_the_terminal(server: LiveServer) -> None:
    say(server.engine, "a\x1b[2Jb\r\x07\n\tc")
    talk = Talk(server.url, "hello\n")
    assert talk.out == "a\ufffd[2Jb\ufffd\ufffd\n\tc\n"
    assert clean("\x9b1m\x7f") == "\ufffd1m\ufffd"


def test_a_key_is_sent(tmp_path: Path) -> None:
    with LiveServer(FakeEngine, api_key="secret") as server:
        with pytest.raises(RadixKVError, match="API key"):
            Talk(server.url, "")
        assert ChatClient(server.url, "secret").call("GET", "/v1/models")["data"]


def test_an_address_of_another_kind_is_refused() -> None:
    with pytest.raises(RadixKVError, match="--url"):
        ChatClient("ftp://127.0.0.1")


def test_a_stream_that_breaks_off_is_an_error(server: LiveServer) -> None:
    client = ChatClient(server.url)
    with pytest.raises(ServerGoneError, match="middle of an answer"):
        list(client.stream("/tokenize", {"prompt": "a body that is no stream"}))


def test_it_needs_nothing_but_http() -> None:
    rooms = ("torch", "aiohttp", "numpy", "radixkv.engine", "radixkv.cache", "radixkv.server")
    code = f"import sys, radixkv.chat; sys.exit(any(name in sys.modules for name in {rooms}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
