import pytest

from radixkv.cache import RadixCache
from radixkv.cache.tiers import Entry, SlotIndex, node_prefix, prefix_keys
from tests.cache.cache_helpers import lock, store

BLOCK = 4 * 4


def tokens_of(*ids: int) -> bytes:
    return b"".join(i.to_bytes(4, "little") for i in ids)


def keys(namespace: tuple[str, ...], tokens: bytes, first: int = 0) -> list[bytes]:
    return list(prefix_keys(namespace, tokens, BLOCK, first, len(tokens) // BLOCK))


def test_key_covers_the_whole_prefix() -> None:
    a, b = tokens_of(1, 2, 3, 4), tokens_of(9, 2, 3, 4)
    same_end = tokens_of(5, 6, 7, 8)
    assert keys((), a + same_end)[0] != keys((), b + same_end)[0]
    assert keys((), a + same_end)[1] != keys((), b + same_end)[1]
    assert keys((), a + same_end, first=1) == keys((), a + same_end)[1:]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((), ("",)),
        (("a",), ("b",)),
        (("ab", "c"), ("a", "bc")),
        (("x", ""), ("", "x")),
        (("a", "b"), ("a/b",)),
    ],
)
def test_key_differs_between_namespaces(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    tokens = tokens_of(*range(8))
    assert not set(keys(one, tokens)) & set(keys(other, tokens))


def test_node_prefix_reaches_from_the_root_across_a_split() -> None:
    cache = RadixCache(16, 4)
    store(cache, range(12))
    store(cache, [*range(8), *range(50, 54)])
    node = lock(cache, range(12))
    assert node.parent is not None
    assert not node.parent.is_root
    assert node_prefix(node) == tokens_of(*range(12))
    cache.unlock(node)


def fill(index: SlotIndex, *names: bytes) -> list[bytes]:
    """File blocks; return the keys that made room."""
    gone = []
    for name in names:
        slot, victim = index.take()
        if victim is not None:
            gone.append(victim.key)
        index.put(name, name.upper(), slot)
        index.check_integrity()
    return gone


def test_least_recently_used_block_makes_room() -> None:
    index = SlotIndex(3)
    assert fill(index, b"a", b"b", b"c") == []
    index.touch(b"a")
    assert fill(index, b"d") == [b"b"]
    assert [entry.key for entry in index.items()] == [b"c", b"a", b"d"]


def test_find_compares_the_tokens() -> None:
    index = SlotIndex(1)
    fill(index, b"a")
    assert index.find(b"a", b"A") == 0
    assert index.find(b"a", b"other") is None


def test_slot_being_filled_is_found_by_nobody_and_not_given_twice() -> None:
    index = SlotIndex(2)
    first, _ = index.take()
    second, _ = index.take()
    assert len(index) == 0
    with pytest.raises(IndexError):
        index.take()
    index.give_back(first)
    assert index.take() == (first, None)
    assert first != second


def test_demoted_block_makes_room_first() -> None:
    index = SlotIndex(3)
    fill(index, b"a", b"b", b"c")
    index.demote(b"c")
    index.demote(b"not here")
    assert fill(index, b"d", b"e") == [b"c", b"a"]


def test_filing_a_key_again_frees_its_old_slot() -> None:
    index = SlotIndex(2)
    fill(index, b"a", b"a")
    assert len(index) == 1
    assert fill(index, b"b") == []


def test_restore_keeps_order_and_free_slots() -> None:
    index = SlotIndex(4)
    index.restore([Entry(b"b", b"B", 3), Entry(b"a", b"A", 1), Entry(b"z", b"Z", 9)])
    index.check_integrity()
    assert [entry.key for entry in index.items()] == [b"b", b"a"]
    assert fill(index, b"c", b"d") == []
    assert fill(index, b"e") == [b"b"]


def test_clear_frees_every_slot() -> None:
    index = SlotIndex(2)
    fill(index, b"a", b"b")
    index.clear()
    index.check_integrity()
    assert fill(index, b"c", b"d") == []
