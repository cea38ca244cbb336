"""What MkDocs calls while it builds the site: pages written from the code, and inline diagrams."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

HERE = Path(__file__).parent
# MkDocs loads this file by its path: neither its neighbours nor the project are importable yet.
sys.path[:0] = [path for path in (str(HERE), str(HERE.parent)) if path not in sys.path]

from hooks_reference import reference_pages  # noqa: E402

# Beside the pages there are the files of the build itself.
NO_PAGES = re.compile(r"(^|/)(mkdocs\.yml$|hooks.*\.py$|__pycache__/)")
DIAGRAM = re.compile(
    r'<p>\s*<img alt="[^"]*" src="(?:\.\./)*img/(?P<name>[\w-]+)\.svg"\s*/?>\s*</p>'
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the pages from the directory of this file."""
    config.docs_dir = str(HERE)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Leave out what is no page, and add the pages of the reference."""
    kept = Files([file for file in files if not NO_PAGES.search(file.src_uri)])
    for uri, text in reference_pages().items():
        kept.append(File.generated(config, uri, content=text))
    return kept


def on_page_content(html: str, **options: Any) -> str:
    """Put diagrams into their page, where they take its colours, light or dark."""

    def inline(match: re.Match[str]) -> str:
        svg = (HERE / "img" / f"{match['name']}.svg").read_text(encoding="utf-8")
        return f"<figure>{svg}</figure>"

    return DIAGRAM.sub(inline, html)
