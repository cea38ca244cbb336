"""Batches of KV events over ZeroMQ, with a bounded memory of those that were sent.

A message is `[topic, sequence number (8 bytes, big-endian), payload]`, the payload that of
`kv_wire`.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque

import zmq

from radixkv.cache.events import KVEvent
from radixkv.engine.kv_wire import encode_batch
from radixkv.errors import ConfigError

__all__ = ["ZmqEventPublisher"]

log = logging.getLogger(__name__)

BUFFERED_BATCHES = 10_000
HIGH_WATER_MARK = 100_000
CLOSE_TIMEOUT_S = 1.0
MAX_LOOSE_EVENTS = 1000
SEQUENCE_BYTES = 8
# Ends a replay.
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)


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
        self.replayed = 0
        self._loose: list[KVEvent] = []  # not in a batch yet
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
        with self._lock:
            self._seal()
            self._append(events)
        self._wake()

    def add(self, event: KVEvent) -> None:
        """Queue one event; it is sent soon, in one batch with others. Never blocks.

        The order of `add` and `publish` is that of the batches, whichever threads they are called
        from.
        """
        with self._lock:
            self._loose.append(event)
            is_first = len(self._loose) == 1
            if len(self._loose) >= MAX_LOOSE_EVENTS:
                self._seal()
        if is_first:
            self._wake()

    def close(self) -> None:
        """Send what is queued, then stop. Idempotent."""
        self._closing = True
        self._wake()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _seal(self) -> None:
        if self._loose:
            loose, self._loose = self._loose, []
            self._append(loose)

    def _append(self, events: list[KVEvent]) -> None:
        self._buffer.append((self._next, encode_batch(events, time.time())))
        self._next += 1

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
        with self._lock:
            self._seal()
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
                self.replayed += 1
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
