"""One route of the OpenAPI document: what it is asked with, and what it answers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from radixkv.server.auth import is_admin_route
from radixkv.server.openapi_fields import FIELDS, PATH_FIELDS
from radixkv.server.openapi_routes import Route

__all__ = ["Schemas", "add_links", "operation"]

JSON = "application/json"
EVENTS = "text/event-stream"
REF = "#/components/schemas/{name}"
STATUSES = {
    200: "Success.",
    304: "It has not changed.",
    308: "It is at another place.",
    400: "A field is wrong, or the prompt is too long.",
    401: "The key is missing or wrong.",
    403: "The key is no admin's, or a page asks whose site may not use this server.",
    404: "There is nothing by that name.",
    408: "The body did not arrive in time.",
    409: "It is in use.",
    413: "The body is too large.",
    415: "The body is no JSON.",
    429: "There are too many already; `Retry-After` says when to come back.",
    500: "The server failed to answer.",
    503: "The server is shutting down, or its engine has failed.",
    504: "The answer was not complete in time.",
}
BODY_ERRORS = {400, 408, 413, 415}
GENERATION_ERRORS = {429, 503, 504}
RETRY_STATUSES = {429, 503}
# "`GET /health`: ", which the document says in other places.
ROUTE_NAME = re.compile(r"^`[^`]+`(?: and `[^`]+`)*: ")
PATH_NAME = re.compile(r"{(\w+)}")


class Schemas:
    """The JSON schemas of types: one for each, and the components that they refer to."""

    def __init__(self, routes: Sequence[Route], model: str) -> None:
        """Take all routes of the document, and the model that is served.

        Fields of bodies are described by name.
        """
        self.model = {"type": "string", "enum": [model]}
        types = [kind for route in routes for kind in route.types()]
        found, self.components = msgspec.json.schema_components(types, ref_template=REF)
        self._found = list(zip(types, found, strict=True))
        bodies = [route.body for route in routes if route.body is not None]
        _, asked = msgspec.json.schema_components(bodies)
        for name in asked:
            for field, schema in self.components[name]["properties"].items():
                text = FIELDS.get(f"{name}.{field}", FIELDS.get(field))
                if text is not None:
                    schema.setdefault("description", text)
                if field == "model":
                    schema["anyOf"] = [self.model, {"type": "null"}]

    def of(self, kind: Any) -> dict[str, Any]:
        """Return the schema of a type, or of one of several if it is a tuple."""
        if isinstance(kind, tuple):
            return {"anyOf": [self.of(one) for one in kind]}
        return next(schema for known, schema in self._found if known == kind)


def operation(
    route: Route,
    handler: Callable[..., Any],
    method: str,
    path: str,
    keys: list[dict[str, list[str]]],
    schemas: Schemas,
) -> dict[str, Any]:
    """Return the operation of a route.

    Args:
        route: what it takes and gives.
        handler: whose docstring describes it.
        method: in capitals.
        path: with its names in braces.
        keys: the ways to be let in, none of them if anyone is.
        schemas: of all types of the document.
    """
    summary, _, more = inspect.cleandoc(handler.__doc__ or "").partition("\n")
    summary = ROUTE_NAME.sub("", summary).rstrip(".")
    entry: dict[str, Any] = {
        "operationId": handler.__name__,
        "tags": [route.tag],
        "summary": summary[:1].upper() + summary[1:],
        "security": keys,
    }
    if more.strip():
        entry["description"] = more.strip()
    parameters = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "description": PATH_FIELDS[name],
            "schema": schemas.model if name == "model" else {"type": "string", "minLength": 1},
        }
        for name in PATH_NAME.findall(path)
    ]
    if route.query is not None:
        parameters += _query(route.query)
    if parameters:
        entry["parameters"] = parameters
    if route.body is not None:
        entry["requestBody"] = {
            "required": route.body_required,
            "content": {JSON: {"schema": schemas.of(route.body)}},
        }
    errors = _errors(route, method, path, takes_key=bool(keys))
    entry["responses"] = _responses(route, errors, schemas)
    return entry


def add_links(paths: dict[str, dict[str, Any]], declared: Mapping[str, Route]) -> None:
    """Link each operation that makes something to those that have its name in their path."""
    takers: dict[str, list[str]] = {}
    for path, methods in paths.items():
        # The last name: what stands before it may be of another thing.
        for name in PATH_NAME.findall(path)[-1:]:
            takers.setdefault(name, []).extend(entry["operationId"] for entry in methods.values())
    for name, route in declared.items():
        method, path = name.split(" ", 1)
        entry = paths.get(path, {}).get(method.lower())
        if entry is None or route.makes not in takers:
            continue
        entry["responses"][str(route.success)]["links"] = {
            taker: {"operationId": taker, "parameters": {route.makes: "$response.body#/id"}}
            for taker in takers[route.makes]
        }


def _query(kind: type[msgspec.Struct]) -> list[dict[str, Any]]:
    _, components = msgspec.json.schema_components([kind])
    component = components[kind.__name__]
    parameters = []
    for name, schema in component["properties"].items():
        text = schema.pop("description")
        if schema.get("default", 0) is None:
            # None can't be written in a query; it stands for leaving the parameter out.
            schema = _without_null(schema)
        parameters.append(
            {
                "name": name,
                "in": "query",
                "required": name in component["required"],
                "description": text,
                "schema": schema,
            }
        )
    return parameters


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    if "enum" in schema:
        return {"enum": [value for value in schema["enum"] if value is not None]}
    (known,) = (one for one in schema["anyOf"] if one != {"type": "null"})
    return dict(known)


def _errors(route: Route, method: str, path: str, *, takes_key: bool) -> set[int]:
    """Return the statuses other than success, as `Route` says."""
    errors = {403, 500, *route.errors}
    if takes_key:
        errors.add(401)
        if method == "POST":
            errors.add(503)
            if not is_admin_route(path):
                errors.add(429)
    if route.body is not None:
        errors |= BODY_ERRORS
    if route.query is not None:
        errors.add(400)
    if PATH_NAME.search(path):
        errors.add(404)
    if route.generates:
        errors |= GENERATION_ERRORS
    return errors


def _responses(route: Route, errors: set[int], schemas: Schemas) -> dict[str, Any]:
    contents = {status: _content(route.error, schemas) for status in errors}
    contents |= {status: _content(kind, schemas) for status, kind in route.answers.items()}
    if route.success is not None:
        success = contents[route.success] = _content(route.answer, schemas)
        if route.events is not None:
            kinds = [schemas.of(route.events), schemas.of(route.error)]
            success[EVENTS] = {"schema": _event({"anyOf": kinds})}
    return {str(status): _response(status, contents[status]) for status in sorted(contents)}


def _content(kind: Any, schemas: Schemas) -> dict[str, Any]:
    """Return the content of an answer by its media type; see `Route.answer`."""
    if kind is None:
        return {}
    if isinstance(kind, str):
        return {kind: {"schema": {"type": "string"}}}
    return {JSON: {"schema": schemas.of(kind)}}


def _event(data: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of one event of a stream, in the form of OpenAPI 3.2's examples."""
    return {
        "type": "object",
        "description": "An event of the stream that `stream: true` asks for.",
        "properties": {
            "event": {"type": "string", "description": "The `type` of the data, where it has one."},
            "data": {
                "type": "string",
                "description": "JSON; a stream of OpenAI's chat or completions ends with `[DONE]`.",
                "contentMediaType": JSON,
                "contentSchema": data,
            },
        },
        "required": ["data"],
    }


def _response(status: int, content: dict[str, Any]) -> dict[str, Any]:
    headers = {"X-Request-ID": {"$ref": "#/components/headers/RequestId"}}
    if status in RETRY_STATUSES:
        headers["Retry-After"] = {"$ref": "#/components/headers/RetryAfter"}
    response: dict[str, Any] = {"description": STATUSES[status], "headers": headers}
    if content:
        response["content"] = content
    return response
