"""The keys a server knows: the one of `--api-key`, the admin's, and those of `--api-keys FILE`."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from radixkv.errors import ConfigError

__all__ = ["UNLIMITED", "ApiKey", "KeyLimits", "KeyRing", "tenant_of_key"]

logger = logging.getLogger(__name__)

MIN_KEY_CHARS = 16
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
# Bits of the file's mode that let others than its owner read or change it.
OPEN_TO_OTHERS = stat.S_IRWXG | stat.S_IRWXO

Limit = Annotated[int, Meta(ge=1, le=10**12)]


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the holder of a key may use; None is as much as it likes.

    Attributes:
        requests_per_minute, tokens_per_minute: sustained; as much at once after a minute's rest.
        concurrent_requests: being answered at the same time.
        max_tokens: of one answer; requests for more are cut to it.
    """

    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    concurrent_requests: Limit | None = None
    max_tokens: Limit | None = None


UNLIMITED = KeyLimits()


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key, or the lack of one.

    Attributes:
        name: for logs; the key itself is kept nowhere.
        tenant: whose cache, sessions and responses its requests see.
        admin: whether it opens the routes under /admin.
        limits: of those who use it, all together.
    """

    name: str
    tenant: str
    admin: bool
    limits: KeyLimits = UNLIMITED


class KeyEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`[keys.NAME]` of the file."""

    key: str | None = None
    sha256: Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")] | None = None
    tenant: str | None = None
    admin: bool = False
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    concurrent_requests: Limit | None = None
    max_tokens: Limit | None = None


class KeyFile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    keys: dict[str, KeyEntry]


class KeyRing:
    """Finds the key that a caller sent, in a time that tells nothing of the keys it has.

    A key is looked up by a keyed hash of its SHA-256, with a secret drawn at the start: how long a
    look-up takes depends on nothing that a caller could aim at.

    Attributes:
        needs_key: whether requests without a key are refused.
        anonymous: what requests without a key count as; None if they are refused.
    """

    def __init__(
        self,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        path: Path | None = None,
    ) -> None:
        """Read `path`, if there is one.

        Raises:
            ConfigError: the file can't be used; the message says why, and shows no key.
        """
        self.needs_key = api_key is not None or path is not None
        self._secret = secrets.token_bytes(32)
        self._path = path
        self._fixed: dict[bytes, ApiKey] = {}
        tenant = "" if api_key is None else tenant_of_key(api_key)
        if api_key is not None:
            plain = ApiKey("api-key", tenant, admin=admin_api_key is None)
            self._fixed[_digest(api_key)] = plain
        if admin_api_key is not None:
            if admin_api_key == api_key:
                raise ConfigError("admin_api_key must differ from api_key")
            # The tenant of those whose prompts it warms and pins.
            self._fixed[_digest(admin_api_key)] = ApiKey("admin-api-key", tenant, admin=True)
        open_admin = admin_api_key is None and not self.needs_key
        self.anonymous = None if self.needs_key else ApiKey("", "", admin=open_admin)
        self._keys: dict[bytes, ApiKey] = {}
        self.reload()

    @property
    def names(self) -> frozenset[str]:
        """The names of all keys."""
        return frozenset(key.name for key in self._keys.values())

    def reload(self) -> None:
        """Read the file again; requests that are being answered go on.

        Raises:
            ConfigError: it can't be used; the keys stay as they were.
        """
        found = dict(self._fixed)
        if self._path is not None:
            for digest, key in _read(self._path):
                if digest in found:
                    raise ConfigError(
                        f"--api-keys {self._path}: {key.name} has the key of {found[digest].name}"
                    )
                found[digest] = key
        self._keys = {self._blind(digest): key for digest, key in found.items()}

    def find(self, given: bytes) -> ApiKey | None:
        """Return the key that the caller's is."""
        return self._keys.get(self._blind(hashlib.sha256(given).digest()))

    def _blind(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def tenant_of_key(api_key: str) -> str:
    """Return the tenant of the requests with `--api-key`."""
    return "key-" + hashlib.sha256(api_key.encode()).hexdigest()[:16]


def _read(path: Path) -> list[tuple[bytes, ApiKey]]:
    """Return the keys of a file, each with its SHA-256.

    Raises:
        ConfigError: it can't be read, isn't TOML, or has an entry that can't be used.
    """
    where = f"--api-keys {path}"
    try:
        with path.open("rb") as file:
            mode = path.stat().st_mode
            data = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{where} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} is not a TOML file: {error}") from None
    try:
        entries = msgspec.convert(data, KeyFile).keys
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from None
    if not entries:
        raise ConfigError(f"{where} has no keys")
    if mode & OPEN_TO_OTHERS:
        logger.warning(
            "%s can be read or changed by others than its owner (mode %o): chmod 600 %s",
            where, stat.S_IMODE(mode), path,
        )  # fmt: skip
    return [
        _checked(name, entry, f"{where}: [keys.{name[:64]}]") for name, entry in entries.items()
    ]


def _checked(name: str, entry: KeyEntry, where: str) -> tuple[bytes, ApiKey]:
    tenant = name if entry.tenant is None else entry.tenant
    for kind, value in (("a name", name), ("tenant", tenant)):
        if not NAME.fullmatch(value):
            raise ConfigError(
                f"{where}: {kind} must have 1 to 64 of the characters A-Z, a-z, 0-9, '.', '_', '-'"
            )
    if (entry.key is None) == (entry.sha256 is None):
        raise ConfigError(f"{where} must have either key or sha256")
    if entry.key is not None and not (
        len(entry.key) >= MIN_KEY_CHARS
        and entry.key.isascii()
        and entry.key.isprintable()
        and " " not in entry.key
    ):
        raise ConfigError(
            f"{where}: key must have at least {MIN_KEY_CHARS} printable ASCII characters, "
            "and no spaces"
        )
    limits = KeyLimits(**{field: getattr(entry, field) for field in KeyLimits.__struct_fields__})
    digest = bytes.fromhex(entry.sha256) if entry.sha256 is not None else _digest(entry.key or "")
    return digest, ApiKey(name, tenant, entry.admin, limits)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
