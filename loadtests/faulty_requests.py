"""Requests that are wrong in every way somebody's server once fell over, for every route."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from loadtests import faulty_values as values
from loadtests.faulty_values import HUGE, SURROGATE, USER
from loadtests.raw_http import head_of

__all__ = ["Fault", "Target", "faults"]

JSON = (("Content-Type", "application/json"),)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
# Whether it was the parser or the handler that noticed decides on the form.
ANY_FORM = "*"


@dataclass(frozen=True, slots=True)
class Target:
    """What a server has that faults are made for.

    Attributes:
        session: the id of one, without turns.
        vocab_size, max_model_len, max_body_bytes: its limits.
        compiles: it compiles grammars, as a server does that has a model.
    """

    session: str
    vocab_size: int
    max_model_len: int
    max_body_bytes: int
    compiles: bool = True


@dataclass(frozen=True, slots=True)
class Fault:
    """One request, and what must be answered to it.

    Attributes:
        kind: of mistake.
        request: all its bytes.
        path: of its route; "*" if the answer may have the form of either API.
        status: of the answer; 0 is any from 400 to 499.
        field: that the answer must name, "" for none.
    """

    kind: str
    request: bytes
    path: str
    status: int = 400
    field: str = ""

    @property
    def anthropic(self) -> bool:
        """Whether the answer has the form of Anthropic's API."""
        return self.path.startswith(MESSAGES)


def faults(target: Target) -> list[Fault]:
    """Return the faults for a server, all different."""
    found: dict[bytes, Fault] = {}
    for make in (_fields, _conversations, _others, _bodies, _places, _transport):
        for fault in make(target):
            found.setdefault(fault.request, fault)
    return list(found.values())


def bases(target: Target) -> dict[str, dict[str, Any]]:
    """Return a valid body for every route that reads one."""
    session = f"/v1/sessions/{target.session}"
    return {
        CHAT: {"messages": [USER], "max_tokens": 2},
        COMPLETIONS: {"prompt": [1, 2, 3], "max_tokens": 2},
        RESPONSES: {"input": "x", "max_output_tokens": 2},
        MESSAGES: {"messages": [USER], "max_tokens": 2},
        f"{MESSAGES}/count_tokens": {"messages": [USER]},
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [1]},
        "/v1/sessions": {},
        f"{session}/messages": {"content": "x", "max_tokens": 2},
        f"{session}/fork": {},
        f"{session}/pin": {},
        "/admin/cache/explain": {"prompt": "x"},
        "/admin/cache/pin": {"prompt": "x"},
        "/admin/cache/warm": {"prompt": "x"},
        "/admin/cache/flush": {"namespace": "nobody"},
    }


def _fields(target: Target) -> Iterator[Fault]:
    """Yield bodies with one field that is wrong, whole and as a stream."""
    turn = f"/v1/sessions/{target.session}/messages"
    compiled = values.COMPILED if target.compiles else {}
    openai = (values.NUMBERS, values.OPENAI_NUMBERS, values.SAMPLED)
    routes: dict[str, tuple[Mapping[str, tuple[str, ...]], ...]] = {
        CHAT: (*openai, compiled, values.CHATTED, {"tools": values.TOOLS, "metadata": _metadata()}),
        COMPLETIONS: (*openai, compiled, {
            "logprobs": ("21", "-1", "1.5", "true"), "suffix": ('"x"',)}),
        # A session is busy while it compiles one, and several of these come at once.
        turn: (*openai, values.CHATTED, {"tools": ("[]",), "cache_salt": ('"a"',)}),
        RESPONSES: (values.NUMBERS, values.OPENAI_NUMBERS, {
            "max_output_tokens": ("0", "-1", '"9"', "1.5"), "metadata": _metadata(),
            "text": ("3", '{"format":{"type":"xml"}}', '{"format":3}'), "background": ("true",),
            "truncation": ('"auto"',), "tool_choice": ('"required"', '{"type":"nothing"}'),
            "tools": ('[{"type":"web_search"}]', "[3]", '[{"type":"function"}]'),
            "conversation": ('"c"',), "stream": ('"yes"',)}),
        MESSAGES: (values.NUMBERS, {
            "max_tokens": ("0", "-1", "null", '"9"', "1.5", HUGE), "stream": ("1",),
            "stop_sequences": ('[""]', '"x"', "[1]", json.dumps(["s"] * 65)),
            "tools": ("[{}]", '[{"name":3}]', '[{"type":"bash_20250124","name":"b"}]', "[3]"),
            "tool_choice": ('{"type":"x"}', '{"type":"tool"}', '{"type":"any"}', '"auto"'),
            "mcp_servers": ("[1]",), "container": ('"c"',),
            "output_config": ('{"format":{"type":"xml"}}', "3")}),
    }  # fmt: skip
    for path, tables in routes.items():
        base = bases(target)[path]
        for table in tables:
            for field, literals in table.items():
                for literal in literals:
                    for stream in ("", ', "stream": true'):
                        # The later of two would win, or both be refused for that.
                        if field == "stream" and stream:
                            continue
                        if (
                            field == "stream_options"
                            and stream
                            and 'include_usage":true' in literal
                        ):
                            continue
                        rest = {k: v for k, v in base.items() if k != field}
                        text = json.dumps(rest)[:-1] + (", " if rest else "")
                        body = f'{text}"{field}": {literal}{stream}}}'
                        named = "" if _unparsable(literal) else field
                        yield _post("field", path, body.encode(), field=named)
    for salt in ('""', json.dumps("x" * 257), "3", SURROGATE):
        for path in (
            CHAT,
            COMPLETIONS,
            RESPONSES,
            MESSAGES,
            "/v1/sessions",
            "/admin/cache/explain",
        ):
            body = json.dumps(bases(target)[path])[:-1] + (", " if bases(target)[path] else "")
            named = "" if salt == SURROGATE else "cache_salt"
            yield _post("salt", path, f'{body}"cache_salt": {salt}}}'.encode(), field=named)


def _conversations(target: Target) -> Iterator[Fault]:
    """Yield messages, prompts and inputs that can't be."""
    for stream in ("", ', "stream": true'):
        for field, literal in values.BAD_MESSAGES:
            body = f'{{"messages": {literal}{stream}}}'.encode()
            yield _post("messages", CHAT, body, field=field)
        for literal in values.BAD_PROMPTS:
            body = f'{{"prompt": {literal}{stream}}}'.encode()
            yield _post("prompt", COMPLETIONS, body, field="prompt")
        for literal in values.BAD_BLOCKS:
            body = f'{{"max_tokens": 2, "messages": {literal}{stream}}}'.encode()
            yield _post("messages", MESSAGES, body, field="messages")
        for literal in values.BAD_INPUTS:
            body = f'{{"input": {literal}{stream}}}'.encode()
            yield _post("messages", RESPONSES, body, field="input")
        long = json.dumps([1] * target.max_model_len)
        body = f'{{"prompt": {long}{stream}}}'.encode()
        yield _post("too long", COMPLETIONS, body, field="prompt")
        text = json.dumps("a b " * 4 * target.max_model_len)
        for path, given in (
            (CHAT, f'"messages": [{{"role": "user", "content": {text}}}]'),
            (MESSAGES, f'"max_tokens": 2, "messages": [{{"role": "user", "content": {text}}}]'),
            (RESPONSES, f'"input": {text}'),
        ):
            yield _post("too long", path, f"{{{given}{stream}}}".encode())
        for path, base in bases(target).items():
            if path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES):
                body = f"{json.dumps({**base, 'model': 'nothing'})[:-1]}{stream}}}".encode()
                yield _post("model", path, body, 404, "model")


def _others(target: Target) -> Iterator[Fault]:
    """Yield what is wrong on routes that don't generate."""
    session = f"/v1/sessions/{target.session}"
    for path, body, status, field in (
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [USER]}, 400, "prompt"),
        ("/tokenize", {"prompt": 3}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [target.vocab_size]}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, 400, "tokens"),
        ("/v1/sessions", {"system": 3}, 400, "system"),
        ("/v1/sessions", {"metadata": {"a": 1}}, 400, "metadata"),
        ("/v1/sessions", {"tools": [3]}, 400, "tools"),
        ("/v1/sessions", {"model": "nothing"}, 404, "model"),
        (f"{session}/messages", {}, 400, "content"),
        (f"{session}/messages", {"content": "x", "messages": [USER]}, 400, "messages"),
        (f"{session}/messages", {"content": "x", "role": "assistant"}, 400, "content"),
        (f"{session}/messages", {"content": [{"type": "image"}]}, 400, "content"),
        (f"{session}/messages", {"content": "x", "n": 2}, 400, "n"),
        (f"{session}/fork", {"at_turn": 99}, 400, "at_turn"),
        (f"{session}/fork", {"at_turn": -1}, 400, "at_turn"),
        (f"{session}/fork", {"at_turn": 0.5}, 400, "at_turn"),
        (f"{session}/pin", {"ttl_seconds": 0}, 400, "ttl_seconds"),
        (f"{session}/pin", {"ttl_seconds": 10**9}, 400, "ttl_seconds"),
        (f"{session}/pin", {"ttl_seconds": "x"}, 400, "ttl_seconds"),
        ("/admin/cache/explain", {}, 400, "prompt"),
        ("/admin/cache/explain", {"prompt": [-1]}, 400, "prompt"),
        ("/admin/cache/pin", {"session": "nothing"}, 404, ""),
        ("/admin/cache/pin", {"session": "nothing", "prompt": "x"}, 400, "session"),
        ("/admin/cache/pin", {"prompt": []}, 400, "prompt"),
        ("/admin/cache/pin", {"prompt": [-1]}, 400, "prompt"),
        ("/admin/cache/pin", {"prompt": "x", "ttl_seconds": -1}, 400, "ttl_seconds"),
        ("/admin/cache/warm", {"prompt": "x", "cache_priority": 1001}, 400, "cache_priority"),
        ("/admin/cache/warm", {"prompt": []}, 400, "prompt"),
        ("/admin/cache/flush", {"namespace": "", "cache_salt": "a"}, 400, "namespace"),
        ("/admin/cache/flush", {"namespace": "x" * 3000}, 400, "namespace"),
        ("/v1/sessions/nothing/messages", {"content": "x"}, 404, ""),
        ("/v1/sessions/nothing/fork", {}, 404, ""),
        ("/v1/sessions/nothing/pin", {}, 404, ""),
        (RESPONSES, {"input": "x", "previous_response_id": "nothing"}, 404, "previous_response_id"),
    ):  # fmt: skip
        yield _post("other routes", path, json.dumps(body).encode(), status, field)


def _bodies(target: Target) -> Iterator[Fault]:
    """Yield what is no body for any route."""
    for path, base in bases(target).items():
        for kind, body in values.BODIES:
            yield _post(kind, path, body)
        good = json.dumps(base).encode()
        for content_type in values.TYPES:
            yield _post("type", path, good, 415, headers=(("Content-Type", content_type),))
        for encoding in ("br", "zstd", "compress", "gzip, gzip", "nothing"):
            given = (*JSON, ("Content-Encoding", encoding))
            request = head_of("POST", path, given, len(good)) + good
            # The parser knows zstd, and notices before any handler that it can't read it.
            form = ANY_FORM if encoding == "zstd" else path
            yield Fault("encoding", request, form, 415)
        gzipped = (*JSON, ("Content-Encoding", "gzip"))
        yield _post("encoding", path, good, headers=gzipped)
        bomb = gzip.compress(b'{"x":"' + b"x" * (target.max_body_bytes + 1) + b'"}')
        yield _post("inflated", path, bomb, 413, headers=gzipped)
        length = target.max_body_bytes + 1
        yield Fault("too large", head_of("POST", path, JSON, length), path, 413)


def _places(target: Target) -> Iterator[Fault]:
    """Yield paths, methods and queries that there are not."""
    for path in (
        *bases(target),
        "/v1/models",
        "/health",
        "/metrics",
        "/admin/cache",
        "/v1/sessions",
    ):
        for method in ("PUT", "PATCH", "OPTIONS", "TRACE", "PROPFIND"):
            yield Fault("method", head_of(method, path, (), 0), path, 405)
    for method in ("GET", "POST", "DELETE", "PUT"):
        for path in ("/nothing", "/v1", "/v1/chat", "/%ff%fe", "/v1//completions", "/..%2f..%2fetc",
                     "/v1/messages/nothing", "/" + "x" * 4000):  # fmt: skip
            yield Fault("path", head_of(method, path, (), 0), path, 404)
    for method, path, status in (
        ("GET", "/v1/models/nothing", 404), ("GET", "/v1/models/%ff", 404),
        ("GET", "/v1/responses/nothing", 404), ("DELETE", "/v1/responses/nothing", 404),
        ("GET", "/v1/responses/nothing/input_items", 404), ("GET", "/v1/responses/%00", 404),
        ("GET", "/v1/sessions/nothing", 404), ("DELETE", "/v1/sessions/nothing", 404),
        ("GET", "/v1/sessions/nothing/messages", 404), ("GET", "/v1/sessions/%ff", 404),
        ("POST", "/v1/sessions/nothing/unpin", 404),
        ("GET", "/v1/sessions?limit=0", 400), ("GET", "/v1/sessions?limit=x", 400),
        ("GET", "/v1/sessions?limit=-1", 400), ("GET", "/v1/sessions?limit=99999999999", 400),
        ("GET", "/admin/cache/tree?depth=0", 400), ("GET", "/admin/cache/tree?depth=x", 400),
        ("GET", "/admin/cache/tree?breadth=100000", 400),
        ("GET", "/admin/cache/misses?limit=0", 400),
        ("GET", "/admin/cache/misses?limit=%C2%B2", 400),
        ("GET", "/admin/cache/explain/nothing", 404),
        ("GET", "/admin/cache/explain/x?index=-1", 400),
        ("DELETE", "/admin/cache/pin/nothing", 404),
        ("DELETE", "/admin/cache/pin/pin_999999999999999999", 404), ("GET", "/admin/nothing", 404),
    ):  # fmt: skip
        yield Fault("place", head_of(method, path, (), 0), path, status)


def _transport(target: Target) -> Iterator[Fault]:
    """Yield what is no HTTP, or a body that isn't framed as it says."""
    for raw in values.RAW:
        yield Fault("no HTTP", raw, "/", 400)
    chunked = (*JSON, ("Transfer-Encoding", "chunked"))
    for path, base in bases(target).items():
        head = head_of("POST", path, chunked)
        for body in (b"x\r\n", b"-1\r\n{}\r\n0\r\n\r\n", b"5\r\n{}\r\n0\r\n\r\n"):
            yield Fault("chunks", head + body, ANY_FORM, 400)
        expecting = head_of("POST", path, (*JSON, ("Expect", "the impossible")), 2)
        yield Fault("expectation", expecting + json.dumps(base).encode()[:2], path, 417)


def _metadata() -> tuple[str, ...]:
    return (
        "3", '{"a":1}', json.dumps({str(i): "x" for i in range(17)}), json.dumps({"x" * 65: "x"}),
        json.dumps({"x": "x" * 513}),
    )  # fmt: skip


def _unparsable(literal: str) -> bool:
    """Return whether a literal is no JSON, so that no field can be named."""
    return "NaN" in literal or "Infinity" in literal or literal == "null]"


def _post(
    kind: str,
    path: str,
    body: bytes,
    status: int = 400,
    field: str = "",
    headers: tuple[tuple[str, str], ...] = JSON,
) -> Fault:
    return Fault(kind, head_of("POST", path, headers, len(body)) + body, path, status, field)
