from __future__ import annotations

import json

import numpy as np
import pytest

from loadtests import bench_sharing
from loadtests.bench_sharing import lengths_of
from loadtests.memory_use import BLOCK_SIZE, VOCAB, MemoryUse, measure, random_engine


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def parallel(width: int, prompt_len: int, output: int) -> MemoryUse:
    engine = random_engine(width, prompt_len + output)
    return measure(engine, [prompt(prompt_len)], [output], width=width)


def test_measure_counts_the_blocks_of_a_prompt_once() -> None:
    """Worked out by hand: 4 blocks of prompt, then one block each, for 16 steps of decoding."""
    use = parallel(3, 4 * BLOCK_SIZE, BLOCK_SIZE + 1)
    assert use.steps == 17
    assert use.blocks_referenced == 4 + 16 * 3 * 5
    assert use.blocks_stored == 4 + 16 * (4 + 3)


def test_measure_sees_a_partly_filled_block_after_its_copies() -> None:
    """Both answers write to the prompt's last block, so each has one; the full one is shared."""
    use = parallel(2, BLOCK_SIZE + 1, 4)
    assert use.blocks_referenced == 2 + 3 * 2 * 2
    assert use.blocks_stored == 2 + 3 * 3


def test_measure_saves_nothing_without_anything_to_share() -> None:
    engine = random_engine(3, 80)
    use = measure(engine, [prompt(40, seed) for seed in range(3)], [40] * 3)
    assert use.saved == 0
    assert use.blocks_referenced > 0
    assert not engine.has_work
    assert engine.cache.num_free_blocks == engine.cache.num_blocks


def test_measure_finds_slots_that_are_not_filled() -> None:
    use = measure(random_engine(1, 17), [prompt(15)], [2])
    # After the prompt 15 slots of 16 hold KV; after the last step nothing runs.
    assert (use.tokens_stored, use.slots_allocated, use.max_wasted) == (15, 16, 0)
    use = measure(random_engine(1, 21), [prompt(17)], [2])
    assert (use.tokens_stored, use.slots_allocated, use.max_wasted) == (17, 32, 14)


def test_beams_share_more_than_answers_drawn_in_parallel() -> None:
    engine = random_engine(4, 200)
    drawn = measure(engine, [prompt(50)], [100], width=4)
    found = measure(engine, [prompt(50)], [100], width=4, beams=True)
    assert found.saved > drawn.saved > 0.1


@pytest.mark.parametrize("mean", [19, 338])
def test_varied_lengths_keep_the_mean(mean: int) -> None:
    lengths = lengths_of(mean, 64, "varied", np.random.default_rng(0))
    assert min(lengths) >= 1
    assert max(lengths) > 3 * mean
    assert np.mean(lengths) == pytest.approx(mean, rel=0.05)
    assert lengths_of(mean, 3, "fixed", np.random.default_rng(0)) == [mean] * 3


def test_bench_sharing_prints_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    bench_sharing.main(
        [
            "--random-beams",
            "--scale",
            "0.1",
            "--requests",
            "2",
            "--beam-requests",
            "1",
            "--load",
            "8",
        ]
    )
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = report["sharing"]
    assert len(rows) == 2 * 2 * 2 * 3
    assert all(0 <= row["saved_percent"] < 100 for row in rows)
    assert all(row["max_wasted_slots"] < BLOCK_SIZE for row in (*rows, report["load"]))
    (row,) = [
        row
        for row in rows
        if (row["method"], row["dataset"], row["lengths"], row["width"])
        == ("beam", "ShareGPT", "fixed", 6)
    ]
    assert (row["paper_percent"], row["logits"]) == ([44.3, 66.3], "random")
