from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import TOLERANCE, PagedBatch, make_paged_batch, random_tensor

import radixkv.kernels.paged_prefill as prefill_module
from radixkv.kernels.paged_prefill import (
    choose_tile_rows,
    paged_prefill,
    plan_tiles,
    prefill_config,
)
from radixkv.kernels.reference import paged_attention
from radixkv.kernels.reference_prefill import prefill_reference

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
INT8, FP8 = torch.int8, torch.float8_e4m3fn


class Case:
    """A batch with its queries, ready to be launched and compared with the reference."""

    def __init__(
        self,
        query_lens: list[int],
        seq_lens: list[int],
        device: torch.device,
        *,
        dtype: torch.dtype = F32,
        kv_dtype: torch.dtype | None = None,
        group_size: int = 2,
        num_kv_heads: int = 1,
        head_dim: int = 64,
        block_size: int = 16,
        tile_rows: int | None = None,
        **pool: Any,
    ) -> None:
        self.batch: PagedBatch = make_paged_batch(
            seq_lens,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=kv_dtype or dtype,
            device=device,
            **pool,
        )
        shape = (sum(query_lens), group_size * num_kv_heads, head_dim)
        self.query = random_tensor(shape, dtype, torch.Generator().manual_seed(1), device)
        starts = [0, *accumulate(query_lens)]
        self.starts = torch.tensor(starts, dtype=torch.int32, device=device)
        self.tile_rows = tile_rows or choose_tile_rows(max(query_lens), group_size, head_dim, dtype)
        contexts = [n - m for n, m in zip(seq_lens, query_lens, strict=True)]
        self.tiles = plan_tiles(query_lens, self.tile_rows, contexts).to(device)
        self.lse = torch.full(shape[:2], math.nan, device=device)

    @property
    def args(self) -> tuple[Any, ...]:
        batch = self.batch
        tensors = (self.query, batch.k_pool, batch.v_pool, batch.block_tables, batch.seq_lens)
        return (*tensors, self.starts, self.query.shape[-1] ** -0.5)

    def run(self, **options: Any) -> torch.Tensor:
        scales = {"k_scale": self.batch.k_scale, "v_scale": self.batch.v_scale}
        launch = {"tiles": self.tiles, "tile_rows": self.tile_rows, "lse": self.lse}
        return paged_prefill(*self.args, **(scales | launch | options))

    def check(self, **options: Any) -> None:
        out = self.run(**options)
        want, want_lse = prefill_reference(
            *self.args, k_scale=self.batch.k_scale, v_scale=self.batch.v_scale, **options
        )
        tolerance = TOLERANCE[self.query.dtype]
        torch.testing.assert_close(out.cpu().double(), want, rtol=0, atol=tolerance)
        # Scores are sums in float32 of products that are exact, but for K's scales per channel.
        tolerance = 1e-5 if self.batch.k_scale is None else tolerance
        torch.testing.assert_close(self.lse.cpu().double(), want_lse, rtol=1e-6, atol=tolerance)


MIXED = ([1, 9, 33, 3], [70, 9, 48, 36])  # a decode, a first chunk, chunks across block borders


def test_reference_of_plain_prefill_equals_the_dense_reference() -> None:
    case = Case(*MIXED, torch.device("cpu"), dtype=torch.float32, num_kv_heads=2)
    query, k_pool, v_pool, *rest = case.args
    out, lse = prefill_reference(query, k_pool, v_pool, *rest)
    want, want_lse = paged_attention(query.double(), k_pool.double(), v_pool.double(), *rest)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype", "group_size", "num_kv_heads"),
    [
        (64, 16, F32, 3, 3),
        (64, 8, F16, 1, 2),
        (80, 32, BF16, 7, 1),
        (96, 128, F16, 2, 2),
        (128, 16, BF16, 4, 1),
        (128, 64, F32, 5, 1),
        (256, 256, BF16, 2, 1),
        (64, 16, BF16, 20, 1),
    ],
)
def test_prefill_equals_reference_for_shapes(
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    group_size: int,
    num_kv_heads: int,
    device: torch.device,
) -> None:
    Case(
        *MIXED,
        device,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        group_size=group_size,
        num_kv_heads=num_kv_heads,
    ).check()


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "target"),
    [(INT8, F16, None), (INT8, BF16, None), (FP8, F16, "sm_80"), (FP8, BF16, "sm_90")],
)
def test_prefill_of_quantised_pool_equals_reference(
    kv_dtype: torch.dtype,
    dtype: torch.dtype,
    target: str | None,
    per_channel: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if target is not None and device.type == "cpu":  # bytes decoded by hand, or by the compiler
        monkeypatch.setattr(prefill_module, "device_target", lambda _: target)
    Case(
        *MIXED, device, dtype=dtype, kv_dtype=kv_dtype, num_kv_heads=2, per_channel=per_channel
    ).check()


def test_prefill_of_float16_queries_survives_scales_beyond_its_range(device: torch.device) -> None:
    case = Case(*MIXED, device, dtype=F16, kv_dtype=INT8, per_channel=True)
    case.query *= 100
    case.batch.k_scale.mul_(1e5)
    out = paged_prefill(
        *case.args[:-1],
        1e-8,
        tiles=case.tiles,
        tile_rows=case.tile_rows,
        k_scale=case.batch.k_scale,
        v_scale=case.batch.v_scale,
    )
    want, _ = prefill_reference(
        *case.args[:-1], 1e-8, k_scale=case.batch.k_scale, v_scale=case.batch.v_scale
    )
    torch.testing.assert_close(out.cpu().double(), want, rtol=0, atol=TOLERANCE[F16])


# 50: the oldest key of a tile's first row lies in another key tile than that of its last row.
@pytest.mark.parametrize("window", [1, 7, 32, 50, 1000])
def test_prefill_with_window_equals_reference(window: int, device: torch.device) -> None:
    Case([1, 50, 20], [200, 50, 130], device, block_size=8).check(window=window)


def test_prefill_with_window_never_reads_the_blocks_before_it(device: torch.device) -> None:
    case = Case([2], [200], device)
    want = case.run(window=40)
    used = case.batch.block_tables[0, :13].tolist()
    spare = next(i for i in range(len(case.batch.k_pool)) if i not in used)  # full of NaN
    case.batch.block_tables[0, : (198 - 39) // 32 * 2] = spare
    assert torch.equal(case.run(window=40), want)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_prefill_with_softcap_equals_reference(softcap: float, device: torch.device) -> None:
    case = Case(*MIXED, device, dtype=F32, num_kv_heads=2)
    case.query *= 20  # scores far beyond the cap, on both sides
    case.check(softcap=softcap, window=30)


def test_prefill_of_shared_blocks_equals_reference(device: torch.device) -> None:
    runs = [(0, 3, 0, 3), (1, 3, 3, 5)]
    Case([4, 5, 1], [60, 85, 90], device, shared=runs).check()


def test_prefill_reads_pools_with_heads_first(device: torch.device) -> None:
    Case(*MIXED, device, num_kv_heads=3, heads_first=True).check()


def test_prefill_reads_and_writes_strided_rows(device: torch.device) -> None:
    case = Case(*MIXED, device, num_kv_heads=2)
    want = case.run()
    num_tokens, num_heads, head_dim = case.query.shape
    fused = torch.full((num_tokens, num_heads + 4, head_dim), math.nan, device=device)
    fused[:, :num_heads] = case.query
    case.query = fused[:, :num_heads]
    slab = torch.full((num_tokens, num_heads * 2, head_dim), 7.0, device=device)
    out = case.run(out=slab[:, ::2])
    assert torch.equal(out, want)
    assert torch.equal(slab[:, ::2], want)
    assert bool((slab[:, 1::2] == 7.0).all())


def test_prefill_of_one_sequence_ignores_nan_in_the_blocks_of_another(
    device: torch.device,
) -> None:
    case = Case([5, 5], [37, 40], device)
    case.tiles = plan_tiles([5, 0], case.tile_rows).to(device)
    want = case.run()[:5].clone()
    other = case.batch.block_tables[1, :3].long()
    case.batch.k_pool[other] = math.nan
    case.batch.v_pool[other] = math.nan
    assert torch.equal(case.run()[:5], want)


def test_prefill_in_chunks_equals_prefill_at_once(device: torch.device) -> None:
    whole = Case([50], [50], device)
    want = whole.run()
    for first, last in ((0, 1), (1, 20), (20, 50)):
        part = Case([last - first], [last], device)
        part.batch = whole.batch
        part.batch.seq_lens[0] = last
        part.query = whole.query[first:last]
        torch.testing.assert_close(part.run(), want[first:last], rtol=0, atol=2e-6)


def test_prefill_leaves_rows_without_a_tile_alone(device: torch.device) -> None:
    """A captured graph has more rows and tiles than the batch in it."""
    case = Case([3, 5], [20, 5], device)
    want = case.run().clone()
    case.query = torch.cat([case.query, torch.full_like(case.query, math.nan)])
    case.lse = torch.full(case.query.shape[:2], 7.0, device=device)
    case.tiles = plan_tiles([3, 5], case.tile_rows, num_tiles=9).to(device)
    out = case.run(out=torch.full_like(case.query, 7.0))
    assert torch.equal(out[:8], want)
    assert bool((out[8:] == 7.0).all())
    assert bool((case.lse[8:] == 7.0).all())


def test_prefill_of_no_tiles_launches_nothing(device: torch.device) -> None:
    case = Case([1], [1], device)
    assert case.run(tiles=case.tiles[:0]).shape == case.query.shape


def test_prefill_reaches_elements_past_two_to_the_31(device: torch.device) -> None:
    """The product of block id and stride was 32-bit in other servers' kernels."""
    case = Case([3], [20], device, dtype=F16, kv_dtype=INT8)
    want = case.run()
    numel = case.batch.k_pool[0].numel()
    num_blocks = 2**31 // numel + 8
    pools = []
    for pool in (case.batch.k_pool, case.batch.v_pool):
        # Its pages are never touched but for the last ones.
        big = torch.empty((num_blocks, *pool.shape[1:]), dtype=INT8, device=device)
        big[-5:] = pool
        pools.append(big)
    tables = case.batch.block_tables + (num_blocks - 5)
    _, _, _, _, lens, starts, scale = case.args
    out = paged_prefill(
        case.query, *pools, tables, lens, starts, scale,
        tiles=case.tiles, tile_rows=case.tile_rows,
        k_scale=case.batch.k_scale, v_scale=case.batch.v_scale,
    )  # fmt: skip
    assert torch.equal(out, want)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_prefill_of_any_ragged_batch_equals_reference(
    device: torch.device, data: st.DataObject
) -> None:
    lengths = st.tuples(st.integers(1, 40), st.integers(0, 70))
    pairs = data.draw(st.lists(lengths, min_size=1, max_size=4))
    case = Case(
        [m for m, _ in pairs],
        [m + context for m, context in pairs],
        device,
        group_size=data.draw(st.integers(1, 4)),
        block_size=data.draw(st.sampled_from([8, 16, 64])),
        tile_rows=data.draw(st.sampled_from([None, 1, 5])),
        seed=data.draw(st.integers(0, 9)),
    )
    case.check(window=data.draw(st.none() | st.integers(1, 50)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tiles": torch.zeros(1, 3, dtype=torch.int32)}, "tiles must have shape"),
        ({"tiles": torch.zeros(1, 2)}, "tiles must be int32"),
        ({"tile_rows": 0}, "tile_rows must be positive"),
        ({"tile_rows": 17}, "tile_rows must be at most 16"),
        ({"window": 0}, "window must be positive"),
        ({"softcap": -1.0}, "softcap must be positive"),
        ({"k_scale": torch.ones(1)}, "k_scale must be None"),
        ({"lse": torch.zeros(3)}, "lse must have shape"),
        ({"out": torch.zeros(4, 2, 64, dtype=BF16)}, "out must be float32"),
    ],
)
def test_prefill_rejects_a_bad_option(change: dict[str, Any], message: str) -> None:
    case = Case([4], [20], torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        case.run(**change)


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.zeros(4, 3, 64, dtype=torch.float64), "query must be float16"),
        (1, torch.zeros(5, 16, 3, 64), "v_pool must have shape"),
        (1, torch.zeros(5, 16, 1, 64, dtype=BF16), "k_pool must be float32"),
        (1, torch.zeros(5, 16, 1, 64, dtype=INT8), "v_pool must be int8"),
        (3, torch.zeros(2, 3, dtype=torch.int32), "block_tables must have shape"),
        (4, torch.zeros(1), "seq_lens must be int32"),
        (5, torch.zeros(3, dtype=torch.int32), "query_start_loc must have shape"),
        (6, 0.0, "scale must be positive"),
    ],
)
def test_prefill_rejects_a_bad_argument(index: int, value: Any, message: str) -> None:
    case = Case([4], [20], torch.device("cpu"))
    args = list(case.args)
    args[index] = value
    with pytest.raises(ValueError, match=message):
        paged_prefill(*args, tiles=case.tiles, tile_rows=case.tile_rows)


@pytest.mark.parametrize(
    ("query_heads", "shape", "message"),
    [
        (3, (5, 16, 2, 64), "num_heads must be a multiple"),
        (2, (5, 12, 2, 64), "block_size must be one of"),
        (2, (5, 16, 2, 48), "head_dim must be one of"),
    ],
)
def test_prefill_rejects_a_shape_without_a_kernel(
    query_heads: int, shape: tuple[int, ...], message: str
) -> None:
    case = Case([4], [20], torch.device("cpu"))
    query, pool = torch.zeros(4, query_heads, shape[-1]), torch.zeros(shape)
    with pytest.raises(ValueError, match=message):
        paged_prefill(query, pool, pool, *case.args[3:], tiles=case.tiles, tile_rows=case.tile_rows)


@given(
    query_lens=st.lists(st.integers(0, 50), max_size=6),
    tile_rows=st.integers(1, 20),
    spare=st.integers(0, 3),
)
def test_plan_covers_every_token_once(query_lens: list[int], tile_rows: int, spare: int) -> None:
    num_tiles = sum(-(-n // tile_rows) for n in query_lens) + spare
    tiles = plan_tiles(query_lens, tile_rows, num_tiles=num_tiles).tolist()
    covered = [
        (seq, row)
        for seq, first in tiles
        if seq >= 0
        for row in range(first, min(first + tile_rows, query_lens[seq]))
    ]
    assert sorted(covered) == [(i, j) for i, n in enumerate(query_lens) for j in range(n)]
    assert [seq for seq, _ in tiles].count(-1) == spare


def test_plan_puts_tiles_with_most_keys_first() -> None:
    tiles = plan_tiles([40, 1, 20], 16, [0, 100, 25])
    assert tiles.tolist() == [[1, 0], [2, 16], [2, 0], [0, 32], [0, 16], [0, 0]]


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        (([3], 0), {}, "tile_rows must be positive"),
        (([3, 4], 2, [1]), {}, "lists of one length"),
        (([3, -4], 2), {}, "must not be negative"),
        (([3], 2), {"num_tiles": 1}, "num_tiles must be at least 2"),
    ],
)
def test_plan_rejects_bad_arguments(
    args: tuple[Any, ...], options: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_tiles(*args, **options)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("group_size", [1, 3, 8, 71])
def test_tile_of_chosen_rows_holds_all_heads(
    dtype: torch.dtype, head_dim: int, group_size: int
) -> None:
    for query_len in (1, 5, 1000):
        tile_rows = choose_tile_rows(query_len, group_size, head_dim, dtype)
        config = prefill_config(head_dim, 16, dtype, dtype, tile_rows * group_size, "sm_90")
        assert tile_rows >= 1
        assert tile_rows * group_size <= config.tile_m <= 128
