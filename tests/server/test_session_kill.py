"""A server killed in the middle of turns: what it said is there, and no half of a turn."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path
from typing import Any

import aiohttp

from radixkv.server.session_db import SessionDb
from radixkv.server.session_state import SessionRecord
from radixkv.server.session_tokens import pack_tokens

ROUNDS = max(1, 2 * int(os.environ.get("RADIXKV_STRESS", "0")))
VICTIM = Path(__file__).parent / "session_victim.py"
NAMES = [f"chat-{i}" for i in range(6)]


class Client:
    """Talks to the sessions without a pause, and remembers what it was told.

    Attributes:
        said: of each session the number of turns told to be saved, and their ids in all.
        asked: turns that were asked for.
    """

    def __init__(self) -> None:
        self.said: dict[str, tuple[int, int]] = {}
        self.asked: dict[str, int] = {}

    async def talk(self, url: str, name: str, rng: random.Random) -> None:
        """Send turns until the server is gone."""
        async with aiohttp.ClientSession() as http:
            while True:
                turn = max(self.asked.get(name, 0), self.said.get(name, (0, 0))[0]) + 1
                self.asked[name] = turn
                body: dict[str, Any] = {
                    "session_id": name,
                    "messages": [{"role": "user", "content": f"q{turn} " * 5}],
                    "max_tokens": rng.randrange(1, 12),
                    "ignore_eos": True,
                }
                try:
                    async with http.post(f"{url}/v1/chat/completions", json=body) as response:
                        answer = await response.json()
                except aiohttp.ClientError:
                    return
                assert response.status == 200, answer
                session = answer["session"]
                assert session["saved"] is True
                self.said[name] = (session["turn"], session["num_tokens"])


async def kill_in_the_middle(path: Path, client: Client, rng: random.Random) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(VICTIM), str(path), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    url = (await process.stdout.readline()).decode().strip()
    talks = [asyncio.create_task(client.talk(url, name, rng)) for name in NAMES]
    turns = sum(count for count, _ in client.said.values()) + rng.randrange(10, 60)
    while sum(count for count, _ in client.said.values()) < turns:
        for task in talks:
            if task.done():
                task.result()
                raise AssertionError("the server is gone too early")
        await asyncio.sleep(0.001)
    process.kill()
    await process.wait()
    await asyncio.gather(*talks)


def check(record: SessionRecord, client: Client) -> None:
    """Compare a session in the file with what its client knows."""
    count, num_tokens = client.said.get(record.id, (0, 0))
    assert count <= len(record.turns) <= client.asked[record.id]
    if count:
        assert record.turns[count - 1].num_tokens == num_tokens
    ids = b""
    for turn in record.turns:
        assert [message["role"] for message in turn.messages] == ["user", "assistant"]
        assert turn.start == len(ids) // 4
        text, answer = turn.messages[0]["content"], turn.messages[1]["content"]
        assert pack_tokens(list(text.encode())) in turn.ids
        assert turn.ids.endswith(pack_tokens(list(answer.encode())))
        ids += turn.ids


async def test_killed_server_comes_back_with_every_turn_that_it_told_to_be_saved(
    tmp_path: Path,
) -> None:
    path, client, rng = tmp_path / "sessions.db", Client(), random.Random(5)
    for _ in range(ROUNDS):
        await kill_in_the_middle(path, client, rng)
        db = SessionDb(path)
        records = db.load()
        db.close()
        assert {record.id for record in records} >= client.said.keys()
        for record in records:
            check(record, client)
            # A turn whose answer was lost on the way is in the history all the same.
            client.said[record.id] = (len(record.turns), record.turns[-1].num_tokens)
            client.asked[record.id] = len(record.turns)
