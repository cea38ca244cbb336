"""What the compiler made of a kernel: read from its code, judged, and put into tables."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass

import triton
from rich.box import SIMPLE_HEAD
from rich.table import Table

__all__ = [
    "SHARED_LIMITS",
    "KernelReport",
    "find_problems",
    "read_amdgcn",
    "read_cubin",
    "read_ptx",
    "report_markdown",
    "report_table",
]

# Bytes of shared memory that one program may have.
SHARED_LIMITS = {
    "sm_80": 163 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "gfx942": 64 * 1024,
}

_COLUMNS = (
    "kernel",
    "configuration",
    "tile",
    "registers",
    "spilled B",
    "shared B",
    "128-bit loads",
    "tensor-core ops",
)


@dataclass(frozen=True, slots=True)
class KernelReport:
    """What the compiler made of one kernel in one configuration.

    Attributes:
        kernel: name of the compiled function.
        config: the case that launches it, in words.
        target: the chip.
        launch: tile sizes (M query rows, N keys, rows of new tokens, ...), warps and stages.
        registers: of a thread; vector registers on AMD.
        spilled_bytes: of a thread's registers that went to memory.
        shared_bytes: shared memory of a program.
        wide_loads: instructions that load 128 bits or more from global memory.
        tile_loads: how many of those a thread needs for one tile of each streamed operand.
        matrix_ops: tensor-core instructions.
        needs_matrix_ops: whether there must be some.
    """

    kernel: str
    config: str
    target: str
    launch: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    wide_loads: int
    tile_loads: int
    matrix_ops: int
    needs_matrix_ops: bool


def find_problems(report: KernelReport) -> list[str]:
    """Return what is wrong with a compiled kernel, a sentence each."""
    where = f"{report.kernel} on {report.target} ({report.config}; {report.launch})"
    problems = []
    if report.spilled_bytes:
        problems.append(f"{where} spills {report.spilled_bytes} bytes of registers a thread")
    limit = SHARED_LIMITS[report.target]
    if report.shared_bytes > limit:
        problems.append(f"{where} takes {report.shared_bytes} bytes of shared memory, over {limit}")
    if report.wide_loads < report.tile_loads:
        problems.append(
            f"{where} has {report.wide_loads} loads of 128 bits, its tiles need {report.tile_loads}"
        )
    if report.needs_matrix_ops and not report.matrix_ops:
        problems.append(f"{where} has no tensor-core instruction")
    return problems


def read_ptx(ptx: str) -> dict[str, int]:
    """Return `wide_loads` and `matrix_ops` of NVIDIA's intermediate assembly."""
    wide = re.findall(r"ld\.global[.\w:]*\.(?:v4\.[bfu]32|v8\.[bfu]32|v2\.[bfu]64)", ptx)
    wide += re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*,\s*(?:0x10|16)\b", ptx)
    matrix = re.findall(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma", ptx)
    return {"wide_loads": len(wide), "matrix_ops": len(matrix)}


def read_cubin(cubin: bytes) -> dict[str, int]:
    """Return `registers` and `spilled_bytes`; a spilled register lives on the thread's stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {"registers": found["REG"], "spilled_bytes": found["STACK"] + found["LOCAL"]}


def read_amdgcn(assembly: str) -> dict[str, int]:
    """Return `registers`, `spilled_bytes`, `wide_loads` and `matrix_ops` of AMD's assembly."""

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        if found is None:
            raise ValueError(f"the assembly has no .{name}")
        return int(found.group(1))

    return {
        "registers": number("vgpr_count"),
        "spilled_bytes": 4 * number("vgpr_spill_count"),
        "wide_loads": len(re.findall(r"\b(?:global|buffer|flat)_load_dwordx4\b", assembly)),
        "matrix_ops": len(re.findall(r"\bv_mfma_", assembly)),
    }


def report_table(reports: list[KernelReport]) -> Table:
    """Return a table, red where there are problems."""
    table = Table(
        title=f"Kernels as compiled by Triton {triton.__version__}", box=SIMPLE_HEAD, padding=(0, 1)
    )
    for name in ("target", *_COLUMNS):
        is_text = name in ("target", *_COLUMNS[:3])
        table.add_column(name, justify="left" if is_text else "right", no_wrap=name == "kernel")
    for report in reports:
        style = "red" if find_problems(report) else None
        table.add_row(report.target, *_cells(report), style=style)
    return table


def report_markdown(reports: list[KernelReport]) -> str:
    """Return a Markdown table for each target."""
    lines = []
    for target in dict.fromkeys(report.target for report in reports):
        lines += [
            f"### {target}",
            "",
            f"| {' | '.join(_COLUMNS)} |",
            "| --- " * len(_COLUMNS) + "|",
        ]
        rows = [report for report in reports if report.target == target]
        lines += [f"| {' | '.join(_cells(report))} |" for report in rows] + [""]
    return "\n".join(lines)


def _cells(report: KernelReport) -> tuple[str, ...]:
    return (
        report.kernel.strip("_").removesuffix("_kernel"),
        report.config,
        report.launch,
        str(report.registers),
        str(report.spilled_bytes),
        f"{report.shared_bytes:,}",
        str(report.wide_loads),
        str(report.matrix_ops),
    )
