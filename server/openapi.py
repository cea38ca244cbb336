"""`GET /openapi.json`: the routes of an application as an OpenAPI document.

Schemas come from the types that requests are decoded with and answers are held to, texts from the
docstrings of handlers and types. What a route takes and gives is declared in `openapi_routes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import orjson
from aiohttp import web

from radixkv import __version__
from radixkv.server.api_keys import KeyRing
from radixkv.server.auth import is_admin_route
from radixkv.server.middleware import OPEN_ROUTES
from radixkv.server.openapi_operation import Schemas, add_links, operation
from radixkv.server.openapi_routes import ROUTES, TAGS, Route
from radixkv.server.state import STATE

__all__ = ["DOCUMENT", "ApiDocument", "document", "openapi", "routes_of"]

OPENAPI = "3.1.0"
DESCRIPTION = (
    "OpenAI's API and Anthropic's Messages API over a radix tree of KV blocks, sessions that can "
    "be forked, and a look into the cache. `null` means that a field is left out; fields nobody "
    "declares are ignored. Every answer has the header `X-Request-ID`: the request's own, or a new "
    "one."
)
HEADERS = {
    "RequestId": {"description": "The name of the request.", "schema": {"type": "string"}},
    "RetryAfter": {
        "description": "Seconds to wait before the next try.",
        "schema": {"type": "string", "pattern": "^[0-9]+$"},
    },
}
KEY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "api_key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}


class ApiDocument:
    """The document of an application, written when it is first asked for."""

    def __init__(self, app: web.Application) -> None:
        self._app = app

    @cached_property
    def body(self) -> bytes:
        """The document as JSON."""
        return orjson.dumps(document(self._app))


DOCUMENT = web.AppKey("openapi", ApiDocument)


async def openapi(request: web.Request) -> web.Response:
    """`GET /openapi.json`: this document."""
    return web.Response(
        body=request.app[DOCUMENT].body, content_type="application/json", charset="utf-8"
    )


def routes_of(app: web.Application) -> Iterator[tuple[str, web.AbstractRoute]]:
    """Yield ("GET /health", route) of every route but those for HEAD, which go with GET."""
    for route in app.router.routes():
        if route.resource is not None and route.method != "HEAD":
            yield f"{route.method} {route.resource.canonical}", route


def document(app: web.Application, declared: Mapping[str, Route] = ROUTES) -> dict[str, Any]:
    """Return the OpenAPI document of an application.

    Args:
        app: made by `create_app`; its routes that nobody declared are left out, which a test
            doesn't let pass.
        declared: what each route takes and gives, by method and path.

    Cost: tens of milliseconds.
    """
    routes = {name: route for name, route in routes_of(app) if name in declared}
    schemas = Schemas([declared[name] for name in routes], app[STATE].model_name)
    paths: dict[str, dict[str, Any]] = {}
    ids: set[str] = set()
    for name, route in routes.items():
        method, path = name.split(" ", 1)
        keys = _keys(app[STATE].keys, path)
        entry = operation(declared[name], route.handler, method, path, keys, schemas)
        if entry["operationId"] in ids:
            entry["operationId"] += f"_{method.lower()}"
        ids.add(entry["operationId"])
        paths.setdefault(path, {})[method.lower()] = entry
    add_links(paths, declared)
    return {
        "openapi": OPENAPI,
        "info": {"title": "RadixKV", "version": __version__, "description": DESCRIPTION},
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "headers": HEADERS,
            "securitySchemes": KEY_SCHEMES,
        },
    }


def _keys(keys: KeyRing, path: str) -> list[dict[str, list[str]]]:
    """Return the ways to ask for a path: without a key, with one in either place."""
    if path in OPEN_ROUTES:
        return []
    ways: list[dict[str, list[str]]] = [{name: []} for name in KEY_SCHEMES]
    anyone = keys.anonymous
    if anyone is not None and (anyone.admin or not is_admin_route(path)):
        ways.insert(0, {})
    return ways
