from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from cache_helpers import compute, store

from radixkv.cache import RadixCache


@pytest.fixture
def cache() -> RadixCache:
    return RadixCache(64, 4)


def children(report: dict[str, Any], index: int = 0) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = report["namespaces"][index]["children"]
    return found


def count_nodes(entries: list[dict[str, Any]]) -> int:
    return sum(1 + count_nodes(e["children"]) for e in entries)


def test_report_of_an_empty_cache_is_empty(cache: RadixCache) -> None:
    assert cache.tree_report() == {
        "block_size": 4,
        "blocks": 0,
        "nodes": 0,
        "namespaces": [],
        "elided_namespaces": 0,
    }


def test_report_tells_sizes_hits_and_ages() -> None:
    now = [10.0]
    cache = RadixCache(64, 4, clock=lambda: now[0])
    store(cache, range(1, 11))
    now[0] = 15.0
    (run,) = children(cache.tree_report())
    assert (run["kind"], run["tokens"], run["blocks"], run["hits"]) == ("run", 8, 2, 0)
    assert (run["age_s"], run["locks"], run["pins"]) == (5.0, 0, 0)
    assert run["token_ids"] == list(range(1, 9))
    (tail,) = run["children"]
    assert (tail["kind"], tail["tokens"], tail["blocks"]) == ("tail", 2, 1)
    for _ in range(3):
        store(cache, range(1, 9))
    (run,) = children(cache.tree_report())
    assert (run["hits"], run["age_s"]) == (3, 0.0)


def test_hits_survive_a_split_on_both_halves(cache: RadixCache) -> None:
    store(cache, range(8))
    store(cache, range(9))
    store(cache, [*range(4), 99, 98, 97, 96])
    (upper,) = children(cache.tree_report())
    lower = next(c for c in upper["children"] if c["token_ids"][0] == 4)
    assert (upper["blocks"], lower["blocks"]) == (1, 1)
    assert (upper["hits"], lower["hits"]) == (2, 1)


def test_report_shows_locks_and_pins(cache: RadixCache) -> None:
    sequence = compute(cache, range(8))
    assert children(cache.tree_report())[0]["locks"] == 1
    cache.pin(list(range(8)))
    assert (
        children(cache.tree_report())[0]["locks"],
        children(cache.tree_report())[0]["pins"],
    ) == (
        2,
        1,
    )
    sequence.free()
    assert children(cache.tree_report())[0]["locks"] == 1


def test_report_counts_what_its_bounds_leave_out(cache: RadixCache) -> None:
    for i in range(7):
        store(cache, [1, 1, 1, 1, i, i, i, i])
    report = cache.tree_report(max_depth=2, max_breadth=3)
    (top,) = children(report)
    assert (len(top["children"]), top["elided_children"]) == (3, 4)
    assert [c["token_ids"][0] for c in top["children"]] == [6, 5, 4], "latest used first"
    (top,) = children(cache.tree_report(max_depth=1))
    assert (top["children"], top["elided_children"]) == ([], 7)


def test_report_can_be_of_one_namespace(cache: RadixCache) -> None:
    for i in range(5):
        store(cache, range(4), (f"t{i}",))
    report = cache.tree_report(max_breadth=2)
    assert [e["namespace"] for e in report["namespaces"]] == [["t4"], ["t3"]]
    assert report["elided_namespaces"] == 3
    report = cache.tree_report(namespace=("t1",))
    assert [(e["namespace"], e["blocks"]) for e in report["namespaces"]] == [(["t1"], 1)]
    assert cache.tree_report(namespace=("unknown",))["namespaces"] == []


def test_report_shows_where_sessions_end(cache: RadixCache) -> None:
    store(cache, range(10), ("t",))
    sessions = [
        ("inside", ("t",), range(6)),
        ("tail", ("t",), range(10)),
        ("longer", ("t",), range(20)),
        ("evicted", ("t",), range(50, 60)),
        ("elsewhere", (), range(10)),
    ]
    report = cache.tree_report(sessions=sessions)
    (run,) = children(report)
    assert run["sessions"] == ["inside"]
    assert run["children"][0]["sessions"] == ["tail", "longer"]
    assert report["namespaces"][0]["sessions"] == ["evicted"]


def test_report_decodes_the_start_of_each_edge(cache: RadixCache) -> None:
    store(cache, map(ord, "a" * 100))
    (run,) = children(cache.tree_report(decode=lambda ids: "".join(map(chr, ids))))
    assert run["text"] == "a" * 24


def test_report_of_a_deep_tree_needs_no_recursion() -> None:
    depth = 3 * sys.getrecursionlimit()
    cache = RadixCache(depth, 1)
    node = cache.tree.get_root(())
    for i in range(depth):
        node = cache.tree.add_child(node, i.to_bytes(16, "big"), i.to_bytes(4, "little"), [i])
    report = cache.tree_report(max_depth=depth)
    entries, found = children(report), 0
    while entries:
        found += 1
        entries = entries[0]["children"]
    assert found == depth


def test_report_is_bounded_in_nodes_and_is_json() -> None:
    from radixkv.cache.inspection import tree_report

    cache = RadixCache(256, 1)
    for i in range(200):
        compute_quietly(cache, [i % 20, i]).free()
    report = tree_report(cache, 8, 1000, max_nodes=50)
    shown = count_nodes(children(report))
    assert shown == 50
    left_out = sum(e["elided_children"] for e in children(report))
    assert left_out + report["namespaces"][0]["elided_children"] + 50 == report["nodes"]
    assert json.loads(json.dumps(report)) == report


def compute_quietly(cache: RadixCache, tokens: list[int]) -> Any:
    """As `compute`, without the check after it, which takes long on a deep tree."""
    sequence = cache.create_sequence(tokens)
    sequence.reuse()
    sequence.reserve(len(sequence))
    cache.take_copies()
    sequence.commit(len(sequence))
    return sequence
