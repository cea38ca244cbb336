"""The thread that writes sessions down: slow and failing disks cost nobody an answer."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from server_fakes import FakeEngine, until
from session_helpers import SESSIONS, Served, text_of

from radixkv.server.session_saver import SessionSaver

LONG_S = 30.0


class FakeDb:
    """Remembers what is written; fails as often as it is told, and waits while `gate` is shut."""

    def __init__(self) -> None:
        self.rows: dict[Any, Any] = {}
        self.batches: list[dict[Any, Any]] = []
        self.failures = 0
        self.unwritable: list[Any] = []
        self.gate = threading.Event()
        self.gate.set()
        self.closed = False

    def write(self, changes: Mapping[Any, Any]) -> list[Any]:
        self.gate.wait(LONG_S)
        self.batches.append(dict(changes))
        if self.failures:
            self.failures -= 1
            raise sqlite3.OperationalError("disk I/O error")
        self.rows.update(changes)
        return [key for key in self.unwritable if key in changes]

    def close(self) -> None:
        self.closed = True


A, B = ("", "a"), ("", "b")


@pytest.fixture
async def db() -> FakeDb:
    return FakeDb()


@pytest.fixture
async def saver(db: FakeDb) -> AsyncIterator[SessionSaver]:
    saver = SessionSaver(db, wait_s=LONG_S, retry_s=0.01)  # type: ignore[arg-type]
    saver.start()
    yield saver
    db.gate.set()
    await saver.close()
    assert db.closed


def put(saver: SessionSaver, key: Any, state: Any) -> None:
    saver.put(key, state)


async def test_saved_means_written(db: FakeDb, saver: SessionSaver) -> None:
    put(saver, A, 1)
    assert await saver.saved(A) is True
    assert db.rows == {A: 1}
    assert (saver.num_saved, saver.num_pending, saver.num_failures) == (1, 0, 0)
    assert await saver.saved(B) is True


async def test_while_the_disk_is_slow_only_the_latest_states_wait(
    db: FakeDb, saver: SessionSaver
) -> None:
    db.gate.clear()
    put(saver, A, 0)
    await until(lambda: saver._writing)
    for state in range(1, 100):
        put(saver, A, state)
        put(saver, B, state)
    assert saver.num_pending == 2
    db.gate.set()
    assert await saver.saved(B) is True
    assert db.batches == [{A: 0}, {A: 99, B: 99}]


async def test_failure_is_told_at_once_and_tried_again(db: FakeDb, saver: SessionSaver) -> None:
    db.failures = 3
    put(saver, A, 1)
    assert await saver.saved(A) is False
    put(saver, A, 2)
    put(saver, B, 1)
    assert await saver.saved(B) is False
    await until(lambda: db.rows == {A: 2, B: 1})
    await until(lambda: saver.num_pending == 0)
    assert saver.num_failures == 3
    put(saver, A, 3)
    assert await saver.saved(A) is True


async def test_state_put_during_a_failing_write_is_not_replaced_by_the_older_one(
    db: FakeDb, saver: SessionSaver
) -> None:
    db.gate.clear()
    db.failures = 1
    put(saver, A, "old")
    await until(lambda: saver._writing)
    put(saver, A, "new")
    db.gate.set()
    await until(lambda: db.rows == {A: "new"})
    assert db.batches == [{A: "old"}, {A: "new"}]


async def test_unwritable_session_is_not_saved_and_others_are(
    db: FakeDb, saver: SessionSaver
) -> None:
    db.unwritable = [A]
    put(saver, A, 1)
    put(saver, B, 1)
    assert (await saver.saved(A), await saver.saved(B)) == (False, True)
    assert saver.num_pending == 1
    db.unwritable = []
    put(saver, A, None)
    assert await saver.saved(A) is True
    assert saver.num_pending == 0


async def test_waiting_for_a_hanging_disk_ends(db: FakeDb) -> None:
    saver = SessionSaver(db, wait_s=0.02)  # type: ignore[arg-type]
    saver.start()
    db.gate.clear()
    put(saver, A, 1)
    assert await saver.saved(A) is False
    await saver.close(0.02)
    assert not db.closed
    assert saver.num_pending == 1
    db.gate.set()
    await until(lambda: db.closed)
    assert db.rows == {A: 1}


async def test_close_writes_what_waits_for_a_retry(db: FakeDb) -> None:
    saver = SessionSaver(db, retry_s=LONG_S)  # type: ignore[arg-type]
    saver.start()
    db.failures = 1
    put(saver, A, 1)
    assert await saver.saved(A) is False
    await saver.close()
    assert db.rows == {A: 1}
    assert db.closed


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hangs", [False, True])
async def test_no_answer_is_lost_to_the_disk_and_the_loop_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool, stream: bool
) -> None:
    served = await Served.start(tmp_path / "s.db", FakeEngine())
    served.saver._wait_s = served.saver._retry_s = 0.05
    url = await served.open("one")
    assert served.db is not None
    real_write, gate, broken = served.db.write, threading.Event(), True

    def write(changes: Any) -> Any:
        if broken and hangs:
            gate.wait(LONG_S)
        elif broken:
            raise sqlite3.OperationalError("database or disk is full")
        return real_write(changes)

    monkeypatch.setattr(served.db, "write", write)
    body = {"content": "two", "max_tokens": 4, "stream": stream}
    async with served.client.post(f"{url}/messages", json=body) as response:
        text = await response.text()
    assert response.status == 200
    assert '"turn":2' in text
    assert '"saved":false' in text
    assert (await served.get(url))["num_turns"] == 2
    assert "radixkv:sessions_unsaved" in await (await served.client.get("/metrics")).text()
    if not hangs:
        assert (await served.say(url, "three"))["session"]["saved"] is False
    broken = False
    served.saver._wait_s = LONG_S
    gate.set()
    await until(lambda: served.saver.num_pending == 0)
    answer = await served.say(url, "four")
    assert answer["session"]["saved"] is True
    turns = answer["session"]["turn"]
    await served.stop()
    served = await Served.start(tmp_path / "s.db", FakeEngine())
    assert (await served.get(url))["messages"][-1]["content"] == text_of(answer)
    assert (await served.get(url))["num_turns"] == turns
    await served.stop()


async def test_without_a_file_nothing_is_said_of_saving() -> None:
    served = await Served.start(engine=FakeEngine())
    created = await served.post(SESSIONS)
    url = f"{SESSIONS}/{created['id']}"
    assert "saved" not in created
    assert "saved" not in (await served.say(url, "x"))["session"]
    assert "saved" not in await served.delete(url)
    await served.stop()
