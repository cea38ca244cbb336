"""Compile the kernels for GPUs that aren't there, and report what the compiler made of them.

Run as `python -m radixkv.kernels.aot [--target sm_90] [--quick] [--markdown]`. Triton's compiler
and the assemblers it brings need no GPU. The public wrappers are called with tensors without
memory (see `aot_cases.py`) in front of a stand-in for a device; Triton's own hook hands over what
it is about to compile, so that nothing here repeats a signature or a tile size.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from rich.console import Console
from rich.progress import Progress
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from radixkv.kernels.aot_cases import Case, all_cases, quick_cases
from radixkv.kernels.aot_report import (
    KernelReport,
    find_problems,
    read_amdgcn,
    read_cubin,
    read_ptx,
    report_markdown,
    report_table,
)

__all__ = ["TARGETS", "Launch", "capture", "main"]

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

# Multiply on tensor cores unless the query is float32, and stream tiles of K and V.
_MATRIX_KERNELS = (
    "paged_decode_kernel",
    "prefix_decode_kernel",
    "paged_prefill_kernel",
    "tree_verify_kernel",
)


@dataclass(frozen=True)
class Launch:
    """One launch, as Triton was about to compile it."""

    case: Case
    target: str
    function: Any
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """Return the kernel's name."""
        return str(self.function.__name__)

    @property
    def label(self) -> str:
        """Return the configuration in words, and the wrapper if the kernel isn't named after it."""
        caller = self.case.kernel
        is_namesake = self.name.strip("_").removesuffix("_kernel") == caller
        return self.case.label + ("" if is_namesake else f", in {caller}")

    @property
    def constant_values(self) -> dict[str, Any]:
        """Return the compile-time constants by name."""
        names = self.function.arg_names
        return {names[path[0]]: value for path, value in self.constants.items()}

    def with_constant(self, name: str, value: int) -> Launch:
        """Return the launch with another compile-time constant, or another option of Triton's."""
        if name in self.options:
            return replace(self, options=self.options | {name: value})
        path = (self.function.arg_names.index(name),)
        return replace(self, constants=self.constants | {path: value})


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print a table, and return 1 if `find_problems` finds any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", action="append", choices=TARGETS, help="all of them if none")
    parser.add_argument("--kernel", action="append", help="public function; all of them if none")
    parser.add_argument("--quick", action="store_true", help="a representative subset")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--markdown", action="store_true", help="print tables in Markdown")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="change a constant of every kernel that has it, as TILE_N=256 or num_warps=8",
    )
    args = parser.parse_args(arguments)
    if triton.knobs.runtime.interpret:
        # Triton decided when the kernels were defined.
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        command = [sys.executable, "-m", "radixkv.kernels.aot", *(arguments or sys.argv[1:])]
        os.execve(sys.executable, command, environment)
    cases = quick_cases() if args.quick else all_cases()
    cases = [case for case in cases if not args.kernel or case.kernel in args.kernel]
    launches = [launch for target in args.target or TARGETS for launch in capture(cases, target)]
    for setting in args.set:
        name, _, number = setting.partition("=")
        launches = [
            launch.with_constant(name, int(number)) if _has_constant(launch, name) else launch
            for launch in launches
        ]
    start = time.perf_counter()
    reports, failures = _compile_all(launches, args.jobs)
    problems = [*failures, *(problem for report in reports for problem in find_problems(report))]
    if args.json:
        print(json.dumps({"reports": [asdict(report) for report in reports], "problems": problems}))
    elif args.markdown:
        print(report_markdown(reports))
    else:
        Console().print(report_table(reports))
    seconds = time.perf_counter() - start
    message = f"{len(reports)} kernels compiled in {seconds:.0f} s, {len(problems)} problems"
    print("\n".join([message, *problems]), file=sys.stderr)
    return 1 if problems else 0


def capture(cases: Iterable[Case], target: str) -> list[Launch]:
    """Return the distinct launches that the wrappers of `cases` make on a chip, without making any.

    Stands in for the device while it runs: not for use beside other threads.
    """
    launches: dict[str, Launch] = {}
    case: Case

    def take(**call: Any) -> bool:
        compile_arguments = call["compile"]
        options = json.loads(compile_arguments["specialization_data"])["options"]
        launch = Launch(
            case,
            target,
            call["fn"].jit_function,
            compile_arguments["signature"],
            compile_arguments["constants"],
            compile_arguments["configs"][0],
            {k: v for k, v in options.items() if k in _OPTIONS and v is not None},
        )
        launches.setdefault(f"{launch.name} {call['key']}", launch)
        return True  # Triton neither compiles nor launches.

    gpu = TARGETS[target]
    previous = triton.runtime.driver._active
    triton.runtime.driver.set_active(_StandIn(gpu))
    try:
        with (
            mock.patch.object(torch.cuda, "get_device_properties", return_value=_properties(gpu)),
            mock.patch.object(torch.version, "hip", "7" if gpu.backend == "hip" else None),
            triton.knobs.runtime.scope(),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", "TRITON_DEFAULT_FP_FUSION is unset")
            triton.knobs.runtime.jit_cache_hook = take
            for case in cases:
                case.launch()
    finally:
        triton.runtime.driver._active = previous
    return list(launches.values())


# Options of a launch, as opposed to what Triton derives from the chip.
_OPTIONS = (
    "num_warps",
    "num_stages",
    "num_ctas",
    "maxnreg",
    "waves_per_eu",
    "matrix_instr_nonkdim",
)


class _StandIn:
    """As much of a Triton driver as a launch asks for before it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return list(TARGETS.values()).index(self._target)

    def get_current_stream(self, device: int) -> int:
        return device


def _properties(gpu: GPUTarget) -> SimpleNamespace:
    """Return what the wrappers ask torch about a device."""
    major, minor = divmod(gpu.arch, 10) if gpu.backend == "cuda" else (0, 0)
    return SimpleNamespace(
        major=major, minor=minor, multi_processor_count=132, gcnArchName=str(gpu.arch)
    )


def _compile_all(launches: list[Launch], jobs: int) -> tuple[list[KernelReport], list[str]]:
    """Compile in `jobs` processes; return the reports in order, and what didn't compile."""
    reports: dict[int, KernelReport] = {}
    failures = []
    # Forked, as the captured functions can't be pickled; the slowest to compile come first.
    context = multiprocessing.get_context("fork")
    order = sorted(range(len(launches)), key=lambda i: _SLOWEST.get(launches[i].name, 9))
    with (
        Progress(console=Console(stderr=True), transient=True) as progress,
        ProcessPoolExecutor(
            max(1, min(jobs, len(launches))), context, _keep, (launches,)
        ) as executor,
    ):
        task = progress.add_task("compiling", total=len(launches))
        futures = {executor.submit(_compile_kept, i): i for i in order}
        for future in as_completed(futures):
            launch = launches[futures[future]]
            try:
                reports[futures[future]] = future.result()
            except Exception as error:
                reason = str(error).strip().splitlines() or [type(error).__name__]
                failures.append(
                    f"{launch.name} on {launch.target} ({launch.label}) doesn't compile: "
                    f"{reason[0]}"
                )
            progress.update(task, advance=1, description=launch.name)
    return [reports[i] for i in sorted(reports)], failures


_SLOWEST = {"tree_verify_kernel": 0, "paged_prefill_kernel": 1, "prefix_decode_kernel": 2}
_kept: list[Launch] = []


def _keep(launches: list[Launch]) -> None:
    warnings.filterwarnings("ignore", "TRITON_DEFAULT_FP_FUSION is unset")
    _kept.extend(launches)


def _compile_kept(index: int) -> KernelReport:
    launch = _kept[index]
    source = ASTSource(launch.function, launch.signature, launch.constants, launch.attributes)
    kernel = triton.compile(source, target=TARGETS[launch.target], options=launch.options)
    if launch.target.startswith("gfx"):
        found = read_amdgcn(kernel.asm["amdgcn"])
    else:
        found = read_ptx(kernel.asm["ptx"]) | read_cubin(kernel.asm["cubin"])
    constants = launch.constant_values
    tiles = ", ".join(f"{word} {constants[k]}" for k, word in _TILE_NAMES.items() if k in constants)
    options = launch.options
    return KernelReport(
        kernel=launch.name,
        config=launch.label,
        target=launch.target,
        launch=f"{tiles}, {options['num_warps']} warps, {options['num_stages']} stages",
        shared_bytes=kernel.metadata.shared,
        tile_loads=_tile_loads(launch),
        needs_matrix_ops=(launch.name in _MATRIX_KERNELS and launch.case.dtype != torch.float32),
        **found,
    )


_TILE_NAMES = {
    "TILE_M": "M",
    "TILE_N": "N",
    "TILE_ROWS": "rows",
    "TILE_WORDS": "words",
    "TILE_PARTS": "parts",
}


def _has_constant(launch: Launch, name: str) -> bool:
    return name in launch.options or name in launch.constant_values


def _tile_loads(launch: Launch) -> int:
    """Return the 128-bit loads a thread needs for one tile of K and of V, or what is copied."""
    constants, case = launch.constant_values, launch.case
    threads = launch.options["num_warps"] * TARGETS[launch.target].warp_size
    sizes: dict[str, Callable[[], int]] = {
        # Of a quantised pool only one operand's layout allows it: the other is converted into the
        # layout of a product, whose rows of a thread are shorter than 16 bytes.
        **dict.fromkeys(
            _MATRIX_KERNELS,
            lambda: (
                (2 if case.kv_dtype is None else 1)
                * constants["TILE_N"]
                * constants["PAD_DIM"]
                * case.pool_dtype.itemsize
            ),
        ),
        "_write_kv_kernel": lambda: (
            2 * constants["TILE_ROWS"] * constants["PADDED_DIM"] * case.dtype.itemsize
        ),
        "_copy_kernel": lambda: constants["TILE_WORDS"] * 4,
    }
    return sizes[launch.name]() // (16 * threads) if launch.name in sizes else 0


if __name__ == "__main__":
    sys.exit(main())
