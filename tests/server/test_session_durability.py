"""Sessions that outlive their server, over the real engine and a fake model."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from server_fakes import FakeEngine, FakeTokenizer, chatml, until
from session_helpers import SESSIONS, Served, cached_of, real_engine, text_of

from radixkv.server.session_vocabulary import vocabulary_digest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


def without_cache(session: Any) -> Any:
    return {k: v for k, v in session.items() if k not in ("cache", "expires", "last_used")}


async def restarted(served: Served, path: Path, engine: Any = None, **options: Any) -> Served:
    await served.stop()
    return await Served.start(path, engine, **options)


async def test_restart_keeps_sessions_and_goes_on_with_the_same_ids(path: Path) -> None:
    served = await Served.start(path)
    url = await served.open("one", "two\n\n", system="S\n\n", metadata={"k": "v"})
    child = await served.post(f"{url}/fork", {"at_turn": 1})
    await served.chat("named", "hello")
    lists = [s["id"] for s in (await served.get(SESSIONS))["data"]]
    before = {i: without_cache(await served.get(f"{SESSIONS}/{i}")) for i in lists}
    ids = {session.id: session.token_ids for session in served.store}
    control = await served.post(f"{url}/fork")
    expected = text_of(await served.say(f"{SESSIONS}/{control['id']}", "three"))
    await served.delete(f"{SESSIONS}/{control['id']}")

    served = await restarted(served, path)
    assert {s["id"] for s in (await served.get(SESSIONS))["data"]} == set(lists)
    assert {i: without_cache(await served.get(f"{SESSIONS}/{i}")) for i in lists} == before
    assert {session.id: session.token_ids for session in served.store} == ids
    answer = await served.say(url, "three")
    assert (text_of(answer), answer["session"]["turn"]) == (expected, 3)
    assert answer["session"]["saved"] is True
    assert cached_of(answer) == 0
    assert (await served.say(f"{SESSIONS}/{child['id']}", "x"))["session"]["turn"] == 2
    assert (await served.chat("named", "again"))["session"]["turn"] == 2
    served = await restarted(served, path)
    assert (await served.get(url))["num_turns"] == 3
    await served.stop()


async def test_rolled_back_deleted_and_expired_sessions_stay_so(path: Path) -> None:
    served = await Served.start(path, session_idle_s=1000)
    rolled, deleted = await served.open("one", "two"), await served.open("x")
    assert (await served.post(f"{rolled}/rollback", {"to_turn": 1}))["saved"] is True
    assert (await served.delete(deleted))["saved"] is True
    expired = await served.open("y")
    for session in served.store:
        if session.id == expired.rpartition("/")[2]:
            session.last_used -= 2000
    served.store._started -= 2000
    await served.get(expired, 404)
    served = await restarted(served, path, session_idle_s=1000)
    assert (await served.get(rolled))["num_turns"] == 1
    await served.get(deleted, 404)
    await served.get(expired, 404)
    await served.stop()


async def test_time_the_server_was_down_does_not_count_as_idle(path: Path) -> None:
    served = await Served.start(path)
    url = await served.open("one")
    await served.stop()
    raw = sqlite3.connect(path)
    raw.execute("UPDATE sessions SET last_used = last_used - 1000000")
    raw.commit()
    raw.close()
    served = await Served.start(path)
    (row,) = (await served.get("/admin/sessions"))["data"]
    assert row["expires_at"] > row["last_used_at"] + 1_000_000
    assert (await served.say(url, "two"))["session"]["turn"] == 2
    await served.stop()


async def test_turn_that_fails_leaves_nothing_in_the_file(path: Path) -> None:
    served = await Served.start(path, FakeEngine())
    url = await served.open("one")
    served.engine.fail_at = 2
    await served.post(f"{url}/messages", {"content": "two"}, 500)
    await served.chat("begun", "one", status=500)
    served = await restarted(served, path, FakeEngine())
    assert [s["num_turns"] for s in (await served.get(SESSIONS))["data"]] == [1]
    await served.stop()


async def test_only_the_key_that_made_a_session_finds_it_and_no_key_is_in_the_file(
    path: Path,
) -> None:
    key = "sk-a-very-secret-key"
    served = await Served.start(path, FakeEngine(), key=key)
    url = await served.open("one")
    files = b"".join(file.read_bytes() for file in path.parent.iterdir())
    assert key.encode() not in files
    for other in ("sk-another-secret-key", None):
        served = await restarted(served, path, FakeEngine(), key=other)
        await served.get(url, 404)
        assert (await served.get(SESSIONS))["data"] == []
    served = await restarted(served, path, FakeEngine(), key=key)
    assert (await served.get(url))["num_turns"] == 1
    await served.stop()


def louder(messages: Any, tools: Any, add: bool) -> str:
    return chatml(messages, tools, add).replace("<|im_start|>", "<|im_start|>\n")


class OtherTokenizer(FakeTokenizer):
    chat_template = "other"

    def __init__(self) -> None:
        super().__init__(louder, chat_template="other")


async def test_session_of_another_vocabulary_can_be_read_but_not_continued(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served = await Served.start(path, FakeEngine())
    url, empty = await served.open("one"), await served.open()
    caplog.clear()
    served = await restarted(served, path, FakeEngine(OtherTokenizer()), served_model_name="new")
    assert "1 sessions are of another tokenizer or chat template" in caplog.text
    session = await served.get(url)
    assert (session["model"], session["num_turns"]) == ("fake", 1)
    for body in ({"content": "two"}, {"content": "two", "stream": True}):
        refused = await served.post(f"{url}/messages", body, 409)
        assert refused["error"]["code"] == "session_of_other_model"
        assert re.search("'fake'.*'new'", refused["error"]["message"])
    fork = await served.post(f"{url}/fork")
    await served.post(f"{SESSIONS}/{fork['id']}/messages", {"content": "two"}, 409)
    assert (await served.say(empty, "one"))["session"]["turn"] == 1
    await served.post(f"{SESSIONS}/{fork['id']}/rollback", {"to_turn": 0})
    assert (await served.say(f"{SESSIONS}/{fork['id']}", "x"))["session"]["turn"] == 1
    served = await restarted(served, path, FakeEngine())
    assert (await served.say(url, "two"))["session"]["turn"] == 2
    await served.post(f"{SESSIONS}/{fork['id']}/messages", {"content": "two"}, 409)
    await served.delete(url)
    await served.stop()


def test_vocabulary_digest_differs_with_tokens_specials_and_template() -> None:
    plain, other_token, other_eos = FakeEngine(), FakeEngine(), FakeEngine()
    other_token.tokenizer.token_bytes = lambda token_id: b"x"  # type: ignore[method-assign]
    other_eos.tokenizer.eos_token_ids = frozenset({256})
    engines = [plain, other_token, other_eos, FakeEngine(OtherTokenizer())]
    digests = [vocabulary_digest(engine) for engine in engines]  # type: ignore[arg-type]
    assert len(set(digests)) == 4
    assert vocabulary_digest(FakeEngine()) == digests[0]  # type: ignore[arg-type]


async def test_pin_is_taken_again_with_the_first_turn_after_a_restart(path: Path) -> None:
    served = await Served.start(path)
    url = await served.open("a question of some length")
    await served.post(f"{url}/pin", {"ttl_seconds": 600})
    served = await restarted(served, path)
    row = await served.row(url)
    assert row["pinned_until"] is None
    await served.say(url, "two")
    row = await served.row(url)
    assert row["pinned_until"] > row["last_used_at"] + 590
    assert len((await served.get("/admin/cache/pins"))["data"]) == 1
    await served.post(f"{url}/unpin")
    served = await restarted(served, path)
    await served.say(url, "three")
    assert (await served.row(url))["pinned_until"] is None
    await served.stop()


async def test_last_use_is_written_at_the_end_and_decides_the_order(path: Path) -> None:
    served = await Served.start(path, FakeEngine())
    first, _ = await served.open("one"), await served.open("two")
    await served.get(first)
    order = [row["id"] for row in (await served.get("/admin/sessions"))["data"]]
    assert order[0] == first.rpartition("/")[2]
    served = await restarted(served, path, FakeEngine())
    assert [row["id"] for row in (await served.get("/admin/sessions"))["data"]] == order
    await served.stop()


async def test_more_sessions_than_allowed_are_kept_but_no_new_one_is_made(path: Path) -> None:
    served = await Served.start(path, FakeEngine())
    urls = [await served.open("x") for _ in range(3)]
    served = await restarted(served, path, FakeEngine(), max_sessions=2)
    for url in urls:
        assert (await served.say(url, "y"))["session"]["turn"] == 2
    await served.post(SESSIONS, status=429)
    await served.stop()


async def test_restart_finds_turns_of_a_stream_that_was_read_to_its_end(path: Path) -> None:
    served = await Served.start(path, real_engine())
    url = await served.open()
    body = {"content": "x", "max_tokens": 5, "ignore_eos": True, "stream": True}
    async with served.client.post(f"{url}/messages", json=body) as response:
        text = await response.text()
    assert '"saved":true' in text
    await until(lambda: served.saver.num_pending == 0)
    served = await restarted(served, path)
    assert (await served.get(url))["num_turns"] == 1
    await served.stop()
