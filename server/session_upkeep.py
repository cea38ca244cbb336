"""What sessions need beside requests: expiry, and a saver that starts and ends with the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from aiohttp import web

from radixkv.server.session_metrics import SessionCollector
from radixkv.server.session_saver import SessionSaver
from radixkv.server.session_vocabulary import vocabulary_digest
from radixkv.server.sessions import SessionStore
from radixkv.server.state import STATE

if TYPE_CHECKING:
    from radixkv.engine import AsyncEngine
    from radixkv.server.config import ServerConfig
    from radixkv.server.session_db import SessionDb

__all__ = ["keep_sessions", "make_store"]

logger = logging.getLogger(__name__)

SWEEP_S = 30.0
SAVER = web.AppKey("session_saver", SessionSaver)


def make_store(
    app: web.Application,
    engine: AsyncEngine,
    config: ServerConfig,
    model_name: str,
    db: SessionDb | None,
) -> SessionStore:
    """Return the sessions of an application, those in `db` among them; see `keep_sessions`.

    Raises:
        ConfigError: the file is damaged.
    """
    saver = None if db is None else SessionSaver(db)
    store = SessionStore(
        max_sessions=config.max_sessions,
        idle_s=config.session_idle_s,
        saver=saver,
        vocabulary=b"" if db is None else vocabulary_digest(engine),
        model=model_name,
    )
    if db is not None and saver is not None:
        store.restore(db.load())
        app[SAVER] = saver
        foreign = sum(map(store.is_foreign, store))
        logger.info("%d sessions restored from %s", len(store), db.path)
        if foreign:
            logger.warning(
                "%d sessions are of another tokenizer or chat template: they can be read, but not "
                "continued",
                foreign,
            )
    return store


async def keep_sessions(app: web.Application) -> AsyncIterator[None]:
    """Save sessions while the application runs, and drop those that expire."""
    state, saver = app[STATE], app.get(SAVER)
    store = state.sessions
    state.metrics.register(SessionCollector(store, saver, state.model_name))
    if saver is not None:
        saver.start()
    sweeping = asyncio.create_task(_sweep(store))
    yield
    sweeping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sweeping
    if saver is not None:
        store.save_uses(0.0)
        await saver.close()


async def _sweep(store: SessionStore) -> None:
    while True:
        await asyncio.sleep(SWEEP_S)
        store.sweep()
        store.save_uses()
