"""Serving an application until a signal, and draining it then."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable, Iterator

from aiohttp import web

from radixkv.server.state import STATE, ServerState

__all__ = ["run_server"]

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
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

    Args:
        app: made by `create_app`.
        host: address to listen on.
        port: 0 picks a free one.
        on_ready: called with the base URL once connections are accepted.
        stop: set it to stop the server as a signal would, where signals cannot be used.
    """
    first = stop or asyncio.Event()
    second = app[STATE].lifecycle.hurry

    def on_signal() -> None:
        (second if first.is_set() else first).set()

    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=CLOSING_S
    )
    with _handled_signals(on_signal):
        try:
            await runner.setup()
            await web.TCPSite(runner, host, port).start()
            if on_ready is not None:
                on_ready(_base_url(runner, host))
            await first.wait()
            await _drain(app[STATE], second)
        finally:
            await runner.cleanup()
    return 0


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
def _handled_signals(callback: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    installed = []
    for number in SIGNALS:
        # Only the main thread may handle signals; elsewhere the caller has its `stop` event.
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, callback)
            installed.append(number)
    try:
        yield
    finally:
        for number in installed:
            loop.remove_signal_handler(number)


def _base_url(runner: web.AppRunner, host: str) -> str:
    port = runner.addresses[0][1]
    shown = "127.0.0.1" if host in ("", "0.0.0.0") else "[::1]" if host == "::" else host
    return f"http://{f'[{shown}]' if ':' in shown and shown[0] != '[' else shown}:{port}"
