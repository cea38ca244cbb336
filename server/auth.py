"""Who is asking: the API key, and the namespace that keeps callers' caches apart."""

from __future__ import annotations

import hashlib
import hmac

from aiohttp import web

from radixkv.request import Namespace
from radixkv.server.errors import ApiError

__all__ = ["authenticate", "make_namespace", "tenant_of"]

MAX_SALT_CHARS = 256
TENANT = web.RequestKey("tenant", str)


def authenticate(request: web.Request, api_key: str | None) -> None:
    """Check the caller's key and remember its tenant on the request.

    Raises:
        ApiError: 401, when a key is set and the request's is missing or wrong.
    """
    if api_key is None:
        request[TENANT] = ""
        return
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    expected = api_key.encode()
    # Bytes of equal or unequal length: compare_digest leaks neither content nor, for short keys
    # of common formats, anything useful about the length.
    known = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), expected)
    if scheme.lower() != "bearer" or not known:
        raise ApiError(
            401,
            "A valid API key is required: send it as 'Authorization: Bearer <key>'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": 'Bearer realm="radixkv"'},
        )
    request[TENANT] = "key-" + hashlib.sha256(expected).hexdigest()[:16]


def tenant_of(request: web.Request) -> str:
    """Return the tenant of an authenticated request; "" when the server needs no key."""
    return request[TENANT]


def make_namespace(tenant: str, cache_salt: str | None) -> Namespace:
    """Return the cache namespace of a request; the only place that builds one.

    The salt subdivides the caller's own space: with another tenant's salt the namespace still
    differs, because the tenant is a field of its own.

    Raises:
        ApiError: 400, when the salt is empty or too long.
    """
    if cache_salt is None:
        return (tenant, "") if tenant else ()
    if not 0 < len(cache_salt) <= MAX_SALT_CHARS:
        raise ApiError(
            400,
            f"cache_salt must have 1 to {MAX_SALT_CHARS} characters, got {len(cache_salt)}",
            param="cache_salt",
            code="invalid_value",
        )
    return (tenant, cache_salt)
