from __future__ import annotations

import random
from array import array

import pytest

from radixkv.server.session_state import Session, join_turns
from radixkv.server.session_tokens import common_tokens, pack_tokens, shared_tokens, unpack_tokens


def test_ids_come_back_as_they_were() -> None:
    ids = [0, 1, 255, 256, 128_000, 2**31 - 1]
    assert unpack_tokens(pack_tokens(ids)) == array("i", ids)
    assert len(pack_tokens(ids)) == 4 * len(ids)


@pytest.mark.parametrize("seed", range(8))
def test_stress_shared_tokens_equals_comparing_all_pairs(seed: int) -> None:
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 3])
    names = [(), ("a", ""), ("a", "b")]
    paths = [
        (rng.choice(names), pack_tokens([rng.choice([1, 256, 65536]) for _ in range(n)]))
        for n in (rng.randrange(9) for _ in range(40))
    ]

    def needed(a: bytes, b: bytes) -> int:
        common = common_tokens(a, b)
        return common if 4 * common in (len(a), len(b)) else common // block_size * block_size

    expected = [
        max(
            (needed(a, b) for j, (other, b) in enumerate(paths) if j != i and other == name),
            default=0,
        )
        for i, (name, a) in enumerate(paths)
    ]
    assert shared_tokens(paths, block_size) == expected


def test_every_turn_keeps_its_own_ids_though_later_ones_rewrote_them() -> None:
    """A fork was once cut out of the latest ids, which need not begin with those of an old turn."""
    session = Session("s", (), 0.0)
    states = [[], [1, 2, 3, 9], [1, 2, 3, 4, 5, 9], [7, 8, 6, 9], [7, 8, 6, 9, 1]]
    for state in states[1:]:
        session.commit_turn([], state[:-1], state[-1:], ended_by_token=True)
    for count, state in enumerate(states):
        assert unpack_tokens(session.packed_tokens(count)).tolist() == state
        assert session.turns[count - 1].num_tokens == len(state) or not count
    assert [turn.start for turn in session.turns] == [0, 3, 0, 4]
    assert join_turns(session.turns) == pack_tokens(states[-1])
