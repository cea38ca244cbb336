"""The backend with the Triton kernels themselves, under the interpreter where there is no GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from triton_cases import LAYERS, make_backend, make_case, raw

from radixkv.errors import ConfigError
from radixkv.model.kv_pool import KVPool
from radixkv.model.triton_kernels import load_kernels

# Decodes, chunks, and groups at three levels that chunks are members of, too.
MIXED = (
    [(150, 1), (143, 1), (161, 6), (180, 1), (184, 1), (124, 2), (124, 1), (9, 1), (30, 20)],
    ((0, 7, 12), (0, 5, 4), (3, 5, 3)),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [8, 16])
def test_mixed_batch_with_groups_and_trees(
    dtype: torch.dtype, block_size: int, device: torch.device
) -> None:
    seqs, groups = MIXED
    groups = tuple((first, last, count * 8 // block_size) for first, last, count in groups)
    make_case(seqs, groups, trees=(2, 8), dtype=dtype, block_size=block_size, device=device).check()


@pytest.mark.parametrize("heads", [(4, 4), (5, 1), (9, 3)])
def test_decode_batch_with_nested_groups(heads: tuple[int, int], device: torch.device) -> None:
    seqs = [(300, 1), (270, 1), (266, 1), (64, 1), (1, 1), (0, 1)]
    make_case(seqs, ((0, 4, 8), (0, 3, 24)), heads=heads, device=device).check()


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_pool_is_read_and_written_through_its_scales(
    kv_dtype: torch.dtype, device: torch.device
) -> None:
    seqs = [(90, 1), (85, 1), (70, 4), (40, 3)]
    case = make_case(
        seqs, ((0, 3, 8),), trees=(3,), dtype=torch.float16, kv_dtype=kv_dtype, device=device
    )
    case.check()
    # What was written is what was given, up to the rounding of the pool's type.
    slot = torch.from_numpy(case.metadata.slot_mapping)
    stored = raw(case.pool.k_slots[1]).cpu()[slot].view(kv_dtype).float()
    assert case.pool.k_scales is not None
    error = (stored * case.pool.k_scales[1].cpu() - case.key.float().cpu()).abs()
    assert float(error.max()) < (0.03 if kv_dtype == torch.int8 else 0.3)


def test_writes_land_in_the_slots_of_the_mapping_only(device: torch.device) -> None:
    case = make_case(*MIXED, device=device)
    before = case.pool.data.clone()
    case.run(layer=1)
    slots = torch.from_numpy(case.metadata.slot_mapping).to(device)
    assert torch.equal(case.pool.k_slots[1][slots], case.key)
    assert torch.equal(case.pool.v_slots[1][slots], case.value)
    case.pool.data.flatten(2, 3)[:, 1, slots] = before.flatten(2, 3)[:, 1, slots]
    assert torch.equal(case.pool.data.nan_to_num(9.0), before.nan_to_num(9.0))


def test_every_layer_of_a_step_uses_one_plan(device: torch.device) -> None:
    case = make_case([(20, 1), (33, 5)], device=device)
    backend = case.backend()
    backend.plan(case.metadata)
    for layer in range(LAYERS):
        out = backend.run(layer, case.query, case.key, case.value)
        expected = case.expected(layer)
        torch.testing.assert_close(out.double().cpu(), expected, rtol=2e-5, atol=2e-5)


def test_kernels_can_not_be_interpreted_after_triton_was_imported_to_compile() -> None:
    code = (
        "import triton, torch\n"
        "from radixkv.errors import ConfigError\n"
        "from radixkv.model.triton_kernels import load_kernels\n"
        "try: load_kernels(torch.device('cpu'))\n"
        "except ConfigError as error: print(error)\n"
    )
    environment = {"PATH": "", "HOME": "/nonexistent"}  # without TRITON_INTERPRET
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert "needs Triton's interpreter" in result.stdout


def test_missing_triton_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.language", None)
    with pytest.raises(ConfigError, match="needs Triton, which can't be imported"):
        load_kernels(torch.device("cpu"))


def test_shapes_without_a_kernel_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"block_size one of .* got 64 and 4"):
        make_backend(KVPool(1, 2, 4, 2, 64, torch.float32), 4)
