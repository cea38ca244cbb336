"""The operators' page at `/admin/`, and the samples that its charts are drawn from."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from radixkv.server.body import json_response
from radixkv.server.errors import ApiError
from radixkv.server.state import STATE

__all__ = ["OPEN_ROUTES", "asset", "keep_timeline", "page", "timeline", "to_page"]

# They hold no data: what the page shows, it asks for with the key it was given.
OPEN_ROUTES = frozenset({"/admin", "/admin/", "/admin/assets/{name}"})

FILES = Path(__file__).parent / "dashboard"
PAGE = "index.html"
TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
MAX_DIGITS = 15


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of the page."""

    body: bytes
    content_type: str
    etag: str


async def to_page(request: web.Request) -> web.Response:
    """`GET /admin`: the page is one level down, so that its addresses are relative to it."""
    # A relative place, so that it is right behind a proxy that adds a prefix.
    return web.Response(status=308, headers={"Location": "admin/", **HEADERS})


async def page(request: web.Request) -> web.Response:
    """`GET /admin/`: the dashboard."""
    return _answer(request, PAGE)


async def asset(request: web.Request) -> web.Response:
    """`GET /admin/assets/{name}`: a style sheet, a script or a picture of the page."""
    return _answer(request, request.match_info["name"])


async def timeline(request: web.Request) -> web.Response:
    """`GET /admin/timeline?first=0&run=`: what was sampled over the last hour."""
    first = request.query.get("first", "0")
    if not (first.isascii() and first.isdecimal() and len(first) <= MAX_DIGITS):
        raise ApiError(
            400, "first must be the number of a sample", param="first", code="invalid_value"
        )
    return json_response(request.app[STATE].timeline.report(int(first), request.query.get("run")))


async def keep_timeline(app: web.Application) -> AsyncIterator[None]:
    """Take samples as long as the application runs; for its `cleanup_ctx`."""
    state = app[STATE]
    task = asyncio.create_task(state.timeline.run(state.requests.recent))
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@functools.cache
def load_assets() -> dict[str, Asset]:
    """Return the files of the page by name. They are part of the package and never change."""
    assets = {}
    for path in sorted(FILES.iterdir()):
        if path.suffix in TYPES:
            body = path.read_bytes()
            etag = hashlib.sha256(body).hexdigest()[:16]
            assets[path.name] = Asset(body, TYPES[path.suffix], etag)
    return assets


def _answer(request: web.Request, name: str) -> web.Response:
    found = load_assets().get(name)
    if found is None:
        raise ApiError(404, f"There is no {request.path[:256]}", code="not_found")
    wanted = request.if_none_match or ()
    if any(etag.value == found.etag for etag in wanted):
        response = web.Response(status=304, headers=HEADERS)
    else:
        response = web.Response(
            body=found.body, content_type=found.content_type, charset="utf-8", headers=HEADERS
        )
    response.etag = found.etag
    return response
