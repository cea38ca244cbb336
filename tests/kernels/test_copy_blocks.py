import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.kernels import reference_copy
from radixkv.kernels.copy_blocks import copy_blocks, gather_blocks, scatter_blocks
from radixkv.model.kv_pool import KVPool

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn]


def _data(num_blocks: int, dtype: torch.dtype, layers: int = 2, block_size: int = 8):
    """Return `[2, layers, num_blocks, block_size, 2, 16]` of random bytes, NaN's too."""
    shape = (2, layers, num_blocks, block_size, 2, 16)
    gen = torch.Generator().manual_seed(0)
    count = math.prod(shape) * dtype.itemsize
    flat = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=gen)
    return flat.view(dtype).view(shape)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_blocks_copies_every_byte_of_all_layers(dtype) -> None:
    data = _data(6, dtype)
    want = data.clone()
    pairs = torch.tensor([[1, 4], [1, 0], [5, 2]])
    reference_copy.copy_blocks(want, pairs)
    copy_blocks(data, pairs)
    assert torch.equal(_bytes(data), _bytes(want))


@given(order=st.permutations(range(9)), num_targets=st.integers(0, 8), picks=st.data())
@settings(max_examples=20, deadline=None)
def test_copy_blocks_copies_any_disjoint_pairs(order, num_targets, picks) -> None:
    targets, sources = order[:num_targets], order[num_targets:]
    pairs = [(picks.draw(st.sampled_from([*sources, -1])), target) for target in targets]
    data = _data(9, torch.bfloat16, layers=1)
    want = data.clone()
    pairs = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    reference_copy.copy_blocks(want, pairs)
    copy_blocks(data, pairs)
    assert torch.equal(_bytes(data), _bytes(want))


def test_copy_blocks_copies_blocks_of_several_tiles() -> None:
    """A block of 18 KiB is two tiles and a part of a third."""
    data = _data(3, torch.float32, layers=1, block_size=144)
    want = data.clone()
    pairs = torch.tensor([[0, 2]])
    reference_copy.copy_blocks(want, pairs)
    copy_blocks(data, pairs)
    assert torch.equal(_bytes(data), _bytes(want))


def test_copy_blocks_equals_the_pool_s_own_copy() -> None:
    pool, other = (KVPool(2, 5, 8, 2, 16, torch.bfloat16) for _ in range(2))
    pool.data.copy_(torch.randn(pool.data.shape))
    other.data.copy_(pool.data)
    pool.copy_blocks([(0, 3), (1, 4)])
    copy_blocks(other.data, torch.tensor([[0, 3], [1, 4]]))
    assert torch.equal(pool.data, other.data)


def test_copy_blocks_skips_padding_and_takes_strided_pairs() -> None:
    data = _data(4, torch.int8)
    want = data.clone()
    want[:, :, 3] = want[:, :, 1]
    columns = torch.tensor([[1, -1, 3, 0], [-1, -1, 2, 0]])
    copy_blocks(data, columns[:, ::2])
    assert torch.equal(data, want)


def test_copy_blocks_of_a_pool_with_gaps_between_blocks() -> None:
    whole = _data(8, torch.float16)
    data = whole[:, :, ::2]
    want = whole.clone()
    want[:, :, 6] = want[:, :, 0]
    copy_blocks(data, torch.tensor([[0, 3]]))
    assert torch.equal(_bytes(whole), _bytes(want))


@pytest.mark.parametrize(("words", "block_id"), [(2**31 + 64, 1), (2**30 + 64, 2)])
def test_copies_reach_blocks_past_two_to_the_31_words(words, block_id, tmp_path) -> None:
    """An offset of 32 bits would be negative; see the test of `write_kv`."""
    size = 4 * (2 * 2**31 + 4096)
    memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=size, dtype=torch.int8)
    strides = (1024, 512, 4 * words, 64, 64, 1)
    data = memory.as_strided((2, 2, block_id + 1, 8, 1, 64), strides, 4 * 2**31)
    data[:, :, 0] = torch.randint(-128, 127, (2, 2, 8, 1, 64))
    copy_blocks(data, torch.tensor([[0, block_id]]))
    assert torch.equal(data[:, :, block_id], data[:, :, 0])
    data[:, :, 0] = 0
    rows = gather_blocks(data, torch.tensor([block_id]))
    assert rows.any()
    scatter_blocks(data, torch.tensor([0]), rows)
    assert torch.equal(data[:, :, block_id], data[:, :, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_blocks_returns_the_rows_of_the_pool(dtype) -> None:
    data, ids = _data(5, dtype), torch.tensor([4, 0, 4])
    assert torch.equal(gather_blocks(data, ids), reference_copy.gather_blocks(data, ids))


def test_gather_blocks_has_the_layout_of_kv_pool() -> None:
    pool = KVPool(3, 4, 8, 2, 16, torch.float16)
    pool.data.copy_(torch.randn(pool.data.shape))
    rows = gather_blocks(pool.data, torch.tensor([2, 1]))
    assert torch.equal(rows, pool.gather_blocks([2, 1]))


def test_gather_blocks_fills_the_given_rows() -> None:
    data = _data(3, torch.bfloat16)
    want = reference_copy.gather_blocks(data, torch.tensor([2]))
    out = torch.zeros(2, want.shape[1], dtype=torch.uint8)
    assert gather_blocks(data, torch.tensor([2, -1]), out) is out
    assert torch.equal(out[:1], want)
    assert not out[1].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_scatter_blocks_undoes_gather_blocks(dtype) -> None:
    data, ids = _data(5, dtype), torch.tensor([3, 1])
    rows, want = gather_blocks(data, ids), _bytes(data.clone())
    data[:, :, [1, 3]] = 0
    scatter_blocks(data, ids, rows)
    assert torch.equal(_bytes(data), want)


def test_scatter_blocks_into_others_equals_the_reference() -> None:
    data = _data(6, torch.float32)
    want, rows = data.clone(), gather_blocks(data, torch.tensor([0, 1, 2]))
    ids = torch.tensor([5, -1, 3])
    reference_copy.scatter_blocks(want, torch.tensor([5, 3]), rows[[0, 2]])
    scatter_blocks(data, ids, rows)
    assert torch.equal(_bytes(data), _bytes(want))


def test_copies_of_nothing_leave_the_pool() -> None:
    data = _data(2, torch.int8)
    want, none = data.clone(), torch.empty(0, dtype=torch.int64)
    copy_blocks(data, none.view(0, 2))
    assert gather_blocks(data, none).shape == (0, 2 * 2 * 256)
    scatter_blocks(data, none, torch.empty(0, 1024, dtype=torch.uint8))
    assert torch.equal(data, want)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.zeros(3, 1, 2, 8, 2, 16), r"data must have shape \[2, any"),
        (torch.zeros(2, 1, 2, 8, 2, 16).double(), "data must be float16 or"),
        (torch.zeros(2, 1, 2, 2, 8, 16).transpose(3, 4), "data's blocks must be contiguous"),
        (torch.zeros(2, 1, 2, 1, 1, 3, dtype=torch.int8), "must be a multiple of 4 bytes, got 3"),
        (torch.zeros(2, 1, 2, 1, 1, 5, dtype=torch.int8)[..., :4], "strides must be multiples"),
    ],
)
def test_copies_reject_data_that_does_not_fit(data, message) -> None:
    with pytest.raises(ValueError, match=message):
        copy_blocks(data, torch.zeros(1, 2, dtype=torch.int64))


def test_copies_reject_ids_and_rows_that_do_not_fit() -> None:
    data, ids = _data(2, torch.int8), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="pairs must be int64"):
        copy_blocks(data, torch.zeros(1, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"pairs must have shape \[any, 2\]"):
        copy_blocks(data, torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"out must have shape \[1, 1024\], got \[1, 512\]"):
        gather_blocks(data, ids, torch.zeros(1, 512, dtype=torch.uint8))
    with pytest.raises(ValueError, match="contents must be contiguous and aligned"):
        scatter_blocks(data, ids, torch.zeros(1, 2048, dtype=torch.uint8)[:, ::2])
