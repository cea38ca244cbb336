from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.engine.prompt_lookup import (
    MAX_OVERLAP,
    MIN_OVERLAP,
    Acceptance,
    Draft,
    Occurrence,
    find_occurrences,
    grow_draft,
)


def ids(text: str) -> np.ndarray:
    return np.array([ord(c) for c in text], dtype=np.int32)


def drafted(text: str, min_chance: float = 0.01, max_nodes: int = 16, **options: int) -> list[str]:
    """Return the lines from root to leaf of the draft for a text, the first one first."""
    tokens = ids(text)
    draft = grow_draft(
        tokens,
        find_occurrences(tokens),
        Acceptance(),
        min_chance=min_chance,
        max_nodes=max_nodes,
        max_depth=options.get("max_depth", 8),
    )
    if draft is None:
        return []
    lines = []
    for node in range(len(draft)):
        if node not in draft.parents:
            line, at = "", node
            while at >= 0:
                line, at = chr(draft.token_ids[at]) + line, draft.parents[at]
            lines.append(line)
    return lines


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2), max_size=60))
def test_occurrences_equal_a_search_by_hand(tokens: list[int]) -> None:
    expected = []
    for end in range(1, len(tokens) - 1):
        overlap = 0
        while (
            overlap <= end
            and overlap < MAX_OVERLAP
            and tokens[end - overlap] == tokens[len(tokens) - 1 - overlap]
        ):
            overlap += 1
        if overlap >= MIN_OVERLAP:
            expected.append(Occurrence(end + 1, overlap))
    expected.sort(key=lambda found: (-found.overlap, -found.start))
    assert find_occurrences(np.array(tokens, dtype=np.int32), limit=100) == expected
    assert find_occurrences(np.array(tokens, dtype=np.int32), limit=3) == expected[:3]


def test_draft_continues_the_longest_overlap_first() -> None:
    assert drafted("abcdX..cdY..abcd", max_depth=1) == ["X", "Y"]


def test_draft_of_equal_overlaps_prefers_the_latest() -> None:
    assert drafted("cdX..cdY..cd", max_depth=1) == ["Y", "X"]


def test_draft_branches_where_occurrences_part() -> None:
    lines = drafted("(abcdef)(abcdeg)(abc", max_nodes=10, max_depth=3)
    assert lines == ["deg", "def"]


def test_draft_follows_a_repetition_past_its_own_beginning() -> None:
    assert drafted("xabab", min_chance=0.001, max_depth=8)[0] == "abababab"
    assert drafted("xaaa", max_depth=3)[0] == "aaa"


def test_draft_is_none_without_a_repetition() -> None:
    assert drafted("abcdefgh") == []
    assert drafted("a") == []
    assert drafted("") == []


def test_draft_drops_what_is_too_unlikely() -> None:
    text = "abcdefghij" * 2 + "abc"
    deep = len(drafted(text, min_chance=0.05)[0])
    shallow = len(drafted(text, min_chance=0.3)[0])
    assert shallow == 1 < deep
    assert drafted(text, min_chance=0.6) == []


def test_draft_is_bounded_in_nodes_and_depth() -> None:
    text = "abcdefghij" * 5 + "abc"
    assert len(drafted(text, 1e-6, max_nodes=3)[0]) == 3
    assert len(drafted(text, 1e-6, max_depth=2)[0]) == 2


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2), min_size=3, max_size=60), st.integers(1, 12))
def test_likeliest_line_of_a_draft_is_its_beginning(tokens: list[int], max_nodes: int) -> None:
    array = np.array(tokens, dtype=np.int32)
    draft = grow_draft(
        array,
        find_occurrences(array),
        Acceptance(),
        min_chance=0.001,
        max_nodes=max_nodes,
        max_depth=6,
    )
    if draft is None:
        return
    assert len(draft) <= max_nodes
    assert all(parent < node for node, parent in enumerate(draft.parents))
    # Every node is the first child of the one before it, or starts another line.
    for node, parent in enumerate(draft.parents):
        assert (parent == node - 1) == (draft.kinds[node][0] == 0)
    mask = draft.mask()
    for node, parent in enumerate(draft.parents):
        ancestors = {0, node + 1}
        while parent >= 0:
            ancestors.add(parent + 1)
            parent = draft.parents[parent]
        assert set(np.flatnonzero(mask[node + 1])) == ancestors
        assert draft.depths()[node] == len(ancestors) - 1


def test_child_is_found_by_token() -> None:
    draft = Draft((5, 6, 7, 6), (-1, 0, 0, -1), ((0, 2),) * 4)
    assert draft.child(-1, 5) == 0
    assert draft.child(-1, 6) == 3
    assert draft.child(0, 6) == 1
    assert draft.child(1, 6) is None
    assert not draft.is_line
    assert Draft((5, 6), (-1, 0), ((0, 2),) * 2).is_line


@pytest.mark.parametrize("truth", [0.05, 0.9])
def test_acceptance_learns_how_often_guesses_are_right(truth: float) -> None:
    rng = np.random.default_rng(0)
    acceptance = Acceptance()
    for _ in range(400):
        acceptance.record((0, 3), bool(rng.random() < truth))
    assert abs(acceptance.chance((0, 3)) - truth) < 0.12
    assert acceptance.chance((0, 4)) == 0.5
    assert acceptance.chance((1, 3)) == 0.15
