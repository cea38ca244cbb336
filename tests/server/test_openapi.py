"""The OpenAPI document: all routes, no other ones, and every field explained."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from aiohttp import web
from openapi_spec_validator import validate
from server_fakes import FakeEngine

from radixkv.server import ServerConfig, create_app
from radixkv.server.middleware import OPEN_ROUTES
from radixkv.server.openapi import document, routes_of
from radixkv.server.openapi_routes import ROUTES, Route
from radixkv.server.protocol import ChatRequest


@pytest.fixture(scope="module")
def app() -> web.Application:
    return create_app(FakeEngine())


@pytest.fixture(scope="module")
def api(app: web.Application) -> dict[str, Any]:
    return document(app)


def operations(api: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{method.upper()} {path}": operation
        for path, methods in api["paths"].items()
        for method, operation in methods.items()
    }


def test_document_has_the_routes_of_the_application_and_no_others(
    app: web.Application, api: dict[str, Any]
) -> None:
    assert operations(api).keys() == {name for name, _ in routes_of(app)}


def test_declarations_are_of_routes_that_exist(app: web.Application) -> None:
    assert ROUTES.keys() == {name for name, _ in routes_of(app)}


def test_a_route_that_nobody_declared_is_left_out(app: web.Application) -> None:
    declared = {"GET /health": ROUTES["GET /health"]}
    assert operations(document(app, declared)).keys() == declared.keys()


def test_document_is_valid(api: dict[str, Any]) -> None:
    validate(api)


async def test_document_is_served(client: Any, api: dict[str, Any]) -> None:
    response = await client.get("/openapi.json")
    assert (response.status, response.content_type) == (200, "application/json")
    assert await response.json() == api


def test_every_field_of_a_request_is_explained(api: dict[str, Any]) -> None:
    bodies = [route.body for route in ROUTES.values() if route.body is not None]
    _, components = msgspec.json.schema_components(bodies)
    schemas = api["components"]["schemas"]
    unexplained = [
        f"{name}.{field}"
        for name in components
        for field, schema in schemas[name]["properties"].items()
        if not schema.get("description")
    ]
    assert unexplained == []


def test_every_operation_and_parameter_is_explained(api: dict[str, Any]) -> None:
    for name, operation in operations(api).items():
        assert len(operation["summary"]) > 3, name
        assert all(p["description"] for p in operation.get("parameters", ())), name


def test_operations_have_names_of_their_own(api: dict[str, Any]) -> None:
    names = [operation["operationId"] for operation in operations(api).values()]
    assert len(set(names)) == len(names)


def test_body_schema_is_that_of_the_decoder(api: dict[str, Any]) -> None:
    body = operations(api)["POST /v1/chat/completions"]["requestBody"]
    assert body["content"]["application/json"]["schema"]["$ref"].endswith("/ChatRequest")
    schema = api["components"]["schemas"]["ChatRequest"]
    assert schema["properties"].keys() == set(ChatRequest.__struct_fields__)
    assert schema["required"] == ["messages"]


def test_only_bodies_that_may_be_left_out_are_optional(api: dict[str, Any]) -> None:
    found = operations(api)
    assert found["POST /v1/sessions"]["requestBody"]["required"] is False
    assert found["POST /v1/completions"]["requestBody"]["required"] is True


def test_a_name_in_the_path_is_a_parameter(api: dict[str, Any]) -> None:
    (parameter,) = operations(api)["GET /v1/models/{model}"]["parameters"]
    assert (parameter["name"], parameter["in"], parameter["required"]) == ("model", "path", True)


def test_query_parameters_have_their_bounds(api: dict[str, Any]) -> None:
    found = operations(api)["GET /admin/cache/tree"]["parameters"]
    depth, _, namespace = found
    assert {k: depth["schema"][k] for k in ("minimum", "maximum", "default")} == {
        "minimum": 1,
        "maximum": 64,
        "default": 4,
    }
    assert namespace["schema"]["type"] == "string"
    assert "default" not in namespace["schema"]


def test_streams_say_what_an_event_is(api: dict[str, Any]) -> None:
    content = operations(api)["POST /v1/chat/completions"]["responses"]["200"]["content"]
    data = content["text/event-stream"]["schema"]["properties"]["data"]
    event, error = data["contentSchema"]["anyOf"]
    assert event["$ref"].endswith("/ChatChunk")
    assert error["$ref"].endswith("/ErrorAnswer")


def test_errors_have_the_form_of_the_routes_api(api: dict[str, Any]) -> None:
    found = operations(api)
    for path, name in (("/v1/messages", "AnthropicErrorAnswer"), ("/tokenize", "ErrorAnswer")):
        schema = found[f"POST {path}"]["responses"]["400"]["content"]["application/json"]["schema"]
        assert schema["$ref"].endswith(f"/{name}")


def ways_in(api: dict[str, Any], name: str) -> set[str]:
    """The names of the schemes that let one in; "" is none at all."""
    return {"".join(way) for way in operations(api)[name]["security"]}


@pytest.mark.parametrize(
    ("options", "client", "admin"),
    [
        ({}, {"", "bearer", "api_key"}, {"", "bearer", "api_key"}),
        ({"api_key": "secret"}, {"bearer", "api_key"}, {"bearer", "api_key"}),
        ({"admin_api_key": "secret"}, {"", "bearer", "api_key"}, {"bearer", "api_key"}),
    ],
)
def test_a_key_is_needed_where_there_is_one(
    options: Any, client: set[str], admin: set[str]
) -> None:
    api = document(create_app(FakeEngine(), ServerConfig(**options)))
    assert ways_in(api, "POST /v1/chat/completions") == client
    assert ways_in(api, "GET /admin/cache") == admin
    assert set(api["components"]["securitySchemes"]) == {"bearer", "api_key"}


def test_open_routes_need_no_key_and_others_answer_401(api: dict[str, Any]) -> None:
    for name, operation in operations(api).items():
        is_open = name.split(" ")[1] in OPEN_ROUTES
        assert (operation["security"] == []) is is_open, name
        assert ("401" in operation["responses"]) is not is_open, name


def test_two_routes_with_one_handler_are_told_apart(api: dict[str, Any]) -> None:
    both = api["paths"]["/flush_cache"]
    assert both["post"]["operationId"] != both["get"]["operationId"]


def test_answers_of_one_status_may_have_several_types(app: web.Application) -> None:
    kinds = (dict[str, int], list[int])
    route = Route(tag="cache", answer=dict[str, str], answers={500: kinds})
    found = document(app, {"GET /admin/check": route})["paths"]["/admin/check"]["get"]
    schema = found["responses"]["500"]["content"]["application/json"]["schema"]
    assert [one["type"] for one in schema["anyOf"]] == ["object", "array"]


def test_what_a_route_makes_is_linked_to_those_that_take_it(api: dict[str, Any]) -> None:
    links = operations(api)["POST /v1/responses"]["responses"]["200"]["links"]
    assert links.keys() == {
        "get_response",
        "delete_response",
        "cancel_response",
        "list_input_items",
    }
    assert links["get_response"]["parameters"] == {"response_id": "$response.body#/id"}


def test_the_model_is_the_one_that_is_served(api: dict[str, Any]) -> None:
    model = api["components"]["schemas"]["ChatRequest"]["properties"]["model"]
    assert model["anyOf"] == [{"type": "string", "enum": ["fake"]}, {"type": "null"}]
