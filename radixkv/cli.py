"""The command line: `radixkv serve`, `pull`, `tree` and `bench`."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from radixkv import __version__
from radixkv.chat_command import chat
from radixkv.config import REPEATABLE, ServeConfig, format_bytes, load_config
from radixkv.errors import RadixKVError
from radixkv.openmp import set_wait_policy
from radixkv.simulate.command import add_commands as add_simulate_commands

if TYPE_CHECKING:
    from radixkv.server.config import ServerConfig

__all__ = ["app", "main"]

app = typer.Typer(
    name="radixkv",
    help="Serve language models to multi-turn agents from a radix tree of KV blocks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

log = logging.getLogger(__name__)

bench = typer.Typer(no_args_is_help=True, help="Measure a model on this machine.")
app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command line."""
    set_wait_policy()
    app()


def serve(config: str | None = None, **options: Any) -> None:
    """Load a model and serve it over the OpenAI API until SIGTERM or Ctrl-C."""
    console = Console(stderr=True)
    began = time.monotonic()
    try:
        for name in REPEATABLE:
            options[name] = ",".join(options[name]) if options[name] else None
        settings = load_config(options, config_file=config)
        if settings.log_format == "json":
            console = Console(stderr=True, quiet=True)  # what is no line of JSON is left out
        # Imported late: `--help` and a refused option should not wait for torch.
        from radixkv.engine.factory import build_engine
        from radixkv.server.access_log import configure_access_log
        from radixkv.server.api_keys import KeyRing
        from radixkv.server.auth import namespace_quotas
        from radixkv.server.logs import configure_logging
        from radixkv.server.session_db import SessionDb
        from radixkv.server.tracing import build_tracer

        configure_logging(
            settings.log_level,
            settings.log_format,
            show_text=settings.log_prompts,
            console=console,
        )
        if settings.access_log is not None:
            configure_access_log(settings.access_log)
        endpoint = settings.otlp_traces_endpoint
        tracer = None if endpoint is None else build_tracer(endpoint)
        server_config = _server_config(settings)
        keys = KeyRing(server_config.api_key, server_config.admin_api_key, server_config.api_keys)
        session_db = None if settings.session_db is None else SessionDb(settings.session_db)
        with console.status("loading the model"):
            quotas = namespace_quotas(
                settings.api_key, settings.tenant_quota, tenants=settings.api_keys is not None
            )
            built = build_engine(settings, quotas=quotas, console=console)
    except RadixKVError as error:
        _fail(error)
    from radixkv.server.app import create_app
    from radixkv.server.run import run_server

    def on_ready(url: str) -> None:
        engine = built.engine
        if settings.log_format == "json":
            log.info("%s is ready, listening on %s", engine.model_name, url)
            return
        console.print(
            f"[bold]{engine.model_name}[/bold] ({built.dtype}, "
            f"{format_bytes(built.weight_bytes)} of weights) is ready after "
            f"{time.monotonic() - began:.1f} s\n"
            f"KV cache: {built.num_blocks} blocks of {built.block_size} tokens in "
            f"{built.kv_dtype}, {format_bytes(built.bytes_per_block)} each, "
            f"{format_bytes(built.kv_bytes)} in all; "
            f"up to {engine.max_model_len} tokens a request\n"
            f"Listening on [bold]{url}[/bold] (dashboard: {url}/admin/). Try:\n",
            highlight=False,
            soft_wrap=True,
        )
        console.print(_example(url, engine.model_name, settings), highlight=False, soft_wrap=True)

    try:
        application = create_app(
            built.engine,
            server_config,
            tracer=tracer,
            keys=keys,
            session_db=session_db,
        )
    except RadixKVError as error:
        _fail(error)
    try:
        code = asyncio.run(run_server(application, settings.host, settings.port, on_ready=on_ready))
    except OSError as error:
        reason = error.strerror or error
        _fail(f"--host {settings.host} --port {settings.port} can't be listened on: {reason}")
    raise typer.Exit(code)


@app.command()
def pull() -> None:
    """Fetch and convert the default model, so that `serve` starts at once."""
    console = Console(stderr=True)
    try:
        from radixkv.model.pull import ensure_default_model

        path = ensure_default_model(console=console)
    except RadixKVError as error:
        _fail(error)
    typer.echo(path)


@app.command()
def tree(
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    depth: Annotated[int, typer.Option(min=1, max=64, help="Nodes on a path at most.")] = 4,
    breadth: Annotated[int, typer.Option(min=1, max=1000, help="Children shown at most.")] = 10,
    namespace: Annotated[str | None, typer.Option(help="Show only this namespace.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="RADIXKV_API_KEY", help="The server's key.")
    ] = None,
) -> None:
    """Show what a running server has cached, as a tree."""
    from radixkv.tree_view import fetch_tree, render_tree

    try:
        report = fetch_tree(url, depth=depth, breadth=breadth, namespace=namespace, api_key=api_key)
    except RadixKVError as error:
        _fail(error)
    Console().print(render_tree(report), soft_wrap=True)


@bench.command()
def quality(
    model: Annotated[
        str | None, typer.Option(help="As for serve. Default: SmolLM2-135M-Instruct.")
    ] = None,
    quantization: Annotated[str, typer.Option(help="Of weights: none or int8.")] = "none",
    kv_cache_dtype: Annotated[str, typer.Option(help="Of KV: auto, int8 or fp8.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    tokens: Annotated[int, typer.Option(min=2, help="Of the text, all if it has fewer.")] = 8192,
    window: Annotated[int, typer.Option(min=2, help="Tokens of one sequence.")] = 2048,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of one step.")] = 128,
) -> None:
    """Measure what quantization costs in perplexity, as a table and a line of JSON."""
    console = Console(stderr=True)
    try:
        from radixkv.quality import QualitySettings, compare, render_report

        report = compare(
            QualitySettings(
                model=model,
                device=device,
                quantization=quantization,
                kv_cache_dtype=kv_cache_dtype,
                num_tokens=tokens,
                window=window,
                chunk=chunk,
            ),
            console=console,
        )
    except RadixKVError as error:
        _fail(error)
    console.print(render_report(report))
    typer.echo(json.dumps(report.as_json()))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _server_config(settings: ServeConfig) -> ServerConfig:
    from radixkv.server.config import ServerConfig

    return ServerConfig(
        api_key=settings.api_key,
        api_keys=None if settings.api_keys is None else Path(settings.api_keys),
        admin_api_key=settings.admin_api_key,
        cors_origins=settings.cors_origins,
        allowed_hosts=settings.allowed_hosts,
        max_connections=settings.max_connections,
        keepalive_timeout_s=settings.keepalive_timeout,
        body_timeout_s=settings.body_timeout,
        max_stream_stall_s=settings.stall_timeout,
        max_body_bytes=settings.max_body_size,
        request_timeout_s=settings.request_timeout,
        session_idle_s=settings.session_idle,
        max_sessions=settings.max_sessions,
        tool_parser=None if settings.tool_parser == "auto" else settings.tool_parser,
        drain_timeout_s=settings.drain_timeout,
        save_timeout_s=settings.disk_save_timeout if settings.disk_cache else 0.0,
        access_log=settings.access_log is not None,
        log_prompts=settings.log_prompts,
    )


def _fail(error: object) -> NoReturn:
    print(f"radixkv: error: {error}", file=sys.stderr)
    raise typer.Exit(2)


def _example(url: str, model: str, settings: ServeConfig) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "What is a radix tree?"}]}
    needs_key = settings.api_key or settings.api_keys
    key = " -H 'Authorization: Bearer '$RADIXKV_API_KEY" if needs_key else ""
    return (
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} "
        f"-d '{json.dumps(body)}'"
    )


def _add_serve_command() -> None:
    """Register `serve` with one text option per field of `ServeConfig`.

    Values stay text until `load_config`, which treats the command line, the environment and the
    file alike and words every refusal.
    """
    parameters = [
        _parameter("config", "TOML file with any of these options.", "FILE"),
        *(
            _parameter(
                option.name,
                f"{option.metadata['help']} Accepts {option.metadata['accepts']}."
                f"{_shown_default(option)}",
                "TEXT",
            )
            for option in dataclasses.fields(ServeConfig)
        ),
    ]
    serve.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    serve.__annotations__ = {p.name: p.annotation for p in parameters}
    app.command()(serve)


def _shown_default(option: dataclasses.Field[Any]) -> str:
    default: Any = option.default
    if default in (None, ()):
        return ""
    if option.name == "max_body_size":
        default = format_bytes(default)
    return f" Default: {str(default).lower() if isinstance(default, bool) else default}."


def _parameter(name: str, help_text: str, metavar: str) -> inspect.Parameter:
    flag = "--" + name.replace("_", "-")
    option = typer.Option(flag, help=help_text, metavar=metavar, show_default=False)
    kind = list[str] | None if name in REPEATABLE else str | None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


_add_serve_command()
app.command()(chat)
add_simulate_commands(app)
