import pytest
import torch

from radixkv.model.kv_pool import QUANTISED_DTYPES, KVPool, kv_bytes_per_block
from radixkv.model.triton_kernels import load_kernels

DTYPES = [torch.bfloat16, torch.float32, *QUANTISED_DTYPES]


@pytest.fixture(params=["torch", "kernels"])
def with_kernels(request: pytest.FixtureRequest) -> bool:
    """Whether blocks are copied by the kernels, as on a GPU."""
    return bool(request.param == "kernels")


def make_pool(
    dtype: torch.dtype = torch.bfloat16,
    *,
    with_kernels: bool = False,
    device: torch.device | str = "cpu",
) -> KVPool:
    """A pool of random bytes."""
    device = torch.device(device) if with_kernels else torch.device("cpu")
    scale = torch.full((3, 2, 8), 0.5) if dtype in QUANTISED_DTYPES else None
    kernels = load_kernels(device) if with_kernels else None
    pool = KVPool(3, 6, 4, 2, 8, dtype, device, k_scale=scale, v_scale=scale, kernels=kernels)
    generator = torch.Generator().manual_seed(0)
    contents = torch.randint(0, 64, bits(pool.data).shape, generator=generator, dtype=torch.uint8)
    bits(pool.data).copy_(contents)
    return pool


def bits(data: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: equal for NaN, too."""
    return data.view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_returns_whole_blocks_in_the_order_asked_for(
    dtype: torch.dtype, with_kernels: bool, device: torch.device
) -> None:
    pool = make_pool(dtype, with_kernels=with_kernels, device=device)
    contents = pool.gather_blocks([4, 1])
    assert contents.shape == (2, kv_bytes_per_block(3, 4, 2, 8, dtype))
    assert contents.is_contiguous()
    assert contents.device.type == "cpu"
    for row, block_id in zip(contents, (4, 1), strict=True):
        block = row.view(dtype).view(2, 3, 4, 2, 8)
        assert torch.equal(bits(block), bits(pool.data[:, :, block_id]).cpu())


def test_gather_returns_a_copy(with_kernels: bool, device: torch.device) -> None:
    pool = make_pool(with_kernels=with_kernels, device=device)
    contents = pool.gather_blocks([2])
    before = contents.clone()
    pool.data.zero_()
    assert torch.equal(contents, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scatter_writes_these_blocks_and_no_others(
    dtype: torch.dtype, with_kernels: bool, device: torch.device
) -> None:
    pool = make_pool(dtype, with_kernels=with_kernels, device=device)
    before = bits(pool.data).clone()
    pool.scatter_blocks([5, 0], pool.gather_blocks([1, 2]))
    after = bits(pool.data)
    assert torch.equal(after[:, :, 5], before[:, :, 1])
    assert torch.equal(after[:, :, 0], before[:, :, 2])
    assert torch.equal(after[:, :, 1:5], before[:, :, 1:5])
    assert torch.equal(bits(pool.k[1][5]), before[0, 1, 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_writes_all_layers_of_the_destinations_and_no_others(
    dtype: torch.dtype, with_kernels: bool, device: torch.device
) -> None:
    pool = make_pool(dtype, with_kernels=with_kernels, device=device)
    before = bits(pool.data).clone()
    pool.copy_blocks([(4, 0), (1, 3), (4, 5)])
    pool.copy_blocks([])
    after = bits(pool.data)
    for source, destination in ((4, 0), (1, 3), (4, 5), (1, 1), (2, 2), (4, 4)):
        assert torch.equal(after[:, :, destination], before[:, :, source])


def test_contents_may_be_changed_after_scatter_returns(
    with_kernels: bool, device: torch.device
) -> None:
    pool = make_pool(with_kernels=with_kernels, device=device)
    before = bits(pool.data).clone()
    contents = pool.gather_blocks([1])
    pool.scatter_blocks([5], contents)
    contents.zero_()
    assert torch.equal(bits(pool.data)[:, :, 5], before[:, :, 1])


def test_scales_are_kept_per_layer() -> None:
    k_scale = torch.arange(1.0, 49).view(3, 2, 8)
    pool = KVPool(3, 6, 4, 2, 8, torch.int8, k_scale=k_scale, v_scale=2 * k_scale)
    assert pool.k_scales is not None
    assert pool.v_scales is not None
    assert torch.equal(pool.k_scales[2], k_scale[2])
    assert torch.equal(pool.v_scales[1], 2 * k_scale[1])


@pytest.mark.parametrize(
    ("dtype", "shape", "message"),
    [
        (torch.int8, None, "k_scale is needed for a pool of torch.int8"),
        (torch.bfloat16, (3, 2, 8), "k_scale is not meant for a pool of torch.bfloat16"),
        (torch.int8, (2, 8), r"k_scale must be float32 \[3, 2, 8\]"),
    ],
)
def test_scales_that_do_not_fit_are_rejected(
    dtype: torch.dtype, shape: tuple[int, ...] | None, message: str
) -> None:
    scale = None if shape is None else torch.ones(shape)
    with pytest.raises(ValueError, match=message):
        KVPool(3, 6, 4, 2, 8, dtype, k_scale=scale, v_scale=scale)
