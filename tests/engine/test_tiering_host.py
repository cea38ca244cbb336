from __future__ import annotations

import numpy as np
import pytest

from radixkv.cache.tiers import Entry
from radixkv.engine.tiering_host import HostTier


def row(value: int, size: int = 4) -> np.ndarray:
    return np.full(size, value, dtype=np.uint8)


def test_a_block_that_cannot_be_kept_costs_no_room() -> None:
    tier = HostTier(1, 4)

    def nobody(victim: Entry, content: np.ndarray) -> None:
        raise RuntimeError("injected")

    with pytest.raises(ValueError, match="broadcast"):
        tier.keep(b"a", b"A", row(1, size=3), nobody)
    tier.keep(b"b", b"B", row(2), nobody)
    with pytest.raises(RuntimeError, match="injected"):
        tier.keep(b"c", b"C", row(3), nobody)
    assert len(tier) == 0
    tier.keep(b"d", b"D", row(4), nobody)
    tier.check_integrity()
    kept = tier.find(b"d", b"D")
    assert kept is not None
    assert kept.tolist() == [4, 4, 4, 4]
    assert tier.find(b"d", b"other") is None


def test_the_block_that_makes_room_is_passed_down_with_its_content() -> None:
    tier, seen, changes = HostTier(1, 4), [], []
    tier.follow(lambda stored, label: changes.append((stored, label)))

    def note(victim: Entry, content: np.ndarray) -> None:
        seen.append((victim.key, content.tolist()))

    tier.keep(b"a", b"A", row(1), note)
    tier.keep(b"b", b"B", row(2), note)
    assert seen == [(b"a", [1, 1, 1, 1])]
    assert changes == [(True, b"A"), (False, b"A"), (True, b"B")]
