"""The tiers below the KV pool: evicted blocks go to host memory, from there to disk, and back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from radixkv.cache import RadixCache
from radixkv.cache import Sequence as CacheSequence
from radixkv.cache.hashing import namespace_seed
from radixkv.cache.radix_tree import Node
from radixkv.cache.tiers import Entry
from radixkv.cache.tiers_disk import DiskTier
from radixkv.engine.tiering_host import HostTier
from radixkv.engine.tiering_io import DiskWorker, Fetch
from radixkv.engine.tiering_labels import node_blocks, prompt_blocks
from radixkv.engine.tiering_plan import LoadPlan, PlannedBlock, TransferCosts
from radixkv.engine.tiering_save import CacheSaver
from radixkv.request import Namespace

__all__ = ["TIERS", "BlockStore", "TierListener", "Tiering"]

log = logging.getLogger(__name__)

TIERS = ("device", "host", "disk")
GATHER_BLOCKS = 64  # copied out in one go; bounds the memory of a copy under way
MAX_QUEUED_BYTES = 256 * 1024**2  # waiting to be written to disk
MAX_FETCH_BYTES = 512 * 1024**2  # read ahead for the one request that is read for
SAVE_LIMIT_S = 20.0  # for writing the cache to disk at the end
WARN_EVERY_S = 60.0

TierListener = Callable[[str, bool, bytes], None]
"""Told of a tier ("host" or "disk"), whether a block came or went, and the block's packed label."""


class BlockStore(Protocol):
    """What holds the content of the pool's blocks."""

    def gather_blocks(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Return a copy of the blocks' content, `[n, content_bytes]` uint8 in host memory."""
        ...

    def scatter_blocks(self, block_ids: Sequence[int], contents: torch.Tensor) -> None:
        """Write `[n, content_bytes]` uint8 from host memory to the blocks."""
        ...


@dataclass(slots=True)
class TierCounters:
    """Blocks moved, and what went wrong; counters never decrease."""

    blocks_offloaded: int = 0
    blocks_loaded_host: int = 0
    blocks_loaded_disk: int = 0
    offload_errors: int = 0
    load_errors: int = 0


class Tiering:
    """Owns the host tier, the way to and from the disk tier, and what a transfer costs.

    Everything runs in the engine's thread but the reads and writes of the disk, which have one of
    their own. The order that keeps contents right: an evicted block is only noted, and `flush`
    copies it away before anything is written to the pool, be it by a step or by `load`. So a block
    that can be found in a tier has been copied as a whole, and one that is in the tree has been
    loaded as a whole. A copy that fails leaves no entry, and its request computes the block.
    """

    def __init__(
        self,
        store: BlockStore,
        cache: RadixCache,
        content_bytes: int,
        *,
        host_blocks: int = 0,
        disk: DiskTier | None = None,
        policy: str = "auto",
        save_limit_s: float = SAVE_LIMIT_S,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Follow a cache.

        Args:
            store: the content of the cache's blocks.
            cache: gets this as an observer.
            content_bytes: bytes of a block's KV.
            host_blocks: blocks of host memory; 0 is none.
            disk: the disk tier, or None; closed by `close`.
            policy: "auto" brings back only what is estimated to be faster than computing it,
                "always" everything.
            save_limit_s: how long `close` may write to disk.
            clock: seconds.
        """
        self.counters = TierCounters()
        self.cache = cache
        self.host = HostTier(host_blocks, content_bytes) if host_blocks else None
        self.worker: DiskWorker | None = None
        if disk is not None:
            self.worker = DiskWorker(disk, max(16, MAX_QUEUED_BYTES // content_bytes))
        self.costs = TransferCosts(cache.block_size, content_bytes)
        self._store = store
        self._content_bytes = content_bytes
        self._policy = policy
        self._clock = clock
        self._saver = CacheSaver(save_limit_s, clock)
        # Not copied away yet: (key, label, block id).
        self._evicted: list[tuple[bytes, bytes, int]] = []
        self._fetch: tuple[int, Fetch] | None = None  # (owner, what is read for it)
        self._last_warning = -WARN_EVERY_S
        cache.observers.append(self)

    def follow(self, listener: TierListener) -> None:
        """Report what the tiers hold, and then every change, in order.

        The host tier is reported by the engine's thread, the disk tier by whichever changes it.
        """
        if self.host is not None:
            self.host.follow(lambda stored, label: listener("host", stored, label))
        if self.worker is not None:
            self.worker.disk.follow(lambda stored, label: listener("disk", stored, label))

    # --- what the cache reports -----------------------------------------------------------------

    def on_stored(self, node: Node, first: int, count: int) -> None:
        """See `CacheObserver`."""

    def on_removed(self, node: Node, first: int, count: int) -> None:
        """Note evicted blocks, to be copied by the next `flush`."""
        if node.is_tail:
            return
        evicted = list(node_blocks(node, first, count, self.cache.tree.block_bytes))
        # The end of a run is the first to be forgotten, as in the tree.
        self._evicted += reversed(evicted)

    def on_cleared(self) -> None:
        """Forget everything: whoever clears the cache wants it to be cold."""
        self._evicted.clear()
        if self.host is not None:
            self.host.discard(lambda _: True)
        if self.worker is not None:
            self.worker.clear()

    def drop_namespace(self, namespace: Namespace) -> None:
        """Forget a namespace's blocks in every tier, and what is being read. Cost: O(blocks)."""
        seed = namespace_seed(namespace, self.cache.tree.digest)

        self._drop(lambda label: label.startswith(seed))

    def drop_path(self, namespace: Namespace, tokens: bytes, first: int) -> None:
        """Forget the whole blocks of a prompt from block `first` on. Cost: O(blocks held).

        Args:
            namespace: of the prompt.
            tokens: int32 ids from its start, little-endian.
            first: blocks before it stay.
        """
        tree = self.cache.tree
        whole = tokens[: len(tokens) // tree.block_bytes * tree.block_bytes]
        blocks = prompt_blocks(tree, namespace, whole, None)
        labels = {label for _, label in islice(blocks, first, None)}
        if labels:
            self._drop(labels.__contains__)

    def _drop(self, matches: Callable[[bytes], bool]) -> None:
        if self._fetch is not None:
            self.forget(self._fetch[0])  # perhaps of one of these blocks
        self._evicted = [item for item in self._evicted if not matches(item[1])]
        if self.host is not None:
            self.host.discard(matches)
        if self.worker is not None:
            self.worker.discard(matches)

    # --- out of the pool ------------------------------------------------------------------------

    def flush(self) -> None:
        """Copy evicted blocks out of the pool. Call it before anything is written there."""
        evicted = [item for item in self._evicted if not self._is_kept(*item[:2])]
        self._evicted.clear()
        if self.host is not None and self.worker is None:
            evicted = evicted[-self.host.capacity :]
        for start in range(0, len(evicted), GATHER_BLOCKS):
            part = evicted[start : start + GATHER_BLOCKS]
            try:
                contents = self._store.gather_blocks([block_id for _, _, block_id in part])
            except Exception as error:
                self.counters.offload_errors += len(part)
                self._warn("evicted blocks can't be copied", error)
                continue
            for (key, label, _), content in zip(part, contents.numpy(), strict=True):
                self._keep(key, label, content)

    def _is_kept(self, key: bytes, label: bytes) -> bool:
        """Whether the highest tier has the block already; it is now its most recently used."""
        if self.host is not None:
            return self.host.touch(key, label)
        return self.worker is not None and self.worker.touch(key)

    def _keep(self, key: bytes, label: bytes, content: npt.NDArray[np.uint8]) -> None:
        if self.host is None:
            if self.worker is not None:
                self.counters.blocks_offloaded += self.worker.write(key, label, content.tobytes())
            return
        try:
            self.host.keep(key, label, content, self._pass_down)
        except Exception as error:
            self.counters.offload_errors += 1
            self._warn("an evicted block can't be kept", error)
            return
        self.counters.blocks_offloaded += 1

    def _pass_down(self, victim: Entry, content: npt.NDArray[np.uint8]) -> None:
        if self.worker is not None and not self.worker.touch(victim.key):
            self.worker.write(victim.key, victim.tokens, content.tobytes())

    # --- back into the pool ---------------------------------------------------------------------

    def find(self, owner: int, sequence: CacheSequence) -> LoadPlan | None:
        """Return what to bring back for a request that is about to start.

        Args:
            owner: the request's number; `forget` it when it has started or ended.
            sequence: not open.

        Returns:
            The plan, perhaps an empty one, to be used before anything else changes; None while
            blocks are read from disk, for this request or for the one before it.
        """
        if self._fetch is not None and self._fetch[0] == owner and not self._fetch[1].done.is_set():
            return None
        # What the request before this one has evicted in the same step can be found, too.
        self.flush()
        cache, size = self.cache, self.cache.block_size
        last = (len(sequence) - 1) // size
        handle = cache.match_prefix(sequence.token_ids, sequence.namespace, len(sequence) - 1)
        first = handle.match.num_blocks if handle.match is not None else 0
        blocks: list[PlannedBlock] = []
        if first < last:
            tokens = sequence.token_ids[: last * size].tobytes()
            wanted = prompt_blocks(cache.tree, sequence.namespace, tokens, handle.match)
            blocks = list(self._lookup(owner, wanted))
        if self._policy == "auto":
            blocks = blocks[: self.costs.num_worth_loading(blocks)]
        unread = [block for block in blocks if block.is_unread]
        if not unread:
            return LoadPlan(first, blocks)
        if self._fetch is None:
            assert self.worker is not None
            unread = unread[: max(1, MAX_FETCH_BYTES // self._content_bytes)]
            known = {b.key: b.content for b in blocks if b.content is not None}
            self._fetch = owner, self.worker.fetch([(b.key, b.tokens) for b in unread], known)
        return None

    def load(self, sequence: CacheSequence, plan: LoadPlan) -> dict[str, int]:
        """Bring blocks back into a sequence's own blocks, which must be reserved; nothing else.

        Returns:
            Tokens brought back by tier; nothing if the copy failed. The caller commits them.
        """
        if not plan.blocks or sequence.num_tree_blocks != plan.first:
            return {}
        block_ids = sequence.block_table[plan.first : plan.first + len(plan.blocks)].tolist()
        try:
            begin = self._clock()
            contents = self._read(plan.blocks)
            seconds = self._clock() - begin
            # Only now, since it may give the slots just read to what was evicted meanwhile.
            self.flush()
            begin = self._clock()
            self._store.scatter_blocks(block_ids, contents)
            self.costs.record_transfer("host", contents.nbytes, self._clock() - begin + seconds)
        except Exception as error:
            self.counters.load_errors += 1
            self._warn("blocks can't be brought back", error)
            return {}
        if self.host is not None:
            # The pool has them now; until they are evicted again, their places serve others best.
            for block in plan.blocks:
                self.host.demote(block.key)
        by_tier = {tier: sum(b.tier == tier for b in plan.blocks) for tier in ("host", "disk")}
        self.counters.blocks_loaded_host += by_tier["host"]
        self.counters.blocks_loaded_disk += by_tier["disk"]
        return {tier: count * self.cache.block_size for tier, count in by_tier.items()}

    def forget(self, owner: int) -> None:
        """Drop what was read for a request. Idempotent."""
        if self._fetch is not None and self._fetch[0] == owner:
            self._fetch[1].cancelled = True
            self._fetch = None

    def wait(self, timeout_s: float = 0.05) -> None:
        """Wait for the reading that a request waits for, if there is one."""
        if self._fetch is not None:
            self._fetch[1].done.wait(timeout_s)

    def _lookup(self, owner: int, wanted: Iterable[tuple[bytes, bytes]]) -> Iterator[PlannedBlock]:
        """Yield the blocks of these keys and labels, up to the first miss."""
        fetch = self._fetch[1] if self._fetch is not None and self._fetch[0] == owner else None
        if fetch is not None and fetch.seconds:
            self.costs.record_transfer("disk", fetch.num_read * self._content_bytes, fetch.seconds)
            fetch.seconds = 0.0
        for key, own in wanted:
            if self.host is not None and self.host.find(key, own) is not None:
                yield PlannedBlock(key, own, "host")
            # Before the disk: a block is in one of the two at any moment, and only moves down.
            elif self.worker is not None and (content := self.worker.queued(key, own)) is not None:
                yield PlannedBlock(key, own, "disk", content)
            elif fetch is not None:
                # Read once: what could not be read then is computed.
                content = fetch.contents.get(key)
                if content is None:
                    return
                yield PlannedBlock(key, own, "disk", content)
            elif self.worker is not None and self.worker.disk.contains(key, own):
                yield PlannedBlock(key, own, "disk")
            else:
                return

    def _read(self, blocks: list[PlannedBlock]) -> torch.Tensor:
        """Return the blocks' content, `[n, content_bytes]` uint8."""
        contents = torch.empty((len(blocks), self._content_bytes), dtype=torch.uint8)
        for row, block in zip(contents.numpy(), blocks, strict=True):
            if block.content is not None:
                row[:] = np.frombuffer(block.content, dtype=np.uint8)
                continue
            kept = self.host.find(block.key, block.tokens) if self.host is not None else None
            if kept is None:
                raise LookupError("a block has left host memory")
            row[:] = kept
        return contents

    # --- the end --------------------------------------------------------------------------------

    def close(self, *, save: bool = True) -> None:
        """Write to disk what is cached, most recently used first, and close it. Idempotent.

        Args:
            save: False writes nothing more.
        """
        if self.worker is None:
            return
        if save:
            self.flush()
        worker, self.worker = self.worker, None
        if not save:
            worker.discard_writes()
        self._saver.begin()
        worker.close()
        if save:
            num_blocks = self.cache.num_tree_blocks + (len(self.host) if self.host else 0)
            self._saver.save(self._all_blocks(), num_blocks, worker.disk, self._gather)
        worker.disk.close()

    def stop_saving(self) -> None:
        """Make `close` write no more than it has begun to. Safe from any thread."""
        self._saver.stop()

    def _gather(self, block_ids: Sequence[int]) -> list[bytes] | None:
        """Return the content of blocks of the pool and, as ~slot, of host memory; None: failed."""
        in_pool = [block_id for block_id in block_ids if block_id >= 0]
        try:
            gathered = iter(self._store.gather_blocks(in_pool).numpy()) if in_pool else iter(())
        except Exception as error:
            self.counters.offload_errors += len(in_pool)
            self._warn("cached blocks can't be copied", error)
            return None
        contents = []
        for block_id in block_ids:
            if block_id >= 0:
                contents.append(next(gathered).tobytes())
            elif self.host is not None:
                contents.append(self.host.row(~block_id).tobytes())
        return contents

    def _all_blocks(self) -> Iterator[tuple[bytes, bytes, int]]:
        """Yield the blocks of pool and host memory, most recently used first."""
        nodes = [n for n in self.cache.tree.nodes() if not n.is_root and not n.is_tail]
        nodes.sort(key=lambda node: -node.last_access)  # stable: parents stay before children
        for node in nodes:
            yield from node_blocks(node, 0, node.num_blocks, self.cache.tree.block_bytes)
        if self.host is not None:
            for entry in reversed(list(self.host.items())):
                yield entry.key, entry.tokens, ~entry.slot

    # --- numbers --------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return counters and sizes by tier, as plain types."""
        report: dict[str, Any] = asdict(self.counters)
        report["load_bytes_per_s"] = dict(self.costs.rates)
        report["prefill_tokens_per_s"] = self.costs.prefill_rate
        if self.host is not None:
            report["host"] = {"blocks": len(self.host), "capacity_blocks": self.host.capacity}
        worker = self.worker  # the engine's thread may close it at any moment
        if worker is not None:
            disk = worker.disk
            report["disk"] = {
                "blocks": len(disk),
                "capacity_blocks": disk.capacity,
                "queued_blocks": worker.num_queued,
                "writes_dropped": worker.num_dropped,
                **asdict(disk.stats),
            }
        return report

    def check_integrity(self) -> None:
        """Raise ValueError unless each tier's slots are in order."""
        if self.host is not None:
            self.host.check_integrity()
        if self.worker is not None:
            self.worker.disk.check_integrity()

    def _warn(self, what: str, error: Exception) -> None:
        now = time.monotonic()
        if now - self._last_warning >= WARN_EVERY_S:
            self._last_warning = now
            log.warning("%s: %s: %s", what, type(error).__name__, error)
