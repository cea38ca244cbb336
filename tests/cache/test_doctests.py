from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import radixkv

PACKAGE = Path(radixkv.__file__).parent
MODULES = sorted(
    ".".join(("radixkv", *path.relative_to(PACKAGE).with_suffix("").parts))
    for path in PACKAGE.rglob("*.py")
    if ">>> " in path.read_text()
)


@pytest.mark.parametrize("name", MODULES)
def test_doctests_of_the_module_pass(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
    assert result.attempted > 0
