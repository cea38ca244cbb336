from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fakes import Harness, prompt_of

from radixkv.engine import batch as batch_module
from radixkv.engine.batch import BatchBuilder, ForwardBatch
from radixkv.engine.scheduler import ScheduledChunk


def same(a: ForwardBatch, b: ForwardBatch) -> bool:
    return (
        a.attention.groups == b.attention.groups
        and all(
            np.array_equal(getattr(a, name), getattr(b, name))
            for name in ("token_ids", "positions", "logits_rows")
        )
        and np.array_equal(a.attention.seq_lens, b.attention.seq_lens)
        and np.array_equal(a.attention.slot_mapping, b.attention.slot_mapping)
    )


def compare(harness: Harness) -> list[int]:
    """Compare each batch with that of a builder that remembers nothing; count the batches."""
    build, compared = harness.engine.batches.build, [0]

    def both(chunks: list[ScheduledChunk], copies: Any) -> Any:
        kept, ordered = build(chunks, copies)
        fresh, fresh_order = BatchBuilder(harness.cache).build(chunks, copies)
        assert ordered == fresh_order
        assert same(kept, fresh)
        compared[0] += 1
        return kept, ordered

    harness.engine.batches.build = both  # type: ignore[method-assign]
    return compared


def test_stress_kept_order_and_groups_equal_fresh_ones() -> None:
    """Requests come and go, split runs that others hold, and fill blocks meanwhile."""
    rng = np.random.default_rng(0)
    harness = Harness(300, 4, max_num_batched_tokens=40, max_num_seqs=12)
    compared = compare(harness)
    base = prompt_of(40)
    for i in range(60):
        prompt = [*base[: int(rng.integers(1, 40))], *prompt_of(int(rng.integers(1, 9)), seed=i)]
        n = int(rng.choice([1, 1, 3]))
        harness.add(str(i), prompt, max_tokens=int(rng.integers(1, 20)), ignore_eos=True, n=n)
        for _ in range(int(rng.integers(0, 6))):
            harness.step()
    harness.run()
    assert compared[0] > 60


def test_run_that_a_newcomer_splits_is_grouped_anew() -> None:
    """Two answers hold one run; a third shares half of it, and neither of the two changes."""
    harness = Harness(300, 4, max_num_seqs=4)
    compared = compare(harness)
    base = prompt_of(33)
    harness.add("a", base, max_tokens=40, ignore_eos=True)
    harness.step()
    harness.add("b", base, max_tokens=40, ignore_eos=True)
    harness.step()
    harness.add("c", [*base[:16], *prompt_of(3, seed=1)], max_tokens=1)
    harness.run()
    assert compared[0] > 40


def test_nothing_is_arranged_again_while_the_same_answers_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness(300, 4)
    for i in range(4):
        harness.add(str(i), prompt_of(9, seed=i), max_tokens=30, ignore_eos=True)
    harness.step()
    harness.step()
    calls: list[int] = []
    group = batch_module.group_by_prefix
    monkeypatch.setattr(
        batch_module, "group_by_prefix", lambda paths: calls.append(1) or group(paths)
    )
    for _ in range(20):
        harness.step()
    assert calls == []
