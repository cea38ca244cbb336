"""A server on a port and a thread of its own, for clients that know no event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from aiohttp import web

from radixkv.server import ServerConfig, create_app, run_server

START_S = 20.0


class LiveServer:
    """Serves an engine while it is open.

    Attributes:
        url: its address.
    """

    def __init__(self, make_engine: Callable[[], Any], **options: Any) -> None:
        """Take what makes the engine, on the server's thread, and options of `ServerConfig`."""
        self.url = ""
        self.engine: Any = None
        self.app: web.Application | None = None
        self._make_engine = make_engine
        self._options = {"drain_timeout_s": 0, **options}
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> LiveServer:
        self._thread.start()
        assert self._ready.wait(START_S), "the server does not start"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def call(self, function: Callable[[], object]) -> None:
        """Have the server's thread call a function."""
        self._loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        """End the server and wait for it. Idempotent."""
        if self._thread.is_alive():
            self.call(self._stop.set)
            self._thread.join(START_S)
        assert not self._thread.is_alive(), "the server does not end"

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.engine = self._make_engine()
        self.app = create_app(self.engine, ServerConfig(**self._options))
        await run_server(self.app, port=0, on_ready=self._note, stop=self._stop)

    def _note(self, url: str) -> None:
        self.url = url
        self._ready.set()
