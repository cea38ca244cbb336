from __future__ import annotations

import ast
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

import radixkv
from radixkv.cache.hashing import HASH_BYTES, common_tokens, hash_blocks, namespace_seed

PACKAGE = Path(radixkv.__file__).parent
ids = st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 2), max_size=12)


def packed(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype="<i4").tobytes()


def test_namespaces_with_equal_joins_differ() -> None:
    """Fields once joined without lengths made ("ab", "c") and ("a", "bc") one namespace."""
    spaces = [(), ("",), ("", ""), ("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("", "abc")]
    assert len({namespace_seed(n) for n in spaces}) == len(spaces)


def test_hash_is_chained() -> None:
    first = hash_blocks(b"seed", packed([1, 2, 3, 4]), 8)
    second = hash_blocks(first[:HASH_BYTES], packed([3, 4]), 8)
    assert first[HASH_BYTES:] == second
    assert hash_blocks(b"seed", packed([9, 2, 3, 4]), 8)[HASH_BYTES:] != second


def test_hash_blocks_ignores_a_rest_shorter_than_a_block() -> None:
    assert hash_blocks(b"s", packed([1, 2, 3]), 8) == hash_blocks(b"s", packed([1, 2]), 8)
    assert hash_blocks(b"s", packed([1]), 8) == b""


@settings(deadline=None)
@given(ids, ids)
def test_common_tokens_equals_a_loop(a: list[int], b: list[int]) -> None:
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_tokens(packed(a), packed(b)) == expected


def test_nothing_in_the_package_uses_the_builtin_hash() -> None:
    calls = [
        f"{path}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "hash"
    ]
    assert calls == []
