from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest
from rich.console import Console
from typer.testing import CliRunner

from radixkv.cache import RadixCache
from radixkv.cli import app
from radixkv.tree_view import render_tree


def cached(*texts: str) -> RadixCache:
    cache = RadixCache(64, 4)
    for text in texts:
        sequence = cache.create_sequence([ord(c) for c in text])
        sequence.reuse()
        sequence.reserve(len(sequence))
        cache.take_copies()
        sequence.commit(len(sequence))
        sequence.free()
    return cache


def printed(report: dict[str, Any]) -> str:
    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        console.print(render_tree(report))
    return capture.get()


def decode(ids: Any) -> str:
    return "".join(map(chr, ids))


def test_a_tree_is_drawn_with_its_numbers() -> None:
    cache = cached("abcdefgh", "abcdefgh", "abcdXYZ[/]", "abcd\n\x1b[2J")
    sessions = [("sess_0123456789abcdef", (), map(ord, "abcd"))]
    shown = printed(cache.tree_report(decode=decode, sessions=sessions))
    assert "0 s ago · sess_0123456  'abcd'" in shown
    assert shown.startswith("6 blocks of 4 tokens in 6 nodes\n")
    assert "4 tokens · 3 hits · 0 s ago" in shown
    assert "'XYZ['" in shown, "a text is no markup"
    assert "\x1b" not in shown, "a text can't reach the terminal"
    assert "tail" in shown


def test_what_is_left_out_is_counted() -> None:
    cache = cached(*("abcd" + c * 4 for c in "123456"))
    assert "… 4 more" in printed(cache.tree_report(max_breadth=2, decode=decode))


def test_ids_are_shown_without_a_tokenizer() -> None:
    assert "'97 98 99 100'" in printed(cached("abcd").tree_report())


class Handler(BaseHTTPRequestHandler):
    """Answers as a server would; the key is "sesame"."""

    report: ClassVar[dict[str, Any]] = {}
    paths: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.paths.append(self.path)
        known = self.headers.get("Authorization") == "Bearer sesame"
        body = self.report if known else {"error": {"message": "A valid API key is required"}}
        self.send_response(200 if known else 401)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["tree", *arguments], env={"RADIXKV_API_KEY": ""})


def test_the_command_draws_a_servers_tree(url: str) -> None:
    Handler.report = cached("abcdefgh").tree_report(decode=decode)
    result = run("--url", url, "--api-key", "sesame", "--depth", "2", "--namespace", "a/b")
    assert result.exit_code == 0, result.output
    assert "'abcdefgh'" in result.output
    assert Handler.paths[-1] == "/admin/cache/tree?depth=2&breadth=10&namespace=a%2Fb"


@pytest.mark.parametrize("bad", ["ftp://x", "http://127.0.0.1:1", None])
def test_the_command_says_why_it_cannot(url: str, bad: str | None) -> None:
    result = run("--url", bad or url)
    assert result.exit_code == 2
    assert "radixkv: error: " in result.stderr
    assert bad is not None or "A valid API key is required" in result.stderr
