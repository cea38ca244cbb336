"""What pages in a browser may do: nothing, unless they are the server's own or were named.

A browser that shows somebody else's page can be made to send requests to a server on the same
machine or network. So a request that says it comes from another page is refused, unless the page's
origin is among `--cors-origins`; then the browser is told that the page may read the answer. No
cookies are used, and credentials are never allowed: a page has to send its key itself.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from aiohttp import web

from radixkv.errors import ConfigError
from radixkv.server.errors import ApiError

__all__ = ["ANY", "BrowserRules", "check_origin_option"]

ANY = "*"
METHODS = "GET, POST, DELETE"
# What OpenAI's and Anthropic's clients send, and what an answer tells beside its body.
REQUEST_HEADERS = frozenset({"authorization", "content-type", "x-api-key", "x-request-id"})
REQUEST_HEADER_PREFIXES = ("anthropic-", "openai-", "x-stainless-")
EXPOSED_HEADERS = (
    "X-Request-ID, Retry-After, x-should-retry, x-ratelimit-limit-requests, "
    "x-ratelimit-limit-tokens, x-ratelimit-remaining-requests, x-ratelimit-remaining-tokens, "
    "x-ratelimit-reset-requests, x-ratelimit-reset-tokens"
)
PREFLIGHT_MAX_AGE_S = 600
# The one route that changes something on GET; a link to it must not.
UNSAFE_GETS = frozenset({"/flush_cache"})
LOCAL_SUFFIXES = (".localhost", ".local", ".internal")


class BrowserRules:
    """Decides which pages a server answers, and under which names.

    Attributes:
        origins: of the pages that may use the server; `ANY` is all.
        hosts: names beside those of this machine by which a server without a key may be called.
    """

    def __init__(self, origins: Iterable[str] = (), hosts: Iterable[str] = ()) -> None:
        self.origins = frozenset(origins)
        self.hosts = frozenset(host.lower() for host in hosts)

    def preflight(self, request: web.Request) -> web.Response | None:
        """Return the answer to a browser that asks whether it may send a request; else None.

        Raises:
            ApiError: 403, it may not.
        """
        asked = request.headers.get("Access-Control-Request-Method")
        if request.method != "OPTIONS" or asked is None or "Origin" not in request.headers:
            return None
        if self._allowed(request) is None:
            raise _foreign(request)
        names = request.headers.get("Access-Control-Request-Headers", "").lower().split(",")
        allowed = sorted(REQUEST_HEADERS) + [
            name for part in names if (name := part.strip()).startswith(REQUEST_HEADER_PREFIXES)
        ]
        return web.Response(
            status=204,
            headers={
                "Access-Control-Allow-Methods": METHODS,
                "Access-Control-Allow-Headers": ", ".join(allowed),
                "Access-Control-Max-Age": str(PREFLIGHT_MAX_AGE_S),
            },
        )

    def check(self, request: web.Request, *, open_server: bool) -> None:
        """Refuse what a foreign page made a browser send.

        Args:
            request: of any kind.
            open_server: it needs no key, so that whoever reaches it is let in.

        Raises:
            ApiError: 403.
        """
        if open_server:
            self._check_host(request)
        if "Origin" in request.headers:
            if self._allowed(request) is None and not _same_origin(request):
                raise _foreign(request)
            return
        # Links, pictures and scripts have no origin, but browsers say where they stand.
        if request.headers.get("Sec-Fetch-Site") not in ("cross-site", "same-site"):
            return
        link = request.headers.get("Sec-Fetch-Mode") == "navigate" and request.method == "GET"
        if not link or request.path in UNSAFE_GETS:
            raise _foreign(request)

    def headers(self, request: web.Request) -> dict[str, str]:
        """Return what lets the page that asked read the answer."""
        if not self.origins:
            return {}
        origin = self._allowed(request)
        vary = {} if ANY in self.origins else {"Vary": "Origin"}
        if origin is None:
            return vary
        return {
            **vary,
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": EXPOSED_HEADERS,
        }

    def _allowed(self, request: web.Request) -> str | None:
        """Return what to call the page's origin in the answer, None if it may not be told."""
        if ANY in self.origins:
            return ANY
        origin = request.headers.get("Origin", "")
        return origin if origin in self.origins else None

    def _check_host(self, request: web.Request) -> None:
        # A page can have its own name resolve to 127.0.0.1 and is then of the same origin. Such a
        # name can be neither an address nor one that only this machine or network knows.
        if not _is_loopback(request) or ANY in self.origins:
            return
        host = _hostname(request.headers.get("Host", ""))
        if not (
            "." not in host
            or _is_address(host)
            or host.endswith(LOCAL_SUFFIXES)
            or host in self.hosts
        ):
            raise ApiError(
                403,
                f"{host[:128]!r} is no name of this machine; add it to --allowed-hosts, or set "
                "--api-key",
                code="host_not_allowed",
            )


def check_origin_option(origin: str) -> None:
    """Check an item of `--cors-origins`.

    Raises:
        ConfigError: it is neither `*` nor a scheme, a host and perhaps a port.
    """
    parts = urlsplit(origin)
    if origin != ANY and (
        not parts.scheme or not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}".lower()
    ):
        raise ConfigError(
            "cors_origins must be '*' or origins such as https://chat.example:8443, "
            f"got {origin[:128]!r}"
        )


def _same_origin(request: web.Request) -> bool:
    origin = urlsplit(request.headers.get("Origin", ""))
    return bool(origin.netloc) and origin.netloc == request.headers.get("Host", "").lower()


def _hostname(host: str) -> str:
    """Return a Host header's name without its port, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, _, port = host.rpartition(":")
    return name if name and port.isdecimal() else host


def _is_loopback(request: web.Request) -> bool:
    """Return whether a request came in by an address that only this machine reaches."""
    transport = request.transport
    name = None if transport is None else transport.get_extra_info("sockname")
    if not isinstance(name, tuple):
        return False
    try:
        return ipaddress.ip_address(str(name[0]).partition("%")[0]).is_loopback
    except ValueError:
        return False


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _foreign(request: web.Request) -> ApiError:
    origin = request.headers.get("Origin", "another site")
    return ApiError(
        403,
        f"A page of {origin[:128]!r} may not use this server; see --cors-origins",
        code="origin_not_allowed",
    )
