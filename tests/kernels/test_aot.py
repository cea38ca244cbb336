"""What Triton's compiler makes of the kernels for four kinds of GPU, none of which is needed."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("triton")

from radixkv.kernels.aot import TARGETS
from radixkv.kernels.aot_report import SHARED_LIMITS, KernelReport, find_problems

ATTENTION = {"paged_decode_kernel", "prefix_decode_kernel", "paged_prefill_kernel",
             "tree_verify_kernel"}  # fmt: skip

# On two cores that do other work too, compiling takes longer than a test may.
pytestmark = pytest.mark.timeout(600)


def _compile(*arguments: str) -> tuple[list[KernelReport], list[str], int]:
    """Run the command; return its reports, the problems it found, and its exit status."""
    command = [sys.executable, "-m", "radixkv.kernels.aot", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    reports = [KernelReport(**report) for report in found["reports"]]
    return reports, found["problems"], done.returncode


@pytest.fixture(scope="module")
def reports() -> list[KernelReport]:
    found, problems, status = _compile("--quick")
    assert status == bool(problems)
    # What doesn't compile has a problem, but no report; the tests below are about the others.
    assert not [problem for problem in problems if "doesn't compile" in problem]
    return found


def _of(reports: list[KernelReport], target: str, *kernels: str) -> list[KernelReport]:
    chosen = [r for r in reports if r.target == target and (not kernels or r.kernel in kernels)]
    assert set(kernels) <= {r.kernel for r in chosen}
    return chosen


@pytest.mark.parametrize("target", TARGETS)
def test_aot_compiles_every_kernel(reports, target) -> None:
    kernels = {report.kernel for report in _of(reports, target)}
    assert kernels == ATTENTION | {"merge_kernel", "_write_kv_kernel", "_copy_kernel"}


@pytest.mark.parametrize("target", TARGETS)
def test_aot_spills_no_registers_in_decode_kernels(reports, target) -> None:
    decode = ("paged_decode_kernel", "prefix_decode_kernel", "merge_kernel", "_write_kv_kernel")
    assert {r.kernel: r.spilled_bytes for r in _of(reports, target, *decode)} == dict.fromkeys(
        decode, 0
    )


@pytest.mark.parametrize("target", TARGETS)
def test_aot_shared_memory_fits_the_chip(reports, target) -> None:
    taken = [r.shared_bytes for r in _of(reports, target)]
    assert 0 < max(taken) <= SHARED_LIMITS[target]


@pytest.mark.parametrize("target", TARGETS)
def test_aot_loads_the_pool_in_128_bits(reports, target) -> None:
    streaming = (*ATTENTION, "_write_kv_kernel", "_copy_kernel")
    for report in _of(reports, target, *streaming):
        assert report.wide_loads >= report.tile_loads > 0, report


@pytest.mark.parametrize("target", TARGETS)
def test_aot_multiplies_on_tensor_cores(reports, target) -> None:
    assert all(r.matrix_ops for r in _of(reports, target, *ATTENTION))
    others = ("merge_kernel", "_write_kv_kernel", "_copy_kernel")
    assert not any(r.matrix_ops for r in _of(reports, target, *others))


def test_aot_finds_too_much_shared_memory_of_a_huge_tile() -> None:
    """The command really compiles what it is told to, and says so when that's too much."""
    _, problems, status = _compile(
        "--target", "sm_80", "--kernel", "paged_decode", "--quick", "--set", "TILE_N=512"
    )
    assert status == 1
    assert any("shared memory, over 166912" in problem for problem in problems), problems


def test_aot_finds_spills_of_a_tile_too_large_for_a_warp() -> None:
    _, problems, _ = _compile(
        "--target", "sm_90", "--kernel", "write_kv", "--quick", "--set", "TILE_ROWS=128",
        "--set", "num_warps=1",
    )  # fmt: skip
    assert any("bytes of registers a thread" in problem for problem in problems), problems


GOOD = KernelReport(
    kernel="paged_decode_kernel",
    config="d 128",
    target="gfx942",
    launch="TILE_N 64",
    registers=100,
    spilled_bytes=0,
    shared_bytes=65536,
    wide_loads=8,
    tile_loads=8,
    matrix_ops=1,
    needs_matrix_ops=True,
)


def test_find_problems_of_a_good_kernel_finds_none() -> None:
    assert find_problems(GOOD) == []
    assert find_problems(replace(GOOD, matrix_ops=0, needs_matrix_ops=False)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spilled_bytes": 4}, "spills 4 bytes"),
        ({"shared_bytes": 65537}, "takes 65537 bytes of shared memory, over 65536"),
        ({"wide_loads": 7}, "has 7 loads of 128 bits, its tiles need 8"),
        ({"matrix_ops": 0}, "has no tensor-core instruction"),
    ],
)
def test_find_problems_names_each_shortcoming(change, message) -> None:
    (problem,) = find_problems(replace(GOOD, **change))
    assert message in problem
