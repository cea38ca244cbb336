from __future__ import annotations

from fakes import Harness, prompt_of

from radixkv.cache import Sequence
from radixkv.engine.branch import Branch
from radixkv.engine.leaders import PrefillLeaders, num_common

BLOCK = 4


def begin(harness: Harness, name: str, prompt: list[int], computed: int = 0) -> Branch:
    """A branch that holds blocks and has computed so many tokens."""
    branch = harness.add(name, prompt, max_tokens=2).live[0]
    branch.sequence.reuse(0)
    branch.sequence.reserve(len(prompt))
    branch.sequence.commit(computed)
    return branch


def sequence_of(harness: Harness, prompt: list[int], namespace: tuple[str, ...] = ()) -> Sequence:
    return harness.cache.create_sequence(prompt, namespace)


def test_leader_is_who_shares_more_than_is_computed_and_cached() -> None:
    harness, prompt = Harness(64, BLOCK), prompt_of(20)
    leaders = PrefillLeaders(harness.cache)
    leader = begin(harness, "a", prompt, computed=8)
    leaders.add(leader)
    follower = sequence_of(harness, [*prompt[:14], 1, 2])
    assert leaders.find(follower, 2) == (leader, 12)
    assert leaders.find(follower, 3) is None
    leader.sequence.commit(12)
    assert leaders.find(follower, 2) is None


def test_less_than_a_block_or_another_namespace_is_nothing_to_wait_for() -> None:
    harness, prompt = Harness(64, BLOCK), prompt_of(20)
    leaders = PrefillLeaders(harness.cache)
    leaders.add(begin(harness, "a", prompt))
    leaders.add(begin(harness, "short", prompt[:3]))
    assert leaders.find(sequence_of(harness, prompt[:3]), 0) is None
    assert leaders.find(sequence_of(harness, prompt, ("other",)), 0) is None
    assert len(leaders) == 1


def test_followers_are_released_as_their_part_is_computed() -> None:
    harness, prompt = Harness(64, BLOCK), prompt_of(20)
    leaders = PrefillLeaders(harness.cache)
    leader = begin(harness, "a", prompt)
    leaders.add(leader)
    leaders.follow(8, leader, 12)
    leaders.follow(7, leader, 8)
    assert leaders.release() == []
    leader.sequence.commit(8)
    assert leaders.release() == [7]
    leader.sequence.commit(19)
    assert leaders.release() == [8]
    assert (len(leaders), leaders.num_followers) == (0, 0)


def test_leader_that_is_gone_releases_everyone() -> None:
    harness, prompt = Harness(64, BLOCK), prompt_of(20)
    leaders = PrefillLeaders(harness.cache)
    leader = begin(harness, "a", prompt)
    leaders.add(leader)
    for order in (7, 8, 9):
        leaders.follow(order, leader, 12)
    leaders.forget(8)
    leaders.forget(8)
    assert sorted(leaders.discard(leader)) == [7, 9]
    assert leaders.discard(leader) == []
    assert leaders.find(sequence_of(harness, prompt), 0) is None


def test_common_beginning_of_arrays() -> None:
    harness = Harness()
    a, b = (sequence_of(harness, ids).token_ids for ids in ([1, 2, 3], [1, 2, 4, 5]))
    assert num_common(a, b) == 2
    assert num_common(a, a) == 3
    assert num_common(a[:0], b) == 0
