import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.kernels import reference_copy
from radixkv.kernels.write_kv import write_kv

QUANTISED = [torch.int8, torch.float8_e4m3fn]
FLOATS = [torch.float16, torch.bfloat16, torch.float32]


def _rows(tokens: int, heads: int, dim: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, dim, generator=gen).to(dtype)


def _pools(blocks: int, block_size: int, heads: int, dim: int, dtype: torch.dtype):
    """Return K and V pools of sevens: what isn't written must stay so."""
    return [torch.full((blocks, block_size, heads, dim), 7.0).to(dtype) for _ in range(2)]


def _check(key, value, pools, slots, **scales) -> None:
    """Write with the kernel and with the reference, and compare every byte of the pools."""
    want = [pool.clone() for pool in pools]
    reference_copy.write_kv(key, value, *want, slots, **scales)
    write_kv(key, value, *pools, slots, **scales)
    for pool, expected in zip(pools, want, strict=True):
        assert torch.equal(pool.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (2, 80), (3, 96), (2, 256)])
def test_write_kv_fills_the_slots_and_nothing_else(dtype, heads, dim) -> None:
    key, value = _rows(5, heads, dim, dtype), _rows(5, heads, dim, dtype, seed=1)
    slots = torch.tensor([9, 47, -1, 0, 16])
    _check(key, value, _pools(3, 16, heads, dim, dtype), slots)


@given(
    block_size=st.sampled_from([1, 2, 8, 32]),
    slots=st.lists(st.integers(0, 63), unique=True, max_size=40),
    skipped=st.sets(st.integers(0, 39)),
)
@settings(max_examples=25, deadline=None)
def test_write_kv_follows_any_slot_mapping(block_size, slots, skipped) -> None:
    mapping = [-1 if i in skipped else slot for i, slot in enumerate(slots)]
    key = _rows(len(slots), 3, 8, torch.bfloat16)
    pools = _pools(64 // block_size, block_size, 3, 8, torch.bfloat16)
    _check(key, key + 1, pools, torch.tensor(mapping, dtype=torch.int64))


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("from_dtype", FLOATS)
def test_write_kv_quantises_by_head_and_by_channel(dtype, channels, from_dtype) -> None:
    key, value = _rows(6, 2, 80, from_dtype), _rows(6, 2, 80, from_dtype, seed=1)
    shape = (2, 80) if channels else (2,)
    gen = torch.Generator().manual_seed(2)
    k_scale, v_scale = (torch.rand(shape, generator=gen) * 0.05 + 0.001 for _ in range(2))
    slots = torch.tensor([3, -1, 31, 8, 17, 0])
    _check(key, value, _pools(4, 8, 2, 80, dtype), slots, k_scale=k_scale, v_scale=v_scale)


def test_write_kv_rounds_ties_to_even_and_saturates_in_int8() -> None:
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 1e9, -128.5, -1e9, 0.0, -3.49])
    key = values.repeat(2)[:16].view(1, 1, 16)
    pools, one = _pools(1, 1, 1, 16, torch.int8), torch.ones(1)
    write_kv(key, -key, *pools, torch.tensor([0]), k_scale=one, v_scale=one)
    want = [0, 2, 2, 0, -2, 126, 127, 127, -128, -128, 0, -3]
    assert pools[0].flatten().tolist()[:12] == want
    assert pools[1].flatten().tolist()[5:10] == [-126, -128, -128, 127, 127]


def test_write_kv_encodes_every_neighbourhood_of_float8_as_torch_does() -> None:
    """All 254 finite codes, the midpoints between them, and one float32 to each side of both."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = codes[codes.isfinite()].unique()
    points = torch.cat([finite, (finite[1:] + finite[:-1]) / 2, torch.tensor([-0.0, 1e-30])])
    infinity = torch.tensor(float("inf"))
    points = torch.cat([points, points.nextafter(infinity), points.nextafter(-infinity)])
    extremes = torch.tensor([448.0, 463.9, 464.0, 1e6, float("inf"), float("nan")])
    points = torch.cat([points, extremes, -extremes])
    points = torch.nn.functional.pad(points, (0, -len(points) % 64)).view(-1, 1, 64)
    pools, one = _pools(len(points), 1, 1, 64, torch.float8_e4m3fn), torch.ones(1)
    write_kv(points, points, *pools, torch.arange(len(points)), k_scale=one, v_scale=one)
    want = points.clamp(-448, 448).to(torch.float8_e4m3fn)
    nan = points.isnan().flatten()
    got = pools[0].flatten()
    assert torch.equal(got.view(torch.uint8)[~nan], want.flatten().view(torch.uint8)[~nan])
    assert got.float()[nan].isnan().all()


def test_write_kv_reads_slices_of_a_fused_projection() -> None:
    fused = _rows(7, 4 + 2 + 2, 64, torch.bfloat16)
    _, key, value = fused.split([4, 2, 2], dim=1)
    assert not key.is_contiguous()
    _check(key, value, _pools(2, 8, 2, 64, torch.bfloat16), torch.arange(7) + 5)


def test_write_kv_reads_k_and_v_of_different_strides() -> None:
    key = _rows(2, 7, 64, torch.bfloat16).transpose(0, 1)
    value = _rows(7, 5, 64, torch.bfloat16, seed=1)[:, 1::3]
    _check(key, value, _pools(2, 8, 2, 64, torch.bfloat16), torch.arange(7) + 5)


def test_write_kv_writes_pools_with_heads_before_slots() -> None:
    key, value = _rows(4, 3, 64, torch.float16), _rows(4, 3, 64, torch.float16, seed=1)
    stored = [torch.zeros(2, 3, 8, 64, dtype=torch.float16) for _ in range(2)]
    slots = torch.tensor([2, 15, 7, 8])
    write_kv(key, value, *(pool.transpose(1, 2) for pool in stored), slots)
    want = [torch.zeros(2, 8, 3, 64, dtype=torch.float16) for _ in range(2)]
    reference_copy.write_kv(key, value, *want, slots)
    for pool, expected in zip(stored, want, strict=True):
        assert torch.equal(pool.transpose(1, 2), expected)


@pytest.mark.parametrize(("block_stride", "block_id"), [(2**31 + 256, 1), (2**30 + 256, 2)])
def test_write_kv_reaches_slots_past_two_to_the_31_elements(
    block_stride, block_id, tmp_path
) -> None:
    """An offset of 32 bits would be negative, whether the stride itself fits into 32 or not.

    The memory is a sparse file, which costs nothing but the few pages that are touched. The pool
    starts 2^31 elements into it, so that a wrapped offset writes to the wrong place, not to
    somebody else's memory.
    """
    size = 2 * 2**31 + 4096
    memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=size, dtype=torch.int8)
    pool = memory.as_strided((block_id + 1, 4, 1, 16), (block_stride, 16, 16, 1), 2**31)
    key = torch.arange(16, dtype=torch.float32).view(1, 1, 16)
    one = torch.ones(1)
    slots = torch.tensor([4 * block_id + 3])
    write_kv(key, key, pool, pool, slots, k_scale=one, v_scale=one)
    assert pool[block_id, 3, 0].tolist() == list(range(16))
    assert not pool[block_id, :3].any()
    assert not pool[:block_id].any()


@pytest.mark.parametrize(("stride", "token"), [(2**31 + 256, 1), (2**30 + 256, 2)])
def test_write_kv_reads_tokens_past_two_to_the_31_elements(stride, token, tmp_path) -> None:
    size = 2 * 2**31 + 4096
    memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=size, dtype=torch.half)
    key = memory.as_strided((token + 1, 1, 16), (stride, 16, 1), 2**31)
    key[token] = torch.arange(16)
    pools = _pools(1, 2, 1, 16, torch.float16)
    write_kv(key, key, *pools, torch.tensor([-1] * token + [1]))
    assert pools[0][0, 1, 0].tolist() == list(range(16))


def test_write_kv_of_no_tokens_leaves_the_pool() -> None:
    pools = _pools(1, 8, 2, 64, torch.float32)
    none = torch.empty(0, 2, 64)
    write_kv(none, none, *pools, torch.empty(0, dtype=torch.int64))
    assert (pools[0] == 7).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(2, 3, 64)}, r"key must have shape \[any, 2, 64\], got \[2, 3, 64\]"),
        ({"key": torch.zeros(2, 2, 64).half()}, r"key must be float32, got torch\.float16"),
        ({"value": torch.zeros(3, 2, 64)}, r"value must have shape"),
        ({"value": torch.zeros(2, 64, 2).mT}, r"value must be contiguous in its last"),
        ({"slot_mapping": torch.zeros(2, dtype=torch.int32)}, r"slot_mapping must be int64"),
        ({"slot_mapping": torch.zeros(3, dtype=torch.int64)}, r"slot_mapping must have shape"),
        ({"k_pool": torch.zeros(2, 6, 2, 64)}, r"block_size must be a power of two, got 6"),
        ({"v_pool": torch.zeros(3, 8, 2, 64)}, r"v_pool must have shape"),
        ({"v_scale": torch.ones(2)}, r"v_scale is meant for int8 and float8_e4m3fn only"),
        ({"key": torch.zeros(2, 2, 64, device="meta")}, r"key must be on cpu, got meta"),
    ],
)
def test_write_kv_rejects_what_does_not_fit(change, message) -> None:
    pool, rows = torch.zeros(2, 8, 2, 64), torch.zeros(2, 2, 64)
    slots = torch.zeros(2, dtype=torch.int64)
    arguments = {"key": rows, "value": rows, "k_pool": pool, "v_pool": pool, "slot_mapping": slots}
    with pytest.raises(ValueError, match=message):
        write_kv(**(arguments | change))


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({}, "k_scale is needed"),
        ({"k_scale": torch.ones(2)}, "v_scale is needed"),
        ({"k_scale": torch.ones(2), "v_scale": torch.ones(2, 64)}, "v_scale must have shape"),
        ({"k_scale": torch.ones(3), "v_scale": torch.ones(3)}, "k_scale must have shape"),
        ({"k_scale": torch.ones(64, 2).T, "v_scale": torch.ones(2, 64)}, "must be contiguous"),
    ],
)
def test_write_kv_rejects_scales_that_do_not_fit(scales, message) -> None:
    pool, rows = torch.zeros(2, 8, 2, 64, dtype=torch.int8), torch.zeros(1, 2, 64)
    with pytest.raises(ValueError, match=message):
        write_kv(rows, rows, pool, pool, torch.zeros(1, dtype=torch.int64), **scales)
