"""A model whose every token depends on the whole history, read back through the block tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from radixkv.cache import RadixCache
from radixkv.cache.hashing import Digest, default_digest
from radixkv.cache.tiers_disk import DiskTier
from radixkv.engine.batch import ForwardBatch
from radixkv.engine.engine import Engine, EngineLimits, Output
from radixkv.engine.request import EngineRequest
from radixkv.engine.scheduler import SchedulingOptions
from radixkv.engine.swap import SwapSpace
from radixkv.engine.tiering import Tiering
from radixkv.request import RequestOutput, SamplingParams

VOCAB = 512
POISON = -1


class FakeRunner:
    """Keeps token ids where a model keeps KV.

    Each step writes its ids to their slots, then reads the whole history of each wanted row back
    through the block table and derives the logits from it: any wrong, stale, shared or misplaced
    block changes the next token, and a slot never written raises.
    """

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int = VOCAB) -> None:
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.slots = np.full((num_blocks, block_size), POISON, dtype=np.int64)
        self.steps: list[ForwardBatch] = []
        self.fail_at: int | None = None
        self.failing_transfers = 0  # of the next transfers between pool and host, so many raise

    def execute(self, batch: ForwardBatch) -> torch.Tensor:
        self.steps.append(batch)
        if self.fail_at == len(self.steps):
            raise RuntimeError("injected")
        if batch.copies:
            sources, destinations = zip(*batch.copies, strict=True)
            self.slots[list(destinations)] = self.slots[list(sources)]
        meta = batch.attention
        self.slots.reshape(-1)[meta.slot_mapping] = batch.token_ids
        rows = set(batch.logits_rows.tolist())
        logits = []
        for i, table in enumerate(meta.block_tables):
            last = int(meta.query_start_loc[i + 1]) - 1
            length = int(meta.seq_lens[i])
            count = last + 1 - int(meta.query_start_loc[i])
            assert count > 0, "a sequence with nothing to compute"
            assert len(table) >= -(-length // self.block_size), "a block table too short"
            history = self.slots[table].reshape(-1)[:length]
            assert (history != POISON).all(), "a slot that was never written is read"
            mask = meta.tree_masks[i] if meta.tree_masks else None
            for new in range(count):
                row = last + 1 - count + new
                if row in rows:
                    context, chunk = np.split(history, [length - count])
                    seen = chunk[: new + 1] if mask is None else chunk[mask[new]]
                    assert batch.positions[row] == length - count + len(seen) - 1
                    logits.append(self.logits_after(np.concatenate([context, seen])))
        for group in meta.groups:
            tables = meta.block_tables[group.first_seq : group.last_seq]
            shared = [t[group.first_block : group.last_block].tolist() for t in tables]
            assert len(tables) > 1
            assert all(s == shared[0] for s in shared)
        return torch.from_numpy(np.array(logits, dtype=np.float32).reshape(-1, self.vocab_size))

    def logits_after(self, history: np.ndarray) -> np.ndarray:
        return fake_logits(history, self.vocab_size)

    def move_slots(self, moves: Sequence[tuple[int, int]]) -> None:
        sources, targets = zip(*moves, strict=True)
        slots = self.slots.reshape(-1)
        slots[list(targets)] = slots[list(sources)]

    def gather_blocks(self, block_ids: Sequence[int]) -> torch.Tensor:
        self._fail_transfer()
        content = self.slots[list(block_ids)]
        # Of a block that isn't full only the beginning was written.
        written = content != POISON
        assert written[:, 0].all(), "a block that was never written is kept"
        assert (np.diff(written.astype(int), axis=1) <= 0).all(), "a block with a gap is kept"
        return torch.from_numpy(content.view(np.uint8).reshape(len(content), -1))

    def scatter_blocks(self, block_ids: Sequence[int], contents: torch.Tensor) -> None:
        self._fail_transfer()
        self.slots[list(block_ids)] = contents.numpy().view(np.int64)

    def _fail_transfer(self) -> None:
        if self.failing_transfers:
            self.failing_transfers -= 1
            raise RuntimeError("injected")


def fake_logits(history: np.ndarray, vocab_size: int = VOCAB) -> np.ndarray:
    """Logits of the token after `history`."""
    seed = xxh3_64_intdigest(np.ascontiguousarray(history, dtype=np.int64).tobytes())
    return np.random.default_rng(seed).normal(size=vocab_size, scale=2.0)


class CharTokenizer:
    """Id i is the character i; ids under 32 decode to nothing when special tokens are skipped."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(i) for i in ids if i >= 32 or not skip_special_tokens)


def make_engine(
    num_blocks: int = 64,
    block_size: int = 4,
    *,
    max_model_len: int = 4096,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 64,
    enabled: bool = True,
    eos_token_ids: tuple[int, ...] = (),
    digest: Digest = default_digest,
    host_blocks: int = 0,
    disk: DiskTier | None = None,
    tier_policy: str = "always",
    swap_blocks: int = 0,
    scheduling: SchedulingOptions | None = None,
    request_timeout_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Engine:
    """An engine over the fake model."""
    runner = FakeRunner(num_blocks, block_size)
    cache = RadixCache(num_blocks, block_size, enabled=enabled, digest=digest)
    tiers = None
    if host_blocks or disk is not None:
        tiers = Tiering(
            runner, cache, 8 * block_size, host_blocks=host_blocks, disk=disk, policy=tier_policy
        )
    swap = None
    if swap_blocks:
        content_bytes = 8 * block_size
        swap = SwapSpace(runner, cache, content_bytes, swap_blocks * content_bytes)
    return Engine(
        runner,
        CharTokenizer(),
        cache,
        EngineLimits(max_model_len, max_num_seqs, max_num_batched_tokens, request_timeout_s),
        eos_token_ids=eos_token_ids,
        tiers=tiers,
        swap=swap,
        scheduling=scheduling,
        clock=clock,
    )


@dataclass
class Answer:
    """Everything that one request was given."""

    outputs: list[RequestOutput] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [t for o in self.outputs for t in o.token_ids]

    @property
    def text(self) -> str:
        return "".join(o.text for o in self.outputs)

    @property
    def last(self) -> RequestOutput:
        return self.outputs[-1]


class Harness:
    """Drives an engine step by step; after each, audits the cache and poisons what became free."""

    def __init__(self, num_blocks: int = 64, block_size: int = 4, **options: Any) -> None:
        self.engine = make_engine(num_blocks, block_size, **options)
        self.cache = self.engine.cache
        self.scheduler = self.engine.scheduler
        self.runner = cast(FakeRunner, self.engine.runner)
        self.answers: dict[str, Answer] = {}  # the first of each request
        self.choices: dict[str, list[Answer]] = {}

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        namespace: tuple[str, ...] = (),
        **params: Any,
    ) -> EngineRequest:
        request = self.engine.add_request(
            request_id, list(prompt), SamplingParams(**params), namespace=namespace
        )
        self.choices[request_id] = [Answer() for _ in range(request.params.n)]
        self.answers[request_id] = self.choices[request_id][0]
        return request

    def abort(self, request_id: str) -> int:
        """Abort a request; return the number of outputs that gave."""
        outputs = self.engine.abort(request_id)
        self._record(outputs)
        return len(outputs)

    def step(self) -> list[Output]:
        outputs = self.engine.step()
        self._record(outputs)
        return outputs

    def run(self, max_steps: int = 5000) -> None:
        """Step until idle."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, "the engine doesn't get done"
        assert self.cache.num_referenced_blocks == 0
        assert not self.cache.sequences
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert not self.scheduler.swap, "something is left in the swap space"
        for request_id, choices in self.choices.items():
            for answer in choices:
                ends = [o.finish_reason is not None for o in answer.outputs]
                assert sum(ends) == 1, f"{request_id} ended {sum(ends)} times"
                assert ends[-1], f"{request_id} got something after its end"
            timings = [o.timings for a in choices for o in a.outputs if o.timings is not None]
            assert timings, f"{request_id} told no timings"

    def ask(self, prompt: Sequence[int], namespace: tuple[str, ...] = (), **params: Any) -> Answer:
        """Run one request to its end."""
        request_id = f"ask-{len(self.answers)}"
        self.add(request_id, prompt, namespace, **params)
        self.run()
        return self.answers[request_id]

    def ask_all(self, prompt: Sequence[int], **params: Any) -> list[Answer]:
        """Run one request to its end; return all of its answers."""
        request_id = f"ask-{len(self.answers)}"
        self.add(request_id, prompt, **params)
        self.run()
        return self.choices[request_id]

    def _record(self, outputs: list[Output]) -> None:
        for item in outputs:
            self.choices[item.request_id][item.output.index].outputs.append(item.output)
        self.cache.check_integrity()
        if self.engine.tiers is not None:
            self.engine.tiers.check_integrity()
        if self.scheduler.swap is not None:
            self.scheduler.swap.check_integrity()
        live = [b for r in self.scheduler.running.values() for b in r.live]
        assert self.cache.sequences == {b.sequence for b in live if b.sequence.is_open}
        for block_id in range(self.cache.num_blocks):
            if self.cache.pool.ref_count(block_id) == 0:
                self.runner.slots[block_id] = POISON


def cold(prompt: Sequence[int], **params: Any) -> Answer:
    """What a request gets from a fresh engine with plenty of room and no cache."""
    length = len(prompt) + (params.get("max_tokens") or 1) + 1
    harness = Harness(length, 1, enabled=False, max_num_batched_tokens=max(64, length))
    return harness.ask(prompt, **params)


def cold_all(prompt: Sequence[int], **params: Any) -> list[Answer]:
    """All answers that a request gets from a fresh engine with plenty of room and no cache."""
    length = len(prompt) + (params.get("max_tokens") or 1) + 1
    harness = Harness(20 * length, 1, enabled=False, max_num_batched_tokens=max(64, length))
    return harness.ask_all(prompt, **params)


def prompt_of(length: int, seed: int = 0, vocab_size: int = VOCAB) -> list[int]:
    """Random printable ids."""
    return [int(i) for i in np.random.default_rng(seed).integers(32, vocab_size, length)]
