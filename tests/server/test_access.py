from __future__ import annotations

import inspect
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from server_fakes import FakeEngine

from radixkv import cli
from radixkv.config import load_config
from radixkv.errors import ConfigError
from radixkv.server import ServerConfig, run_server
from radixkv.server.auth import make_namespace

KEY = "sk-test-1"
PROTECTED = [
    ("GET", "/v1/models"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/sessions"),
    ("GET", "/v1/sessions/x"),
    ("GET", "/admin/cache"),
    ("GET", "/admin/check"),
    ("POST", "/admin/cache/flush"),
    ("POST", "/flush_cache"),
]


@pytest.mark.parametrize("header", [None, "Bearer wrong", KEY, f"Basic {KEY}", "Bearer \xff"])
@pytest.mark.parametrize(("method", "path"), PROTECTED)
async def test_request_without_the_key_is_a_401(
    make_client: Any, method: str, path: str, header: str | None
) -> None:
    client = await make_client(api_key=KEY)
    headers = {} if header is None else {"Authorization": header}
    response = await client.request(method, path, headers=headers)
    assert response.status == 401
    assert response.headers["WWW-Authenticate"].startswith("Bearer")
    assert (await response.json())["error"]["code"] == "invalid_api_key"


async def test_request_with_the_key_is_served_and_probes_need_none(make_client: Any) -> None:
    client = await make_client(api_key=KEY)
    known = {"Authorization": f"bearer {KEY}"}
    assert (await client.get("/v1/models", headers=known)).status == 200
    assert (await client.get("/health")).status == 200
    assert (await client.get("/metrics")).status == 200
    assert (await client.get("/nothing")).status == 404


async def test_namespace_has_tenant_and_salt_as_separate_fields() -> None:
    assert make_namespace("", None) == ()
    assert make_namespace("a", None) == ("a", "")
    assert make_namespace("a", "b") != make_namespace("b", "a")
    assert make_namespace("", "a") != make_namespace("a", None)
    assert make_namespace("ab", "c") != make_namespace("a", "bc")


async def test_caller_with_key_never_shares_the_keyless_namespace(make_client: Any) -> None:
    engine = FakeEngine()
    client = await make_client(engine, api_key=KEY)
    await client.post(
        "/v1/completions",
        json={"prompt": [1, 2], "max_tokens": 1},
        headers={"Authorization": f"Bearer {KEY}"},
    )
    (namespace,) = engine.filed
    assert namespace[0].startswith("key-")
    assert KEY not in namespace[0]


@pytest.mark.parametrize(
    ("given", "kept"), [("abc-1", True), ("x" * 128, True), ("x" * 129, False), ("caf\xe9", False)]
)
async def test_request_id_is_echoed_if_sane(client: Any, given: str, kept: bool) -> None:
    response = await client.get("/v1/models", headers={"X-Request-ID": given})
    assert (response.headers["X-Request-ID"] == given) is kept
    assert response.headers["X-Request-ID"]


async def test_request_id_is_on_streams_and_errors_and_may_repeat(client: Any) -> None:
    body = {"prompt": "x", "max_tokens": 1, "stream": True}
    ids = []
    for url in ("/v1/completions", "/v1/completions", "/nothing"):
        response = await client.post(url, json=body, headers={"X-Request-ID": "same"})
        ids.append(response.headers["X-Request-ID"])
        await response.read()
    assert ids == ["same"] * 3


async def test_access_log_has_no_text_of_prompts(
    make_client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    client = await make_client(access_log=True)
    body = {"messages": [{"role": "user", "content": "SECRET"}], "max_tokens": 1, "typo_field": 1}
    await client.post("/v1/chat/completions", json=body, headers={"X-Request-ID": "r1"})
    await client.post("/v1/completions", json={"prompt": "SECRET", "suffix": "SECRET"})
    lines = [json.loads(r.message) for r in caplog.records if r.name == "radixkv.access"]
    assert [line["status"] for line in lines] == [200, 400]
    assert lines[0]["request_id"] == "r1"
    assert lines[0]["ms"] >= 0
    assert "typo_field" in caplog.text
    assert "SECRET" not in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        {"api_key": ""},
        {"admin_api_key": " "},
        {"max_connections": 0},
        {"keepalive_timeout_s": 0.0},
        {"max_body_bytes": 0},
        {"request_timeout_s": -1.0},
        {"max_stream_stall_s": float("nan")},
        {"drain_timeout_s": -1.0},
        {"max_sessions": 0},
    ],
)
def test_bad_option_is_refused_by_name(options: Any) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        ServerConfig(**options)


def test_options_of_the_command_line_reach_the_server(tmp_path: Path) -> None:
    file = tmp_path / "radixkv.toml"
    file.write_text('cors-origins = ["https://a.example", "https://b.example"]\n')
    given = {
        "api_keys": "keys.toml",
        "admin_api_key": "sk-admin",
        "allowed_hosts": "a.example, b.example",
        "max_connections": "77",
        "keepalive_timeout": "7",
        "body_timeout": "8",
        "stall_timeout": "9",
    }
    config = cli._server_config(load_config(given, config_file=str(file), environ={}))
    assert config.api_keys == Path("keys.toml")
    assert config.admin_api_key == "sk-admin"
    assert config.cors_origins == ("https://a.example", "https://b.example")
    assert config.allowed_hosts == ("a.example", "b.example")
    assert (config.max_connections, config.keepalive_timeout_s) == (77, 7.0)
    assert (config.body_timeout_s, config.max_stream_stall_s) == (8.0, 9.0)


def test_the_server_listens_on_loopback_unless_told_otherwise() -> None:
    assert load_config({}, environ={}).host == "127.0.0.1"
    signature = inspect.signature(run_server)
    assert signature.parameters["host"].default == "127.0.0.1"
