"""Runs requests through an engine and watches how it uses the memory of its KV blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from radixkv.cache import RadixCache
from radixkv.engine.batch import ForwardBatch
from radixkv.engine.engine import Engine, EngineLimits
from radixkv.engine.runner import Runner
from radixkv.engine.sharing import KVSharing
from radixkv.request import SamplingParams

__all__ = ["BLOCK_SIZE", "VOCAB", "MemoryUse", "measure", "random_engine"]

BLOCK_SIZE = 16
VOCAB = 512


@dataclass(slots=True)
class MemoryUse:
    """What the steps of a run found, all steps together.

    Attributes:
        blocks_referenced, blocks_stored: entries of all block tables, and the different ones.
        tokens_stored, slots_allocated: slots that hold KV, and slots of the blocks stored.
        max_wasted: most slots that a table had beyond its sequence's tokens.
    """

    steps: int = 0
    blocks_referenced: int = 0
    blocks_stored: int = 0
    tokens_stored: int = 0
    slots_allocated: int = 0
    max_wasted: int = 0

    def see_step(self, cache: RadixCache) -> None:
        """Count blocks while the model would run: what the step writes to is copied by then."""
        self.steps += 1
        tables = [sequence.block_table for sequence in cache.sequences]
        if tables:
            self.blocks_referenced += sum(map(len, tables))
            self.blocks_stored += len(np.unique(np.concatenate(tables)))

    def see_rest(self, cache: RadixCache) -> None:
        """Count slots between two steps."""
        sharing = KVSharing.of(cache)
        self.tokens_stored += sharing.tokens_stored
        self.slots_allocated += sharing.slots_allocated
        for sequence in cache.sequences:
            wasted = sequence.num_blocks * cache.block_size - len(sequence)
            self.max_wasted = max(self.max_wasted, wasted)

    @property
    def saved(self) -> float:
        """Part of the entries of all block tables that needed no block of their own."""
        return 1 - self.blocks_stored / max(self.blocks_referenced, 1)

    @property
    def filled(self) -> float:
        """Part of the slots allocated that held KV."""
        return self.tokens_stored / max(self.slots_allocated, 1)


def measure(
    engine: Engine,
    prompts: Sequence[np.ndarray],
    outputs: Sequence[int],
    *,
    width: int = 1,
    beams: bool = False,
) -> MemoryUse:
    """Run requests to their ends, all given at once, and watch the memory.

    Args:
        engine: idle; it is left idle with an empty cache.
        prompts: `[n]` int32 each.
        outputs: tokens to generate, per prompt.
        width: answers of each, or beams.
        beams: whether to search instead of drawing.

    Raises:
        RuntimeError: an answer did not come to its full length.
    """
    use = MemoryUse()
    runner = engine.runner
    engine.runner = WatchedRunner(runner, engine.cache, use)
    expected = engine.tokens_generated
    for i, (prompt, length) in enumerate(zip(prompts, outputs, strict=True)):
        params = SamplingParams(
            max_tokens=length, n=width, use_beam_search=beams, ignore_eos=True, seed=i
        )
        engine.add_request(f"request {i}", prompt, params)
        expected += width * length
    try:
        while engine.has_work:
            engine.step()
            use.see_rest(engine.cache)
    finally:
        engine.runner = runner
    engine.cache.check_integrity()
    engine.cache.reset()
    if engine.tokens_generated != expected:
        raise RuntimeError(f"{engine.tokens_generated} tokens came, {expected} were asked for")
    return use


def random_engine(max_num_seqs: int, max_model_len: int) -> Engine:
    """Return an engine over random logits, with blocks for all of its sequences."""
    num_blocks = max_num_seqs * (max_model_len // BLOCK_SIZE + 2)
    return Engine(
        RandomRunner(),
        LetterTokenizer(),
        RadixCache(num_blocks, BLOCK_SIZE),
        EngineLimits(max_model_len, max_num_seqs, max(256, max_num_seqs)),
    )


class RandomRunner:
    """Returns random logits and keeps no KV."""

    def __init__(self, vocab_size: int = VOCAB) -> None:
        self.vocab_size = vocab_size
        self._generator = torch.Generator().manual_seed(0)

    def execute(self, batch: ForwardBatch) -> torch.Tensor:
        """Return a row per token that is wanted."""
        return torch.randn(len(batch.logits_rows), self.vocab_size, generator=self._generator)

    def move_slots(self, moves: Sequence[tuple[int, int]]) -> None:
        """Keep no KV."""


class WatchedRunner:
    """Shows every step to a `MemoryUse` before it runs."""

    def __init__(self, runner: Runner, cache: RadixCache, use: MemoryUse) -> None:
        self.vocab_size = runner.vocab_size
        self._runner, self._cache, self._use = runner, cache, use

    def execute(self, batch: ForwardBatch) -> torch.Tensor:
        """See `Runner.execute`."""
        self._use.see_step(self._cache)
        return self._runner.execute(batch)

    def move_slots(self, moves: Sequence[tuple[int, int]]) -> None:
        """See `Runner.move_slots`."""
        self._runner.move_slots(moves)


class LetterTokenizer:
    """Every token is a letter."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return a letter per id."""
        return "".join(chr(97 + i % 26) for i in ids)
