"""`python -m loadtests.bench_kernels --tiny` runs the code of the real benchmark, interpreted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import loadtests.kernel_checks as kernel_checks
from loadtests.kernel_checks import Check, CheckConfig, run_checks

ROOT = Path(__file__).parents[2]


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "loadtests.bench_kernels", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment,
    )


@pytest.mark.timeout(300)
def test_bench_kernels_tiny_checks_and_times_every_kernel() -> None:
    done = _run("--tiny", "--check", "--bench")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert {check["kernel"] for check in report["checks"]} == {
        "write_kv", "copy_blocks", "paged_decode", "prefix_decode", "paged_prefill", "tree_verify",
    }  # fmt: skip
    assert all(check["passed"] for check in report["checks"])
    kernels = {timing["kernel"] for timing in report["timings"]}
    assert kernels == {"decode", "prefill", "verify", "write_kv", "copy_blocks"}
    assert not report["skipped"]
    assert not report["failures"]
    # Every peer that can run here did, and computed the same as ours.
    assert [timing["notes"] for timing in report["timings"] if timing["notes"]] == []
    contenders = {name for timing in report["timings"] for name in timing["ms"]}
    assert contenders >= {"plain", "grouped", "ours", "sdpa", "flex", "torch"}
    assert [step["num_seqs"] for step in report["engine"]] == [1, 3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bench_kernels_says_that_there_is_no_gpu() -> None:
    done = _run("--check", "--bench")
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert "no GPU" in first
    assert json.loads(last) == {"bench": "kernels", "device": None}


def test_checks_fail_when_an_output_is_left_unwritten(monkeypatch) -> None:
    """A kernel that writes nothing leaves the NaN that the output was filled with."""
    monkeypatch.setattr(kernel_checks, "paged_decode", lambda *args, **kwargs: None)
    config = CheckConfig(torch.float32, head_dim=64, num_kv_heads=1, group_size=1)
    monkeypatch.setattr(
        kernel_checks, "_CHECKS", {"paged_decode": kernel_checks._CHECKS["paged_decode"]}
    )
    (check,) = run_checks(config, torch.device("cpu"))
    assert check.error != check.error
    assert not check.passed


@pytest.mark.parametrize(("error", "passed"), [(0.0, True), (1e-3, True), (2e-3, False)])
def test_check_passes_up_to_the_tolerance(error, passed) -> None:
    assert Check("paged_decode", "", error, 1e-3).passed == passed
