from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from radixkv.cache import POLICIES

PAGE = (Path(__file__).parents[2] / "docs" / "cache.md").read_text(encoding="utf-8")


def test_the_examples_of_the_page_run() -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    for example in examples:
        exec(compile(example, "docs/cache.md", "exec"), names)
    assert len(examples) == 4
    assert names["cache"].quotas.limit(("tenant-a",)) == 512


def test_the_page_names_every_policy() -> None:
    assert all(f"| `{name}`" in PAGE for name in POLICIES)
