"""What stands before the handlers: rules for browsers, keys, limits, and headers of safety."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler

from radixkv.server.auth import is_admin_route, key_of
from radixkv.server.limits import KeyUse
from radixkv.server.state import STATE

__all__ = ["add_guard_headers", "check_browser", "keep_limits", "use_of"]

USE = web.RequestKey("use", KeyUse)
# Pages that set a policy of their own keep it.
HTML_HEADERS = {
    "Content-Security-Policy": "base-uri 'none'; frame-ancestors 'none'; object-src 'none'",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}


@web.middleware
async def check_browser(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a browser's question whether it may ask, and refuse what foreign pages send."""
    state = request.app[STATE]
    answer = state.browsers.preflight(request)
    if answer is not None:
        return answer
    state.browsers.check(request, open_server=not state.keys.needs_key)
    return await handler(request)


@web.middleware
async def keep_limits(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count a request against the limits of its key for as long as it is being answered."""
    if request.method != "POST" or is_admin_route(request.path):
        return await handler(request)
    use = request.app[STATE].limits.use_of(key_of(request))
    if use is None:
        return await handler(request)
    request[USE] = use
    # Nothing may come between: what is begun is ended, also for a client that is gone by now.
    use.begin()
    try:
        return await handler(request)
    finally:
        use.end()


def use_of(request: web.Request) -> KeyUse | None:
    """Return what the tokens of a request count against; None if nothing."""
    return request.get(USE)


async def add_guard_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add what browsers and clients should know; a signal handler of `on_response_prepare`."""
    state = request.app[STATE]
    headers = response.headers
    headers.setdefault("X-Content-Type-Options", "nosniff")
    if response.content_type == "text/html":
        for name, value in HTML_HEADERS.items():
            headers.setdefault(name, value)
    headers.update(state.browsers.headers(request))
    use = use_of(request)
    if use is not None:
        headers.update(use.headers())
    if state.lifecycle.draining:
        # Clients that keep the connection would send their next request into a closing socket.
        response.force_close()
        headers["Connection"] = "close"
