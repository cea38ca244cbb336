"""A small mover between a cache and its tiers, and what the tiers should hold then."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
from faults import FailingOS
from pool_model import Name, Namespace, Tokens

from radixkv.cache import RadixCache
from radixkv.cache.radix_tree import Node
from radixkv.cache.tiers import SlotIndex, node_prefix, prefix_keys
from radixkv.cache.tiers_disk import DiskTier

__all__ = ["Mover", "TierModel", "open_disk", "packed"]

Block = tuple[bytes, bytes]
"""Key and tokens."""


def packed(content: list[int]) -> bytes:
    return np.array(content, dtype="<i8").tobytes()


def open_disk(path: Path, block_size: int, num_blocks: int) -> DiskTier:
    content, tokens = 8 * block_size, 4 * block_size
    return DiskTier(
        path,
        72 + num_blocks * (content + tokens + 72),
        fingerprint=bytes(32),
        content_bytes=content,
        token_bytes=tokens,
    )


class Mover:
    """Moves evicted blocks to host memory, those it loses to disk, and brings them back.

    What an engine does, in one thread: evicted blocks are noted, and copied by `flush`, which
    comes before anything is written to the pool.
    """

    def __init__(
        self, cache: RadixCache, read: Callable[[int], list[int]], host_blocks: int
    ) -> None:
        self.cache = cache
        self.read_pool = read
        self.host = SlotIndex(host_blocks)
        self.memory: dict[int, list[int]] = {}
        self.disk: DiskTier | None = None
        self.waiting: list[tuple[bytes, bytes, int]] = []
        cache.observers.append(self)

    def on_stored(self, node: Node, first: int, count: int) -> None: ...

    def on_removed(self, node: Node, first: int, count: int) -> None:
        if node.is_tail:
            return
        size, prefix = self.cache.tree.block_bytes, node_prefix(node)
        start = len(prefix) // size - node.num_blocks + first
        keys = prefix_keys(node.root.namespace, prefix, size, start, start + count)
        blocks = [
            (key, node.tokens[i * size : (i + 1) * size], node.block_ids[i])
            for i, key in enumerate(keys, first)
        ]
        self.waiting += reversed(blocks)

    def on_cleared(self) -> None:
        self.waiting.clear()
        self.host.clear()
        if self.disk is not None:
            self.disk.clear()

    def flush(self) -> None:
        for key, tokens, block in self.waiting:
            self.host.touch(key)
            if self.host.find(key, tokens) is not None:
                continue
            slot, victim = self.host.take()
            if victim is not None and self.disk is not None:
                self.disk.write(victim.key, victim.tokens, packed(self.memory[victim.slot]))
            self.memory[slot] = list(self.read_pool(block))
            self.host.put(key, tokens, slot)
        self.waiting.clear()

    def blocks(self, namespace: Namespace, tokens: Tokens, first: int, last: int) -> list[Block]:
        data, size = np.array(tokens, dtype="<i4").tobytes(), self.cache.tree.block_bytes
        keys = prefix_keys(namespace, data, size, first, last)
        return [(key, data[i * size : (i + 1) * size]) for i, key in enumerate(keys, first)]

    def where(self, block: Block) -> str:
        """The tier that has a block, or ""."""
        if self.host.find(*block) is not None:
            return "host"
        return "disk" if self.disk is not None and self.disk.contains(*block) else ""

    def load(self, block: Block) -> list[int] | None:
        slot = self.host.find(*block)
        if slot is not None:
            self.host.demote(block[0])
            return self.memory[slot]
        content = self.disk.read(*block) if self.disk is not None else None
        return None if content is None else np.frombuffer(content, "<i8").tolist()

    def check_integrity(self) -> None:
        self.host.check_integrity()
        if self.disk is not None:
            self.disk.check_integrity()


class TierModel:
    """Which prefix is in which tier, least recently used first.

    Attributes:
        disk: prefix to (number of its write, whether it must be readable).
        is_exact: False once a failure may have lost, or brought back, what a restart finds.
    """

    def __init__(self, mover: Mover, io: FailingOS, host_blocks: int, disk_blocks: int) -> None:
        self.mover = mover
        self.io = io
        self.host_blocks = host_blocks
        self.disk_blocks = disk_blocks
        self.host: OrderedDict[Name, list[int]] = OrderedDict()
        self.disk: OrderedDict[Name, tuple[int, bool]] = OrderedDict()
        self.written: dict[Name, list[int]] = {}
        self.num_writes = 0
        self.is_exact = True

    def flush(self, copy_away: Callable[[], list[tuple[Name, list[int]]]]) -> None:
        """Move evicted blocks and compare what happens with what should."""
        writes = self._observe()
        self.mover.flush()
        for name, content in copy_away():
            if name in self.host:
                self.host.move_to_end(name)
                continue
            if len(self.host) == self.host_blocks:
                victim, lost = self.host.popitem(last=False)
                if self.mover.disk is not None:
                    self._write(victim, lost, *writes.pop(0))
            self.host[name] = content
        assert not writes

    def _observe(self) -> list[tuple[bool, str]]:
        """Collect (result, failed call) of every write to the disk from now on."""
        found: list[tuple[bool, str]] = []
        disk, io = self.mover.disk, self.io
        if disk is not None:
            write = type(disk).write

            def observed(key: bytes, tokens: bytes, content: bytes) -> bool:
                io.reset()
                found.append((write(disk, key, tokens, content), io.fired))
                return found[-1][0]

            disk.write = observed  # type: ignore[method-assign]
        return found

    def _write(self, name: Name, content: list[int], is_stored: bool, failed: str) -> None:
        if name in self.disk:
            self.disk.move_to_end(name)
            assert is_stored
            return
        if len(self.disk) == self.disk_blocks:
            self.disk.popitem(last=False)
        self.num_writes += 1
        assert is_stored == (not failed or self.io.kind == "lie")
        self.is_exact &= not failed
        self.written[name] = content
        if is_stored:
            self.disk[name] = self.num_writes, not failed

    def where(self, name: Name) -> str:
        return "host" if name in self.host else "disk" if name in self.disk else ""

    def load(self, name: Name, content: list[int] | None) -> None:
        """Note that a block was asked for and `content` came back."""
        failed = self.io.fired
        self.io.reset()
        if name in self.host:
            assert content == self.host[name]
            self.host.move_to_end(name, last=False)
            return
        _, is_sure = self.disk[name]
        assert content is None or content == self.written[name]
        assert (content is not None) or failed or not is_sure
        assert content is None or not failed
        self.is_exact &= content is not None
        if content is None:
            del self.disk[name]
        else:
            self.disk.move_to_end(name)

    def clear(self) -> None:
        self.is_exact &= not self.io.fired
        self.io.reset()
        self.host.clear()
        self.disk.clear()

    def restart(
        self, reopen: Callable[[], DiskTier], *, is_orderly: bool, reads_all: bool = True
    ) -> None:
        """End the process that has the disk tier, in order or at once, and start another one.

        `reads_all` reads all that was restored, which hides whether it is in the order of use.
        """
        mover = self.mover
        self.io.reset()
        if mover.disk is not None:
            if is_orderly:
                mover.disk.close()
                if self.io.fired:
                    self.is_exact = False
                else:
                    entries = enumerate(self.disk.items(), start=1)
                    self.disk = OrderedDict((n, (i, sure)) for i, (n, (_, sure)) in entries)
                    self.num_writes = len(self.disk)
            else:
                os.close(mover.disk._index_file)
                os.close(mover.disk._content_file)
        self.disk = OrderedDict(sorted(self.disk.items(), key=lambda item: item[1][0]))
        mover.disk = None
        try:
            mover.disk = reopen()
        except OSError:
            assert self.io.fired
        self.is_exact &= not self.io.fired
        self.io.reset()
        if mover.disk is not None and (reads_all or not self.is_exact):
            self._compare()

    def _compare(self) -> None:
        """Read back all that was restored: only what was written may be there, and as it was."""
        mover, disk = self.mover, self.mover.disk
        assert disk is not None
        size = mover.cache.block_size
        found: OrderedDict[Name, tuple[int, bool]] = OrderedDict()
        order = list(self.disk) + [n for n in self.written if n not in self.disk]
        for name in order:
            namespace, prefix = name
            last = len(prefix) // size
            (block,) = mover.blocks(namespace, prefix, last - 1, last)
            if not disk.contains(*block):
                assert not self.is_exact or name not in self.disk
                continue
            assert not self.is_exact or name in self.disk
            content = disk.read(*block)  # makes the order that of `order`
            assert content in (None, packed(self.written[name]))
            assert content is not None or not self.is_exact
            if content is not None:
                found[name] = self.disk.get(name, (0, True))[0], True
        self.disk = found
        assert len(disk) == len(found)
