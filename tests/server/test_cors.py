"""What pages in a browser may do."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.errors import ConfigError
from radixkv.server import ServerConfig

CHAT = "https://chat.example"
EVIL = "https://evil.example"
BODY = {"prompt": [1], "max_tokens": 1}
URL = "/v1/completions"


async def preflight(client: Any, origin: str, method: str = "POST") -> Any:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": "authorization, x-stainless-os, x-evil",
    }
    return await client.options(URL, headers=headers)


async def test_no_page_may_use_a_server_unless_it_is_named(client: Any) -> None:
    asked = await preflight(client, EVIL)
    assert asked.status == 403
    assert not [name for name in asked.headers if name.startswith("Access-Control")]
    for stream in (False, True):
        body = {**BODY, "stream": stream}
        refused = await client.post(URL, json=body, headers={"Origin": EVIL})
        assert refused.status == 403
        assert (await refused.json())["error"]["code"] == "origin_not_allowed"
    assert (await client.post(URL, json=BODY)).status == 200


async def test_a_named_page_gets_its_preflight_and_its_answers(make_client: Any) -> None:
    client = await make_client(api_key="sk", cors_origins=(CHAT,))
    asked = await preflight(client, CHAT)
    assert asked.status == 204
    assert asked.headers["Access-Control-Allow-Origin"] == CHAT
    assert "POST" in asked.headers["Access-Control-Allow-Methods"]
    allowed = asked.headers["Access-Control-Allow-Headers"]
    assert {"authorization", "content-type", "x-stainless-os"} <= set(allowed.split(", "))
    assert "x-evil" not in allowed
    assert "Access-Control-Allow-Credentials" not in asked.headers
    known = {"Origin": CHAT, "Authorization": "Bearer sk"}
    for body in (BODY, {**BODY, "stream": True}, {"prompt": 3}):
        response = await client.post(URL, json=body, headers=known)
        assert response.headers["Access-Control-Allow-Origin"] == CHAT
        assert "X-Request-ID" in response.headers["Access-Control-Expose-Headers"]
        assert response.headers["Vary"] == "Origin"
    # Also the refusal must be readable, or the page could not tell what is wrong.
    unknown = await client.post(URL, json=BODY, headers={"Origin": CHAT})
    assert unknown.status == 401
    assert unknown.headers["Access-Control-Allow-Origin"] == CHAT
    other = await client.post(URL, json=BODY, headers={**known, "Origin": EVIL})
    assert other.status == 403
    assert "Access-Control-Allow-Origin" not in other.headers


async def test_a_wildcard_never_comes_with_credentials(make_client: Any) -> None:
    client = await make_client(cors_origins=("*",))
    for response in (
        await preflight(client, EVIL),
        await client.post(URL, json=BODY, headers={"Origin": EVIL}),
    ):
        assert response.status in (200, 204)
        assert response.headers["Access-Control-Allow-Origin"] == "*"
        assert "Access-Control-Allow-Credentials" not in response.headers


@pytest.mark.parametrize(
    ("method", "path", "mode", "status"),
    [
        ("GET", "/flush_cache", "no-cors", 403),
        ("GET", "/flush_cache", "navigate", 403),
        ("POST", URL, "no-cors", 403),
        ("POST", URL, "navigate", 403),
        ("GET", "/v1/models", "no-cors", 403),
        ("GET", "/health", "navigate", 200),
    ],
)
async def test_foreign_pictures_and_forms_are_refused_and_links_followed(
    client: Any, method: str, path: str, mode: str, status: int
) -> None:
    """Requests without an origin, of which browsers say that another site caused them."""
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": mode}
    response = await client.request(method, path, json=BODY, headers=headers)
    assert response.status == status
    own = {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}
    assert (await client.request(method, path, json=BODY, headers=own)).status == 200


async def test_the_servers_own_pages_may_post(client: Any) -> None:
    own = {"Origin": f"http://{client.host}:{client.port}"}
    assert (await client.post(URL, json=BODY, headers=own)).status == 200
    other = {"Origin": f"http://{client.host}:{client.port + 1}"}
    assert (await client.post(URL, json=BODY, headers=other)).status == 403


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200), ("localhost", 200), ("[::1]:80", 200), ("radixkv:8000", 200),
        ("box.local", 200), ("evil.example", 403), ("evil.example:8000", 403),
        ("127.0.0.1.evil.example", 403), ("proxy.example", 200),
    ],
)  # fmt: skip
async def test_a_name_that_was_made_to_mean_this_machine_is_refused(
    make_client: Any, host: str, status: int
) -> None:
    """A page of evil.example whose name resolves to 127.0.0.1 is of the server's own origin."""
    client = await make_client(allowed_hosts=("Proxy.example",))
    headers = {"Host": host, "Origin": f"http://{host}"}
    assert (await client.post(URL, json=BODY, headers=headers)).status == status


async def test_any_name_will_do_where_a_key_is_needed(make_client: Any) -> None:
    client = await make_client(api_key="sk")
    headers = {"Host": "llm.example", "Authorization": "Bearer sk"}
    assert (await client.post(URL, json=BODY, headers=headers)).status == 200


@pytest.mark.parametrize("origin", ["chat.example", "https://", "https://a/b", "HTTPS://A", "null"])
def test_an_origin_that_is_none_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="cors_origins"):
        ServerConfig(cors_origins=(origin,))


async def test_every_answer_has_the_headers_of_safety(client: Any) -> None:
    for path in ("/health", "/metrics", "/v1/models", "/nothing", "/admin/"):
        response = await client.get(path)
        assert response.headers["X-Content-Type-Options"] == "nosniff", path
    stream = await client.post(URL, json={**BODY, "stream": True})
    assert stream.headers["X-Content-Type-Options"] == "nosniff"
    page = await client.get("/admin/")
    assert page.content_type == "text/html"
    assert page.headers["X-Frame-Options"] == "DENY"
    assert "frame-ancestors 'none'" in page.headers["Content-Security-Policy"]
