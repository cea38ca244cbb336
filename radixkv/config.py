"""Every option of the server: its default, its accepted range, and where its value comes from."""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from radixkv.errors import ConfigError

__all__ = ["REPEATABLE", "ServeConfig", "format_bytes", "load_config", "parse_bytes"]

REPEATABLE = frozenset({"allowed_hosts", "cors_origins", "tenant_quota"})
# Never shown, not even when they are wrong.
SECRET = frozenset({"admin_api_key", "api_key"})

_UNITS = {
    "": 1, "b": 1,
    "k": 1000, "kb": 1000, "m": 1000**2, "mb": 1000**2, "g": 1000**3, "gb": 1000**3,
    "ki": 1024, "kib": 1024, "mi": 1024**2, "mib": 1024**2, "gi": 1024**3, "gib": 1024**3,
}  # fmt: skip


def parse_bytes(text: str) -> int:
    """Return the bytes that "512MiB", "4GB" or "1000000" means.

    Raises:
        ValueError: it isn't a size.

    >>> parse_bytes("1.5GiB")
    1610612736
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not a size in bytes")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_bytes(count: int) -> str:
    """Return a size for people.

    >>> format_bytes(368640)
    '360 KiB'
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def _integer(low: int, high: int) -> tuple[Callable[[str], int], str]:
    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise ValueError
        return value

    return parse, f"a whole number from {low} to {high}"


def _number(low: float, high: float) -> tuple[Callable[[str], float], str]:
    def parse(text: str) -> float:
        value = float(text)
        if not low <= value <= high:  # NaN fails this too
            raise ValueError
        return value

    return parse, f"a number from {low:g} to {high:g}"


def _choice(*values: str) -> tuple[Callable[[str], str], str]:
    def parse(text: str) -> str:
        if text not in values:
            raise ValueError
        return text

    return parse, "one of " + ", ".join(values)


def _flag() -> tuple[Callable[[str], bool], str]:
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    return lambda text: known[text.lower()], "true or false"


def _text(what: str = "text that is not empty") -> tuple[Callable[[str], str], str]:
    def parse(text: str) -> str:
        if not text:
            raise ValueError
        return text

    return parse, what


def _names(what: str) -> tuple[Callable[[str], tuple[str, ...]], str]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(part.strip() for part in text.split(","))
        if not all(names):
            raise ValueError
        return names

    return parse, f"{what}, several separated by commas"


def _size(low: int) -> tuple[Callable[[str], int], str]:
    def parse(text: str) -> int:
        value = parse_bytes(text)
        if value < low:
            raise ValueError
        return value

    return parse, f"a size of at least {format_bytes(low)}, such as 512MiB or 4GiB"


def _shares() -> tuple[Callable[[str], tuple[tuple[str, float], ...]], str]:
    def parse(text: str) -> tuple[tuple[str, float], ...]:
        shares: dict[str, float] = {}
        for part in text.split(","):
            name, _, share = part.strip().rpartition("=")
            if not name or name in shares or not 0.001 <= float(share) <= 1:
                raise ValueError
            shares[name] = float(share)
        return tuple(shares.items())

    return parse, (
        "NAME=SHARE, several separated by commas, each name once and each share from 0.001 to 1 "
        "(in a name, %2C stands for a comma and %25 for a percent sign)"
    )


def _auto(inner: tuple[Callable[[str], Any], str]) -> tuple[Callable[[str], Any], str]:
    parse, accepts = inner
    return lambda text: None if text == "auto" else parse(text), f"auto, or {accepts}"


def _option(default: Any, kind: tuple[Callable[[str], Any], str], help_text: str) -> Any:
    parse, accepts = kind
    return field(default=default, metadata={"parse": parse, "accepts": accepts, "help": help_text})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The options of `radixkv serve`. None stands for "auto" or "not set".

    Each is `--max-num-seqs` on the command line, `RADIXKV_MAX_NUM_SEQS` in the environment and
    `max-num-seqs` in the TOML file, in this order of precedence. What may be repeated on the
    command line is separated by commas in the environment, and may be an array in the file.
    """

    model: str | None = _option(
        None,
        _text("a directory, a .gguf file or a hub id"),
        "Directory of safetensors, a .gguf file, or a hub id. Default: SmolLM2-135M-Instruct.",
    )
    served_model_name: str | None = _option(
        None, _text(), "Name of the model in the API. Default: the model's own."
    )
    load_format: str = _option(
        "auto",
        _choice("auto", "safetensors", "gguf", "dummy"),
        "dummy gives random weights for the config.json of --model.",
    )
    dtype: str = _option(
        "auto",
        _choice("auto", "bfloat16", "float16", "float32"),
        "Type of weights and KV. auto: the model's own.",
    )
    quantization: str = _option(
        "none",
        _choice("none", "int8"),
        "int8 rounds weights to 8 bits, on a CPU: less memory, and faster.",
    )
    kv_cache_dtype: str = _option(
        "auto",
        _choice("auto", "int8", "fp8"),
        "Type of KV; 8 bits hold twice the tokens, and take longer to read on a CPU. auto: that "
        "of --dtype.",
    )
    device: str = _option(
        "auto",
        _choice("auto", "cpu", "cuda"),
        "Where the model runs; cuda is an AMD GPU, too. auto: on a GPU if there is one.",
    )
    attention: str = _option(
        "auto",
        _choice("auto", "cpu", "triton"),
        "What computes attention. auto: triton on a GPU. On a CPU triton is interpreted: slow.",
    )
    cuda_graphs: bool = _option(
        True, _flag(), "Record the steps of decoding on a GPU once and replay them."
    )
    threads: int | None = _option(
        None, _auto(_integer(1, 1024)), "Threads of the model. auto: one per physical core."
    )
    kv_cache_memory: int | None = _option(
        None,
        _auto(_size(1024)),
        "Memory for KV blocks. auto: a third of what is available, at most 4 GiB; on a GPU 90 % of "
        "what the model leaves free.",
    )
    block_size: int = _option(16, _integer(1, 256), "Tokens in a block.")
    prefix_caching: bool = _option(True, _flag(), "Keep and reuse KV across requests.")
    eviction_policy: str = _option(
        "lru",
        _choice("lru", "lfu", "slru", "priority", "session"),
        "What is evicted first when blocks are needed.",
    )
    namespace_quota: float = _option(
        1.0,
        _number(0.001, 1),
        "Part of the KV blocks that a namespace keeps from others; what it has above goes first.",
    )
    tenant_quota: tuple[tuple[str, float], ...] = _option(
        (),
        _shares(),
        "Parts of the KV blocks for those who use these cache_salts, instead of --namespace-quota; "
        "default stands for requests without one. May be repeated.",
    )
    pin_share: float = _option(
        0.5, _number(0, 0.95), "Part of the KV blocks that pins may hold; 0 allows no pins."
    )
    host_cache_memory: int = _option(
        0, _size(0), "Host memory for evicted KV blocks; 0 keeps none."
    )
    disk_cache: str | None = _option(
        None, _text("a directory"), "Directory for evicted KV blocks; they survive a restart."
    )
    disk_cache_size: int = _option(
        10 * 1024**3, _size(1024), "Disk space for evicted KV blocks, with --disk-cache."
    )
    disk_save_timeout: float = _option(
        20.0,
        _number(0, 3600),
        "Seconds that the server may take at its end to write the cache to --disk-cache.",
    )
    tier_policy: str = _option(
        "auto",
        _choice("auto", "always"),
        "Bring blocks back from host memory and disk if that is faster than computing, or always.",
    )
    max_model_len: int | None = _option(
        None,
        _auto(_integer(2, 10_000_000)),
        "Tokens of prompt and answer together. auto: the model's, as far as the blocks suffice.",
    )
    max_num_seqs: int = _option(64, _integer(1, 4096), "Requests that run at once.")
    max_num_batched_tokens: int | None = _option(
        None,
        _auto(_integer(1, 1_000_000)),
        "Tokens computed in one step; at least max-num-seqs. auto: 256, on a GPU "
        "2048, or more if that needs it.",
    )
    max_num_waiting: int = _option(
        1024, _integer(0, 1_000_000), "Requests that may wait; more get status 429."
    )
    scheduling_policy: str = _option(
        "fcfs",
        _choice("fcfs", "priority", "cache-aware"),
        "Which waiting request runs next: the oldest, the lowest `priority`, or the one of which "
        "most is cached. Namespaces that were served less go first in each case.",
    )
    max_queue_skip: float = _option(
        10.0,
        _number(0, 86400),
        "With cache-aware, seconds after which the oldest goes before what is cached.",
    )
    itl_target: float | None = _option(
        None,
        _auto(_number(0.1, 60_000)),
        "Milliseconds between two tokens of an answer that prompts should not exceed; they are "
        "cut into chunks for it. auto: no target.",
    )
    speculative_tokens: int = _option(
        0,
        _integer(0, 64),
        "Tokens guessed ahead by prompt lookup for each answer and step, verified in the step; "
        "0 guesses none.",
    )
    preemption_mode: str = _option(
        "auto",
        _choice("auto", "recompute", "swap"),
        "What happens to the KV of a preempted request. auto: swap it out to host memory if that "
        "is faster than computing it again.",
    )
    swap_space: int | None = _option(
        None,
        _auto(_size(0)),
        "Host memory for preempted requests. auto: an eighth of what is left, at most 4 GiB.",
    )
    host: str = _option("127.0.0.1", _text("an address"), "Address to listen on.")
    port: int = _option(8000, _integer(0, 65535), "Port to listen on; 0 picks a free one.")
    api_key: str | None = _option(None, _text(), "Key that clients must send as a bearer token.")
    api_keys: str | None = _option(
        None,
        _text("a TOML file"),
        "File of further keys, each with a tenant and limits of its own; read again on SIGHUP.",
    )
    admin_api_key: str | None = _option(
        None, _text(), "Key for the routes under /admin, which --api-key then no longer opens."
    )
    cors_origins: tuple[str, ...] = _option(
        (),
        _names("origins such as https://chat.example, or *"),
        "Pages that may use the server from a browser. May be repeated. Default: none.",
    )
    allowed_hosts: tuple[str, ...] = _option(
        (),
        _names("host names"),
        "Names that a proxy on this machine passes on to a server without a key. May be repeated.",
    )
    max_connections: int | None = _option(
        None,
        _auto(_integer(1, 1_000_000)),
        "Connections open at once; more get status 503. auto: as many as files may be open.",
    )
    keepalive_timeout: float = _option(
        75.0,
        _number(1, 86400),
        "Seconds after which a connection is closed on which no request has come in full.",
    )
    body_timeout: float = _option(
        60.0, _number(0.1, 86400), "Seconds that a request body may take; more gets status 408."
    )
    stall_timeout: float = _option(
        30.0,
        _number(0.1, 86400),
        "Seconds after which a client is dropped that takes nothing of what is sent to it.",
    )
    max_body_size: int = _option(
        16 * 1024**2, _size(1024), "Largest request body; more gets status 413."
    )
    request_timeout: float | None = _option(
        None, _auto(_number(0.1, 86400)), "Seconds after which a request is ended. auto: never."
    )
    drain_timeout: float = _option(
        30.0, _number(0, 3600), "Seconds that running requests may go on after SIGTERM."
    )
    session_idle: float = _option(
        3600.0, _number(1, 31_536_000), "Seconds after which an unused session is dropped."
    )
    tool_parser: str = _option(
        "auto",
        _choice("auto", "hermes", "llama3", "mistral", "mistral-args", "generic"),
        "How the model writes tool calls. auto: as its chat template teaches.",
    )
    max_sessions: int = _option(10_000, _integer(1, 10_000_000), "Sessions kept at once.")
    session_db: str | None = _option(
        None,
        _text("a file"),
        "SQLite file that keeps sessions across restarts. Default: none; they are in memory only.",
    )
    kv_events: str | None = _option(
        None,
        _text("an address such as tcp://127.0.0.1:5557 (with a leading > to connect, not bind)"),
        "ZeroMQ address where stored and removed blocks are published. Default: nowhere.",
    )
    kv_events_replay: str | None = _option(
        None,
        _text("an address such as tcp://127.0.0.1:5558"),
        "ZeroMQ address where subscribers ask for batches they missed. Default: none.",
    )
    kv_events_topic: str = _option(
        "kv-events", _text(), "First frame of each message; llm-d wants kv@<pod>@<model>."
    )
    log_level: str = _option(
        "info", _choice("debug", "info", "warning", "error"), "What is logged."
    )
    log_format: str = _option(
        "text", _choice("text", "json"), "Form of the log's lines, on standard error."
    )
    log_prompts: bool = _option(
        False,
        _flag(),
        "Log the text of prompts, and messages of exceptions, which may quote it.",
    )
    access_log: str | None = _option(
        None,
        _text("a file, or - for standard output"),
        "Where a line of JSON about each HTTP request goes, without any text of it. Default: "
        "nowhere.",
    )
    otlp_traces_endpoint: str | None = _option(
        None,
        _text("a URL such as http://localhost:4318/v1/traces"),
        "OpenTelemetry collector that gets a trace of each request, over HTTP; needs the extra "
        "otel. Default: none.",
    )

    def __post_init__(self) -> None:
        if self.kv_events_replay is not None and self.kv_events is None:
            raise ConfigError("--kv-events-replay needs --kv-events")
        if (
            self.max_num_batched_tokens is not None
            and self.max_num_batched_tokens < self.max_num_seqs
        ):
            raise ConfigError(
                f"--max-num-batched-tokens must be at least --max-num-seqs ({self.max_num_seqs}), "
                f"got {self.max_num_batched_tokens}"
            )


def load_config(
    cli: Mapping[str, str | None],
    *,
    config_file: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ServeConfig:
    """Combine command line, environment and file into a checked configuration.

    Args:
        cli: option name with underscores to its text; None where it wasn't given.
        config_file: a TOML file, or None to look at RADIXKV_CONFIG.
        environ: where `RADIXKV_*` is looked up.

    Raises:
        ConfigError: one line that names the option, where it came from, and what it accepts.
    """
    options = {option.name: option for option in dataclasses.fields(ServeConfig)}
    config_file = config_file or environ.get("RADIXKV_CONFIG")
    from_file = _read_file(config_file, options) if config_file else {}
    values: dict[str, Any] = {}
    for name, option in options.items():
        flag = "--" + name.replace("_", "-")
        variable = "RADIXKV_" + name.upper()
        if (text := cli.get(name)) is not None:
            source = flag
        elif (text := environ.get(variable)) is not None:
            source = f"{variable} ({flag})"
        elif (text := from_file.get(name)) is not None:
            source = f"{flag} in {config_file}"
        else:
            continue
        try:
            values[name] = option.metadata["parse"](text)
        except (ValueError, KeyError):
            shown = "the value given" if name in SECRET else repr(text)
            raise ConfigError(
                f"{source} must be {option.metadata['accepts']}, got {shown}"
            ) from None
    return ServeConfig(**values)


def _read_file(path: str, options: Mapping[str, Any]) -> dict[str, str]:
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not a TOML file: {error}") from None
    values = {}
    for key, value in data.items():
        name = key.replace("-", "_")
        if name not in options:
            raise ConfigError(f"--config {path}: there is no option {key!r}")
        if name in REPEATABLE and isinstance(value, list):
            value = ",".join(map(str, value))
        if not isinstance(value, str | int | float):
            raise ConfigError(f"--config {path}: {key} must be a text, a number or a truth value")
        values[name] = str(value)
    return values
