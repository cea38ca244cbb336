"""The options of an engine as keyword arguments."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, unquote

from radixkv.config import REPEATABLE, ServeConfig, load_config
from radixkv.errors import ConfigError
from radixkv.request import Namespace

__all__ = ["config_of", "namespace_of_salt", "naming_keywords", "quotas_of"]


def config_of(model: object, options: Mapping[str, Any]) -> ServeConfig:
    """Return the configuration that keyword arguments mean; nothing else is looked at.

    Args:
        model: see `ServeConfig.model`.
        options: fields of `ServeConfig`, as values or as the text that the command line takes;
            None is the default. `tenant_quota` may be a mapping of salts to shares.

    Raises:
        ConfigError: an option is unknown or out of range; the message names it.
    """
    known = [field.name for field in dataclasses.fields(ServeConfig)]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise ConfigError(f"there is no option {name!r}{hint}")
    texts = {name: _text(name, value) for name, value in {"model": model, **options}.items()}
    # A file that the environment names is the server's.
    with naming_keywords():
        return load_config(texts, environ={})


def quotas_of(config: ServeConfig) -> dict[Namespace, float]:
    """Return the shares of the namespaces that `tenant_quota` names."""
    return {
        namespace_of_salt(None if name == "default" else unquote(name)): share
        for name, share in config.tenant_quota
    }


def namespace_of_salt(cache_salt: str | None) -> Namespace:
    """Return the namespace of a salt: that of the same salt at a server without keys."""
    return () if cache_salt is None else ("", cache_salt)


@contextmanager
def naming_keywords() -> Iterator[None]:
    """Let errors name options as `max_num_seqs`, not as the command line's `--max-num-seqs`."""
    try:
        yield
    except ConfigError as error:
        message = re.sub(r"--([a-z][a-z-]+)", lambda m: m[1].replace("-", "_"), str(error))
        raise ConfigError(message) from error


def _text(name: str, value: Any) -> str | None:
    if isinstance(value, bool):
        return str(value).lower()
    if name in REPEATABLE and isinstance(value, Mapping):
        return ",".join(f"{quote(str(key), safe='')}={share}" for key, share in value.items())
    if name in REPEATABLE and isinstance(value, list | tuple):
        return ",".join(map(str, value)) or None
    return None if value is None else str(value)
