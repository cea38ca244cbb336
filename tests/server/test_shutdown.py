"""How long the end may take while the engine writes its cache to disk."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest
from aiohttp import web
from server_fakes import FakeEngine

from radixkv.server import ServerConfig, app, create_app
from radixkv.server.state import STATE


class SavingEngine(FakeEngine):
    """Its shutdown takes `save_s`, or until it is told to stop saving."""

    def __init__(self, save_s: float) -> None:
        super().__init__()
        self.save_s = save_s
        self.told = asyncio.Event()
        self.ended = False

    async def shutdown(self, drain_timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.told.wait(), self.save_s)
        self.ended = True
        await super().shutdown(0.0)

    def stop_saving(self) -> None:
        self.told.set()


async def run_to_the_end(engine: FakeEngine, save_timeout_s: float, *, hurry: bool = False) -> None:
    application = create_app(engine, ServerConfig(save_timeout_s=save_timeout_s))  # type: ignore[arg-type]
    runner = web.AppRunner(application)
    await runner.setup()
    if hurry:
        application[STATE].lifecycle.hurry.set()
    await runner.cleanup()


async def test_saving_is_waited_for_as_long_as_it_may_take(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app, "ENGINE_STOP_S", 0.05)
    engine = SavingEngine(0.3)
    await run_to_the_end(engine, 30.0)
    assert engine.ended
    assert not engine.told.is_set()
    with caplog.at_level(logging.ERROR):
        engine = SavingEngine(30.0)
        await run_to_the_end(engine, 0.0)
    assert not engine.ended
    assert "did not stop in time" in caplog.text


async def test_a_second_signal_ends_the_saving() -> None:
    engine = SavingEngine(30.0)
    await run_to_the_end(engine, 30.0, hurry=True)
    assert engine.told.is_set()
    assert engine.ended
