"""The file of API keys, and which key opens what."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import pytest
from server_fakes import FakeEngine

from radixkv.errors import ConfigError
from radixkv.server.api_keys import KeyRing
from radixkv.server.auth import namespace_quotas
from radixkv.server.run import reload_keys
from radixkv.server.state import STATE

ALICE, BOB, ROOT = "sk-alice-0123456789", "sk-bob-0123456789ab", "sk-root-0123456789a"
FILE = f"""
[keys.alice]
key = "{ALICE}"
requests_per_minute = 60

[keys.bob]
sha256 = "{hashlib.sha256(BOB.encode()).hexdigest().upper()}"
tenant = "team"

[keys.root]
key = "{ROOT}"
admin = true
"""
ADMIN = [
    ("GET", "/admin/cache"), ("GET", "/admin/check"), ("GET", "/admin/engine"),
    ("POST", "/admin/cache/flush"), ("POST", "/flush_cache"), ("GET", "/flush_cache"),
]  # fmt: skip
BODY = {"prompt": [1, 2], "max_tokens": 1}


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.touch(0o600)
    path.write_text(FILE)
    return path


def write(path: Path, text: str) -> None:
    path.write_text(text)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_keys_are_found_by_themselves_or_by_their_sha256(key_file: Path) -> None:
    ring = KeyRing(path=key_file)
    alice, bob = ring.find(ALICE.encode()), ring.find(BOB.encode())
    assert alice is not None
    assert bob is not None
    assert (alice.name, alice.tenant, alice.admin) == ("alice", "alice", False)
    assert alice.limits.requests_per_minute == 60
    assert (bob.name, bob.tenant) == ("bob", "team")
    assert ring.find(ALICE[:-1].encode()) is None
    assert ring.find(b"") is None
    assert ring.needs_key
    assert ring.anonymous is None


def test_no_key_is_kept_in_memory_as_it_is(key_file: Path) -> None:
    ring = KeyRing("sk-plain-0123456789", path=key_file)
    held = repr([vars(ring), list(ring._keys.values())])
    assert not any(key in held for key in (ALICE, BOB, ROOT, "sk-plain"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("keys = 3", "keys"),
        ("", "keys"),
        ("[keys]", "has no keys"),
        ("[keys.a]\nkey = ", "not a TOML file"),
        ("[keys.a]", "either key or sha256"),
        (f"[keys.a]\nkey = '{ALICE}'\nsha256 = '{'0' * 64}'", "either key or sha256"),
        ("[keys.a]\nkey = 'short'", "at least 16"),
        (f"[keys.a]\nkey = '{ALICE} x'", "no spaces"),
        ("[keys.a]\nsha256 = 'xyz'", "sha256"),
        (f"[keys.'a b']\nkey = '{ALICE}'", "a name must"),
        (f"[keys.a]\nkey = '{ALICE}'\ntenant = ''", "tenant must"),
        (f"[keys.a]\nkey = '{ALICE}'\nrequests_per_minute = 0", "requests_per_minute"),
        (f"[keys.a]\nkey = '{ALICE}'\nrequest_per_minute = 1", "request_per_minute"),
        (f"[keys.a]\nkey = '{ALICE}'\nadmin = 'yes'", "admin"),
        (f"[keys.a]\nkey = '{ALICE}'\n[keys.b]\nkey = '{ALICE}'", "b has the key of a"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_without_showing_a_key(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="--api-keys") as refused:
        KeyRing(path=path)
    assert words in str(refused.value)
    assert ALICE not in str(refused.value)
    with pytest.raises(ConfigError, match="can't be read"):
        KeyRing(path=tmp_path / "nowhere")


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o400, False), (0o640, True)])
def test_a_file_that_others_can_read_is_warned_of(
    key_file: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
) -> None:
    key_file.chmod(mode)
    with caplog.at_level(logging.WARNING):
        KeyRing(path=key_file)
    assert ("chmod 600" in caplog.text) is warned


async def test_tenants_of_the_file_share_nothing_and_keys_of_one_tenant_do(
    make_client: Any, key_file: Path
) -> None:
    write(key_file, FILE + f'[keys.bob2]\nkey = "{BOB}-2"\ntenant = "team"\n')
    engine = FakeEngine()
    client = await make_client(engine, api_keys=key_file)

    async def cached(key: str) -> int:
        body = {"prompt": list(range(40)), "max_tokens": 1}
        answer = await (await client.post("/v1/completions", json=body, headers=bearer(key))).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [await cached(key) for key in (ALICE, ALICE, BOB, f"{BOB}-2")] == [0, 39, 0, 39]
    assert set(engine.filed) == {("alice", ""), ("team", "")}
    session = await (await client.post("/v1/sessions", json={}, headers=bearer(ALICE))).json()
    url = f"/v1/sessions/{session['id']}"
    assert (await client.get(url, headers=bearer(ALICE))).status == 200
    assert (await client.get(url, headers=bearer(BOB))).status == 404


@pytest.mark.parametrize("header", [{}, bearer("sk-wrong-0123456789"), {"X-API-Key": "x"}])
async def test_a_server_with_a_file_of_keys_lets_nobody_else_in(
    make_client: Any, key_file: Path, header: dict[str, str]
) -> None:
    client = await make_client(api_keys=key_file)
    assert (await client.post("/v1/completions", json=BODY, headers=header)).status == 401
    assert (await client.get("/admin/cache", headers=header)).status == 401
    given = {"X-API-Key": ALICE}
    assert (await client.post("/v1/completions", json=BODY, headers=given)).status == 200


@pytest.mark.parametrize(("method", "path"), ADMIN)
async def test_admin_routes_want_an_admins_key(
    make_client: Any, key_file: Path, method: str, path: str
) -> None:
    client = await make_client(api_key="sk-plain", admin_api_key="sk-admin", api_keys=key_file)
    for key, status in (("sk-plain", 403), (ALICE, 403), ("sk-admin", 200), (ROOT, 200)):
        response = await client.request(method, path, headers=bearer(key))
        assert response.status == status, key
        if status == 403:
            assert (await response.json())["error"]["code"] == "admin_key_required"
    assert (await client.request(method, path)).status == 401


async def test_the_plain_key_is_an_admins_as_long_as_there_is_no_other(
    make_client: Any, key_file: Path
) -> None:
    client = await make_client(api_key="sk-plain", api_keys=key_file)
    assert (await client.get("/admin/cache", headers=bearer("sk-plain"))).status == 200
    assert (await client.get("/admin/cache", headers=bearer(ALICE))).status == 403


async def test_an_admin_key_alone_leaves_other_routes_open(make_client: Any) -> None:
    engine = FakeEngine()
    client = await make_client(engine, admin_api_key="sk-admin")
    dummy = bearer("whatever")
    assert (await client.post("/v1/completions", json=BODY)).status == 200
    assert (await client.post("/v1/completions", json=BODY, headers=dummy)).status == 200
    assert (await client.get("/admin/cache")).status == 401
    assert (await client.get("/admin/cache", headers=dummy)).status == 401
    assert (await client.get("/admin/cache", headers=bearer("sk-admin"))).status == 200
    # What the admin warms is what the others ask for.
    given = bearer("sk-admin")
    assert (await client.post("/v1/completions", json=BODY, headers=given)).status == 200
    assert set(engine.filed) == {()}


async def test_reloading_adds_and_revokes_keys_and_keeps_them_if_the_file_is_broken(
    make_client: Any, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = await make_client(api_keys=key_file)
    state = client.app[STATE]

    async def status(key: str) -> int:
        return int((await client.get("/v1/models", headers=bearer(key))).status)

    assert await status(ALICE) == 200
    await client.post("/v1/completions", json=BODY, headers=bearer(ALICE))
    assert len(state.limits) == 1
    write(key_file, f'[keys.carol]\nkey = "{ALICE}-2"\n')
    assert await status(ALICE) == 200
    reload_keys(state)
    assert [await status(key) for key in (ALICE, f"{ALICE}-2")] == [401, 200]
    assert len(state.limits) == 0
    write(key_file, "[keys.carol]\nkey = 3\n")
    reload_keys(state)
    assert "stay as they were" in caplog.text
    assert await status(f"{ALICE}-2") == 200


def test_equal_keys_for_admins_and_others_are_refused() -> None:
    with pytest.raises(ConfigError, match="admin_api_key must differ"):
        KeyRing("sk-same", "sk-same")


def test_quotas_name_tenants_when_there_is_a_file_of_keys() -> None:
    shares = [("alice", 0.5), ("team/a%2Fb", 0.25), ("default", 0.125)]
    assert namespace_quotas(None, shares, tenants=True) == {
        ("alice", ""): 0.5, ("team", "a/b"): 0.25, (): 0.125,
    }  # fmt: skip
