"""A model whose every token depends on the whole history, read back through the block tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from radixkv.cache import RadixCache
from radixkv.engine.batch import ForwardBatch
from radixkv.engine.engine import Engine, EngineLimits

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
            if last in rows:
                logits.append(fake_logits(history, self.vocab_size))
        for group in meta.groups:
            tables = meta.block_tables[group.first_seq : group.last_seq]
            shared = [t[group.first_block : group.last_block].tolist() for t in tables]
            assert len(tables) > 1
            assert all(s == shared[0] for s in shared)
        return torch.from_numpy(np.array(logits, dtype=np.float32).reshape(-1, self.vocab_size))


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
) -> Engine:
    """An engine over the fake model."""
    return Engine(
        FakeRunner(num_blocks, block_size),
        CharTokenizer(),
        RadixCache(num_blocks, block_size, enabled=enabled),
        EngineLimits(max_model_len, max_num_seqs, max_num_batched_tokens),
        eos_token_ids=eos_token_ids,
    )
