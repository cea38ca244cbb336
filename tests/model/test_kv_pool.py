import pytest
import torch

from radixkv.model.kv_pool import KVPool, kv_bytes_per_block


def make_pool(dtype: torch.dtype = torch.bfloat16, *, bytewise: bool = True) -> KVPool:
    """A pool of random values; `bytewise` False goes the way of other devices."""
    pool = KVPool(3, 6, 4, 2, 8, dtype)
    if not bytewise:
        pool._bytes = None
    pool.data.copy_(torch.randn(pool.data.shape, generator=torch.Generator().manual_seed(0)))
    return pool


@pytest.mark.parametrize("bytewise", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gather_returns_whole_blocks_in_the_order_asked_for(
    dtype: torch.dtype, bytewise: bool
) -> None:
    pool = make_pool(dtype, bytewise=bytewise)
    contents = pool.gather_blocks([4, 1])
    assert contents.shape == (2, kv_bytes_per_block(3, 4, 2, 8, dtype))
    assert contents.is_contiguous()
    for row, block_id in zip(contents, (4, 1), strict=True):
        assert torch.equal(row.view(dtype).view(2, 3, 4, 2, 8), pool.data[:, :, block_id])


def test_gather_returns_a_copy() -> None:
    pool = make_pool()
    contents = pool.gather_blocks([2])
    before = contents.clone()
    pool.data.zero_()
    assert torch.equal(contents, before)


@pytest.mark.parametrize("bytewise", [True, False])
def test_scatter_writes_these_blocks_and_no_others(bytewise: bool) -> None:
    pool = make_pool(bytewise=bytewise)
    before = pool.data.clone()
    pool.scatter_blocks([5, 0], pool.gather_blocks([1, 2]))
    assert torch.equal(pool.data[:, :, 5], before[:, :, 1])
    assert torch.equal(pool.data[:, :, 0], before[:, :, 2])
    assert torch.equal(pool.data[:, :, 1:5], before[:, :, 1:5])
    assert torch.equal(pool.k[1][5], before[0, 1, 1])
