"""Who is asking: the API key, and the namespace that keeps callers' caches apart."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from urllib.parse import unquote

from aiohttp import web

from radixkv.errors import ConfigError
from radixkv.request import Namespace
from radixkv.server.errors import ApiError

__all__ = ["authenticate", "make_namespace", "namespace_quotas", "tenant_of"]

MAX_SALT_CHARS = 256
API_KEY_HEADER = "X-API-Key"
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
    if not scheme and API_KEY_HEADER in request.headers:  # where clients of Anthropic's API put it
        scheme, given = "bearer", request.headers[API_KEY_HEADER]
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
    request[TENANT] = _tenant(api_key)


def tenant_of(request: web.Request) -> str:
    """Return the tenant of an authenticated request; "" when the server needs no key."""
    return request[TENANT]


def namespace_quotas(
    api_key: str | None, shares: Iterable[tuple[str, float]]
) -> dict[Namespace, float]:
    """Return the share of each namespace that `--tenant-quota` names.

    Args:
        api_key: the server's.
        shares: (name, share); a name is a cache_salt, percent-encoded, or "default" for requests
            without one.

    Raises:
        ConfigError: a name can't be a cache_salt.
    """
    tenant = "" if api_key is None else _tenant(api_key)
    quotas = {}
    for name, share in shares:
        try:
            namespace = make_namespace(tenant, None if name == "default" else unquote(name))
        except ApiError as error:
            raise ConfigError(f"--tenant-quota {name[:64]!r}: {error.message}") from None
        quotas[namespace] = share
    return quotas


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


def _tenant(api_key: str) -> str:
    return "key-" + hashlib.sha256(api_key.encode()).hexdigest()[:16]
