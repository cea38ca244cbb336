from __future__ import annotations

from typing import Any

import pytest
from server_fakes import read_events, until

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BODIES = [
    (COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True}),
    (
        CHAT,
        {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 4000,
            "ignore_eos": True,
        },
    ),
]


@pytest.mark.parametrize(("url", "body"), BODIES)
async def test_timeout_of_a_request_ends_it_with_the_form_of_the_servers_own(
    serve: Any, url: str, body: dict[str, Any]
) -> None:
    client, engine = await serve()
    whole = await client.post(url, json={**body, "timeout": 0.05})
    assert whole.status == 504
    error = (await whole.json())["error"]
    assert (error["type"], error["code"]) == ("timeout_error", "request_timeout")
    assert error["message"] == "The answer was not complete within 0.05 s"
    events = await read_events(
        await client.post(url, json={**body, "timeout": 0.05, "stream": True})
    )
    assert events[-1]["error"]["code"] == "request_timeout"
    await until(lambda: not engine.health().busy)
    assert engine.stats().requests_finished["timeout"] == 2
    assert engine.stats().blocks_referenced == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("timeout", 0), ("timeout", -1), ("timeout", 1e9), ("priority", 0.5), ("priority", 1e12)],
)
async def test_field_out_of_range_is_refused(serve: Any, field: str, value: float) -> None:
    client, _ = await serve()
    response = await client.post(COMPLETIONS, json={**BODIES[0][1], field: value})
    assert response.status == 400
    assert (await response.json())["error"]["param"] == field


async def test_priority_and_timeout_reach_the_engine(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, engine = await serve()
    seen: list[Any] = []
    add = engine.engine.add_request
    monkeypatch.setattr(
        engine.engine, "add_request", lambda *a, **k: seen.append(a[2]) or add(*a, **k)
    )
    body = {"prompt": [5], "max_tokens": 1, "priority": -3, "timeout": 20}
    assert (await client.post(COMPLETIONS, json=body)).status == 200
    assert (seen[0].priority, seen[0].timeout_s) == (-3, 20)
