"""The picture of the tree in the dashboard, walked in a headless Chromium."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from dashboard_tools import CELL, Page, Served, open_tree

# Lays out a report of the tree; returns each cell with the cell above it, and what its node is.
LAYOUT = """
const [report, width, rows] = arguments;
return import("/admin/assets/tree_layout.js").then(({ build, layout }) => {
  const model = build(report);
  const cells = layout(model.top, width, rows).map(({ node, row, x, width }) =>
    ({ key: node.key, parent: node.parent?.key, row, x, width, total: node.total }));
  return { cells, total: model.top.total };
});
"""


def selected(page: Page) -> str:
    key: str = page.run(f"return document.querySelector('{CELL}[aria-selected=true]').dataset.key")
    return key


def test_tree_is_walked_with_the_mouse(page: Page, busy: Served) -> None:
    open_tree(page, busy)
    key = page.run(
        f"return [...document.querySelectorAll('{CELL}.run')].find((cell) => "
        "cell.ariaExpanded === 'true').dataset.key"
    )
    cell = f"{CELL}[data-key='{key}']"
    page.click(cell)
    page.until_text("#tree-facts", "You are a tra")
    for fact in ("Tokens", "Blocks", "Found again", "Last used", "Pins", "Namespace", "Sessions"):
        assert fact in page.text("#tree-facts"), fact
    page.click(cell)
    assert page.run("return document.querySelector(arguments[0]).offsetWidth", cell) >= 0.98 * (
        page.run("return document.querySelector('#tree-picture').offsetWidth")
    )
    assert page.run("return document.querySelectorAll('#tree-path li').length") == 3
    page.click("#tree-out")
    assert page.run("return document.querySelectorAll('#tree-path li').length") == 2
    assert selected(page) == key
    page.click("#tree-path button")
    assert page.text("#tree-path") == "everything"


def test_tree_is_walked_with_the_keyboard(page: Page, busy: Served) -> None:
    open_tree(page, busy)
    page.run(f"document.querySelector('{CELL}[tabindex=\"0\"]').focus()")
    assert selected(page) == "all"
    page.press("ArrowDown")
    assert selected(page) == "ns:default"
    page.press("ArrowRight")
    other = selected(page)
    assert other.startswith("ns:")
    assert other != "ns:default"
    page.press("ArrowLeft")
    page.press("ArrowDown")
    below = selected(page)
    assert below.startswith("n:")
    page.press("Enter")
    assert page.run("return document.querySelectorAll('#tree-path li').length") == 3
    assert page.run("return document.activeElement.dataset.key") == below
    page.press("Escape")
    assert selected(page) == below
    page.press("ArrowUp")
    assert selected(page) == "ns:default"
    page.press("Home")
    assert selected(page) == "all"
    # There is one place to tab to, whatever the number of boxes.
    assert page.run(f"return document.querySelectorAll('{CELL}[tabindex=\"0\"]').length") == 1


def test_tree_keeps_its_place_and_the_focus_when_it_is_asked_anew(page: Page, busy: Served) -> None:
    open_tree(page, busy)
    page.run(f"document.querySelector('{CELL}[tabindex=\"0\"]').focus()")
    for key in ("ArrowDown", "ArrowDown", "Enter"):
        page.press(key)
    before = selected(page)
    cells = page.run(f"return document.querySelectorAll('{CELL}').length")
    page.run(f"document.querySelector('{CELL}:not([data-key=\"{before}\"])').remove()")
    page.click("#pause")
    page.click("#pause")  # going on asks for everything
    page.until(f"document.querySelectorAll('{CELL}').length === arguments[0]", cells)
    assert page.run("return document.activeElement.dataset.key") == before
    assert page.run(f"return document.querySelector('{CELL}').dataset.key") == before


def test_tree_is_coloured_by_hits_on_demand(page: Page, busy: Served) -> None:
    open_tree(page, busy)
    classes = f"return [...document.querySelectorAll('{CELL}.run')].map((cell) => cell.className)"
    assert all("age-" in name for name in page.run(classes))
    page.click("#tree-colour [data-colour=hits]")
    assert all("hits-" in name for name in page.run(classes))
    assert "found again" in page.text("#tree-legend")


def test_a_session_leads_to_its_place_in_the_tree(page: Page, busy: Served) -> None:
    open_tree(page, busy)
    page.show("#sessions")
    page.until("document.querySelector('#sessions-rows button.small') !== null")
    page.click("#sessions-rows button.small")
    page.until_text("#tree-facts", "sess_")


def random_report(rng: random.Random, breadth: int, depth: int) -> dict[str, Any]:
    """A report of `/admin/cache/tree`, as far as a layout looks at it; no blocks are left out."""
    ids = itertools.count()

    def children(level: int) -> list[dict[str, Any]]:
        if level == depth:
            return []
        made = []
        for _ in range(rng.randrange(breadth)):
            blocks = rng.choice((1, 1, 2, 40))
            node = {"id": next(ids), "kind": "run", "tokens": 16 * blocks, "blocks": blocks}
            made.append({**node, "elided_children": 0, "children": children(level + 1)})
        return made

    def blocks_of(nodes: list[dict[str, Any]]) -> int:
        return sum(node["blocks"] + blocks_of(node["children"]) for node in nodes)

    spaces = []
    for name in ("default", "a/b"):
        below = children(0)
        space = {"namespace": name, "blocks": blocks_of(below), "elided_children": 0}
        spaces.append({**space, "children": below})
    return {"block_size": 16, "namespaces": spaces}


def check_layout(report: dict[str, Any], result: Any, width: float) -> None:
    cells = {cell["key"]: cell for cell in result["cells"]}
    assert result["total"] == 16 * sum(space["blocks"] for space in report["namespaces"])
    assert len(cells) == len(result["cells"])
    for row in range(14):
        line = sorted((c["x"], c["x"] + c["width"]) for c in cells.values() if c["row"] == row)
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(line))
    for cell in cells.values():
        assert cell["width"] == pytest.approx(width * cell["total"] / result["total"])
        right = cell["x"] + cell["width"]
        above = [
            c
            for c in (cells.get(cell["parent"]), cells.get(f"small:{cell['parent']}"))
            if c and c["row"] == cell["row"] - 1
        ]
        assert cell["key"] == "all" or any(
            c["x"] - 1e-6 <= cell["x"] and right <= c["x"] + c["width"] + 1e-6 for c in above
        )


def test_boxes_lie_below_their_parents_and_never_overlap(page: Page, busy: Served) -> None:
    page.open(busy)
    for seed in range(3):
        report = random_report(random.Random(seed), breadth=8, depth=4)
        for width in (1000, 300):
            check_layout(report, page.run(LAYOUT, report, width, 14), width)


def test_left_out_children_get_what_the_namespace_has_left(page: Page, busy: Served) -> None:
    node = {"id": 1, "kind": "run", "tokens": 64, "blocks": 4, "elided_children": 3, "children": []}
    space = {"namespace": "default", "blocks": 24, "elided_children": 1, "children": [node]}
    page.open(busy)
    report = {"block_size": 16, "namespaces": [space]}
    cells = {cell["key"]: cell for cell in page.run(LAYOUT, report, 1000, 14)["cells"]}
    assert cells["ns:default"]["total"] == 24 * 16
    assert cells["more:n:1"]["total"] == 0.75 * 20 * 16
    assert cells["more:ns:default"]["total"] == 0.25 * 20 * 16
