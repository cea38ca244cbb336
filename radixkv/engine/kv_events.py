"""KV events over ZeroMQ, in the form in which vLLM sends them.

A message is `[topic, sequence number (8 bytes, big-endian), payload]`; the payload is msgpack of
`[ts, events, data_parallel_rank]`, and an event an array that begins with its name. This is the
array form that routers (llm-d, Dynamo) and subscribers written for vLLM or SGLang read.

A block hash travels as an unsigned 64-bit integer, the last eight bytes of the hash: the one form
every public router takes, since some know no byte strings. Chance collisions are as likely as for
any 64-bit hash, and cost a router a wrong guess, never a wrong answer.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from typing import Any

import msgspec
import zmq

from radixkv.cache import RadixCache
from radixkv.cache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventLog,
)
from radixkv.errors import ConfigError

__all__ = ["KVEventStream", "ZmqEventPublisher", "encode_batch", "wire_hash"]

log = logging.getLogger(__name__)

BUFFERED_BATCHES = 10_000
HIGH_WATER_MARK = 100_000
CLOSE_TIMEOUT_S = 1.0
SEQUENCE_BYTES = 8
# Ends a replay.
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)


class KVEventStream:
    """Follows a cache and publishes what happens to it; the engine flushes it after each step."""

    def __init__(self, cache: RadixCache, publisher: ZmqEventPublisher) -> None:
        self._publisher = publisher
        self._log = KVEventLog(cache, publisher.publish)

    def flush(self) -> None:
        """Publish what happened since the last call as one batch. Never blocks."""
        self._log.flush()

    def close(self) -> None:
        """Publish the rest, then stop. Idempotent."""
        self._log.flush()
        self._log.close()
        self._publisher.close()

    def counters(self) -> dict[str, int]:
        """Return the batches published so far, and how many of them were dropped unsent."""
        return {"published": self._publisher.published, "dropped": self._publisher.dropped}


class ZmqEventPublisher:
    """Sends batches of events to whoever subscribes, and repeats the latest on request.

    `publish` only appends to a bounded buffer; a thread sends from it, so that the engine never
    waits for a socket. A batch that leaves the buffer before it was sent is counted in `dropped`
    and shows as a gap in the sequence numbers. ZeroMQ itself drops for a subscriber that is too
    slow, which shows the same way; a subscriber asks the replay socket for what it missed by
    sending the first number it wants, and gets `[number, payload]` for each, and then
    `[-1, empty]`.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        capacity: int = BUFFERED_BATCHES,
    ) -> None:
        """Open the sockets and start the thread.

        Args:
            endpoint: address to bind, such as tcp://127.0.0.1:5557; with a leading ">" the
                address of a subscriber to connect to.
            replay_endpoint: address to bind for replays; None offers none.
            topic: first frame of each message.
            capacity: batches kept for replay.

        Raises:
            ConfigError: an address can't be used.
        """
        self.dropped = 0
        self._topic = topic.encode()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=capacity)
        self._lock = threading.Lock()  # of the buffer
        self._next = 0  # number of the next batch
        self._sent = 0  # number of the next batch to send
        self._closing = False
        self._context = zmq.Context()
        try:
            self._pub = _open(self._context, zmq.PUB, endpoint, "--kv-events")
            self._replay = (
                _open(self._context, zmq.ROUTER, replay_endpoint, "--kv-events-replay")
                if replay_endpoint
                else None
            )
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = _address(self._pub)
        self.replay_endpoint = None if self._replay is None else _address(self._replay)
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._thread = threading.Thread(target=self._main, name="radixkv-kv-events", daemon=True)
        self._thread.start()

    @property
    def published(self) -> int:
        """Batches published, which is the next sequence number."""
        return self._next

    def publish(self, events: list[KVEvent]) -> None:
        """Queue one batch. Never blocks."""
        payload = encode_batch(events, time.time())
        with self._lock:
            self._buffer.append((self._next, payload))
            self._next += 1
        self._wake()

    def close(self) -> None:
        """Send what is queued, then stop. Idempotent."""
        self._closing = True
        self._wake()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _wake(self) -> None:
        # A full pipe means that the thread has been woken already; a closed one, that it is gone.
        with contextlib.suppress(BlockingIOError, OSError):
            self._waker.send(b"\0")

    def _main(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while not self._closing:
                poller.poll()
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
                self._send_queued()
                self._answer_replays()
            self._send_queued()
        except Exception:
            log.exception("KV events are no longer published")
        finally:
            self._context.destroy(linger=int(CLOSE_TIMEOUT_S * 1000))
            self._waker.close()
            self._woken.close()

    def _send_queued(self) -> None:
        for number, payload in self._since(self._sent):
            self.dropped += number - self._sent
            self._sent = number + 1
            try:
                self._pub.send_multipart((self._topic, _sequence(number), payload), zmq.NOBLOCK)
            except zmq.Again:
                self.dropped += 1

    def _answer_replays(self) -> None:
        while self._replay is not None and self._replay.poll(0):
            frames = self._replay.recv_multipart()
            # A REQ socket puts an empty frame before its message, which a DEALER may leave out.
            client, wanted = frames[0], frames[-1]
            if len(frames) not in (2, 3) or len(wanted) != SEQUENCE_BYTES:
                log.warning("a replay request of %d frames is ignored", len(frames))
                continue
            for number, payload in self._since(int.from_bytes(wanted, "big")):
                self._reply(client, _sequence(number), payload)
            self._reply(client, END_OF_REPLAY, b"")

    def _reply(self, client: bytes, number: bytes, payload: bytes) -> None:
        assert self._replay is not None
        with contextlib.suppress(zmq.Again):
            self._replay.send_multipart((client, b"", number, payload), zmq.NOBLOCK)

    def _since(self, number: int) -> list[tuple[int, bytes]]:
        """Return the buffered batches from `number` on."""
        with self._lock:
            skip = max(0, number - (self._next - len(self._buffer)))
            count = len(self._buffer) - skip
            return [self._buffer[i] for i in range(-count, 0)] if count > 0 else []


def encode_batch(events: list[KVEvent], timestamp: float) -> bytes:
    """Return the payload of one message: msgpack of [ts, events, data_parallel_rank]."""
    return msgspec.msgpack.encode([timestamp, [_wire(event) for event in events], 0])


def wire_hash(block_hash: bytes) -> int:
    """Return a block hash as it travels: its last eight bytes, big-endian, unsigned."""
    return int.from_bytes(block_hash[-8:], "big")


def _wire(event: KVEvent) -> list[Any]:
    """Return an event as vLLM's array: its name, then its fields in order."""
    if isinstance(event, AllBlocksCleared):
        return ["AllBlocksCleared"]
    hashes = [wire_hash(h) for h in event.block_hashes]
    if isinstance(event, BlockRemoved):
        return ["BlockRemoved", hashes, event.medium]
    return _wire_stored(event, hashes)


def _wire_stored(event: BlockStored, hashes: list[int]) -> list[Any]:
    parent = None if event.parent_block_hash is None else wire_hash(event.parent_block_hash)
    wire: list[Any] = [
        "BlockStored",
        hashes,
        parent,
        event.token_ids,
        event.block_size,
        event.lora_id,
        event.medium,
        None,  # lora_name
    ]
    if event.namespace_key and parent is None:
        # extra_keys, per block: what went into its hash beside tokens. Only a first block has it.
        wire.append([[event.namespace_key], *[None] * (len(hashes) - 1)])
    return wire


def _address(opened: zmq.Socket[bytes]) -> str:
    """Return where a socket is bound (its port, if any was to be picked) or connected."""
    return opened.get_string(zmq.LAST_ENDPOINT)


def _sequence(number: int) -> bytes:
    return number.to_bytes(SEQUENCE_BYTES, "big")


def _open(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str, option: str
) -> zmq.Socket[bytes]:
    opened = context.socket(kind)
    opened.set_hwm(HIGH_WATER_MARK)
    try:
        if endpoint.startswith(">"):
            opened.connect(endpoint[1:])
        else:
            opened.bind(endpoint)
    except (zmq.ZMQError, ValueError) as error:
        opened.close(linger=0)
        raise ConfigError(f"{option} {endpoint} can't be opened: {error}") from None
    return opened
