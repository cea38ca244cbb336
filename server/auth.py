"""Who is asking: the API key, and the namespace that keeps callers' caches apart."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import unquote

from aiohttp import web

from radixkv.errors import ConfigError
from radixkv.request import Namespace
from radixkv.server.api_keys import ApiKey, KeyRing, tenant_of_key
from radixkv.server.errors import ApiError

__all__ = [
    "authenticate",
    "is_admin_route",
    "key_of",
    "make_namespace",
    "namespace_quotas",
    "tenant_of",
]

MAX_SALT_CHARS = 256
API_KEY_HEADER = "X-API-Key"
API_KEY = web.RequestKey("api_key", ApiKey)
# Beside all below /admin.
ADMIN_ROUTES = frozenset({"/admin", "/flush_cache"})


def is_admin_route(route: str) -> bool:
    """Return whether a route's pattern is for the one who runs the server."""
    return route in ADMIN_ROUTES or route.startswith("/admin/")


def authenticate(request: web.Request, keys: KeyRing, *, admin: bool = False) -> None:
    """Check the caller's key and remember on the request whose it is.

    Args:
        request: whose route needs a key, if any does.
        keys: the server's.
        admin: whether the route wants an admin's key.

    Raises:
        ApiError: 401, the key is missing or wrong; 403, it is right but no admin's.
    """
    given = _given_key(request)
    known = None if given is None else keys.find(given)
    # Where no key is needed, one that is sent all the same is an ordinary client's dummy.
    key = known or keys.anonymous
    if key is None or (admin and known is None and not key.admin):
        kind = "An admin's API key" if admin and keys.anonymous is not None else "A valid API key"
        raise ApiError(
            401,
            f"{kind} is required: send it as 'Authorization: Bearer <key>'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": 'Bearer realm="radixkv"'},
        )
    if admin and not key.admin:
        raise ApiError(403, "This API key is not an admin's", code="admin_key_required")
    request[API_KEY] = key


def key_of(request: web.Request) -> ApiKey | None:
    """Return the key of an authenticated request; None on routes that need none."""
    return request.get(API_KEY)


def tenant_of(request: web.Request) -> str:
    """Return the tenant of an authenticated request; "" when the server needs no key."""
    return request[API_KEY].tenant


def namespace_quotas(
    api_key: str | None, shares: Iterable[tuple[str, float]], *, tenants: bool = False
) -> dict[Namespace, float]:
    """Return the share of each namespace that `--tenant-quota` names.

    Args:
        api_key: the server's.
        shares: (name, share); a name is a cache_salt, percent-encoded, or "default" for requests
            without one.
        tenants: the names are tenants of `--api-keys` instead, or TENANT/SALT; "default" still
            stands for the requests with `api_key`.

    Raises:
        ConfigError: a name can't be a cache_salt, or no tenant.
    """
    own = "" if api_key is None else tenant_of_key(api_key)
    quotas = {}
    for name, share in shares:
        tenant, salt = own, None if name == "default" else unquote(name)
        if tenants and name != "default":
            tenant, slash, rest = name.partition("/")
            tenant, salt = unquote(tenant), unquote(rest) if slash else None
        try:
            namespace = make_namespace(tenant, salt)
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


def _given_key(request: web.Request) -> bytes | None:
    """Return the key that a request has, where OpenAI's or Anthropic's clients put it."""
    authorization = request.headers.get("Authorization")
    if not authorization:
        given = request.headers.get(API_KEY_HEADER)
    else:
        scheme, _, rest = authorization.partition(" ")
        given = rest if scheme.lower() == "bearer" else None
    return None if given is None else given.strip().encode("utf-8", "surrogateescape")
