"""What sessions hold in the cache, and what goes back at once, over the real engine."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from server_fakes import until
from session_helpers import FIELDS, SESSIONS, Served, cached_of, real_engine, text_of

from radixkv.cache.release import Release
from radixkv.server.session_tokens import common_tokens, pack_tokens

SYSTEM = "You are a helpful assistant who answers in few words." * 2


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = await Served.start()
    yield served
    await served.stop()


async def test_delete_gives_private_blocks_back_at_once(served: Served) -> None:
    before = await served.blocks()
    url = await served.open("one", "two", "three")
    _, cached = await served.blocks()
    row = await served.row(url)
    assert row["private_blocks"] == row["cached_blocks"] == cached > 5
    assert row["cached_tokens"] == row["tokens"] - 1
    assert (await served.delete(url))["freed_blocks"] == cached
    assert await served.blocks() == before


async def test_delete_keeps_what_a_fork_needs(served: Served) -> None:
    url = await served.open("one", "two", "three")
    child = await served.post(f"{url}/fork", {"at_turn": 2})
    kept = child["num_tokens"] - 1
    shown = (await served.get(url))["cache"]
    assert child["cache"]["private_blocks"] == 0
    _, before = await served.blocks()
    assert (await served.delete(url))["freed_blocks"] == shown["private_blocks"] > 0
    assert (await served.blocks())[1] == before - shown["private_blocks"]
    child_url = f"{SESSIONS}/{child['id']}"
    assert cached_of(await served.say(child_url, "other")) >= kept
    await served.delete(child_url)
    assert (await served.blocks())[1] == 0


async def test_delete_keeps_a_prompt_that_others_share(served: Served) -> None:
    one = await served.open("one", system=SYSTEM)
    two = await served.open("two", system=SYSTEM)
    shared = (await served.get(two))["cache"]
    assert 0 < shared["private_blocks"] < shared["cached_blocks"]
    assert (await served.delete(two))["freed_blocks"] == shared["private_blocks"]
    assert cached_of(await served.say(one, "again")) > 0
    third = await served.say(await served.open(system=SYSTEM), "three")
    assert cached_of(third) >= len(SYSTEM) // 16 * 16


async def test_beginning_that_another_session_needs_stays_though_its_own_branch_is_gone(
    served: Served,
) -> None:
    """The tree alone shows no use of a beginning whose other branch was evicted."""
    one = await served.open("one", system=SYSTEM)
    two = await served.open("two", system=SYSTEM)
    cache = served.engine.engine.cache
    ids = _ids(served, two)
    shared = common_tokens(pack_tokens(ids), pack_tokens(_ids(served, one)))
    assert shared >= 96
    # As eviction would: the end of `two`, which nobody has used for longest.
    plan = Release(cache)
    plan.add(pack_tokens(ids), (), shared)
    assert plan.run() > 0
    row = await served.row(one)
    assert row["private_blocks"] == row["cached_blocks"] - shared // 16
    assert (await served.delete(one))["freed_blocks"] == row["private_blocks"]
    assert cached_of(await served.say(two, "again")) >= shared // 16 * 16


async def test_roll_back_to_any_turn_restores_its_exact_ids(served: Served) -> None:
    url = await served.open()
    states = [(await served.get(url))["num_tokens"]]
    answers = [await served.say(url, f"q{i}") for i in range(4)]
    states += [answer["session"]["num_tokens"] for answer in answers]
    forks = [await served.post(f"{url}/fork", {"at_turn": i}) for i in range(5)]
    for turn in (4, 3, 1, 0):
        session = await served.post(f"{url}/rollback", {"to_turn": turn})
        assert (session["num_turns"], session["num_tokens"]) == (turn, states[turn])
        fork = await served.get(f"{SESSIONS}/{forks[turn]['id']}")
        assert fork["num_tokens"] == states[turn]
        assert (await served.get(url))["messages"] == fork["messages"]
        assert text_of(await served.say(url, "same")) == text_of(
            await served.say(f"{SESSIONS}/{forks[turn]['id']}", "same")
        )
        await served.post(f"{url}/rollback", {"to_turn": turn})


async def test_roll_back_frees_what_only_the_dropped_turns_used(served: Served) -> None:
    url = await served.open("one")
    _, one = await served.blocks()
    tokens = (await served.get(url))["num_tokens"]
    await served.say(url, "a question that takes some blocks " * 3)
    _, two = await served.blocks()
    rolled = await served.post(f"{url}/rollback", {"to_turn": 1})
    assert 0 < rolled["freed_blocks"] <= two - one
    assert (await served.blocks())[1] == two - rolled["freed_blocks"]
    answer = await served.say(url, "another")
    assert answer["session"]["turn"] == 2
    assert cached_of(answer) >= tokens - 1
    await served.delete(url)
    assert (await served.blocks())[1] == 0


async def test_roll_back_refuses_what_is_not_there_and_a_running_turn(served: Served) -> None:
    url = await served.open("one")
    for turn in (-1, 2):
        refused = await served.post(f"{url}/rollback", {"to_turn": turn}, 400)
        assert refused["error"]["param"] == "to_turn"
    assert (await served.post(f"{url}/rollback", {}, 400))["error"]["param"] == "to_turn"
    async with served.client.post(
        f"{url}/messages", json={**FIELDS, "content": "x", "max_tokens": 900, "stream": True}
    ) as response:
        await response.content.readline()
        busy = await served.post(f"{url}/rollback", {"to_turn": 0}, 409)
        assert busy["error"]["code"] == "session_busy"
        assert (await served.row(url))["busy"] is True
    await until(lambda: not served.engine.engine.requests)
    assert (await served.get(url))["num_turns"] == 1


async def test_delete_frees_a_running_turn_and_broken_off_ones_too(served: Served) -> None:
    url = await served.open("one")
    for _ in range(2):
        body = {**FIELDS, "content": "abandoned " * 5, "max_tokens": 900, "stream": True}
        async with served.client.post(f"{url}/messages", json=body) as response:
            for _ in range(80):
                await response.content.readline()
    await until(lambda: not served.engine.engine.requests)
    await until(lambda: not _busy(served))
    _, cached = await served.blocks()
    row = await served.row(url)
    assert row["private_blocks"] == cached > row["cached_blocks"]

    body = {**FIELDS, "content": "running", "max_tokens": 900, "stream": True}
    response = await served.client.post(f"{url}/messages", json=body)
    for _ in range(80):
        await response.content.readline()
    await served.delete(url)
    await response.read()
    assert (await served.blocks())[1] == 0


def _busy(served: Served) -> bool:
    return any(session.busy for session in served.store)


async def test_own_pin_goes_with_the_session_and_another_pin_stays(served: Served) -> None:
    url = await served.open("a question of some length", "two")
    await served.post(f"{url}/pin", {"ttl_seconds": 600})
    row = await served.row(url)
    assert row["private_blocks"] == row["cached_blocks"]
    assert row["expires_at"] >= row["pinned_until"] > row["last_used_at"] + 590
    ids = _ids(served, url)
    await served.post("/admin/cache/pin", {"prompt": ids[:32], "ttl_seconds": 600})
    shown = await served.row(url)
    assert shown["private_blocks"] == row["private_blocks"] - 2
    assert (await served.delete(url))["freed_blocks"] == shown["private_blocks"]
    assert len((await served.get("/admin/cache/pins"))["data"]) == 1


def _ids(served: Served, url: str) -> list[int]:
    return list(served.store.get(url.rpartition("/")[2], "").token_ids)


async def test_roll_back_of_a_pinned_session_pins_what_is_left(served: Served) -> None:
    url = await served.open("a question of some length", "two", "three")
    whole = await served.post(f"{url}/pin", {"ttl_seconds": 600})
    await served.post(f"{url}/rollback", {"to_turn": 1})
    (pin,) = (await served.get("/admin/cache/pins"))["data"]
    assert 0 < pin["pinned_blocks"] < whole["pinned_blocks"]
    assert (await served.row(url))["pinned_until"] is not None
    assert (await served.post(f"{url}/unpin"))["unpinned"] is True
    assert (await served.row(url))["pinned_until"] is None


async def test_pinned_session_outlives_its_idle_time() -> None:
    served = await Served.start(session_idle_s=1000)
    idle, kept = await served.open("x"), await served.open("a question of some length")
    await served.post(f"{kept}/pin", {"ttl_seconds": 600})
    for session in served.store:
        session.last_used -= 2000
    served.store._started -= 2000
    assert (await served.get("/admin/sessions"))["total"] == 1
    assert served.store.sweep() == 1
    assert (await served.get(kept))["num_turns"] == 1
    await served.get(idle, 404)
    await served.stop()


async def test_admin_list_is_ordered_and_bounded(served: Served) -> None:
    long = await served.open("a question that is longer than all the others", cache_salt="s")
    short = await served.open("x")
    none = await served.open()
    names = [url.rpartition("/")[2] for url in (none, short, long)]
    page = await served.get("/admin/sessions")
    assert (page["object"], page["total"]) == ("list", 3)
    assert [row["id"] for row in page["data"]] == names
    page = await served.get("/admin/sessions?order=tokens&limit=2")
    assert [row["id"] for row in page["data"]] == [names[2], names[1]]
    assert page["total"] == 3
    row = page["data"][0]
    block_bytes = served.engine.engine.bytes_per_block
    assert row["bytes"] == row["cached_blocks"] * block_bytes
    assert (row["tenant"], row["namespace"], row["turns"]) == ("", "/s", 1)
    assert row["created_at"] <= row["last_used_at"] < row["expires_at"]
    for query in ("limit=0", "limit=1001", "limit=x", "order=size"):
        await served.get(f"/admin/sessions?{query}", 400)


async def test_evicted_session_holds_nothing_and_its_deletion_frees_nothing() -> None:
    served = await Served.start(engine=real_engine(num_blocks=64))
    url = await served.open("one")
    assert (await served.row(url))["cached_tokens"] > 0
    await served.post("/flush_cache")
    row = await served.row(url)
    assert (row["cached_tokens"], row["cached_blocks"], row["private_blocks"]) == (0, 0, 0)
    assert (await served.delete(url))["freed_blocks"] == 0
    await served.stop()


@pytest.mark.parametrize("seed", range(2))
async def test_stress_private_blocks_are_what_deletion_frees(served: Served, seed: int) -> None:
    rng = random.Random(seed)
    urls: list[str] = []
    for number in range(30):
        kind = rng.random()
        if not urls or kind < 0.2:
            urls.append(await served.open("hi", system=rng.choice([None, SYSTEM])))
        elif kind < 0.5:
            await served.say(rng.choice(urls), f"{number}" * rng.randrange(1, 30))
        elif kind < 0.7:
            child = await served.post(f"{rng.choice(urls)}/fork")
            urls.append(f"{SESSIONS}/{child['id']}")
        elif kind < 0.8:
            url = rng.choice(urls)
            turns = (await served.get(url))["num_turns"]
            await served.post(f"{url}/rollback", {"to_turn": rng.randrange(turns + 1)})
        else:
            url = urls.pop(rng.randrange(len(urls)))
            private = (await served.row(url))["private_blocks"]
            others = {other: (await served.row(other))["cached_tokens"] for other in urls}
            free, _ = await served.blocks()
            assert (await served.delete(url))["freed_blocks"] == private
            assert (await served.blocks())[0] == free + private
            for other, tokens in others.items():
                assert (await served.row(other))["cached_tokens"] == tokens
    for url in urls:
        await served.delete(url)
    assert (await served.blocks())[1] == 0


async def test_lists_tell_what_each_session_has_cached(served: Served) -> None:
    urls = [await served.open("one"), await served.open()]
    (empty, used) = (await served.get(SESSIONS))["data"]
    assert empty["cache"] == {"cached_tokens": 0, "cached_blocks": 0, "private_blocks": 0}
    assert used["cache"]["cached_tokens"] == used["num_tokens"] - 1
    assert used["expires"] > used["last_used"]
    shown: Any = await served.get(urls[0])
    assert shown["cache"] == used["cache"]


async def test_only_turns_without_an_answer_leave_drafts(served: Served) -> None:
    url = await served.open("one", "two")
    (session,) = served.store
    assert session.drafts == []
    body = {**FIELDS, "content": "broken off", "max_tokens": 900, "stream": True}
    async with served.client.post(f"{url}/messages", json=body) as response:
        await response.content.readline()
    await until(lambda: not _busy(served))
    assert [draft.num_turns for draft in session.drafts] == [2]
    await served.post(f"{url}/rollback", {"to_turn": 1})
    assert session.drafts == []
