"""The site of docs/: it builds strictly, loads nothing from other hosts, and lists everything."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from server_fakes import FakeEngine

from radixkv.config import ServeConfig
from radixkv.server import create_app
from radixkv.server.openapi import routes_of
from radixkv.server.openapi_routes import ROUTES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
# Attributes by which a page makes a browser load something.
LOADING = {"src", "srcset", "poster", "data"}
LOADING_LINKS = {"stylesheet", "preload", "preconnect", "dns-prefetch", "icon", "manifest"}
OUTSIDE = re.compile(r"^\s*(?:https?:)?//", re.IGNORECASE)

pytest.importorskip("material", reason="the extra docs is not installed")


class Loads(HTMLParser):
    """Collects what a page loads from other hosts, and elements that make the theme do so."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.found += [v for n, v in values.items() if n in LOADING and OUTSIDE.match(v)]
        rel = set(values.get("rel", "").split())
        if tag == "link" and rel & LOADING_LINKS and OUTSIDE.match(values.get("href", "")):
            self.found.append(values["href"])
        # The theme fetches the renderer of these from another host.
        if "mermaid" in values.get("class", "").split():
            self.found.append(f"{tag}.mermaid")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if built := os.environ.get("RADIXKV_SITE"):
        return Path(built)
    directory = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [
            *(sys.executable, "-m", "mkdocs", "build", "--strict"),
            *("-f", str(DOCS / "mkdocs.yml"), "-d", str(directory)),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return directory


def text_of(site: Path, page: str) -> str:
    html = (site / page / "index.html").read_text(encoding="utf-8")
    article = html[html.index("<article") : html.index("</article>")]
    return re.sub(r"<[^>]+>", "", article)


@pytest.mark.timeout(120)
def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    found = {}
    for page in site.rglob("*.html"):
        loads = Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        if loads.found:
            found[str(page.relative_to(site))] = loads.found
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        outside = re.findall(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')]+)", text)
        if outside:
            found[str(sheet.relative_to(site))] = outside
    assert found == {}


def test_a_page_that_loads_from_another_host_is_noticed() -> None:
    loads = Loads()
    loads.feed(
        '<script src="https://a.example/x.js"></script><img src="//b.example/y.png">'
        '<link rel="stylesheet" href="https://fonts.example/css"><pre class="mermaid"></pre>'
        '<a href="https://c.example/">a link loads nothing</a><img src="img/z.png">'
    )
    assert len(loads.found) == 4


def test_the_reference_has_every_option(site: Path) -> None:
    text = text_of(site, "reference/options")
    for option in dataclasses.fields(ServeConfig):
        assert f"--{option.name.replace('_', '-')}\n" in text, option.name


def test_the_reference_has_every_metric_of_the_page_on_metrics(site: Path) -> None:
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `((?:radixkv|vllm):\w+)`", page, re.MULTILINE))
    listed = set(re.findall(r"(?:radixkv|vllm):\w+", text_of(site, "reference/metrics")))
    assert len(documented) > 50
    assert documented == listed


def test_the_reference_has_every_command(site: Path) -> None:
    text = text_of(site, "reference/cli")
    for command in ("serve", "pull", "tree", "bench quality", "simulate", "kv-size", "version"):
        assert f"radixkv {command}" in text


def test_the_reference_has_every_route(site: Path) -> None:
    text = text_of(site, "reference/http")
    routes = [name for name, _ in routes_of(create_app(FakeEngine()))]
    assert len(routes) > 30
    assert [name for name in routes if name in ROUTES and name not in text] == []


def test_the_search_index_has_the_guides(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    assert '"location":"guides/misses/' in index


def test_diagrams_stand_in_their_pages(site: Path) -> None:
    html = (site / "concepts" / "index.html").read_text(encoding="utf-8")
    assert html.count("<figure><svg") == 6
    assert 'src="../img/' not in html


@pytest.mark.parametrize("path", sorted(DOCS.glob("img/*.svg")), ids=lambda path: path.stem)
def test_a_diagram_tells_what_it_shows_and_loads_nothing(path: Path) -> None:
    root = ElementTree.parse(path).getroot()
    tags = [element.tag.rsplit("}", 1)[-1] for element in root.iter()]
    assert tags[1:3] == ["title", "desc"]
    assert not {"image", "script", "foreignObject"} & set(tags)
