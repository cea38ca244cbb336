"""Connections that stall or vanish leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import random

import pytest
from live import live_server, tiny_engine
from server_fakes import until

from loadtests.raw_http import head_of
from loadtests.vanish import ENDINGS, STAGES, Vanishing, open_files, vanish
from radixkv.server import run

COUNT = 200
# Short, so that the test is.
TIMEOUTS = {"keepalive_timeout_s": 0.5, "body_timeout_s": 0.5, "max_stream_stall_s": 0.4}


async def test_200_connections_that_vanish_leave_nothing_behind() -> None:
    rng = random.Random(5)
    plans = [Vanishing.draw(rng, 0.2) for _ in range(COUNT)]
    assert {plan.stage for plan in plans} == set(STAGES)
    assert {plan.ending for plan in plans} == set(ENDINGS)
    engine = tiny_engine(num_blocks=2048, max_num_seqs=64)
    async with live_server(engine, **TIMEOUTS) as live:
        await live.send(head_of("GET", "/health", ()))
        tasks, files = len(asyncio.all_tasks()), open_files(os.getpid())
        jobs = [vanish("127.0.0.1", live.port, plan, max_tokens=60) for plan in plans]
        held = [sock for sock in await asyncio.gather(*jobs) if sock is not None]
        assert len(held) > COUNT // 8
        # What stalls is still open on this side: it is the server that has to let go.
        await until(lambda: open_files(os.getpid()) <= files + len(held), 60)
        await until(lambda: len(asyncio.all_tasks()) <= tasks, 60)
        assert not live.state.lifecycle.handlers
        for sock in held:
            sock.close()
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.blocks_referenced) == (0, 0, 0)
        assert open_files(os.getpid()) == files
        await engine.check_integrity()
        answer = await live.post("/v1/completions", b'{"prompt": "x", "max_tokens": 2}')
        assert answer.status == 200


async def test_streams_that_nobody_reads_free_their_blocks_behind_tiny_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "SEND_BUFFER_BYTES", 16 * 1024)
    plan = Vanishing("streamed in bulk", "stalled", 0.0, 0.5)
    engine = tiny_engine(num_blocks=4096, max_num_seqs=32, max_model_len=8192)
    async with live_server(engine, **TIMEOUTS) as live:
        files = open_files(os.getpid())
        # Long enough that the engine can't be done before the readers are given up.
        jobs = [vanish("127.0.0.1", live.port, plan, max_tokens=8000) for _ in range(16)]
        held = [sock for sock in await asyncio.gather(*jobs) if sock is not None]
        await until(lambda: engine.stats().num_running == 16, 10)
        await until(lambda: not engine.health().busy, 60)
        stats = engine.stats()
        assert stats.requests_finished["abort"] == 16
        assert stats.blocks_referenced == 0
        await until(lambda: open_files(os.getpid()) <= files + len(held), 10)
        for sock in held:
            sock.close()
        await engine.check_integrity()
