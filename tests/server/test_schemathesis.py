"""Requests made up from the OpenAPI document: whatever they are, answers are as it says.

`docs/testing.md` has the command that does the same with more requests and a real model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fakes import make_engine
from hypothesis import HealthCheck, Phase, given, settings
from live_server import LiveServer
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from server_fakes import END, STOP, FakeTokenizer

from radixkv.engine import AsyncEngine
from radixkv.server.openapi_routes import ROUTES

EXAMPLES = 2  # of each kind for each route
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


def served() -> AsyncEngine:
    engine = make_engine(
        64, 16, max_num_batched_tokens=256, eos_token_ids=(END, STOP), max_model_len=96
    )
    engine.cache.pins.max_blocks = 32
    engine.tokenizer = tokenizer = FakeTokenizer()
    return AsyncEngine(engine, tokenizer, model_name="real")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer(served, keepalive_s=0) as server:
        yield server


@pytest.fixture(scope="module")
def api(server: LiveServer) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.mark.parametrize("name", ROUTES)
def test_made_up_requests_get_declared_answers(api: Any, name: str) -> None:
    check(api, name, GenerationMode.POSITIVE, CHECKS)


@pytest.mark.parametrize("name", [name for name, r in ROUTES.items() if r.body or r.query])
def test_made_up_mistakes_are_refused(api: Any, name: str) -> None:
    check(api, name, GenerationMode.NEGATIVE, [*CHECKS, negative_data_rejection])


def check(api: Any, name: str, mode: GenerationMode, checks: list[Any]) -> None:
    method, path = name.split(" ")

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=api[path][method].as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        case.call_and_validate(checks=checks, timeout=20, allow_redirects=False)

    send()
