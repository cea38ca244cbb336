from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import PagedBatch, assert_attention_close, make_paged_batch, random_tensor

from radixkv.kernels import decode_plan, reference
from radixkv.kernels.decode_plan import workspace_numel
from radixkv.kernels.paged_decode import paged_decode
from radixkv.kernels.prefix_decode import DecodeGroups, prefix_decode

# Two prompts, one of which forks into two conversations; the last sequence shares nothing.
NESTED = [(0, 4, 0, 2), (0, 2, 2, 3), (2, 4, 2, 5), (4, 6, 0, 1)]
NESTED_LENS = [49, 64, 82, 100, 17, 40, 33]

Range = tuple[int, int, int, int]


def _groups(ranges: list[Range], batch: PagedBatch, group_size: int, **options: Any):
    return DecodeGroups.from_ranges(
        ranges, num_seqs=len(batch.seq_lens), block_size=batch.block_size, group_size=group_size,
        device=batch.k_pool.device, **options,
    )  # fmt: skip


def _query(batch: PagedBatch, group_size: int, dtype: torch.dtype) -> torch.Tensor:
    num_kv_heads, head_dim = batch.k_pool.shape[2:]
    shape = (len(batch.seq_lens), num_kv_heads * group_size, head_dim)
    return random_tensor(shape, dtype, torch.Generator().manual_seed(7), batch.k_pool.device)


def _check(
    batch: PagedBatch,
    query: torch.Tensor,
    groups: DecodeGroups,
    exact_scores: bool = True,
    num_splits: int | None = None,
    num_prefix_splits: int | None = None,
    **options: Any,
) -> torch.Tensor:
    """Compare the kernel with attention that knows of no groups; return the kernel's output."""
    arrays = (batch.k_pool, batch.v_pool, batch.block_tables, batch.seq_lens)
    options |= {"k_scale": batch.k_scale, "v_scale": batch.v_scale}
    scale = query.shape[2] ** -0.5
    got = prefix_decode(
        query, *arrays, groups, scale, return_lse=True, num_splits=num_splits,
        num_prefix_splits=num_prefix_splits, **options,
    )  # fmt: skip
    want = reference.paged_decode(query.double(), *arrays, scale, **options)
    assert_attention_close(got, want, query.dtype, exact_scores=exact_scores)
    return got[0]


@pytest.mark.parametrize(
    ("head_dim", "block_size", "group_size", "dtype"),
    [
        (64, 16, 3, torch.float32),
        (80, 16, 1, torch.bfloat16),
        (96, 16, 2, torch.float32),
        (128, 16, 4, torch.float16),
        (256, 16, 2, torch.bfloat16),
    ],
)
def test_prefix_decode_of_nested_groups_equals_attention_without_groups(
    device, head_dim, block_size, group_size, dtype
) -> None:
    batch = make_paged_batch(
        NESTED_LENS, block_size=block_size, num_kv_heads=2, head_dim=head_dim, dtype=dtype,
        shared=NESTED, device=device,
    )  # fmt: skip
    groups = _groups(NESTED, batch, group_size)
    _check(batch, _query(batch, group_size, dtype), groups, num_splits=2, num_prefix_splits=2)


@pytest.mark.parametrize("block_size", [8, 32, 128])
def test_prefix_decode_equals_reference_whatever_the_block_size(device, block_size) -> None:
    ranges = [(0, 3, 0, 2), (1, 3, 2, 3)]
    lens = [2 * block_size + 1, 3 * block_size + 1, 3 * block_size + 9]
    batch = make_paged_batch(
        lens, block_size=block_size, num_kv_heads=1, head_dim=64, dtype=torch.float16,
        shared=ranges, device=device,
    )  # fmt: skip
    groups = _groups(ranges, batch, 2)
    _check(batch, _query(batch, 2, torch.float16), groups, num_prefix_splits=3)


@pytest.mark.parametrize(
    ("num_seqs", "group_size", "dtype"),
    [
        (5, 3, torch.float32),
        (6, 3, torch.float32),
        (11, 3, torch.float32),
        (5, 30, torch.float16),
    ],
)
def test_prefix_decode_covers_groups_of_several_row_tiles(
    device, num_seqs, group_size, dtype
) -> None:
    # Tiles of 16 rows in float32 and 128 in float16: some sequences' rows lie in two tiles.
    lens = [33 + i % 5 for i in range(num_seqs)]
    batch = make_paged_batch(
        lens, block_size=16, num_kv_heads=1, head_dim=64, dtype=dtype,
        shared=[(0, num_seqs, 0, 2)], device=device,
    )  # fmt: skip
    groups = _groups([(0, num_seqs, 0, 2)], batch, group_size)
    _check(batch, _query(batch, group_size, dtype), groups, num_splits=1, num_prefix_splits=1)


@pytest.mark.parametrize("num_prefix_splits", [1, 2, 3, 7])
def test_prefix_decode_is_right_around_the_boundaries_of_splits(device, num_prefix_splits) -> None:
    # Runs of 1 and 5 blocks in tiles of 2 blocks: the last tile is half empty, as are splits.
    ranges = [(0, 2, 0, 1), (2, 4, 0, 5)]
    batch = make_paged_batch(
        [17, 40, 81, 96], block_size=16, num_kv_heads=1, head_dim=64, shared=ranges, device=device
    )
    groups = _groups(ranges, batch, 1)
    _check(
        batch, _query(batch, 1, torch.float32), groups, num_splits=1,
        num_prefix_splits=num_prefix_splits,
    )  # fmt: skip


@pytest.mark.parametrize("window", [1, 20, 36, 50, 70])
def test_prefix_decode_applies_the_window_to_each_sequence(device, window) -> None:
    """Members of a group end in different places, so that the window hides different keys."""
    batch = make_paged_batch(
        NESTED_LENS, block_size=16, num_kv_heads=1, head_dim=64, shared=NESTED, device=device
    )
    groups = _groups(NESTED, batch, 2)
    _check(
        batch, _query(batch, 2, torch.float32), groups, num_splits=1, num_prefix_splits=2,
        window=window,
    )  # fmt: skip


def test_prefix_decode_with_softcap_equals_reference(device) -> None:
    batch = make_paged_batch(
        NESTED_LENS, block_size=16, num_kv_heads=1, head_dim=64, shared=NESTED, device=device
    )
    groups = _groups(NESTED, batch, 2)
    _check(batch, _query(batch, 2, torch.float32) * 8, groups, softcap=3.0)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(
    ("kv_dtype", "has_fp8_loads"),
    [(torch.int8, True), (torch.float8_e4m3fn, True), (torch.float8_e4m3fn, False)],
)
def test_prefix_decode_of_quantised_pool_equals_reference(
    device, kv_dtype, has_fp8_loads, per_channel, monkeypatch
) -> None:
    if not has_fp8_loads:
        monkeypatch.setattr(decode_plan, "has_fp8_loads", lambda target: False)
    ranges = [(0, 2, 0, 1)]
    batch = make_paged_batch(
        [17, 30], block_size=16, num_kv_heads=2, head_dim=64, dtype=kv_dtype, shared=ranges,
        per_channel=per_channel, device=device,
    )  # fmt: skip
    groups = _groups(ranges, batch, 3)
    query = _query(batch, 3, torch.bfloat16)
    _check(batch, query, groups, exact_scores=not per_channel)


def test_prefix_decode_ignores_padding_groups_and_rows(device) -> None:
    ranges = [(0, 2, 0, 1)]
    batch = make_paged_batch(
        [17, 20, 0], block_size=16, num_kv_heads=1, head_dim=64, shared=ranges, device=device
    )
    groups = _groups(ranges, batch, 1, num_groups=3)
    assert groups.num_groups == 3
    out = _check(batch, _query(batch, 1, torch.float32), groups, num_prefix_splits=2)
    assert torch.equal(out[2], torch.zeros_like(out[2]))


def test_prefix_decode_with_more_levels_and_rows_than_needed_equals_reference(device) -> None:
    """A captured graph is launched for the most levels and rows there may be."""
    ranges = [(0, 2, 0, 1)]
    batch = make_paged_batch(
        [17, 20], block_size=16, num_kv_heads=1, head_dim=64, shared=ranges, device=device
    )
    exact = _groups(ranges, batch, 1, num_groups=2)
    fields = ("first_seq", "last_seq", "first_block", "last_block", "level", "start_lens")
    arrays = {name: getattr(exact, name) for name in fields}
    groups = DecodeGroups(**arrays, num_levels=3, max_group_rows=50)
    _check(batch, _query(batch, 1, torch.float32), groups)


def test_prefix_decode_reads_shared_run_through_the_first_table_only(device) -> None:
    batch = make_paged_batch(
        [40, 50, 60], block_size=16, num_kv_heads=1, head_dim=64, shared=[(0, 3, 0, 2)],
        device=device,
    )  # fmt: skip
    groups, query = _groups([(0, 3, 0, 2)], batch, 2), _query(batch, 2, torch.float32)
    want = _check(batch, query, groups)
    batch.block_tables[1:, :2] = 2**30
    got = prefix_decode(
        query, batch.k_pool, batch.v_pool, batch.block_tables, batch.seq_lens, groups, 0.125
    )
    assert torch.equal(got, want)


def test_prefix_decode_writes_into_out_and_workspace(device) -> None:
    batch = make_paged_batch(
        NESTED_LENS, block_size=16, num_kv_heads=2, head_dim=64, shared=NESTED, device=device
    )
    groups, query = _groups(NESTED, batch, 2), _query(batch, 2, torch.float32)
    out = torch.empty_like(query)
    numel = workspace_numel(groups.num_levels * 2 + 1, len(NESTED_LENS), 4, 64)
    workspace = torch.full((numel,), float("nan"), device=device)
    got = prefix_decode(
        query, batch.k_pool, batch.v_pool, batch.block_tables, batch.seq_lens, groups, 0.125,
        num_splits=1, num_prefix_splits=2, out=out, workspace=workspace,
    )  # fmt: skip
    assert got is out
    assert torch.equal(out, _check(batch, query, groups, num_splits=1, num_prefix_splits=2))
    with pytest.raises(ValueError, match=f"workspace must have at least {numel} elements"):
        prefix_decode(
            query, batch.k_pool, batch.v_pool, batch.block_tables, batch.seq_lens, groups, 0.125,
            num_splits=1, num_prefix_splits=2, workspace=workspace[1:],
        )  # fmt: skip


def test_prefix_decode_without_groups_is_paged_decode(device) -> None:
    batch = make_paged_batch([5, 20], block_size=16, num_kv_heads=1, head_dim=64, device=device)
    query, arrays = _query(batch, 1, torch.float32), (batch.k_pool, batch.v_pool)
    arrays += (batch.block_tables, batch.seq_lens)
    got = prefix_decode(query, *arrays, _groups([], batch, 1), 0.125, window=9)
    assert torch.equal(got, paged_decode(query, *arrays, 0.125, window=9))


@st.composite
def _batches(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a forest of groups, each sequence a little longer than what it shares."""
    block_size = draw(st.sampled_from([8, 16, 64]))
    num_seqs = draw(st.integers(1, 5))
    ranges: list[Range] = []

    def fork(first_seq: int, last_seq: int, first_block: int, depth: int) -> None:
        while first_seq < last_seq:
            end = draw(st.integers(first_seq + 1, last_seq))
            if depth < 3 and draw(st.booleans()):
                last_block = first_block + draw(st.integers(1, 3))
                ranges.append((first_seq, end, first_block, last_block))
                fork(first_seq, end, last_block, depth + 1)
            first_seq = end

    fork(0, num_seqs, 0, 0)
    ends = [max((r[3] for r in ranges if r[0] <= i < r[1]), default=0) for i in range(num_seqs)]
    tails = st.sampled_from([1, block_size - 1, block_size, block_size + 1, 40])
    return {
        "block_size": block_size,
        "ranges": ranges,
        "lens": [end * block_size + draw(tails) for end in ends],
        "window": draw(st.none() | st.sampled_from([1, block_size, block_size + 1, 50])),
        "splits": (draw(st.integers(1, 3)), draw(st.integers(1, 3))),
        "group_size": draw(st.sampled_from([1, 3])),
        "seed": draw(st.integers(0, 5)),
    }


@settings(max_examples=12, deadline=None, derandomize=True)
@given(case=_batches())
def test_prefix_decode_of_any_forest_equals_reference(device, case) -> None:
    batch = make_paged_batch(
        case["lens"], block_size=case["block_size"], num_kv_heads=1, head_dim=64,
        shared=case["ranges"], device=device, seed=case["seed"],
    )  # fmt: skip
    group_size, (num_splits, num_prefix_splits) = case["group_size"], case["splits"]
    _check(
        batch, _query(batch, group_size, torch.float32), _groups(case["ranges"], batch, group_size),
        num_splits=num_splits, num_prefix_splits=num_prefix_splits, window=case["window"],
    )  # fmt: skip


@settings(max_examples=30, deadline=None, derandomize=True)
@given(case=_batches())
def test_reference_prefix_decode_of_any_forest_equals_attention_without_groups(case) -> None:
    batch = make_paged_batch(
        case["lens"], block_size=case["block_size"], num_kv_heads=1, head_dim=64,
        shared=case["ranges"], seed=case["seed"],
    )  # fmt: skip
    query = _query(batch, case["group_size"], torch.float64)
    arrays = (batch.k_pool, batch.v_pool, batch.block_tables, batch.seq_lens)
    got = reference.prefix_decode(query, *arrays, case["ranges"], 0.2, window=case["window"])
    want = reference.paged_decode(query, *arrays, 0.2, window=case["window"])
    torch.testing.assert_close(got, want)


def test_groups_from_ranges_have_levels_starts_and_rows() -> None:
    groups = DecodeGroups.from_ranges(
        NESTED, num_seqs=7, block_size=16, group_size=3, device="cpu", num_groups=5
    )
    assert groups.level.tolist() == [0, 1, 1, 0, 0]
    assert groups.first_seq.tolist() == [0, 0, 2, 4, 0]
    assert groups.last_seq.tolist() == [4, 2, 4, 6, 0]
    assert groups.first_block.tolist() == [0, 2, 2, 0, 0]
    assert groups.last_block.tolist() == [2, 3, 5, 1, 0]
    assert groups.start_lens.tolist() == [48, 48, 80, 80, 16, 16, 0]
    assert (groups.num_levels, groups.max_group_rows) == (2, 12)


@pytest.mark.parametrize(
    "ranges",
    [
        [(0, 3, 0, 2), (1, 4, 2, 3)],  # crosses the end of a group
        [(0, 2, 0, 2), (2, 4, 0, 2), (1, 3, 2, 3)],  # spans two groups
        [(0, 3, 0, 2), (0, 3, 3, 4)],  # a gap
        [(0, 3, 0, 2), (0, 3, 1, 4)],  # an overlap
        [(0, 2, 1, 2)],  # starts after the first block
        [(0, 5, 0, 1)],  # more sequences than there are
        [(1, 1, 0, 1)],  # no sequences
        [(0, 2, 0, 0)],  # no blocks
    ],
)
def test_groups_from_ranges_rejects_what_does_not_nest(ranges: list[Range]) -> None:
    with pytest.raises(ValueError, match="must lie in one group"):
        DecodeGroups.from_ranges(ranges, num_seqs=4, block_size=16, group_size=1, device="cpu")


def test_groups_from_ranges_rejects_more_groups_than_padding_allows() -> None:
    with pytest.raises(ValueError, match="num_groups must be at least 4"):
        DecodeGroups.from_ranges(
            NESTED, num_seqs=7, block_size=16, group_size=1, device="cpu", num_groups=3
        )


def test_prefix_decode_rejects_groups_of_another_batch(device) -> None:
    batch = make_paged_batch([17, 20], block_size=16, num_kv_heads=1, head_dim=64, device=device)
    groups = DecodeGroups.from_ranges(
        [(0, 2, 0, 1)], num_seqs=3, block_size=16, group_size=1, device=device
    )
    with pytest.raises(ValueError, match=r"groups.start_lens must have shape \[2\]"):
        _check(batch, _query(batch, 1, torch.float32), groups)
