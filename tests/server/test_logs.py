"""The process's log: its two forms, the id of the request, and that no prompt's text is in it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import pytest
from rich.console import Console
from server_fakes import FakeEngine, FakeTokenizer
from typer.testing import CliRunner

from radixkv import cli
from radixkv.config import ServeConfig, load_config
from radixkv.errors import ConfigError
from radixkv.request import RequestOutput
from radixkv.server.generation import Generation
from radixkv.server.logs import JsonFormatter, TextFormatter, configure_logging
from radixkv.server.request_log import RequestLog
from radixkv.server.scope import RequestScope, enter_scope, leave_scope

MARKER = "xyzzy plugh"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": MARKER}]

Capture = Callable[..., io.StringIO]


@pytest.fixture
def capture() -> Iterator[Capture]:
    """Send the log to a text; keyword arguments are those of the formatter."""
    added: list[logging.Handler] = []
    root = logging.getLogger()
    level = root.level

    def start(formatter: type[Any] = JsonFormatter, **options: Any) -> io.StringIO:
        text = io.StringIO()
        handler = logging.StreamHandler(text)
        handler.setFormatter(formatter(**options))
        root.addHandler(handler)
        root.setLevel(logging.DEBUG)
        added.append(handler)
        return text

    yield start
    root.setLevel(level)
    for handler in added:
        root.removeHandler(handler)


def lines(text: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.getvalue().splitlines()]


def errors(text: io.StringIO) -> list[dict[str, Any]]:
    """The server's own errors; a thread of another test may have some, too."""
    named = (line for line in lines(text) if line["logger"].startswith("radixkv."))
    return [line for line in named if line["level"] == "error"]


def scope(**fields: Any) -> RequestScope:
    return RequestScope(
        request_id="req-1",
        method="GET",
        route="/",
        model="m",
        headers={},
        log=RequestLog(),
        **fields,
    )


def fail() -> None:
    try:
        raise ValueError(f"can't read {MARKER!r}")
    except ValueError as error:
        raise KeyError(MARKER) from error


def test_json_lines_have_the_fields_that_programs_read(capture: Capture) -> None:
    text = capture()
    token = enter_scope(scope())
    logging.getLogger("radixkv.test").warning("%d blocks\nand a line", 3)
    leave_scope(token)
    logging.getLogger("radixkv.test").info("outside")
    inside, outside = lines(text)
    assert inside.pop("time").endswith("Z")
    assert inside == {
        "level": "warning", "logger": "radixkv.test", "message": "3 blocks\nand a line",
        "request_id": "req-1",
    }  # fmt: skip
    assert "request_id" not in outside


def test_text_lines_name_the_request(capture: Capture) -> None:
    text = capture(TextFormatter)
    token = enter_scope(scope())
    logging.getLogger("radixkv.test").warning("full")
    leave_scope(token)
    logging.getLogger("radixkv.test").warning("empty")
    assert text.getvalue() == "radixkv.test [req-1]: full\nradixkv.test: empty\n"


async def test_the_id_ends_with_its_request(make_client: Any, capture: Capture) -> None:
    client = await make_client(access_log=True)
    text = capture()
    await client.get("/health", headers={"X-Request-ID": "req-1"})
    told = {line["logger"]: line.get("request_id") for line in lines(text)}
    # The second is logged by the connection, once the request is over.
    assert (told["radixkv.access"], told["aiohttp.access"]) == ("req-1", None)


@pytest.mark.parametrize("formatter", [JsonFormatter, TextFormatter])
def test_a_trace_keeps_types_and_places_but_no_message(capture: Capture, formatter: Any) -> None:
    text = capture(formatter)
    try:
        fail()
    except KeyError:
        logging.getLogger("radixkv.test").exception("request %s failed", "a")
    shown = text.getvalue()
    assert MARKER not in shown
    assert "request a failed" in shown
    for part in ("KeyError (", "ValueError (", "test_logs.py", "in fail", "--log-prompts"):
        assert part in shown


def test_a_trace_shows_messages_that_are_the_systems(capture: Capture) -> None:
    text = capture()
    for error in (OSError(28, "No space left"), MemoryError("of the pool")):
        try:
            raise error
        except (OSError, MemoryError):
            logging.getLogger("radixkv.test").exception("failed")
    assert "No space left" in text.getvalue()
    assert "MemoryError: of the pool" in text.getvalue()


def test_groups_and_loops_of_exceptions_are_shown_without_messages(capture: Capture) -> None:
    text = capture()
    inner = ValueError(MARKER)
    group = ExceptionGroup(MARKER, [inner])
    inner.__context__ = group
    logging.getLogger("radixkv.test").error("failed", exc_info=group)
    assert MARKER not in text.getvalue()
    assert "ExceptionGroup (" in text.getvalue()
    assert "ValueError (" in text.getvalue()


def test_messages_are_shown_to_those_who_asked_for_prompts(capture: Capture) -> None:
    text = capture(show_text=True)
    try:
        fail()
    except KeyError:
        logging.getLogger("radixkv.test").exception("failed")
    assert MARKER in text.getvalue()


def test_another_handlers_trace_is_not_taken_over(capture: Capture) -> None:
    """A record keeps the trace that the first formatter made of it."""
    other, text = capture(logging.Formatter), capture(TextFormatter)
    try:
        fail()
    except KeyError:
        logging.getLogger("radixkv.test").exception("failed")
    assert MARKER in other.getvalue()
    assert MARKER not in text.getvalue()


async def test_asyncio_tells_of_failures_without_their_texts(capture: Capture) -> None:
    text = capture()
    error = ValueError(MARKER)
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    future.set_exception(error)
    future.exception()
    loop.default_exception_handler(
        {"message": "Task exception was never retrieved", "exception": error, "future": future}
    )
    loop.call_soon(lambda _: fail(), MARKER)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    told = [line["message"] for line in lines(text) if line["logger"] == "asyncio"]
    assert told[0] == "Task exception was never retrieved"
    assert told[1].startswith("Exception in callback test_asyncio")
    assert MARKER not in text.getvalue()


def test_half_of_a_surrogate_pair_can_be_logged() -> None:
    # Not through the log itself, which pytest would keep for its report.
    record = logging.makeLogRecord({"msg": "the file %s", "args": ("a\ud800",)})
    line = JsonFormatter().format(record)
    assert json.loads(line.encode())["message"] == "the file a\\ud800"


@pytest.fixture
def _root_as_before() -> Iterator[None]:
    """Undo what `configure_logging` does to the whole process."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


@pytest.mark.usefixtures("_root_as_before")
@pytest.mark.parametrize("kind", ["json", "text"])
def test_configured_log_goes_to_standard_error(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("warning", kind, console=Console(stderr=True, width=80))
    logging.getLogger("radixkv.test").info("unseen")
    logging.getLogger("radixkv.test").warning("seen")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "unseen" not in shown.err
    if kind == "json":
        assert json.loads(shown.err)["message"] == "seen"
    else:
        assert "radixkv.test: seen" in shown.err


@pytest.mark.usefixtures("_root_as_before")
def test_warnings_of_python_are_lines_of_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "json")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)  # once more: catching them has put the old way back
        warnings.warn("old", stacklevel=1)
    line = json.loads(capsys.readouterr().err)
    assert (line["logger"], line["level"]) == ("py.warnings", "warning")


class FailingTokenizer(FakeTokenizer):
    """Quotes what it fails on, as tokenizers do."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        if "fail" in text:
            raise ValueError(f"can't encode {text!r}")
        return super().encode(text, add_special_tokens=add_special_tokens)


REFUSED: list[tuple[str, Any]] = [
    (CHAT, {"messages": MARKER}),
    (CHAT, {"messages": [{"role": MARKER, "content": MARKER}]}),
    (CHAT, {"messages": [{"role": "assistant", "content": MARKER}]}),
    (CHAT, {"messages": MESSAGES, "model": MARKER}),
    (CHAT, {"messages": MESSAGES, MARKER: MARKER, "max_tokens": 1}),
    (CHAT, {"messages": MESSAGES, "functions": [{"name": MARKER}]}),
    (
        CHAT,
        {
            "messages": MESSAGES,
            "tools": [{"type": "function", "function": {"name": MARKER}}],
            "max_tokens": 1,
        },
    ),
    (CHAT, {"messages": MESSAGES, "tool_choice": MARKER}),
    (CHAT, {"messages": MESSAGES, "stop": [MARKER] * 100}),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": MARKER}}),
    (CHAT, {"messages": [{"role": "user", "content": MARKER * 900}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "url": MARKER}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": f"fail {MARKER}"}]}),
    (CHAT, {"messages": MESSAGES, "cache_salt": MARKER * 100}),
    ("/v1/completions", {"prompt": [MARKER, 5]}),
    ("/v1/completions", {"prompt": MARKER * 900}),
    ("/v1/completions", {"prompt": f"fail {MARKER}"}),
    ("/v1/completions", {"prompt": f"fail {MARKER}", "stream": True}),
    ("/v1/completions", {"prompt": MARKER, "suffix": MARKER}),
    ("/v1/responses", {"input": [{"type": MARKER}]}),
    ("/v1/responses", {"input": f"fail {MARKER}"}),
    ("/v1/responses", {"input": MARKER, "previous_response_id": MARKER}),
    ("/v1/messages", {"messages": [{"role": MARKER, "content": MARKER}], "max_tokens": 1}),
    ("/v1/messages", {"messages": MESSAGES, "system": f"fail {MARKER}", "max_tokens": 1}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES, "system": f"fail {MARKER}"}),
    ("/v1/sessions", {"metadata": {MARKER: MARKER * 100}}),
    ("/v1/sessions/plugh/messages", {"content": MARKER}),
    ("/tokenize", {"prompt": f"fail {MARKER}"}),
    ("/detokenize", {"tokens": MARKER}),
    ("/admin/cache/explain", {"prompt": f"fail {MARKER}"}),
    ("/admin/cache/warm", {"prompt": f"fail {MARKER}"}),
    ("/admin/cache/pin", {"prompt": f"fail {MARKER}"}),
    ("/admin/cache/flush", {"namespace": MARKER * 9, "cache_salt": MARKER}),
    (f"/v1/{MARKER}", {"prompt": MARKER}),
]


async def test_no_refusal_logs_text_of_its_request(make_client: Any, capture: Capture) -> None:
    client = await make_client(FakeEngine(FailingTokenizer()), access_log=True)
    text = capture()
    statuses = []
    for url, body in REFUSED:
        response = await client.post(url, json=body, headers={"X-Request-ID": "req-1"})
        statuses.append(response.status)
        await response.read()
    half = b'{"messages": "' + MARKER.encode()
    response = await client.post(CHAT, data=half, headers={"Content-Type": "application/json"})
    assert response.status == 400
    # All but the field that nobody knows, which is ignored, and the tool of that name.
    assert sum(400 <= status < 500 for status in statuses) >= len(REFUSED) - 12
    assert statuses.count(500) == sum("fail" in str(body) for _, body in REFUSED)
    assert MARKER not in text.getvalue()
    failed = errors(text)
    assert len(failed) == statuses.count(500)
    assert {line["request_id"] for line in failed} == {"req-1"}


@pytest.mark.parametrize("stream", [True, False])
async def test_no_failure_while_answering_logs_text(
    make_client: Any, capture: Capture, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    client = await make_client()
    text = capture()

    def checked(self: Generation, prompt: int, output: RequestOutput) -> Any:
        raise ValueError(f"can't read {output.text!r} of {MARKER}")

    monkeypatch.setattr(Generation, "_checked", checked)
    body = {"messages": MESSAGES, "max_tokens": 2, "stream": stream}
    response = await client.post(CHAT, json=body, headers={"X-Request-ID": "req-1"})
    answer = await response.text()
    assert "error" in answer
    assert MARKER not in answer
    assert MARKER not in text.getvalue()
    (failed,) = errors(text)
    assert failed["request_id"] == "req-1"
    assert "ValueError (" in failed["exception"]


@pytest.mark.parametrize("where", ["model", "text", "arrival"])
async def test_no_failure_in_the_engine_logs_text(
    serve: Any, capture: Capture, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    client, served = await serve()
    text = capture()

    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError(f"can't go on with {MARKER!r}")

    target, name = {
        "model": (served.engine.runner, "execute"),
        "text": (served.engine.tokenizer, "decode"),
        "arrival": (served.engine, "add_request"),
    }[where]
    monkeypatch.setattr(target, name, fail)
    body = {"prompt": MARKER, "max_tokens": 2, "ignore_eos": True, "stream": True}
    response = await client.post("/v1/completions", json=body)
    assert "error" in await response.text()
    assert MARKER not in text.getvalue()
    (failed,) = errors(text)
    assert "ValueError (" in failed["exception"]
    assert "test_logs.py" in failed["exception"]


async def test_a_malformed_request_line_is_not_logged(make_client: Any, capture: Capture) -> None:
    client = await make_client()
    text = capture()
    reader, writer = await asyncio.open_connection(client.host, client.port)
    writer.write(b"PO\x01ST /" + MARKER.encode() + b" HTTP/9\r\n\r\n")
    await writer.drain()
    assert b" 400 " in await reader.readline()
    writer.close()
    await writer.wait_closed()
    assert MARKER not in text.getvalue()


async def test_prompts_are_logged_for_those_who_ask_for_it(
    make_client: Any, capture: Capture
) -> None:
    quiet, loud = await make_client(), await make_client(log_prompts=True)
    text = capture()
    body = {"prompt": f"one\n{MARKER}", "max_tokens": 1}
    await quiet.post("/v1/completions", json=body)
    assert MARKER not in text.getvalue()
    answer = await (await loud.post("/v1/completions", json=body)).json()
    (line,) = (line for line in lines(text) if MARKER in line["message"])
    assert answer["id"].removeprefix("cmpl-") in line["message"]
    assert r"'one\nxyzzy plugh'" in line["message"]
    assert line["request_id"]


async def test_the_id_is_on_every_answer(make_client: Any) -> None:
    client = await make_client(api_key="sk-1", max_body_bytes=2000)
    known = {"Authorization": "Bearer sk-1", "X-Request-ID": "req-1"}
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("GET", "/health", {}),
        ("GET", "/metrics", {}),
        ("GET", "/nothing", {}),
        ("DELETE", "/v1/models", {}),
        ("POST", CHAT, {"json": {"messages": MESSAGES, "max_tokens": 1}}),
        ("POST", CHAT, {"json": {"messages": MESSAGES, "max_tokens": 1, "stream": True}}),
        ("POST", CHAT, {"json": {"messages": "x" * 3000}}),
        ("POST", CHAT, {"data": b"{"}),
        ("POST", "/v1/messages", {"json": {}}),
        ("POST", "/v1/responses", {"data": aiohttp.FormData({"a": "b"})}),
    ]
    statuses = set()
    for method, url, options in asked:
        response = await client.request(method, url, headers=known, **options)
        statuses.add(response.status)
        assert response.headers.getall("X-Request-ID") == ["req-1"], (method, url)
        await response.read()
    unknown = await client.get("/v1/models", headers={"X-Request-ID": "req-2"})
    assert (unknown.status, unknown.headers["X-Request-ID"]) == (401, "req-2")
    assert statuses >= {200, 400, 404, 405, 413, 415}


@pytest.mark.parametrize(
    ("option", "bad"),
    [("log_format", "xml"), ("log_prompts", "maybe"), ("access_log", ""), ("log_level", "all")],
)
def test_options_of_the_log_are_checked(option: str, bad: str) -> None:
    with pytest.raises(ConfigError, match="--" + option.replace("_", "-")):
        load_config({option: bad}, environ={})
    assert (ServeConfig().log_format, ServeConfig().log_prompts) == ("text", False)
    assert (ServeConfig().access_log, ServeConfig().otlp_traces_endpoint) == (None, None)


@pytest.mark.usefixtures("_root_as_before")
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--otlp-traces-endpoint", "nowhere"], "--otlp-traces-endpoint must be an http"),
        (["--access-log", "/nowhere/access.log"], "--access-log /nowhere/access.log can't be"),
    ],
)
def test_what_can_not_be_set_up_is_refused_before_the_model_is_loaded(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixkv.engine.factory.build_engine", None)
    result = CliRunner().invoke(cli.app, ["serve", *arguments])
    assert result.exit_code == 2
    assert told in result.output
