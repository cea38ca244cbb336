"""The access log: what its lines say, and what can't get into them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_fakes import FakeEngine, read_events, until

from radixkv.errors import ConfigError
from radixkv.server.access_log import ACCESS_LOG, configure_access_log

BODY = {"prompt": "plugh xyzzy", "max_tokens": 3, "ignore_eos": True, "temperature": 0}
ALWAYS = {"time", "request_id", "method", "route", "status", "ms", "bytes", "tenant"}
TOKENS = {"id", "prompt_tokens", "cached_tokens", "output_tokens", "ttft_ms", "finish_reason"}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    access = logging.getLogger(ACCESS_LOG)
    before = access.propagate, access.level
    yield
    for handler in list(access.handlers):
        access.removeHandler(handler)
        handler.close()
    access.propagate = before[0]
    access.setLevel(before[1])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    configure_access_log(tmp_path / "access.log")
    return tmp_path / "access.log"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def rotate(path: Path) -> None:
    path.rename(path.with_suffix(".1"))


async def test_line_of_a_completion_has_its_counts(make_client: Any, path: Path) -> None:
    client = await make_client(access_log=True)
    response = await client.post("/v1/completions", json=BODY, headers={"X-Request-ID": "r-1"})
    answer = await response.read()
    (line,) = lines(path)
    assert line.keys() == ALWAYS | TOKENS
    usage = json.loads(answer)["usage"]
    assert line["id"] == json.loads(answer)["id"]
    assert (line["request_id"], line["status"]) == ("r-1", 200)
    assert (line["method"], line["route"]) == ("POST", "/v1/completions")
    assert line["bytes"] == len(answer)
    assert line["prompt_tokens"] == usage["prompt_tokens"] == 11
    assert (line["cached_tokens"], line["output_tokens"]) == (0, 3)
    assert 0 <= line["ttft_ms"] <= line["ms"]
    assert line["finish_reason"] == "length"


async def test_line_of_a_stream_counts_its_bytes(make_client: Any, path: Path) -> None:
    client = await make_client(access_log=True)
    response = await client.post("/v1/completions", json={**BODY, "stream": True})
    size = len(await response.read())
    await until(lambda: path.read_text())
    (line,) = lines(path)
    assert (line["bytes"], line["output_tokens"]) == (size, 3)


async def test_lines_of_refusals_have_no_counts_and_the_route_only(
    make_client: Any, path: Path
) -> None:
    client = await make_client(access_log=True)
    for url in ("/v1/sessions/xyzzy", "/xyzzy", "/v1/models/xyzzy?x=plugh"):
        await client.get(url)
    await client.post("/v1/completions", json={"prompt": ""})
    assert [(line["route"], line["status"]) for line in lines(path)] == [
        ("/v1/sessions/{session_id}", 404),
        ("unknown", 404),
        ("/v1/models/{model}", 404),
        ("/v1/completions", 400),
    ]
    assert all(line.keys() == ALWAYS and line["bytes"] > 0 for line in lines(path))
    assert "xyzzy" not in str(lines(path))
    assert "plugh" not in str(lines(path))


async def test_line_of_a_client_that_left_says_so(make_client: Any, path: Path) -> None:
    engine = FakeEngine()
    client = await make_client(engine, access_log=True)
    engine.gate.clear()
    response = await client.post("/v1/completions", json={**BODY, "stream": True})
    await until(lambda: engine.waiting)
    response.close()
    await until(lambda: path.read_text())
    (line,) = lines(path)
    assert (line["status"], line["finish_reason"], line["ttft_ms"]) == (499, "abort", None)


async def test_line_of_a_failed_stream_says_why(make_client: Any, path: Path) -> None:
    engine = FakeEngine()
    engine.fail_at = 1
    client = await make_client(engine, access_log=True)
    await read_events(await client.post("/v1/completions", json={**BODY, "stream": True}))
    await until(lambda: path.read_text())
    (line,) = lines(path)
    assert (line["status"], line["finish_reason"]) == (200, "error")


@pytest.mark.parametrize(
    "given",
    ['a", "status": 500', "a b", "[bold]a", "a\\n{}", "{}", "<x>", "é", "%s", "x" * 129],
)
async def test_an_id_that_could_pretend_to_be_more_is_replaced(
    make_client: Any, path: Path, given: str
) -> None:
    client = await make_client(access_log=True)
    response = await client.get("/health", headers={"X-Request-ID": given})
    kept = response.headers["X-Request-ID"]
    assert kept != given.strip()
    assert kept.isalnum()
    assert [line["request_id"] for line in lines(path)] == [kept]


async def test_tenant_is_that_of_the_key(make_client: Any, path: Path) -> None:
    client = await make_client(access_log=True, api_key="sk-xyzzy")
    await client.get("/v1/models", headers={"Authorization": "Bearer sk-xyzzy"})
    await client.get("/v1/models")
    known, unknown = lines(path)
    assert known["tenant"].startswith("key-")
    assert (unknown["tenant"], unknown["status"]) == ("", 401)
    assert "xyzzy" not in str(lines(path))


async def test_a_file_that_was_moved_away_is_made_anew(make_client: Any, path: Path) -> None:
    client = await make_client(access_log=True)
    await client.get("/health")
    rotate(path)
    await client.get("/health")
    assert len(lines(path)) == len(lines(path.with_suffix(".1"))) == 1


def test_dash_is_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    configure_access_log("-")
    logging.getLogger(ACCESS_LOG).info("%s", "{}")
    assert capsys.readouterr().out == "{}\n"


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--access-log .* can't be written"):
        configure_access_log(tmp_path / "missing" / "access.log")
