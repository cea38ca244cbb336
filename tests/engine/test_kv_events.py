from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from fakes import Harness, make_engine, prompt_of
from test_async_engine import collect

from radixkv.cache import AllBlocksCleared, BlockRemoved, BlockStored
from radixkv.cache.hashing import HASH_BYTES
from radixkv.config import load_config
from radixkv.engine import AsyncEngine, Engine
from radixkv.engine.kv_events import KVEventStream
from radixkv.engine.kv_publisher import ZmqEventPublisher
from radixkv.engine.kv_wire import encode_batch, wire_hash
from radixkv.errors import ConfigError
from radixkv.request import SamplingParams

ANY = "tcp://127.0.0.1:*"
TIMEOUT_MS = 5000
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


class Sockets:
    """A subscriber's sockets, which all end with the test."""

    def __init__(self) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.opened: list[zmq.Socket[Any]] = []

    def open(self, kind: int) -> zmq.Socket[Any]:
        opened: zmq.Socket[Any] = self.context.socket(kind)
        opened.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        self.opened.append(opened)
        return opened


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    sockets = Sockets()
    yield sockets
    sockets.context.destroy(linger=0)


@pytest.fixture
def publisher() -> Iterator[ZmqEventPublisher]:
    publisher = ZmqEventPublisher(ANY, replay_endpoint=ANY, topic="kv", capacity=50)
    yield publisher
    publisher.close()


def subscribe(sockets: Sockets, publisher: ZmqEventPublisher) -> zmq.Socket[Any]:
    """Connect and wait until the subscription has arrived: a probe comes through."""
    sub = sockets.open(zmq.SUB)
    sub.setsockopt(zmq.RCVTIMEO, 50)
    sub.connect(publisher.endpoint)
    sub.subscribe(b"kv")
    for _ in range(100):
        publisher.publish([AllBlocksCleared()])
        try:
            sub.recv_multipart()
            break
        except zmq.Again:
            continue
    sub.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
    return sub


def read(sub: zmq.Socket[Any], until: int) -> list[tuple[int, Any]]:
    """Return (sequence number, batch) up to number `until`."""
    batches: list[tuple[int, Any]] = []
    while not batches or batches[-1][0] < until:
        topic, number, payload = sub.recv_multipart()
        assert topic == b"kv"
        assert len(number) == 8
        batches.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))
    return batches


def replay(sockets: Sockets, publisher: ZmqEventPublisher, start: int) -> list[tuple[int, Any]]:
    """Ask for batches as subscribers written for vLLM do."""
    request = sockets.open(zmq.REQ)
    assert publisher.replay_endpoint is not None
    request.connect(publisher.replay_endpoint)
    request.send(start.to_bytes(8, "big"))
    batches: list[tuple[int, Any]] = []
    # A REQ socket reads one reply per request; the others of the stream need the raw protocol.
    number, payload = request.recv_multipart()
    batches.append((int.from_bytes(number, "big", signed=True), payload))
    return batches


def replay_all(
    sockets: Sockets, publisher: ZmqEventPublisher, start: int
) -> list[tuple[int, bytes]]:
    dealer = sockets.open(zmq.DEALER)
    assert publisher.replay_endpoint is not None
    dealer.connect(publisher.replay_endpoint)
    dealer.send_multipart((b"", start.to_bytes(8, "big")))
    batches: list[tuple[int, Any]] = []
    while True:
        empty, number, payload = dealer.recv_multipart()
        assert empty == b""
        if int.from_bytes(number, "big", signed=True) == -1:
            assert payload == b""
            return batches
        batches.append((int.from_bytes(number, "big"), payload))


def apply(batches: list[tuple[int, Any]]) -> set[int]:
    """A router's view after these batches."""
    hashes: set[int] = set()
    for _, (_, events, rank) in batches:
        assert rank == 0
        for name, *fields in events:
            if name == "BlockStored":
                assert fields[1] is None or fields[1] in hashes
                hashes.update(fields[0])
            elif name == "BlockRemoved":
                assert hashes.issuperset(fields[0])
                hashes.difference_update(fields[0])
            else:
                assert name == "AllBlocksCleared"
                hashes.clear()
    return hashes


def tree_hashes(engine: Engine) -> set[int]:
    return {
        wire_hash(node.hashes[i : i + HASH_BYTES])
        for node in engine.cache.tree.nodes()
        for i in range(0, len(node.hashes), HASH_BYTES)
    }


def test_a_batch_has_the_form_that_routers_decode() -> None:
    stored = BlockStored([b"\1" * 16, b"\2" * 16], b"\3" * 16, [1, 2, 3, 4], 2)
    first = BlockStored([b"\4" * 16], None, [1, 2], 2, namespace_key="ab")
    removed = BlockRemoved([b"\xff" * 16], "CPU")
    payload = encode_batch([stored, first, removed, AllBlocksCleared()], 1.5)
    one, two, three, four = (int.from_bytes(bytes([i]) * 8, "big") for i in (1, 2, 3, 4))
    assert msgspec.msgpack.decode(payload) == [
        1.5,
        [
            ["BlockStored", [one, two], three, [1, 2, 3, 4], 2, None, "GPU", None],
            ["BlockStored", [four], None, [1, 2], 2, None, "GPU", None, [["ab"]]],
            ["BlockRemoved", [2**64 - 1], "CPU"],
            ["AllBlocksCleared"],
        ],
        0,
    ]


def test_a_hash_travels_as_its_last_eight_bytes() -> None:
    assert wire_hash(bytes(range(16))) == 0x08090A0B0C0D0E0F


def test_a_subscriber_can_follow_the_tree(sockets: Sockets, publisher: ZmqEventPublisher) -> None:
    harness = Harness(num_blocks=24)
    sub = subscribe(sockets, publisher)
    stream = harness.engine.kv_events = KVEventStream(harness.cache, publisher)
    batches: list[tuple[int, Any]] = []
    for i in range(12):
        harness.add(str(i), prompt_of(16 + 3 * i, seed=i % 4), max_tokens=4)
        while harness.engine.has_work:
            harness.step()
            harness.engine.flush_kv_events()
        if publisher.published - 1 > (batches[-1][0] if batches else -1):
            batches += read(sub, publisher.published - 1)
        assert apply(batches) == tree_hashes(harness.engine)
    assert harness.cache.stats.blocks_evicted > 0
    harness.cache.reset()
    stream.flush()
    batches += read(sub, publisher.published - 1)
    assert batches[-1][1][1][-1] == ["AllBlocksCleared"]
    numbers = [number for number, _ in batches]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "a gap"
    assert harness.engine.stats().kv_events == {
        "published": publisher.published,
        "dropped": 0,
        "replayed": 0,
    }


def test_missed_batches_are_replayed(sockets: Sockets, publisher: ZmqEventPublisher) -> None:
    for i in range(10):
        publisher.publish([BlockRemoved([bytes([i]) * 16])])
    batches = replay_all(sockets, publisher, 4)
    assert [n for n, _ in batches] == [4, 5, 6, 7, 8, 9]
    assert msgspec.msgpack.decode(batches[0][1])[1] == [
        ["BlockRemoved", [0x0404040404040404], "GPU"]
    ]
    assert replay_all(sockets, publisher, 10) == []
    assert publisher.replayed == 6
    assert replay(sockets, publisher, 3)[0][0] == 3


def test_a_replay_goes_back_as_far_as_the_buffer(
    sockets: Sockets, publisher: ZmqEventPublisher
) -> None:
    for _ in range(80):
        publisher.publish([AllBlocksCleared()])
    assert [n for n, _ in replay_all(sockets, publisher, 0)] == list(range(30, 80))
    assert [n for n, _ in replay_all(sockets, publisher, 60)] == list(range(60, 80))


def test_a_bad_replay_request_is_ignored(sockets: Sockets, publisher: ZmqEventPublisher) -> None:
    publisher.publish([AllBlocksCleared()])
    dealer = sockets.open(zmq.DEALER)
    assert publisher.replay_endpoint is not None
    dealer.connect(publisher.replay_endpoint)
    for frames in ((b"",), (b"", b"short"), (b"1", b"2", b"3", b"4"), (b"",)):
        dealer.send_multipart(frames)
    assert len(replay_all(sockets, publisher, 0)) == 1


def test_publishing_without_a_reader_neither_blocks_nor_grows() -> None:
    publisher = ZmqEventPublisher(ANY, capacity=5)
    for _ in range(2000):
        publisher.publish([AllBlocksCleared()])
    assert publisher.published == 2000
    publisher.close()
    publisher.close()
    assert 0 <= publisher.dropped <= 1995


def test_batches_that_leave_the_buffer_unsent_are_counted() -> None:
    publisher = ZmqEventPublisher(ANY, capacity=5)
    publisher.close()  # its thread has ended, so nothing is sent any more
    for _ in range(12):
        publisher.publish([AllBlocksCleared()])
    publisher._pub = type("Pub", (), {"send_multipart": lambda *_: None})()
    publisher._send_queued()
    assert publisher.dropped == 7


def test_a_replay_address_alone_is_refused() -> None:
    options = {"kv_events": "tcp://127.0.0.1:5557", "kv_events_replay": "tcp://127.0.0.1:5558"}
    assert load_config(options, environ={}).kv_events_topic == "kv-events"
    with pytest.raises(ConfigError, match="--kv-events-replay needs --kv-events"):
        load_config({**options, "kv_events": None}, environ={})


@pytest.mark.parametrize("endpoint", ["nonsense", "tcp://no.such.host.invalid:1", "tcp://:x"])
def test_an_address_that_cannot_be_used_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--kv-events "):
        ZmqEventPublisher(endpoint)
    with pytest.raises(ConfigError, match="--kv-events-replay"):
        ZmqEventPublisher(ANY, replay_endpoint=endpoint)


def test_a_publisher_can_connect_to_its_subscriber(sockets: Sockets) -> None:
    sub = sockets.open(zmq.SUB)
    sub.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
    sub.bind(ANY)
    sub.subscribe(b"")
    publisher = ZmqEventPublisher(">" + sub.get_string(zmq.LAST_ENDPOINT))
    for _ in range(1000):
        publisher.publish([AllBlocksCleared()])
        if sub.poll(5):
            break
    assert sub.recv_multipart()[0] == b""
    publisher.close()


async def test_an_async_engine_publishes_each_step_and_its_end(
    sockets: Sockets, publisher: ZmqEventPublisher
) -> None:
    engine = make_engine()
    engine.kv_events = KVEventStream(engine.cache, publisher)
    served = AsyncEngine(engine, None, model_name="fake")  # type: ignore[arg-type]
    sub = subscribe(sockets, publisher)
    await served.start()
    await collect(served.submit(prompt_of(30), PARAMS))
    batches = read(sub, 0)
    while batches[-1][1][1][0][0] != "BlockStored":
        batches += read(sub, batches[-1][0] + 1)
    await served.flush_cache()
    await served.shutdown()
    batches += read(sub, publisher.published - 1)
    names = [event[0] for _, batch in batches for event in batch[1]]
    assert {"BlockStored", "BlockRemoved"} <= set(names)
    assert names[-1] == "AllBlocksCleared"
    assert apply(batches) == set()
