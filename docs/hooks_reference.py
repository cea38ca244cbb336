"""The pages of the reference, written from what the code declares."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from loadtests.soak_server import write_tiny_model
from radixkv.cli import app as command_line
from radixkv.config import ServeConfig, format_bytes
from radixkv.engine import AsyncEngine
from radixkv.engine.factory import build_engine
from radixkv.server import create_app
from radixkv.server.openapi import document
from radixkv.server.state import STATE

__all__ = ["cli_page", "http_page", "metrics_page", "options_page", "reference_pages"]

METHODS = ("get", "post", "delete", "put", "patch")


def reference_pages() -> dict[str, str]:
    """Return every generated file by its path in the site's sources."""
    with tempfile.TemporaryDirectory() as directory:
        api, page = asyncio.run(_started(create_app(_engine(Path(directory)))))
    return {
        "reference/cli.md": cli_page(),
        "reference/options.md": options_page(),
        "reference/http.md": http_page(api),
        "reference/openapi.json": json.dumps(api, indent=1),
        "reference/metrics.md": metrics_page(page),
    }


def cli_page() -> str:
    """Return a section for each command, with its arguments and options."""
    lines = ["# Command line", "", "What `--help` says, of all commands.", ""]
    for path, command in _commands(typer.main.get_command(command_line), "radixkv"):
        lines += [f"## {path}", "", _first_paragraph(command.help or ""), ""]
        if path == "radixkv serve":
            lines += ["Its options are on a page of [their own](options.md).", ""]
            continue
        rows = [_parameter(parameter) for parameter in command.params if parameter.name != "help"]
        if rows:
            lines += ["| | |", "| --- | --- |", *rows, ""]
    return "\n".join(lines)


def options_page() -> str:
    """Return the options of `radixkv serve`."""
    lines = [
        "# Options of radixkv serve",
        "",
        "Each is also an environment variable, `RADIXKV_` and the name in capitals "
        "(`RADIXKV_MAX_NUM_SEQS`), and a key of the TOML file that `--config` names "
        "(`max-num-seqs`). The command line goes before the environment, and that before the file.",
        "",
        "| option | default | accepts | |",
        "| --- | --- | --- | --- |",
    ]
    for option in dataclasses.fields(ServeConfig):
        cells = (
            f"`--{option.name.replace('_', '-')}`",
            _default(option),
            _cell(option.metadata["accepts"]),
            _cell(option.metadata["help"]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def http_page(api: dict[str, Any]) -> str:
    """Return the routes of an OpenAPI document, by tag, with the fields of their bodies."""
    lines = [
        "# HTTP routes",
        "",
        "Written from the server's own description of itself, `GET /openapi.json` "
        "([this version's](openapi.json)). What fields mean together is explained in "
        "[HTTP API](../http_api.md).",
        "",
    ]
    schemas = api["components"]["schemas"]
    for tag in api["tags"]:
        lines += [f"## {tag['name']}", "", tag["description"], ""]
        for path, operations in api["paths"].items():
            for method in METHODS:
                operation = operations.get(method)
                if operation and tag["name"] in operation["tags"]:
                    lines += _operation(method, path, operation, schemas)
    return "\n".join(lines)


def metrics_page(page: str) -> str:
    """Return a row for each metric of a page that `GET /metrics` answered."""
    lines = [
        "# List of metrics",
        "",
        "What `GET /metrics` can print, by the registry; [Metrics](../metrics.md) explains how the "
        "numbers hang together.",
        "",
        "| name | type | |",
        "| --- | --- | --- |",
    ]
    families = text_string_to_metric_families(page)
    for family in sorted(families, key=lambda family: family.name):
        if family.name.endswith("_created"):
            continue  # the client library's own, one for each counter and histogram
        name = family.name + ("_total" if family.type == "counter" else "")
        lines.append(f"| `{name}` | {family.type} | {_cell(family.documentation)} |")
    return "\n".join([*lines, ""])


async def _started(app: web.Application) -> tuple[dict[str, Any], str]:
    """Start an application; return its OpenAPI document and its page of metrics."""
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        return document(app), app[STATE].metrics.render().decode()
    finally:
        await runner.cleanup()


def _engine(directory: Path) -> AsyncEngine:
    """Return an engine that has everything there are metrics of; it isn't started."""
    config = ServeConfig(
        model=write_tiny_model(directory / "model"),
        load_format="dummy",
        kv_cache_memory=4 * 1024**2,
        max_num_seqs=4,
        host_cache_memory=1024**2,
        disk_cache=str(directory / "disk"),
        disk_cache_size=1024**2,
        swap_space=1024**2,
        kv_events="inproc://radixkv-docs",
    )
    return build_engine(config, console=Console(quiet=True)).engine


def _commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield every command that does something, with its words."""
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
        return
    for name in sorted(children):
        yield from _commands(children[name], f"{path} {name}")


def _parameter(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        names = parameter.name.upper()
    else:
        names = ", ".join(parameter.opts + parameter.secondary_opts)
    text = _cell(getattr(parameter, "help", None) or "")
    default = parameter.default
    if default not in (None, False, ()) and not callable(default):
        shown = ", ".join(map(str, default)) if isinstance(default, list | tuple) else default
        text += f" Default: {_cell(str(shown))}."
    return f"| `{names}` | {text.strip()} |"


def _default(option: dataclasses.Field[Any]) -> str:
    value: Any = option.default
    if value in (None, ()):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    # Sizes are told by what they accept.
    if isinstance(value, int) and value and "a size" in option.metadata["accepts"]:
        return format_bytes(value)
    return _cell(str(value))


def _operation(
    method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]
) -> list[str]:
    lines = [f"### `{method.upper()} {path}`", "", f"{operation['summary']}.", ""]
    if more := operation.get("description"):
        lines += [_prose(more), ""]
    rows = [
        f"| `{parameter['name']}` | {parameter['in']} | {_kind(parameter['schema'], schemas)} | "
        f"{_cell(parameter.get('description', ''))} |"
        for parameter in operation.get("parameters", ())
    ]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if body:
        schema = _resolved(body["schema"], schemas)
        needed = schema.get("required", ())
        for name, field in schema.get("properties", {}).items():
            place = "body, required" if name in needed else "body"
            text = _cell(field.get("description", ""))
            rows.append(f"| `{name}` | {place} | {_kind(field, schemas)} | {text} |")
    if rows:
        lines += ["| field | in | type | |", "| --- | --- | --- | --- |", *rows, ""]
    lines += [f"Statuses: {', '.join(operation['responses'])}.", ""]
    return lines


def _kind(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    """Return the type of a field in a few words."""
    if "$ref" in schema:
        return schema["$ref"].rsplit("/", 1)[-1]
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kinds = [_kind(one, schemas) for one in schema.get("anyOf", ()) if one.get("type") != "null"]
    if kinds:
        return " or ".join(dict.fromkeys(kinds))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items') or {}, schemas)}"
    return str(schema.get("type", "any"))


def _resolved(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = schemas[schema["$ref"].rsplit("/", 1)[-1]]
    return schema


def _first_paragraph(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())


def _prose(text: str) -> str:
    """Return a docstring's text as paragraphs."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _cell(text: str) -> str:
    """Return a text that can stand in a table."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")
