"""The options of the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from radixkv.errors import ConfigError
from radixkv.server.cors import check_origin_option
from radixkv.server.tool_parsers import FAMILIES

__all__ = ["ServerConfig"]

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How the server talks to its clients. Validated on construction.

    Attributes:
        api_key: the key clients must send as `Authorization: Bearer <key>`; None: no key needed.
            `/health` and `/metrics` never need it: they hold counts, and no text of any prompt.
        api_keys: a TOML file of further keys, each with a tenant and limits of its own.
        admin_api_key: the key for the routes under /admin; `api_key` no longer opens them then.
        cors_origins: of pages that may use the server from a browser; "*" is any.
        allowed_hosts: names beside this machine's own by which a server without a key, on a
            loopback address, may be called; a proxy may pass on such a name.
        served_model_name: the name clients use; None: the engine's own.
        max_body_bytes: largest request body. Agents resend long histories, so it is generous.
        body_timeout_s: a body that has not arrived in full by then is answered with 408.
        request_timeout_s: longest time from arrival to the end of an answer; None: no limit.
        max_stream_stall_s: a reader of an answer that takes no bytes for so long is dropped.
        keepalive_timeout_s: a connection on which no request is complete for so long is closed.
        max_connections: open at once; further ones are told so. None: as many as files may be open.
        keepalive_s: a stream that is silent for so long gets an SSE comment line; 0: never.
        session_idle_s: a session that nobody used for so long is forgotten.
        max_sessions: sessions held at most; further ones are refused, none is thrown away.
        tool_parser: family of models whose tool calls are read, by its name in `FAMILIES`; None:
            the one that the chat template teaches.
        max_prompts: prompts in one `/v1/completions` request at most.
        save_timeout_s: time that the engine may take at the end to write its cache to disk.
        drain_timeout_s: time that accepted requests get to finish after a stop signal.
        engine_stuck_s: a step longer than this is shown as "stuck" by `/health`.
        access_log: write one JSON line per request (id, route, status, times, tokens; never any
            text).
        log_prompts: log the text of every prompt, and messages of exceptions, which may quote it.

    Raises:
        ConfigError: a value cannot be used; the message names the option.
    """

    api_key: str | None = None
    api_keys: Path | None = None
    admin_api_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    served_model_name: str | None = None
    max_body_bytes: int = 16 * MIB
    body_timeout_s: float = 60.0
    request_timeout_s: float | None = None
    max_stream_stall_s: float = 30.0
    keepalive_timeout_s: float = 75.0
    max_connections: int | None = None
    keepalive_s: float = 15.0
    session_idle_s: float = 3600.0
    max_sessions: int = 10_000
    tool_parser: str | None = None
    max_prompts: int = 128
    drain_timeout_s: float = 30.0
    save_timeout_s: float = 0.0
    engine_stuck_s: float = 30.0
    access_log: bool = False
    log_prompts: bool = False

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("api_key must not be empty; leave it out to need no key")
        if self.admin_api_key is not None and not self.admin_api_key.strip():
            raise ConfigError("admin_api_key must not be empty; leave it out to have none")
        for origin in self.cors_origins:
            check_origin_option(origin)
        if self.tool_parser is not None and self.tool_parser not in FAMILIES:
            known = ", ".join(sorted(FAMILIES))
            raise ConfigError(f"tool_parser must be one of {known}, got {self.tool_parser[:64]!r}")
        for option in fields(self):
            value = getattr(self, option.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            low = 0 if option.name in {"keepalive_s", "drain_timeout_s", "save_timeout_s"} else None
            # `not (value > 0)` instead of `value <= 0`, so that NaN is refused too.
            if not (value >= low if low is not None else value > 0):
                bound = "at least 0" if low is not None else "greater than 0"
                raise ConfigError(f"{option.name} must be {bound}, got {value}")
