from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from fakes import CharTokenizer, FakeRunner, cold, make_engine, prompt_of

from radixkv.engine import AsyncEngine, RequestOutput, RequestStream, SamplingParams
from radixkv.engine.batch import ForwardBatch
from radixkv.errors import (
    CacheCorruptionError,
    ContextLengthError,
    EngineClosedError,
    QueueFullError,
    RequestRejectedError,
)

GREEDY: dict[str, Any] = {"temperature": 0.0}


class GatedRunner(FakeRunner):
    """A fake model that computes a step only when it is let."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.gate = threading.Semaphore(0)
        self.is_open = True
        self.entered = threading.Event()

    def execute(self, batch: ForwardBatch) -> torch.Tensor:
        self.entered.set()
        if not self.is_open:
            assert self.gate.acquire(timeout=20)
        return super().execute(batch)


class Service:
    def __init__(self, **options: Any) -> None:
        max_num_waiting = options.pop("max_num_waiting", 1024)
        engine = make_engine(**options)
        self.runner = GatedRunner(engine.cache.num_blocks, engine.cache.block_size)
        engine.runner = self.runner
        self.engine = engine
        self.front = AsyncEngine(
            engine,
            CharTokenizer(),  # type: ignore[arg-type]
            model_name="fake",
            max_num_waiting=max_num_waiting,
        )

    def submit(self, prompt: list[int], **params: Any) -> RequestStream:
        return self.front.submit(prompt, SamplingParams(**{**GREEDY, **params}))

    def close(self) -> None:
        """Stop the model at its next step."""
        self.runner.is_open = False
        self.runner.entered.clear()

    async def until_in_step(self) -> None:
        assert await asyncio.to_thread(self.runner.entered.wait, 20)

    def open(self) -> None:
        self.runner.is_open = True
        self.runner.gate.release(1000)


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[Service]:
    service = Service(**options)
    await service.front.start()
    try:
        yield service
    finally:
        service.open()
        await service.front.shutdown()
        assert not service.front._streams
        assert not service.engine.has_work


async def collect(stream: RequestStream) -> list[RequestOutput]:
    outputs = [output async for output in stream]
    assert [o.finish_reason is not None for o in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs


def ids(outputs: list[RequestOutput]) -> list[int]:
    return [t for o in outputs for t in o.token_ids]


async def test_streams_equal_cold_and_second_one_hits() -> None:
    prompt = prompt_of(20)
    expected = cold(prompt, max_tokens=12, **GREEDY).token_ids
    async with serving() as service:
        many = await asyncio.gather(
            *(collect(service.submit(prompt, max_tokens=12)) for _ in range(5))
        )
        assert [ids(outputs) for outputs in many] == [expected] * 5
        again = await collect(service.submit(prompt, max_tokens=12))
        assert again[-1].num_cached_tokens == 19
        assert service.front.stats().requests_finished == {"length": 6}
        await service.front.check_integrity()


async def test_timings_are_in_order() -> None:
    async with serving() as service:
        stream = service.submit(prompt_of(20), max_tokens=5)
        await collect(stream)
    t = stream.timings
    assert None not in (t.first_scheduled, t.first_token, t.last_token, t.finished)
    assert (
        t.arrival
        <= (t.first_scheduled or 0)
        <= (t.first_token or 0)
        < (t.last_token or 0)
        <= (t.finished or 0)
    )
    assert len(t.inter_token) == 4


async def test_abort_in_the_middle_ends_with_abort_and_frees_all() -> None:
    async with serving() as service:
        stream = service.submit(prompt_of(20), max_tokens=2000)
        healthy = service.submit(prompt_of(9, seed=1), max_tokens=30)
        await anext(stream)
        stream.abort()
        stream.abort()
        outputs = await collect(stream)
        assert [(o.finish_reason, o.text, o.token_ids) for o in outputs] == [("abort", "", ())]
        expected = cold(prompt_of(9, seed=1), max_tokens=30, **GREEDY).token_ids
        assert ids(await collect(healthy)) == expected
        assert service.front.stats().requests_finished == {"abort": 1, "length": 1}
        assert service.front.stats().blocks_referenced == 0


@pytest.mark.parametrize("max_tokens", [1, 9])
async def test_abort_while_the_result_is_in_flight_delivers_no_token(max_tokens: int) -> None:
    """A cancelled request still gave one token, because the step was under way."""
    async with serving() as service:
        service.close()
        stream = service.submit(prompt_of(5), max_tokens=max_tokens)
        await service.until_in_step()
        stream.abort()
        service.open()
        (output,) = await collect(stream)
        assert (output.finish_reason, output.token_ids, output.text) == ("abort", (), "")
        await service.front._idle.wait()
        assert not stream._outputs


async def test_abort_before_admission() -> None:
    async with serving(max_num_seqs=1) as service:
        service.close()
        first = service.submit(prompt_of(5), max_tokens=3)
        await service.until_in_step()
        waiting = service.submit(prompt_of(6), max_tokens=3)
        waiting.abort()
        service.open()
        (output,) = await collect(waiting)
        assert (output.finish_reason, output.num_completion_tokens) == ("abort", 0)
        await collect(first)
        assert service.front.stats().requests_admitted == 1


async def test_abort_after_an_unread_end_still_gives_one_end() -> None:
    """The end was thrown away with the unread text, and the reader waited for ever."""
    async with serving() as service:
        stream = service.submit(prompt_of(5), max_tokens=3)
        async with asyncio.timeout(20):
            await service.front._idle.wait()
            stream.abort()
            (output,) = await collect(stream)
        assert output.finish_reason == "abort"
        stream.abort()


async def test_queue_is_bounded_and_has_room_again_after_an_abort() -> None:
    async with serving(max_num_seqs=2, max_num_waiting=3) as service:
        service.close()
        streams = [service.submit(prompt_of(5, seed=i), max_tokens=2) for i in range(5)]
        for _ in range(10):
            with pytest.raises(QueueFullError) as caught:
                service.submit(prompt_of(5), max_tokens=2)
        assert caught.value.retry_after_s > 0
        streams[4].abort()
        service.open()
        await collect(streams[4])
        streams.append(service.submit(prompt_of(5, seed=9), max_tokens=2))
        for stream in (*streams[:4], streams[5]):
            assert (await collect(stream))[-1].finish_reason == "length"
        assert service.front.stats().requests_rejected == 10


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        (lambda: prompt_of(64), ContextLengthError),
        (list, RequestRejectedError),
        (lambda: [-1], RequestRejectedError),
    ],
)
async def test_invalid_requests_are_refused_at_once(
    prompt: Callable[[], list[int]], error: type[Exception]
) -> None:
    async with serving(max_model_len=64) as service:
        with pytest.raises(error):
            service.submit(prompt())
        assert not service.front.health().busy


async def test_request_id_in_use_is_refused() -> None:
    async with serving() as service:
        params = SamplingParams(max_tokens=2)
        stream = service.front.submit([40, 41], params, request_id="x")
        with pytest.raises(RequestRejectedError, match="in use"):
            service.front.submit([40, 41], params, request_id="x")
        await collect(stream)
        await collect(service.front.submit([40, 41], params, request_id="x"))


async def test_shutdown_with_drain_lets_accepted_requests_finish() -> None:
    service = Service(max_num_seqs=2)
    await service.front.start()
    streams = [service.submit(prompt_of(5, seed=i), max_tokens=40) for i in range(5)]
    closing = asyncio.create_task(service.front.shutdown(drain_timeout_s=30))
    await asyncio.sleep(0)
    with pytest.raises(EngineClosedError):
        service.submit(prompt_of(5))
    assert not service.front.health().accepting
    for i, stream in enumerate(streams):
        expected = cold(prompt_of(5, seed=i), max_tokens=40, **GREEDY).token_ids
        assert ids(await collect(stream)) == expected
    await closing
    assert not service.front.health().alive
    assert service.engine.cache.num_referenced_blocks == 0


async def test_shutdown_at_the_drain_limit_aborts_the_rest() -> None:
    service = Service(max_num_seqs=1)
    await service.front.start()
    streams = [service.submit(prompt_of(5, seed=i), max_tokens=3000) for i in range(3)]
    await anext(streams[0])
    await service.front.shutdown()
    ends = [(await collect(stream))[-1].finish_reason for stream in streams]
    assert ends == ["abort"] * 3
    assert service.engine.cache.num_referenced_blocks == 0
    await service.front.shutdown()


async def test_failure_of_the_thread_ends_every_stream(caplog: pytest.LogCaptureFixture) -> None:
    service = Service(max_num_seqs=1)
    await service.front.start()
    service.close()
    streams = [service.submit(prompt_of(5, seed=i), max_tokens=9) for i in range(3)]
    await service.until_in_step()

    def broken(now: float) -> Any:
        raise MemoryError

    service.engine.scheduler.schedule = broken  # type: ignore[method-assign]
    call = asyncio.ensure_future(service.front.flush_cache())
    service.open()
    for stream in streams:
        last = (await collect(stream))[-1]
        assert (last.finish_reason, last.error) == ("error", "the engine failed: MemoryError")
    with pytest.raises(RequestRejectedError):
        await call
    health = service.front.health()
    assert (health.alive, health.accepting, health.busy) == (False, False, False)
    with pytest.raises(EngineClosedError):
        service.submit(prompt_of(5))
    with pytest.raises(EngineClosedError):
        await service.front.check_integrity()
    await service.front.shutdown(drain_timeout_s=5)


async def test_failure_before_a_queued_call_answers_it() -> None:
    """Whatever still lay in the inbox of a dead thread was never answered."""
    service = Service()
    await service.front.start()
    service.close()
    stream = service.submit(prompt_of(5), max_tokens=9)
    await service.until_in_step()
    service.engine.step = _raise  # type: ignore[method-assign,assignment]
    service.front._post(_raise)
    call = asyncio.ensure_future(service.front.check_integrity())
    late = service.submit(prompt_of(6), max_tokens=9)
    service.open()
    async with asyncio.timeout(20):
        with pytest.raises(EngineClosedError):
            await call
        assert (await collect(stream))[-1].finish_reason == "error"
        assert (await collect(late))[-1].finish_reason == "error"
        await service.front.shutdown()


def _raise(*args: object) -> Any:
    raise RuntimeError("broken")


async def test_call_given_up_by_its_caller_does_not_kill_the_thread() -> None:
    """Setting the result of a cancelled future raised in the engine's thread."""
    async with serving() as service:
        service.close()
        stream = service.submit(prompt_of(5), max_tokens=4)
        await service.until_in_step()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(service.front.check_integrity(), 0.01)
        service.open()
        assert (await collect(stream))[-1].finish_reason == "length"
        assert service.front.health().alive


async def test_error_in_the_model_ends_its_step_only() -> None:
    async with serving(max_num_seqs=1) as service:
        service.runner.fail_at = 2
        first = service.submit(prompt_of(5), max_tokens=9)
        second = service.submit(prompt_of(6, seed=1), max_tokens=9)
        assert (await collect(first))[-1].finish_reason == "error"
        expected = cold(prompt_of(6, seed=1), max_tokens=9, **GREEDY).token_ids
        assert ids(await collect(second)) == expected
        assert service.front.health().alive


async def test_flush_is_refused_while_busy_and_complete_when_idle() -> None:
    prompt = prompt_of(20)
    async with serving() as service:
        service.close()
        stream = service.submit(prompt, max_tokens=30)
        await service.until_in_step()
        flush = asyncio.ensure_future(service.front.flush_cache())
        await asyncio.sleep(0)
        service.open()
        with pytest.raises(RequestRejectedError, match=r"1 requests hold \d+ blocks") as caught:
            await flush
        assert caught.value.code == "busy"
        await collect(stream)
        warm = await collect(service.submit(prompt, max_tokens=1))
        assert warm[-1].num_cached_tokens == 19
        assert await service.front.flush_cache() > 0
        assert service.front.stats().blocks_free == service.front.stats().blocks_total
        fresh = await collect(service.submit(prompt, max_tokens=1))
        assert fresh[-1].num_cached_tokens == 0


async def test_failed_check_is_reported_and_ends_nothing() -> None:
    async with serving() as service:
        await collect(service.submit(prompt_of(9), max_tokens=2))
        service.engine.cache.num_tree_blocks += 1
        with pytest.raises(CacheCorruptionError):
            await service.front.check_integrity()
        service.engine.cache.num_tree_blocks -= 1
        assert service.front.health().alive
        await collect(service.submit(prompt_of(9), max_tokens=2))


async def test_health_tells_a_stuck_step_from_an_idle_engine() -> None:
    async with serving() as service:
        assert service.front.health().seconds_in_step == 0.0
        service.close()
        stream = service.submit(prompt_of(5), max_tokens=2)
        await service.until_in_step()
        await asyncio.sleep(0.05)
        health = service.front.health()
        assert health.seconds_in_step >= 0.04
        assert (health.alive, health.busy, health.num_running) == (True, True, 1)
        assert service.front.stats().num_running == 1  # readable while the model runs
        service.open()
        await collect(stream)


async def test_storm_of_aborts_leaves_healthy_requests_alone() -> None:
    expected = cold(prompt_of(9), max_tokens=15, **GREEDY).token_ids
    async with serving(num_blocks=40, max_num_seqs=6) as service:

        async def impatient(i: int) -> None:
            stream = service.submit(prompt_of(12, seed=i), max_tokens=2000)
            for _ in range(i % 4):
                await anext(stream)
            stream.abort()
            await collect(stream)

        async def patient() -> list[int]:
            return ids(await collect(service.submit(prompt_of(9), max_tokens=15)))

        jobs: list[Awaitable[Any]] = []
        for i in range(30):
            jobs += [impatient(i), patient()]
        results = await asyncio.gather(*jobs)
        assert results[1::2] == [expected] * 30
        stats = service.front.stats()
        assert stats.requests_finished == {"abort": 30, "length": 30}
        assert stats.blocks_referenced == 0
        await service.front.check_integrity()
