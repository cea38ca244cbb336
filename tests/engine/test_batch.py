from __future__ import annotations

from collections import defaultdict

import hypothesis.strategies as st
import numpy as np
from fakes import Harness, prompt_of
from hypothesis import given, settings

from radixkv.engine.batch import Path, group_by_prefix
from radixkv.model.attention import PrefixGroup


@st.composite
def sorted_paths(draw: st.DrawFn) -> list[Path]:
    """Paths through one random tree, whose node ids tell the way."""
    widths: dict[tuple[int, ...], int] = {}
    paths: list[Path] = []
    for way in draw(st.lists(st.lists(st.integers(0, 1), max_size=5), max_size=8)):
        path, end = [], 0
        for depth in range(1, len(way) + 1):
            key = tuple(way[:depth])
            end += widths.setdefault(key, draw(st.integers(1, 3)))
            path.append((int("1" + "".join(map(str, key)), 2), end))
        paths.append(path)
    return sorted(paths)


def brute_force(paths: list[Path]) -> set[PrefixGroup]:
    """Group every node by who shares it, then join the runs of nodes with the same sharers."""
    sharers: dict[tuple[tuple[int, int], ...], list[int]] = defaultdict(list)
    for i, path in enumerate(paths):
        for depth in range(1, len(path) + 1):
            sharers[tuple(path[:depth])].append(i)
    runs: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for prefix, who in sharers.items():
        if len(who) > 1:
            first_block = prefix[-2][1] if len(prefix) > 1 else 0
            runs[tuple(who)] += [first_block, prefix[-1][1]]
    return {PrefixGroup(w[0], w[-1] + 1, min(b), max(b)) for w, b in runs.items()}


@settings(deadline=None)
@given(sorted_paths())
def test_groups_equal_a_brute_force(paths: list[Path]) -> None:
    groups = group_by_prefix(paths)
    assert set(groups) == brute_force(paths)
    assert len(set(groups)) == len(groups)


@settings(deadline=None)
@given(sorted_paths())
def test_groups_nest_and_parents_come_first(paths: list[Path]) -> None:
    groups = group_by_prefix(paths)
    for i, group in enumerate(groups):
        assert group.last_seq - group.first_seq > 1
        assert group.first_block < group.last_block
        if group.first_block:
            (parent,) = [
                j
                for j, g in enumerate(groups)
                if g.last_block == group.first_block
                and g.first_seq <= group.first_seq
                and group.last_seq <= g.last_seq
            ]
            assert parent < i


def test_batch_describes_decodes_and_chunks() -> None:
    harness = Harness(64, 4, max_num_batched_tokens=16)
    old = harness.add("old", prompt_of(6), max_tokens=10, temperature=0.0)
    harness.step()
    new = harness.add("new", prompt_of(30, seed=1), max_tokens=1, temperature=0.0)
    harness.step()
    batch = harness.runner.steps[-1]
    meta = batch.attention
    assert (meta.num_seqs, meta.num_tokens) == (2, 16)
    counts = np.diff(meta.query_start_loc).tolist()
    decode, chunk = counts.index(1), counts.index(15)
    assert meta.seq_lens[decode] == 7
    assert meta.seq_lens[chunk] == 15
    first, last = meta.query_start_loc[chunk : chunk + 2]
    assert batch.token_ids[first:last].tolist() == new.branches[0].sequence.token_ids[:15].tolist()
    assert batch.positions[first:last].tolist() == list(range(15))
    row = int(meta.query_start_loc[decode])
    assert batch.positions[row] == 6
    assert batch.token_ids[row] == old.branches[0].sequence.token_ids[6]
    assert batch.logits_rows.tolist() == [row]
    for i, table in enumerate(meta.block_tables):
        for row in range(*meta.query_start_loc[i : i + 2].tolist()):
            position = int(batch.positions[row])
            assert meta.slot_mapping[row] == table[position // 4] * 4 + position % 4
    assert meta.query_start_loc.dtype == meta.seq_lens.dtype == np.dtype(np.int32)
    assert meta.slot_mapping.dtype == batch.positions.dtype == np.dtype(np.int64)


def test_sequences_that_share_blocks_are_grouped() -> None:
    harness = Harness(64, 4, max_num_batched_tokens=64)
    prompt = prompt_of(16)
    harness.ask(prompt, max_tokens=1, temperature=0.0)
    for i in range(3):
        harness.add(f"s{i}", prompt + prompt_of(5, seed=i + 1), max_tokens=8, temperature=0.0)
        harness.add(f"x{i}", prompt_of(9, seed=i + 9), max_tokens=8, temperature=0.0)
    harness.step()
    harness.step()
    (group,) = harness.runner.steps[-1].attention.groups
    assert (group.last_seq - group.first_seq, group.first_block, group.last_block) == (3, 0, 4)
