"""Imports point one way: server -> engine -> model -> kernels, engine and simulate -> cache."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BASE = ("radixkv", "radixkv.errors", "radixkv.config", "radixkv.request")

# Folder -> (what of radixkv it may import, what else it may import beside the standard library).
# An entry allows the module of that name and, but for `radixkv` itself, all below it.
ROOMS: dict[str, tuple[tuple[str, ...], tuple[str, ...] | None]] = {
    "radixkv/cache": ((*BASE, "radixkv.cache"), ("numpy", "sortedcontainers", "xxhash")),
    "kernels": (("radixkv.kernels",), ("rich", "torch", "triton")),
    "radixkv/model": ((*BASE, "radixkv.model", "radixkv.kernels"), None),
    "radixkv/engine": (
        (*BASE, "radixkv.engine", "radixkv.cache", "radixkv.model"),
        ("llguidance", "msgspec", "numpy", "rich", "sortedcontainers", "torch", "xxhash", "zmq"),
    ),
    "radixkv/simulate": (
        (*BASE, "radixkv.cache", "radixkv.simulate"),
        ("matplotlib", "numpy", "rich", "typer"),
    ),
    "server": (
        ("radixkv", "radixkv.engine", "radixkv.errors", "radixkv.request", "radixkv.server"),
        None,
    ),
}
FORBIDDEN_ELSEWHERE = {"radixkv/model": ("aiohttp",), "server": ("torch", "transformers")}
SUBPACKAGES = (
    "cache",
    "cli",
    "config",
    "engine",
    "errors",
    "kernels",
    "model",
    "request",
    "server",
    "simulate",
)


def imports(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute module name) of every import, wherever it stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                module = ".".join([*parent, *([module] if module else [])])
            if module == "radixkv":
                names = [a.name for a in node.names]
                yield from ((node.lineno, f"radixkv.{n}") for n in names if n in SUBPACKAGES)
                if not set(names) <= set(SUBPACKAGES):
                    yield node.lineno, module
            else:
                yield node.lineno, module


def violations(source: str, room: str) -> list[str]:
    """Return the imports that a file of the room may not have."""
    allowed, third_party = ROOMS[room]
    package = "radixkv." + room.removeprefix("radixkv/")
    found = []
    for line, module in imports(source, package):
        top = module.split(".")[0]
        if top == "radixkv":
            inside = any(
                module == name or (name != "radixkv" and module.startswith(name + "."))
                for name in allowed
            )
        elif third_party is None:
            inside = top not in FORBIDDEN_ELSEWHERE[room]
        else:
            inside = top in sys.stdlib_module_names or top in third_party
        if not inside:
            found.append(f"line {line}: {module}")
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_only_what_lies_below_it(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    found = {
        str(path.relative_to(ROOT)): bad
        for path in files
        if (bad := violations(path.read_text(), room))
    }
    assert found == {}


def test_nobody_but_the_command_line_imports_the_server() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in (ROOT / "radixkv").rglob("*.py")
        if path.name not in ("cli.py", "__main__.py")
        for line, module in imports(path.read_text(), "radixkv")
        if module.startswith("radixkv.server")
    ]
    assert found == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("radixkv/cache", "import torch"),
        ("radixkv/cache", "def f():\n    from radixkv.engine import Engine"),
        ("radixkv/cache", "from ..model import kv_pool"),
        ("kernels", "from radixkv.errors import RadixKVError"),
        ("kernels", "import numpy"),
        ("radixkv/model", "from radixkv import engine"),
        ("radixkv/engine", "import radixkv.server.app"),
        ("radixkv/engine", "import aiohttp.web"),
        ("radixkv/engine", "from radixkv.simulate.models import MODELS"),
        ("radixkv/simulate", "from radixkv.engine import Engine"),
        ("radixkv/simulate", "import torch"),
        ("server", "from radixkv.cache import RadixCache"),
        ("server", "from radixkv import __version__, model"),
        ("server", "import torch.nn"),
    ],
)
def test_a_new_arrow_is_noticed(room: str, source: str) -> None:
    assert len(violations(source, room)) == 1


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("radixkv/cache", "from radixkv.errors import OutOfBlocksError\nimport array"),
        ("radixkv/engine", "from . import batch\nfrom radixkv.model.kv_pool import KVPool"),
        ("server", "from radixkv import __version__\nimport aiohttp"),
    ],
)
def test_an_arrow_downwards_is_allowed(room: str, source: str) -> None:
    assert violations(source, room) == []


def test_importing_the_cache_loads_no_torch() -> None:
    code = "import sys, radixkv.cache; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
