"""What the Triton backend makes of a batch, with torch twins in the place of the kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_cases import make_case, random_tree, twins, without_groups

from radixkv.model.attention import AttentionMetadata, PrefixGroup
from radixkv.model.triton_attention_plan import DecodeGroup, pack_masks, split_batch


def split(
    query_lens: list[int],
    groups: tuple[PrefixGroup, ...],
    *,
    partial: int = 0,
    min_saved: int = 0,
    max_levels: int = 4,
) -> tuple[tuple[DecodeGroup, ...], list[int]]:
    """The chosen groups and start_lens of a batch with blocks of one token."""
    starts = np.cumsum([0, *query_lens], dtype=np.int32)
    metadata = AttentionMetadata(
        query_start_loc=starts,
        seq_lens=np.full(len(query_lens), 10_000, dtype=np.int32),
        block_tables=(),
        slot_mapping=np.empty(0, dtype=np.int64),
        groups=groups,
    )
    result = split_batch(
        metadata,
        block_size=1,
        partial_tokens=partial,
        min_saved_tokens=min_saved,
        max_levels=max_levels,
    )
    return result.groups, result.start_lens.tolist()


def test_groups_of_decodes_keep_their_levels() -> None:
    groups = (PrefixGroup(0, 4, 0, 8), PrefixGroup(0, 2, 8, 9), PrefixGroup(2, 4, 8, 12))
    assert split([1, 1, 1, 1], groups) == (
        (DecodeGroup(0, 4, 0, 8, 0), DecodeGroup(0, 2, 8, 9, 1), DecodeGroup(2, 4, 8, 12, 1)),
        [9, 9, 12, 12],
    )


def test_chunks_are_no_members_of_groups() -> None:
    groups = (PrefixGroup(0, 4, 0, 8), PrefixGroup(0, 2, 8, 9))
    # Sequence 1 is a chunk: its group with sequence 0 has one decode left.
    assert split([1, 5, 1, 1], groups) == ((DecodeGroup(0, 3, 0, 8, 0),), [8, 8, 8])


def test_group_with_the_decodes_of_the_one_above_extends_it() -> None:
    groups = (PrefixGroup(0, 3, 0, 8), PrefixGroup(0, 2, 8, 11))
    assert split([1, 1, 7], groups) == ((DecodeGroup(0, 2, 0, 11, 0),), [11, 11])


def test_group_below_a_dropped_one_begins_where_that_did() -> None:
    # Of 2 tokens, three members save 4 and pay 6; of 12, two save 12 and pay 4.
    groups = (PrefixGroup(0, 3, 0, 2), PrefixGroup(0, 2, 2, 12))
    assert split([1, 1, 1], groups, partial=2) == ((DecodeGroup(0, 2, 0, 12, 0),), [12, 12, 0])


def test_group_that_saves_what_it_costs_is_dropped() -> None:
    groups = (PrefixGroup(0, 2, 0, 8),)
    assert split([1, 1], groups, partial=4) == ((), [0, 0])
    assert split([1, 1], groups, partial=3) == ((DecodeGroup(0, 2, 0, 8, 0),), [8, 8])


def test_groups_that_save_too_little_together_are_dropped_together() -> None:
    groups = (PrefixGroup(0, 3, 0, 5), PrefixGroup(0, 2, 5, 8))  # save 10 and 3
    assert split([1, 1, 1], groups, min_saved=14) == ((), [0, 0, 0])
    assert split([1, 1, 1], groups, min_saved=13)[1] == [8, 8, 5]


def test_levels_past_the_limit_are_private() -> None:
    groups = tuple(PrefixGroup(0, 6 - i, i, i + 1) for i in range(4))
    kept, starts = split([1] * 6, groups, max_levels=2)
    assert kept == (DecodeGroup(0, 6, 0, 1, 0), DecodeGroup(0, 5, 1, 2, 1))
    assert starts == [2, 2, 2, 2, 2, 1]


def test_masks_are_packed_bit_by_bit() -> None:
    mask = random_tree(40, np.random.default_rng(0))
    out = np.full((42, 2), -1, dtype=np.int32)
    pack_masks((None, mask), np.array([0, 2, 42], dtype=np.int32), out)
    assert not out[:2].any()
    bits = [[(int(out[2 + i, j // 32]) >> (j % 32)) & 1 for j in range(40)] for i in range(40)]
    assert np.array_equal(np.array(bits, dtype=np.bool_), mask)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seqs=st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 1, 2, 5, 35])), min_size=1, max_size=6
    ),
    shares=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    trees=st.sets(st.integers(0, 5), max_size=3),
    block_size=st.sampled_from([8, 16]),
)
def test_any_batch(
    seqs: list[tuple[int, int]], shares: tuple[int, int], trees: set[int], block_size: int
) -> None:
    outer, inner = shares
    half = (len(seqs) + 1) // 2
    groups = [(0, len(seqs), outer), (0, half, inner)]
    seqs = [
        (old + (outer + (inner if i < half else 0)) * block_size, new)
        for i, (old, new) in enumerate(seqs)
    ]
    case = make_case(
        seqs,
        [group for group in groups if group[2]],
        trees=[i for i in trees if i < len(seqs)],
        block_size=block_size,
    )
    case.check(twins()[0])


def test_each_kind_of_sequence_goes_to_its_kernel() -> None:
    seqs = [(90, 1), (85, 1), (70, 4), (40, 3)]
    kernels, calls = twins()
    make_case(seqs, ((0, 3, 8),), trees=(3,)).run(kernels)
    assert calls == {"prefix_decode": 1, "paged_prefill": 1, "tree_verify": 1}
    kernels, calls = twins()
    make_case(seqs[:2]).run(kernels)
    assert calls == {"paged_decode": 1}
    kernels, calls = twins()
    make_case(seqs[2:3], trees=(0,)).run(kernels)
    assert calls == {"tree_verify": 1}


def test_tree_of_one_node_is_a_decode() -> None:
    kernels, calls = twins()
    make_case([(9, 1), (20, 1)], trees=(1,)).check(kernels)
    assert calls == {"paged_decode": 1}


def test_groups_do_not_change_the_result() -> None:
    case = make_case([(90, 1), (85, 1), (99, 1)], ((0, 3, 8), (1, 3, 2)))
    kernels, _ = twins()
    with_groups, without = case.run(kernels), without_groups(case).run(kernels)
    torch.testing.assert_close(with_groups, without, rtol=2e-5, atol=2e-5)


def test_a_step_is_uploaded_in_one_copy() -> None:
    case = make_case([(90, 1), (85, 1), (70, 4), (40, 3)], ((0, 3, 8),), trees=(3,))
    backend = case.backend(twins()[0])
    inputs = [np.arange(9), np.arange(4) * 7]
    on_device = backend.plan_step(case.metadata, inputs)
    assert backend._buffer.num_uploads == 1
    assert [tensor.tolist() for tensor in on_device] == [array.tolist() for array in inputs]


def test_plan_of_a_smaller_batch_sees_nothing_of_the_one_before() -> None:
    big = make_case([(90, 1), (85, 1), (70, 4), (40, 3)], ((0, 3, 8),), trees=(3,))
    backend = big.backend(twins()[0])
    backend.plan(big.metadata)
    first = backend.run(1, big.query, big.key, big.value)
    small = replace(
        big.metadata,
        query_start_loc=big.metadata.query_start_loc[:2],
        seq_lens=big.metadata.seq_lens[:1],
        block_tables=big.metadata.block_tables[:1],
        slot_mapping=big.metadata.slot_mapping[:1],
        groups=(),
        tree_masks=(),
    )
    backend.plan(small)
    rows = (big.query[:1], big.key[:1], big.value[:1])
    torch.testing.assert_close(backend.run(1, *rows), first[:1], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("field", "bad", "message"),
    [
        ("query_start_loc", [0, 0, 2], "at least one new token"),
        ("seq_lens", [5, 0], "none more than its length"),
        ("seq_lens", [5, 99], "block tables must name"),
        ("block_tables", ([0, 1], [3]), "block tables must name"),
        ("block_tables", ([0, 1], [3, -1, 1]), "block tables must name"),
        ("block_tables", ([0, 1], [3, 99, 1]), "block tables must name"),
        ("slot_mapping", [1, 9999], "slot_mapping must have 2 slots"),
        ("slot_mapping", [1, -2], "slot_mapping must have 2 slots"),
        ("slot_mapping", [1], "slot_mapping must have 2 slots"),
        ("groups", (PrefixGroup(0, 2, 1, 2),), "must start at block 0"),
        ("groups", (PrefixGroup(0, 2, 0, 2),), "within the"),
        ("groups", (PrefixGroup(0, 3, 0, 1),), "must be of some of 2 sequences"),
        (
            "groups",
            (PrefixGroup(0, 1, 0, 1), PrefixGroup(1, 2, 0, 1), PrefixGroup(0, 2, 1, 2)),
            "only sequences of that group",
        ),
        ("tree_masks", (None,), "must have 2 entries"),
        ("tree_masks", (None, np.ones((2, 2), dtype=np.bool_)), r"must be bool \[1, 1\]"),
        ("tree_masks", (None, np.zeros((1, 1), dtype=np.bool_)), "must see itself"),
    ],
)
def test_plan_rejects_what_is_not_a_batch(field: str, bad: object, message: str) -> None:
    case = make_case([(8, 1), (15, 1)])
    now = getattr(case.metadata, field)
    if isinstance(bad, list):
        bad = np.array(bad, dtype=now.dtype)
    if field == "block_tables":
        bad = tuple(np.array(table, dtype=np.int32) for table in bad)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=message):
        case.backend(twins()[0]).plan(replace(case.metadata, **{field: bad}))


def test_node_that_sees_a_later_one_is_rejected() -> None:
    case = make_case([(8, 3)])
    mask = np.ones((3, 3), dtype=np.bool_)
    with pytest.raises(ValueError, match="no node after it"):
        case.backend(twins()[0]).plan(replace(case.metadata, tree_masks=(mask,)))


def test_run_rejects_a_batch_that_was_not_planned() -> None:
    case = make_case([(4, 1), (6, 1)])
    backend = case.backend(twins()[0])
    with pytest.raises(ValueError, match="planned for None tokens"):
        backend.run(0, case.query, case.key, case.value)
    backend.plan(case.metadata)
    with pytest.raises(ValueError, match="planned for 2 tokens, got 1"):
        backend.run(0, case.query[:1], case.key[:1], case.value[:1])
