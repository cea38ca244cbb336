"""A router that follows nothing but events knows which blocks every medium holds."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from fakes import Harness, prompt_of
from test_kv_events import Sockets, read, replay_all, subscribe, tree_hashes
from tiering_helpers import BLOCK, MakeHarness, ask, fill, open_disk, tiers_of, worker_of

from radixkv.cache.events import AllBlocksCleared, BlockRemoved
from radixkv.cache.hashing import namespace_seed
from radixkv.engine import kv_publisher
from radixkv.engine.kv_events import KVEventStream
from radixkv.engine.kv_publisher import ZmqEventPublisher
from radixkv.engine.kv_wire import wire_hash
from radixkv.engine.tiering_labels import BlockLabel

ANY = "tcp://127.0.0.1:*"
Sets = dict[str, set[int]]


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    sockets = Sockets()
    yield sockets
    sockets.context.destroy(linger=0)


@pytest.fixture
def publisher() -> Iterator[ZmqEventPublisher]:
    publisher = ZmqEventPublisher(ANY, replay_endpoint=ANY, topic="kv")
    yield publisher
    publisher.close()


class Router:
    """Subscribes, and applies events as a router does."""

    def __init__(self, sockets: Sockets, publisher: ZmqEventPublisher) -> None:
        self.publisher = publisher
        self.sub: zmq.Socket[Any] = subscribe(sockets, publisher)
        self.media: Sets = {"GPU": set(), "CPU": set(), "STORAGE": set()}
        self.stored: dict[tuple[str, int], list[Any]] = {}
        self.next: int | None = None

    def catch_up(self) -> Sets:
        """Read all that was published so far; the sequence numbers must have no gap."""
        self.publisher.publish([])
        for number, (_, events, _) in read(self.sub, self.publisher.published - 1):
            assert self.next in (None, number), "a gap"
            self.next = number + 1
            for name, *fields in events:
                self.apply(name, fields)
        return self.media

    def apply(self, name: str, fields: list[Any]) -> None:
        if name == "AllBlocksCleared":
            for held in self.media.values():
                held.clear()
        elif name == "BlockRemoved":
            self.media[fields[1]].difference_update(fields[0])
        else:
            hashes, medium = fields[0], fields[5]
            self.media[medium].update(hashes)
            self.stored |= {(medium, h): fields for h in hashes}


def held(harness: Harness) -> Sets:
    """What the cache and its tiers really hold."""
    tiers = tiers_of(harness)
    if tiers.worker is not None:
        tiers.worker.drain()

    def of(entries: Any) -> set[int]:
        return {wire_hash(BlockLabel.unpack(entry.tokens).hash) for entry in entries}

    return {
        "GPU": tree_hashes(harness.engine),
        "CPU": of(tiers.host.items()) if tiers.host is not None else set(),
        "STORAGE": of(tiers.worker.disk._index.items()) if tiers.worker is not None else set(),
    }


def connect(harness: Harness, publisher: ZmqEventPublisher) -> KVEventStream:
    stream = KVEventStream(harness.cache, publisher, harness.engine.tiers)
    harness.engine.kv_events = stream
    return stream


@pytest.mark.parametrize(("host_blocks", "disk_blocks"), [(4, 0), (0, 9), (5, 12)])
def test_a_router_knows_the_blocks_of_every_medium(
    make: MakeHarness,
    sockets: Sockets,
    publisher: ZmqEventPublisher,
    host_blocks: int,
    disk_blocks: int,
) -> None:
    rng = random.Random(host_blocks)
    harness = make(num_blocks=10, host_blocks=host_blocks, disk_blocks=disk_blocks)
    router = Router(sockets, publisher)
    connect(harness, publisher)
    for i in range(24):
        ask(harness, prompt_of(rng.randrange(5, 26), seed=rng.randrange(6)), ((), ("t",))[i % 2])
        harness.engine.flush_kv_events()
        if i == 15:
            harness.cache.reset()
        if i == 20:
            harness.cache.reset_namespace(("t",))
            tiers_of(harness).drop_namespace(("t",))
            harness.engine.flush_kv_events()
        expected = held(harness)
        assert router.catch_up() == expected
    assert bool(expected["CPU"]) == bool(host_blocks)
    assert bool(expected["STORAGE"]) == bool(disk_blocks)


def test_events_of_a_tier_tell_parent_tokens_and_namespace(
    make: MakeHarness, sockets: Sockets, publisher: ZmqEventPublisher
) -> None:
    harness = make(host_blocks=32)
    router = Router(sockets, publisher)
    connect(harness, publisher)
    prompt = prompt_of(9)
    ask(harness, prompt, ("t",))
    fill(harness, 1, 2)
    harness.engine.flush_kv_events()
    router.catch_up()
    in_pool = [f for (medium, _), f in router.stored.items() if medium == "GPU"]
    (run,) = {tuple(f[0]): f for f in in_pool if f[2][:4] == prompt[:4]}.values()
    first, second = run[0]
    key = namespace_seed(("t",)).hex()
    assert router.stored["CPU", first] == [
        [first], None, prompt[:4], BLOCK, None, "CPU", None, [[key]],
    ]  # fmt: skip
    assert router.stored["CPU", second] == [[second], first, prompt[4:8], BLOCK, None, "CPU", None]


def test_blocks_found_on_disk_at_the_start_come_first(
    make: MakeHarness, sockets: Sockets, publisher: ZmqEventPublisher
) -> None:
    first = make(num_blocks=32, disk_blocks=64)
    ask(first, prompt_of(21), ("t",))
    expected = held(first)["GPU"]
    first.engine.close()
    second = make(num_blocks=32, disk_blocks=64)
    router = Router(sockets, publisher)
    connect(second, publisher)
    assert router.catch_up() == {"GPU": set(), "CPU": set(), "STORAGE": expected}
    assert ask(second, prompt_of(21), ("t",)) == 20
    second.engine.flush_kv_events()
    assert router.catch_up()["GPU"] == expected, "a block has one hash in every medium"


def test_a_block_that_is_damaged_on_disk_is_removed(
    make: MakeHarness, sockets: Sockets, publisher: ZmqEventPublisher, tmp_path: Path
) -> None:
    harness = make(disk_blocks=64)
    router = Router(sockets, publisher)
    connect(harness, publisher)
    ask(harness, prompt_of(21))
    fill(harness, 1, 2)
    worker_of(harness).drain()
    (file,) = tmp_path.glob("*.blocks")
    file.write_bytes(bytes(file.stat().st_size))
    assert ask(harness, prompt_of(21)) == 0
    harness.engine.flush_kv_events()
    expected = held(harness)
    assert router.catch_up() == expected


def test_the_disk_is_reported_while_the_engine_is_idle(
    make: MakeHarness, sockets: Sockets, publisher: ZmqEventPublisher
) -> None:
    harness = make(disk_blocks=64)
    router = Router(sockets, publisher)
    connect(harness, publisher)
    ask(harness, prompt_of(21))
    fill(harness, 1)
    expected = held(harness)["STORAGE"]
    assert expected
    # Nothing is published or flushed by the test from here on.
    while router.media["STORAGE"] != expected:
        (_, (_, events, _)), *_ = read(router.sub, 0)
        for name, *fields in events:
            router.apply(name, fields)


def test_a_flush_is_not_overtaken_by_what_a_tier_takes_after_it(
    make: MakeHarness, sockets: Sockets, publisher: ZmqEventPublisher
) -> None:
    """Nothing but the cache's own report flushes the events between the two."""
    harness = make(disk_blocks=64)
    router = Router(sockets, publisher)
    stream = connect(harness, publisher)
    ask(harness, prompt_of(21))
    harness.cache.reset()
    ask(harness, prompt_of(21, seed=5))
    fill(harness, 1, 2)
    expected = held(harness)
    stream.flush()
    assert router.catch_up() == expected
    assert expected["STORAGE"]


def test_events_of_many_threads_are_numbered_without_a_gap(
    sockets: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_publisher, "MAX_LOOSE_EVENTS", 7)
    publisher = ZmqEventPublisher(ANY, replay_endpoint=ANY, topic="kv")
    add: list[Callable[[], None]] = [
        lambda: publisher.add(AllBlocksCleared()),
        lambda: publisher.publish([AllBlocksCleared()]),
    ]
    threads = [threading.Thread(target=lambda f=f: [f() for _ in range(200)]) for f in add * 2]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    publisher.publish([])
    batches = replay_all(sockets, publisher, 0)
    assert [number for number, _ in batches] == list(range(publisher.published))
    assert sum(payload.count(b"AllBlocksCleared") for _, payload in batches) == 800
    publisher.close()


def test_the_disk_tier_lists_what_it_holds_before_it_reports_changes(tmp_path: Path) -> None:
    disk = open_disk(tmp_path, blocks=1)
    label = BlockLabel(b"s" * 16, b"s" * 16, b"h" * 16, bytes(4 * BLOCK))
    assert BlockLabel.unpack(label.pack()) == label
    assert disk.write(b"k" * 32, label.pack(), bytes(8 * BLOCK))
    seen: list[tuple[bool, bytes]] = []
    disk.follow(lambda stored, tokens: seen.append((stored, tokens[32:48])))
    other = BlockLabel(b"s" * 16, b"h" * 16, b"i" * 16, bytes(4 * BLOCK))
    assert disk.write(b"l" * 32, other.pack(), bytes(8 * BLOCK))
    disk.discard(lambda tokens: tokens == other.pack())
    assert seen == [(True, b"h" * 16), (False, b"h" * 16), (True, b"i" * 16), (False, b"i" * 16)]
    disk.check_integrity()
    disk.close()
    assert len(open_disk(tmp_path, blocks=1)) == 0


def test_single_events_and_batches_keep_their_order() -> None:
    publisher = ZmqEventPublisher(ANY)
    publisher.close()  # its thread has ended, so nothing but the two calls makes batches
    publisher.add(BlockRemoved([b"1" * 16], "CPU"))
    publisher.publish([AllBlocksCleared()])
    batches = [msgspec.msgpack.decode(payload)[1] for _, payload in publisher._since(0)]
    assert batches == [[["BlockRemoved", [wire_hash(b"1" * 16)], "CPU"]], [["AllBlocksCleared"]]]
