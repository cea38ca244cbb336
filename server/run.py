"""Serving an application until a signal, and draining it then."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping

from aiohttp import web

from radixkv.errors import ConfigError
from radixkv.server.connections import Connections, default_max_connections
from radixkv.server.state import STATE, ServerState

__all__ = ["run_server"]

logger = logging.getLogger(__name__)

BACKLOG = 1024
SEND_BUFFER_BYTES = 256 * 1024
# Time for handlers to write the end of their streams once the engine has ended the requests.
CLOSING_S = 5.0
# The same, and no more, after a second signal.
ABORTING_S = 0.5


async def run_server(
    app: web.Application,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    on_ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
) -> int:
    """Serve `app` until SIGTERM, SIGINT or `stop`; then drain, and return the exit code 0.

    While draining, `/health` and new requests get 503 and accepted ones go on; those not finished
    within `drain_timeout_s` end with an error event. A second signal ends everything at once.
    SIGHUP reads the file of API keys again, if there is one.

    Args:
        app: made by `create_app`.
        host: address to listen on.
        port: 0 picks a free one.
        on_ready: called with the base URL once connections are accepted.
        stop: set it to stop the server as a signal would, where signals cannot be used.

    Raises:
        OSError: the address can't be listened on.
    """
    state = app[STATE]
    config = state.config
    first = stop or asyncio.Event()
    second = state.lifecycle.hurry

    def on_signal() -> None:
        (second if first.is_set() else first).set()

    handlers: dict[signal.Signals, Callable[[], None]] = {
        signal.SIGTERM: on_signal,
        signal.SIGINT: on_signal,
    }
    if config.api_keys is not None:
        handlers[signal.SIGHUP] = lambda: reload_keys(state)
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=CLOSING_S
    )
    with _handled_signals(handlers), contextlib.ExitStack() as opened:
        try:
            await runner.setup()
            if runner.server is None:
                raise RuntimeError("the application could not be set up")
            connections = Connections(
                runner.server,
                limit=config.max_connections or default_max_connections(),
                stall_s=config.max_stream_stall_s,
                keepalive_timeout_s=config.keepalive_timeout_s,
            )
            opened.callback(connections.close)
            listener = await asyncio.get_running_loop().create_server(
                connections, host, port, backlog=BACKLOG
            )
            opened.callback(listener.close)
            for listening in listener.sockets:
                # What is accepted inherits it. Else the kernel would keep megabytes for each reader
                # that stalls, and it would take as many to notice.
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            addresses = [listening.getsockname()[:2] for listening in listener.sockets]
            if not state.keys.needs_key:
                _warn_if_open(address for address, _ in addresses)
            if on_ready is not None:
                on_ready(_base_url(addresses[0][1], host))
            await first.wait()
            await _drain(state, second)
        finally:
            opened.close()
            await runner.cleanup()
    return 0


def reload_keys(state: ServerState) -> None:
    """Read the file of API keys again; one that can't be used changes nothing."""
    try:
        state.keys.reload()
    except ConfigError as error:
        logger.error("the API keys stay as they were: %s", error)
        return
    state.limits.forget(state.keys.names)
    logger.info("read %d API keys", len(state.keys.names))


async def _drain(state: ServerState, now: asyncio.Event) -> None:
    """Refuse new work and let accepted requests end, each with its last event written.

    Once `now` is set nothing is waited for: requests are aborted and connections dropped.
    """
    state.lifecycle.draining = True
    limit = state.config.drain_timeout_s
    logger.info("draining for at most %g s", limit)
    # The limit is the engine's to keep; the outer one is for an engine that is stuck in a step.
    await _until(state.engine.shutdown(limit), now, limit + CLOSING_S)
    handlers = state.lifecycle.handlers
    if not now.is_set() and handlers:
        await _until(asyncio.wait(set(handlers)), now, CLOSING_S)
    if now.is_set():
        logger.warning("second signal: stopping at once")
        await _until(state.engine.shutdown(0.0), asyncio.Event(), ABORTING_S)
        if handlers:
            await asyncio.wait(set(handlers), timeout=ABORTING_S)
    for handler in set(handlers):
        handler.cancel()


async def _until(work: Awaitable[object], now: asyncio.Event, limit_s: float) -> None:
    """Wait for `work`, but no longer than `limit_s`, and not once `now` is set."""
    task = asyncio.ensure_future(work)
    signalled = asyncio.ensure_future(now.wait())
    try:
        await asyncio.wait({task, signalled}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        signalled.cancel()
        if not task.done():
            task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        logger.warning("gave up waiting for the engine or for open connections")
    except Exception:
        logger.exception("draining failed")


@contextlib.contextmanager
def _handled_signals(handlers: Mapping[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    installed = []
    for number, handler in handlers.items():
        # Only the main thread may handle signals; elsewhere the caller has its `stop` event.
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, handler)
            installed.append(number)
    try:
        yield
    finally:
        for number in installed:
            loop.remove_signal_handler(number)


def _warn_if_open(addresses: Iterable[str]) -> None:
    """Say so if anyone who reaches one of the addresses may use the server."""
    reachable = [
        address
        for address in addresses
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback
    ]
    if reachable:
        logger.warning(
            "listening on %s WITHOUT an API key: everyone who reaches this address can use the "
            "model and read what others asked it. Set --api-key or --api-keys, or leave --host "
            "at 127.0.0.1",
            ", ".join(reachable),
        )


def _base_url(port: int, host: str) -> str:
    shown = "127.0.0.1" if host in ("", "0.0.0.0") else "[::1]" if host == "::" else host
    return f"http://{f'[{shown}]' if ':' in shown and shown[0] != '[' else shown}:{port}"
