"""The disk tier: blocks in one file, and what they are in another."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_128_digest

from radixkv.cache.tiers import KEY_BYTES, Entry, SlotIndex

__all__ = ["FORMAT_VERSION", "DiskStats", "DiskTier"]

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
CHECKSUM_BYTES = 16
WARN_EVERY_S = 60.0

_MAGIC = b"RADIXKV\0"
_HEADER = struct.Struct("<8sI32sQI")  # magic, version, fingerprint, content bytes, token bytes
_HEADER_BYTES = _HEADER.size + CHECKSUM_BYTES
_TICK = struct.Struct("<Q")


@dataclass(slots=True)
class DiskStats:
    """What happened since the start; counters never decrease.

    Attributes:
        blocks_restored: blocks found at the start.
        blocks_written, blocks_read: blocks moved.
        write_errors, read_errors: what the operating system refused (a full disk, a bad sector).
        blocks_torn: entries and contents that didn't match their checksum or were cut off.
        files_foreign: files of another model, dtype, block size, layout or version.
    """

    blocks_restored: int = 0
    blocks_written: int = 0
    blocks_read: int = 0
    write_errors: int = 0
    read_errors: int = 0
    blocks_torn: int = 0
    files_foreign: int = 0


class DiskTier:
    """Owns two files named by the fingerprint: `NAME.blocks`, and `NAME.index` with its lock.

    Slot `i` of the first holds a block's content, entry `i` of the second its key, tokens, time of
    use and checksum, and a checksum of its own. Nothing is trusted that doesn't match its
    checksum, so a crash at any moment, in any order of the writes, loses blocks and no more.

    One thread reads and writes; `contains`, `clear` and the counters may be used from others.
    """

    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        *,
        fingerprint: bytes,
        content_bytes: int,
        token_bytes: int,
    ) -> None:
        """Open the tier and read its index.

        Args:
            directory: made if need be.
            max_bytes: size of the two files together.
            fingerprint: 32 bytes that differ wherever content must not be shared.
            content_bytes: bytes of a block's KV.
            token_bytes: bytes of a block's token ids.

        Raises:
            ValueError: `max_bytes` is less than one block takes.
            OSError: the files can't be made, or another process uses them.

        Cost: one read of the index, O(blocks).
        """
        self.content_bytes = content_bytes
        self.token_bytes = token_bytes
        self._entry_bytes = _TICK.size + KEY_BYTES + 2 * CHECKSUM_BYTES + token_bytes
        capacity = (max_bytes - _HEADER_BYTES) // (content_bytes + self._entry_bytes)
        if capacity < 1:
            raise ValueError(f"{max_bytes} bytes are less than one block takes")
        self.stats = DiskStats()
        self._index = SlotIndex(capacity)
        self._checksums: dict[int, bytes] = {}  # of the content of each slot
        self._lock = threading.Lock()
        self._tick = 0
        self._on_change: Callable[[bool, bytes], None] | None = None
        self._generation = 0  # of `clear`: a write that began before one must not be filed
        self._last_warning = -WARN_EVERY_S
        fields = (_MAGIC, FORMAT_VERSION, fingerprint, content_bytes, token_bytes)
        header = _HEADER.pack(*fields)
        self._header = header + xxh3_128_digest(header)
        directory.mkdir(parents=True, exist_ok=True)
        name = f"kv-{xxh3_128_digest(header).hex()}"
        self.stats.files_foreign = sum(p.stem != name for p in directory.glob("*.index"))
        self._content_file = -1
        self._index_file = os.open(directory / f"{name}.index", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._index_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._content_file = os.open(
                directory / f"{name}.blocks", os.O_RDWR | os.O_CREAT, 0o600
            )
            self._restore()
        except BlockingIOError:
            self._close_files()
            raise OSError(errno.EBUSY, "another server uses it") from None
        except OSError:
            self._close_files()
            raise

    def __len__(self) -> int:
        return len(self._index)

    @property
    def capacity(self) -> int:
        """Blocks that fit."""
        return self._index.capacity

    def follow(self, on_change: Callable[[bool, bytes], None]) -> None:
        """Report each block that is here, and then every change.

        Args:
            on_change: called with whether a block came or went, and its tokens; by the thread
                that changes the tier, in the order of the changes. It must not use the tier.
        """
        with self._lock:
            self._on_change = on_change
            for entry in self._index.items():
                on_change(True, entry.tokens)

    def contains(self, key: bytes, tokens: bytes) -> bool:
        """Whether the block is here, as far as the index says."""
        with self._lock:
            return self._index.find(key, tokens) is not None

    def touch(self, key: bytes) -> bool:
        """Make a block the most recently used; return whether it is here."""
        with self._lock:
            self._index.touch(key)
            return key in self._index

    def write(self, key: bytes, tokens: bytes, content: bytes) -> bool:
        """Store a block, in the place of the least recently used if need be.

        It can be found once all of it is written. A failure is counted and leaves no entry.

        Returns:
            Whether the block is here now.
        """
        with self._lock:
            if key in self._index:
                self._index.touch(key)
                return True
            slot, victim = self._index.take()
            if victim is not None:
                self._report(False, victim.tokens)
            self._tick += 1
            tick, generation = self._tick, self._generation
        checksum = xxh3_128_digest(content)
        try:
            if victim is not None:
                self._write_at(self._index_file, bytes(self._entry_bytes), self._entry_at(slot))
            self._write_at(self._content_file, content, slot * self.content_bytes)
            entry = self._pack(slot, tick, key, checksum, tokens)
            self._write_at(self._index_file, entry, self._entry_at(slot))
        except OSError as error:
            with self._lock:
                self.stats.write_errors += 1
                if generation == self._generation:
                    self._index.give_back(slot)
            self._warn("a block can't be written to the disk cache: %s", error)
            return False
        with self._lock:
            if generation != self._generation:
                return False
            self._checksums[slot] = checksum
            self._index.put(key, tokens, slot)
            self.stats.blocks_written += 1
            self._report(True, tokens)
        return True

    def read(self, key: bytes, tokens: bytes) -> bytes | None:
        """Return a block's content; None if it isn't here, can't be read, or isn't what it was."""
        with self._lock:
            slot = self._index.find(key, tokens)
            if slot is None:
                return None
            checksum = self._checksums[slot]
        try:
            content = os.pread(self._content_file, self.content_bytes, slot * self.content_bytes)
        except OSError as error:
            self._forget(key, tokens, slot)
            self.stats.read_errors += 1
            self._warn("a block can't be read from the disk cache: %s", error)
            return None
        if xxh3_128_digest(content) != checksum:
            self._forget(key, tokens, slot)
            self.stats.blocks_torn += 1
            self._warn("a block of the disk cache is damaged (%d bytes read)", len(content))
            return None
        with self._lock:
            self._index.touch(key)
        self.stats.blocks_read += 1
        return content

    def clear(self) -> None:
        """Forget every block."""
        with self._lock:
            self._generation += 1
            for entry in self._index.items():
                self._report(False, entry.tokens)
            self._index = SlotIndex(self._index.capacity)
            self._checksums.clear()
            try:
                os.ftruncate(self._index_file, 0)
                self._write_at(self._index_file, self._header, 0)
            except OSError as error:
                self.stats.write_errors += 1
                self._warn("the disk cache can't be cleared: %s", error)

    def discard(self, matches: Callable[[bytes], bool]) -> None:
        """Forget the blocks whose tokens match, on the disk too. Cost: O(blocks)."""
        with self._lock:
            for entry in [e for e in self._index.items() if matches(e.tokens)]:
                self._index.drop(entry.key)
                del self._checksums[entry.slot]
                self._report(False, entry.tokens)
                try:
                    empty = bytes(self._entry_bytes)
                    self._write_at(self._index_file, empty, self._entry_at(entry.slot))
                except OSError as error:
                    self.stats.write_errors += 1
                    self._warn("a block can't be taken out of the disk cache: %s", error)

    def close(self) -> None:
        """Note the order of use, and see to it that all is on the disk. Idempotent."""
        if self._index_file < 0:
            return
        try:
            table = bytearray(self._entry_bytes * (max(self._checksums, default=-1) + 1))
            for tick, entry in enumerate(self._index.items(), start=1):
                start = entry.slot * self._entry_bytes
                table[start : start + self._entry_bytes] = self._pack(
                    entry.slot, tick, entry.key, self._checksums[entry.slot], entry.tokens
                )
            self._write_at(self._index_file, bytes(table), _HEADER_BYTES)
            os.fsync(self._content_file)
            os.fsync(self._index_file)
        except OSError as error:
            self.stats.write_errors += 1
            log.warning("the disk cache can't be closed in order: %s", error)
        self._close_files()

    def check_integrity(self) -> None:
        """Raise ValueError unless every block has one slot and a checksum."""
        with self._lock:
            self._index.check_integrity()
            if any(entry.slot not in self._checksums for entry in self._index.items()):
                raise ValueError("a block of the disk tier has no checksum")

    def _restore(self) -> None:
        size = os.fstat(self._index_file).st_size
        raw = os.pread(self._index_file, size, 0) if size else b""
        if raw[:_HEADER_BYTES] != self._header:
            self.stats.files_foreign += bool(raw)
            os.ftruncate(self._index_file, 0)
            os.ftruncate(self._content_file, 0)
            self._write_at(self._index_file, self._header, 0)
            return
        num_content = os.fstat(self._content_file).st_size // self.content_bytes
        found: list[tuple[int, Entry]] = []
        empty = bytes(self._entry_bytes)
        for slot, start in enumerate(range(_HEADER_BYTES, len(raw), self._entry_bytes)):
            packed = raw[start : start + self._entry_bytes]
            if packed == empty or slot >= self._index.capacity:
                continue
            body, seal = packed[:-CHECKSUM_BYTES], packed[-CHECKSUM_BYTES:]
            if slot >= num_content or xxh3_128_digest(_TICK.pack(slot) + body) != seal:
                self.stats.blocks_torn += 1
                continue
            (tick,) = _TICK.unpack_from(body)
            key_end = _TICK.size + KEY_BYTES
            self._checksums[slot] = body[key_end : key_end + CHECKSUM_BYTES]
            tokens = body[key_end + CHECKSUM_BYTES :]
            found.append((tick, Entry(body[_TICK.size : key_end], tokens, slot)))
        found.sort(key=lambda item: item[0])
        self._index.restore(entry for _, entry in found)
        self._tick = found[-1][0] if found else 0
        self.stats.blocks_restored = len(self._index)
        # What a smaller size has no room for is given back to the file system.
        if num_content > self._index.capacity:
            os.ftruncate(self._content_file, self._index.capacity * self.content_bytes)
            os.ftruncate(self._index_file, self._entry_at(self._index.capacity))

    def _close_files(self) -> None:
        files = self._content_file, self._index_file
        self._content_file = self._index_file = -1
        for file in files:
            if file >= 0:
                # What couldn't be kept is found out by its checksum.
                with suppress(OSError):
                    os.close(file)

    def _forget(self, key: bytes, tokens: bytes, slot: int) -> None:
        with self._lock:
            if self._checksums.pop(slot, None) is not None:
                self._index.drop(key)
                self._report(False, tokens)

    def _report(self, stored: bool, tokens: bytes) -> None:
        if self._on_change is not None:
            self._on_change(stored, tokens)

    def _pack(self, slot: int, tick: int, key: bytes, checksum: bytes, tokens: bytes) -> bytes:
        body = _TICK.pack(tick) + key + checksum + tokens
        # The slot is sealed in, so that an entry in the wrong place is no entry.
        return body + xxh3_128_digest(_TICK.pack(slot) + body)

    def _entry_at(self, slot: int) -> int:
        return _HEADER_BYTES + slot * self._entry_bytes

    def _write_at(self, file: int, data: bytes, offset: int) -> None:
        written = os.pwrite(file, data, offset)
        if written != len(data):
            raise OSError(errno.ENOSPC, "only a part could be written")

    def _warn(self, message: str, detail: object) -> None:
        now = time.monotonic()
        if now - self._last_warning >= WARN_EVERY_S:
            self._last_warning = now
            log.warning(message, detail)
