from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import PagedBatch, assert_attention_close, make_paged_batch, random_tensor

from radixkv.kernels import decode_plan, reference
from radixkv.kernels.paged_decode import (
    choose_num_splits,
    paged_attention_decode,
    paged_decode,
    workspace_numel,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _query(batch: PagedBatch, group_size: int, dtype: torch.dtype) -> torch.Tensor:
    num_kv_heads, head_dim = batch.k_pool.shape[2:]
    shape = (len(batch.seq_lens), num_kv_heads * group_size, head_dim)
    return random_tensor(shape, dtype, torch.Generator().manual_seed(7), batch.k_pool.device)


def _check(batch: PagedBatch, query: torch.Tensor, exact_scores: bool = True, **options: Any):
    """Compare the kernel with the reference in float64; return the kernel's output."""
    arrays = (batch.k_pool, batch.v_pool, batch.block_tables, batch.seq_lens)
    scales = {"k_scale": batch.k_scale, "v_scale": batch.v_scale}
    scale = query.shape[2] ** -0.5
    got = paged_decode(query, *arrays, scale, return_lse=True, **scales, **options)
    options.pop("num_splits", None)
    want = reference.paged_decode(query.double(), *arrays, scale, **scales, **options)
    assert_attention_close(got, want, query.dtype, exact_scores=exact_scores)
    return got[0]


@pytest.mark.parametrize(
    ("head_dim", "block_size", "group_size", "dtype", "num_splits"),
    [
        (64, 16, 3, torch.float32, 1),
        (64, 8, 1, torch.float16, 3),
        (80, 32, 4, torch.float32, 2),
        (96, 16, 2, torch.bfloat16, 2),
        (128, 16, 8, torch.bfloat16, 3),
        (128, 128, 1, torch.float16, 2),
        (256, 256, 2, torch.float16, 2),
        (256, 64, 5, torch.bfloat16, 1),
    ],
)
def test_paged_decode_equals_reference(
    device, head_dim, block_size, group_size, dtype, num_splits
) -> None:
    lens = [1, block_size - 1, block_size, block_size + 1, 2 * block_size + 3]
    batch = make_paged_batch(
        lens, block_size=block_size, num_kv_heads=2, head_dim=head_dim, dtype=dtype, device=device
    )
    _check(batch, _query(batch, group_size, dtype), num_splits=num_splits)


def test_paged_decode_takes_more_query_heads_than_a_tile_has_rows(device) -> None:
    batch = make_paged_batch([5, 40], block_size=16, num_kv_heads=2, head_dim=64, device=device)
    _check(batch, _query(batch, 35, torch.float32), num_splits=2)


@pytest.mark.parametrize("num_splits", [2, 3, 5, 9])
def test_paged_decode_is_right_around_the_boundaries_of_splits(device, num_splits) -> None:
    # Tiles of 32 keys: sequences of one key, of a tile or a split more or less than a key.
    lens = [1, 31, 32, 33, 63, 64, 65, 32 * num_splits - 1, 32 * num_splits + 1]
    batch = make_paged_batch(lens, block_size=16, num_kv_heads=1, head_dim=128, device=device)
    _check(batch, _query(batch, 2, torch.float32), num_splits=num_splits)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_paged_decode_of_padding_row_is_zeros(device, num_splits) -> None:
    batch = make_paged_batch([0, 20, 0], block_size=8, num_kv_heads=1, head_dim=64, device=device)
    out = _check(batch, _query(batch, 2, torch.float32), num_splits=num_splits)
    assert torch.equal(out[[0, 2]], torch.zeros_like(out[[0, 2]]))


@pytest.mark.parametrize("num_splits", [1, 2])
def test_paged_decode_with_window_skips_what_lies_before_it(device, num_splits) -> None:
    batch = make_paged_batch(
        [1, 9, 10, 11, 70, 200], block_size=8, num_kv_heads=1, head_dim=64, device=device
    )
    _check(batch, _query(batch, 3, torch.float32), num_splits=num_splits, window=10)


def test_paged_decode_with_window_never_follows_entries_of_blocks_before_it(device) -> None:
    batch = make_paged_batch([100], block_size=8, num_kv_heads=1, head_dim=64, device=device)
    query = _query(batch, 2, torch.float32)
    want = _check(batch, query, window=20)
    # Key 80 is the first: blocks 0 to 9 may have been given away.
    batch.block_tables[0, :10] = 2**30
    got = paged_decode(
        query, batch.k_pool, batch.v_pool, batch.block_tables, batch.seq_lens, 0.125, window=20
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_paged_decode_with_softcap_equals_reference(device, dtype) -> None:
    batch = make_paged_batch(
        [3, 50], block_size=16, num_kv_heads=1, head_dim=64, dtype=dtype, device=device
    )
    _check(batch, _query(batch, 2, dtype) * 8, softcap=3.0, num_splits=2)


def test_paged_decode_of_large_scores_stays_finite(device) -> None:
    batch = make_paged_batch(
        [3, 50], block_size=16, num_kv_heads=1, head_dim=64, dtype=torch.float16, device=device
    )
    out = _check(batch, _query(batch, 2, torch.float16) * 1000, num_splits=2)
    assert out.isfinite().all()


@pytest.mark.parametrize("num_splits", [1, 3])
def test_paged_decode_leaves_out_keys_before_start_lens(device, num_splits) -> None:
    lens = [40, 40, 40, 41, 17, 64]
    starts = torch.tensor([0, 16, 40, 39, 16, 32], dtype=torch.int32, device=device)
    batch = make_paged_batch(lens, block_size=16, num_kv_heads=1, head_dim=64, device=device)
    query = _query(batch, 2, torch.float32)
    out = _check(batch, query, num_splits=num_splits, start_lens=starts)
    assert torch.equal(out[2], torch.zeros_like(out[2]))
    _check(batch, query, num_splits=num_splits, start_lens=starts, window=20)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", DTYPES)
def test_paged_decode_of_quantised_pool_equals_reference(
    device, dtype, kv_dtype, per_channel
) -> None:
    batch = make_paged_batch(
        [1, 21], block_size=16, num_kv_heads=2, head_dim=80, dtype=kv_dtype,
        per_channel=per_channel, device=device,
    )  # fmt: skip
    _check(batch, _query(batch, 3, dtype), exact_scores=not per_channel, num_splits=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_paged_decode_of_float8_bytes_equals_reference(device, dtype, monkeypatch) -> None:
    """What runs on chips that have no such type."""
    monkeypatch.setattr(decode_plan, "has_fp8_loads", lambda target: False)
    batch = make_paged_batch(
        [1, 21], block_size=16, num_kv_heads=2, head_dim=64, dtype=torch.float8_e4m3fn,
        device=device,
    )  # fmt: skip
    # Every finite value, subnormal ones included.
    values = torch.cat([torch.arange(0, 127), torch.arange(128, 255)]).to(torch.uint8)
    for pool in (batch.k_pool, batch.v_pool):
        rows = pool.view(torch.uint8)[batch.block_tables[1, 0].item()]
        rows.view(-1)[: len(values)] = values.to(device)
    _check(batch, _query(batch, 3, dtype) / 50)


def test_paged_decode_of_large_k_scales_does_not_overflow_float16(device) -> None:
    batch = make_paged_batch(
        [30], block_size=16, num_kv_heads=1, head_dim=64, dtype=torch.int8, per_channel=True,
        device=device,
    )  # fmt: skip
    assert batch.k_scale is not None
    batch.k_scale.mul_(1e6)
    query = _query(batch, 2, torch.float16)
    got = paged_decode(
        query, batch.k_pool, batch.v_pool, batch.block_tables, batch.seq_lens, 1e-7,
        k_scale=batch.k_scale, v_scale=batch.v_scale,
    )  # fmt: skip
    want, _ = reference.paged_decode(
        query.double(), batch.k_pool, batch.v_pool, batch.block_tables, batch.seq_lens, 1e-7,
        k_scale=batch.k_scale, v_scale=batch.v_scale,
    )  # fmt: skip
    torch.testing.assert_close(got.double(), want, rtol=4e-3, atol=4e-3)


def test_paged_decode_reads_strided_arguments_and_writes_into_out_and_workspace(device) -> None:
    batch = make_paged_batch(
        [7, 40], block_size=16, num_kv_heads=2, head_dim=64, heads_first=True, device=device
    )
    wide = torch.randn(2, 9, 64, device=device)
    query, out = wide[:, 1:7], torch.full((2, 8, 64), 7.0, device=device)
    tables = torch.cat([batch.block_tables, batch.block_tables], 1)[
        :, : batch.block_tables.shape[1]
    ]
    arrays = (batch.k_pool, batch.v_pool, tables, batch.seq_lens)
    workspace = torch.full((workspace_numel(3, 2, 6, 64),), float("nan"), device=device)
    got = paged_decode(query, *arrays, 0.125, num_splits=3, out=out[:, :6], workspace=workspace)
    want, _ = reference.paged_decode(query.double(), *arrays, 0.125)
    assert got.data_ptr() == out.data_ptr()
    torch.testing.assert_close(out[:, :6].double(), want, rtol=2e-5, atol=2e-5)
    assert (out[:, 6:] == 7.0).all()


def test_paged_decode_reads_blocks_beyond_two_to_the_31_elements(device) -> None:
    """Block ids were multiplied by the stride in 32 bits."""
    block = 256 * 256
    try:
        # Two blocks of an int8 pool of 2 GiB, of which the rest is never touched.
        pool = torch.empty(2**31 + 2 * block, dtype=torch.int8, device=device)
    except RuntimeError:
        pytest.skip("there are no 2 GiB")
    pool = pool.view(-1, 256, 1, 256)
    last = pool.shape[0] - 1
    generator = torch.Generator().manual_seed(0)
    pool[last], pool[0] = random_tensor((256, 1, 256), torch.int8, generator, device), 127
    tables = torch.tensor([[last]], dtype=torch.int32, device=device)
    lens = torch.tensor([40], dtype=torch.int32, device=device)
    ones = torch.full((1,), 0.01, device=device)
    query = random_tensor((1, 2, 256), torch.float32, generator, device)
    got = paged_decode(query, pool, pool, tables, lens, 0.1, k_scale=ones, v_scale=ones)
    want = paged_decode(query, pool[last:], pool[last:], tables - last, lens, 0.1,
                        k_scale=ones, v_scale=ones)  # fmt: skip
    assert torch.equal(got, want)


def test_paged_attention_decode_takes_pools_with_heads_before_slots(device) -> None:
    batch = make_paged_batch(
        [1, 33, 16], block_size=16, num_kv_heads=2, head_dim=64, heads_first=True, device=device
    )
    query = _query(batch, 3, torch.float32)
    key_pool = batch.k_pool.transpose(1, 2).contiguous()
    value_pool = batch.v_pool.transpose(1, 2).contiguous()
    got = paged_attention_decode(
        query, key_pool, value_pool, batch.block_tables, batch.seq_lens, 0.2
    )
    want, _ = reference.paged_decode(
        query.double(), batch.k_pool, batch.v_pool, batch.block_tables, batch.seq_lens, 0.2
    )
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)


@st.composite
def _batches(draw: st.DrawFn) -> dict[str, Any]:
    block_size = draw(st.sampled_from([8, 16, 64]))
    edges = [0, 1, block_size - 1, block_size, block_size + 1, 2 * block_size, 127, 128, 129]
    lens = draw(st.lists(st.sampled_from(edges) | st.integers(1, 90), min_size=1, max_size=3))
    return {
        "lens": lens,
        "block_size": block_size,
        "shared": draw(st.booleans()),
        "starts": [draw(st.sampled_from([0, n // 2, max(n - 1, 0), n])) for n in lens],
        "window": draw(st.none() | st.sampled_from([1, block_size, block_size + 1, 50])),
        "num_splits": draw(st.integers(1, 4)),
        "group_size": draw(st.sampled_from([1, 3])),
        "seed": draw(st.integers(0, 5)),
    }


@settings(max_examples=12, deadline=None, derandomize=True)
@given(case=_batches())
def test_paged_decode_of_any_ragged_batch_equals_reference(device, case) -> None:
    lens, block_size = case["lens"], case["block_size"]
    run = min(lens) // block_size
    batch = make_paged_batch(
        lens, block_size=block_size, num_kv_heads=1, head_dim=64, device=device,
        shared=[(0, len(lens), 0, run)] if case["shared"] and run else (), seed=case["seed"],
    )  # fmt: skip
    starts = torch.tensor(case["starts"], dtype=torch.int32, device=device)
    _check(
        batch, _query(batch, case["group_size"], torch.float32), num_splits=case["num_splits"],
        window=case["window"], start_lens=starts,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 3, 64)}, "num_heads must be a multiple"),
        ({"query": torch.zeros(2, 2, 72)}, "k_pool must have shape"),
        ({"query": torch.zeros(2, 2, 64).half()}, "k_pool must have the dtype of query"),
        ({"v_pool": torch.zeros(5, 16, 1, 64)}, "v_pool must have shape"),
        ({"seq_lens": torch.zeros(2, dtype=torch.int64)}, "seq_lens must be int32"),
        ({"block_tables": torch.zeros(3, 4, dtype=torch.int32)}, "block_tables must have shape"),
        ({"start_lens": torch.zeros(1, dtype=torch.int32)}, "start_lens must have shape"),
        ({"k_scale": torch.ones(2)}, "pool has no scales"),
        ({"window": 0}, "window must be at least 1"),
        ({"softcap": 0.0}, "softcap must be positive"),
        ({"scale": 0.0}, "scale must be positive"),
        ({"num_splits": 0}, "num_splits must be at least 1"),
        ({"num_splits": 2, "workspace": torch.zeros(9)}, "workspace must have at least 520"),
        ({"out": torch.zeros(2, 2, 64).half()}, "out must be float32"),
    ],
)
def test_paged_decode_rejects_wrong_argument(change: dict[str, Any], message: str) -> None:
    arguments = {
        "query": torch.zeros(2, 2, 64),
        "k_pool": torch.zeros(4, 16, 2, 64),
        "v_pool": torch.zeros(4, 16, 2, 64),
        "block_tables": torch.zeros(2, 4, dtype=torch.int32),
        "seq_lens": torch.ones(2, dtype=torch.int32),
        "scale": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        paged_decode(**(arguments | change))


def test_paged_decode_rejects_quantised_pool_without_scales() -> None:
    pool = torch.zeros(4, 16, 2, 64, dtype=torch.int8)
    tables, lens = torch.zeros(1, 4, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="needs v_scale"):
        paged_decode(torch.zeros(1, 2, 64), pool, pool, tables, lens, 1.0, k_scale=torch.ones(2))


def test_choose_num_splits_is_one_when_the_batch_fills_the_device() -> None:
    assert choose_num_splits(64, 8, 100_000, 132) == 1


def test_choose_num_splits_fills_the_device_for_one_long_sequence() -> None:
    splits = choose_num_splits(1, 8, 32_768, 132)
    assert 0.85 * 264 <= 8 * splits <= 264


@pytest.mark.parametrize(("max_seq_len", "most"), [(0, 1), (1, 1), (511, 1), (512, 2), (4096, 16)])
def test_choose_num_splits_leaves_256_tokens_to_a_split(max_seq_len: int, most: int) -> None:
    assert choose_num_splits(1, 1, max_seq_len, 132) <= most


@given(st.integers(0, 500), st.integers(1, 64), st.integers(0, 200_000), st.integers(1, 304))
def test_choose_num_splits_uses_the_device_at_least_as_well_as_one_split(
    num_seqs: int, num_kv_heads: int, max_seq_len: int, num_multiprocessors: int
) -> None:
    splits = choose_num_splits(num_seqs, num_kv_heads, max_seq_len, num_multiprocessors)
    slots, programs = 2 * num_multiprocessors, max(1, num_seqs * num_kv_heads)
    # Rounds of the device, in units of an unsplit program's time.
    assert -(-programs * splits // slots) / splits <= -(-programs // slots) * 1.2
    assert 1 <= splits <= 128


def test_choose_num_splits_rejects_negative_size() -> None:
    with pytest.raises(ValueError, match="sizes of at least 0"):
        choose_num_splits(-1, 1, 1, 1)
