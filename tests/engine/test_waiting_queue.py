from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from radixkv.engine.waiting_queue import MAX_HEAD_LOOKUPS, MAX_TURN_LOOKUPS, WaitingQueue


class Cached:
    """Cached lengths by name; counts the lookups."""

    def __init__(self, **lengths: int) -> None:
        self.lengths = lengths
        self.version = 0
        self.looked_up: list[str] = []

    def change(self, **lengths: int) -> None:
        self.lengths |= lengths
        self.version += 1

    def look_up(self, name: str) -> int:
        self.looked_up.append(name)
        return self.lengths.get(name, 0)

    def queue(self, **options: Any) -> WaitingQueue[str]:
        return WaitingQueue(
            "cache-aware", num_cached=self.look_up, version=lambda: self.version, **options
        )


def fill(queue: WaitingQueue[str], names: str, **options: Any) -> None:
    for name in names:
        queue.add(name, ord(name), **options)


def drain(queue: WaitingQueue[str], now: float = 0.0) -> str:
    """Take everything out in the order in which it is served."""
    names = ""
    while (name := queue.peek(now)) is not None:
        names += name
        queue.remove(ord(name))
    assert len(queue) == 0
    return names


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="fcfs, priority, cache-aware"):
        WaitingQueue("sjf")


def test_cache_aware_without_a_lookup_is_refused() -> None:
    with pytest.raises(ValueError, match="num_cached"):
        WaitingQueue("cache-aware")


def test_fcfs_ignores_priorities() -> None:
    queue: WaitingQueue[str] = WaitingQueue()
    queue.add("b", ord("b"), priority=-5)
    queue.add("a", ord("a"), priority=5)
    queue.add("c", ord("c"))
    assert list(queue) == ["a", "b", "c"]
    assert drain(queue) == "abc"


def test_lower_priority_number_goes_first_and_age_decides_among_equals() -> None:
    queue: WaitingQueue[str] = WaitingQueue("priority")
    for name, priority in (("a", 1), ("b", 0), ("c", -2), ("d", 0)):
        queue.add(name, ord(name), priority=priority)
    assert drain(queue) == "cbda"


def test_preempted_goes_before_new_ones_of_its_priority_only() -> None:
    queue: WaitingQueue[str] = WaitingQueue("priority")
    fill(queue, "ab", priority=1)
    queue.add("z", ord("z"), priority=1, resumed=True)
    queue.add("y", ord("y"), priority=0)
    assert drain(queue) == "yzab"


def test_preempted_goes_before_new_ones_of_less_served_namespaces() -> None:
    queue: WaitingQueue[str] = WaitingQueue()
    queue.charge(("flood",), 1000)
    queue.add("a", ord("a"), namespace=("quiet",))
    queue.add("b", ord("b"), namespace=("flood",), resumed=True)
    assert drain(queue) == "ba"


def test_one_namespace_is_served_in_order_whatever_it_was_charged() -> None:
    queue: WaitingQueue[str] = WaitingQueue()
    fill(queue, "abcd", namespace=("only",))
    names = ""
    while (name := queue.peek(0.0)) is not None:
        names += name
        queue.charge(("only",), 100)
        queue.remove(ord(name))
    assert names == "abcd"


def test_namespaces_take_turns_by_what_they_were_served() -> None:
    queue: WaitingQueue[str] = WaitingQueue()
    fill(queue, "abcdef", namespace=("flood",))
    fill(queue, "xy", namespace=("quiet",))
    names = ""
    while (name := queue.peek(0.0)) is not None:
        names += name
        queue.charge(("flood",) if name in "abcdef" else ("quiet",), 10)
        queue.remove(ord(name))
    assert names == "axbycdef"


def test_charge_while_waiting_moves_a_namespace_back_on_every_level() -> None:
    queue: WaitingQueue[str] = WaitingQueue("priority")
    for name, priority, namespace in (("a", 0, "x"), ("b", 0, "y"), ("c", 1, "x"), ("d", 1, "y")):
        queue.add(name, ord(name), priority=priority, namespace=(namespace,))
    queue.charge(("x",), generated=1)
    assert drain(queue) == "badc"


def test_longest_cached_prefix_goes_first() -> None:
    cached = Cached(a=0, b=32, c=64)
    queue = cached.queue()
    fill(queue, "abcd")
    assert drain(queue) == "cbad"


def test_oldest_goes_first_once_it_has_waited_long_enough() -> None:
    cached = Cached(a=0, b=0, c=64)
    queue = cached.queue(max_skip_s=5.0)
    for name, arrival in (("a", 0.0), ("b", 3.0), ("c", 4.0)):
        queue.add(name, ord(name), arrival=arrival)
    assert queue.peek(4.9) == "c"
    assert queue.peek(5.0) == "a"
    queue.remove(ord("a"))
    assert queue.peek(5.0) == "c"


def test_stale_head_is_looked_up_again_before_it_goes() -> None:
    cached = Cached(a=16, b=32, c=64)
    queue = cached.queue()
    fill(queue, "abc")
    cached.change(c=0)
    assert queue.peek(0.0) == "b"


def test_nothing_is_looked_up_while_the_cache_stays_the_same() -> None:
    cached = Cached(a=16, b=32)
    queue = cached.queue()
    fill(queue, "ab")
    cached.looked_up.clear()
    for _ in range(10):
        queue.peek(0.0)
        queue.refresh()
    assert cached.looked_up == []


def test_lookups_of_a_step_are_bounded_and_reach_everyone_in_turn() -> None:
    names = "abcdefghijklmnopqrstuvwxyz"
    cached = Cached()
    queue = cached.queue()
    fill(queue, names)
    cached.change(z=64)
    cached.looked_up.clear()
    for step in range(-(-len(names) // MAX_TURN_LOOKUPS)):
        queue.refresh()
        queue.peek(0.0)
        assert len(cached.looked_up) <= (step + 1) * (MAX_TURN_LOOKUPS + MAX_HEAD_LOOKUPS)
    assert set(cached.looked_up) == set(names)
    assert queue.peek(0.0) == "z"


def test_request_put_aside_is_no_candidate_but_waits() -> None:
    queue: WaitingQueue[str] = WaitingQueue()
    fill(queue, "abc", arrival=7.0)
    queue.put_aside(ord("a"))
    assert queue.peek(0.0) == "b"
    assert list(queue) == ["a", "b", "c"]
    assert queue.oldest_arrival == 7.0
    queue.recall(ord("a"))
    assert drain(queue) == "abc"


def test_request_put_aside_can_be_removed_and_recalled_no_more() -> None:
    queue: WaitingQueue[str] = WaitingQueue()
    fill(queue, "a")
    queue.put_aside(ord("a"))
    assert queue.peek(0.0) is None
    assert queue.remove(ord("a"))
    queue.recall(ord("a"))
    assert not queue.remove(ord("a"))
    assert queue.peek(0.0) is None
    assert queue.oldest_arrival is None


@pytest.mark.parametrize("policy", ["fcfs", "priority", "cache-aware"])
def test_stress_order_equals_a_sort(policy: str) -> None:
    """Random adds, removals, charges and asides, against sorting everything each time."""
    rng = np.random.default_rng(0)
    cached = Cached()
    queue: WaitingQueue[str] = WaitingQueue(
        policy, max_skip_s=1e9, num_cached=cached.look_up, version=lambda: cached.version
    )
    facts: dict[int, tuple[int, bool, tuple[str, ...], int]] = {}
    aside: set[int] = set()
    for order in range(600):
        action = rng.random()
        if action < 0.5 or not facts:
            name = f"r{order}"
            cached.lengths[name] = int(rng.integers(0, 4)) * 16
            level, resumed = int(rng.integers(0, 3)), bool(rng.random() < 0.1)
            namespace = ("xyz"[int(rng.integers(0, 3))],)
            queue.add(name, order, priority=level, namespace=namespace, resumed=resumed)
            facts[order] = (level, resumed, namespace, cached.lengths[name])
        elif action < 0.75:
            gone = int(rng.choice(list(facts)))
            assert queue.remove(gone)
            del facts[gone]
            aside.discard(gone)
        elif action < 0.85:
            queue.charge(("xyz"[int(rng.integers(0, 3))],), int(rng.integers(1, 9)))
        else:
            moved = int(rng.choice(list(facts)))
            (queue.recall if moved in aside else queue.put_aside)(moved)
            aside ^= {moved}

        def rank(order: int) -> tuple[Any, ...]:
            level, resumed, namespace, length = facts[order]
            return (
                level if policy == "priority" else 0,
                not resumed,
                0.0 if resumed else queue.counters.get(namespace),
                0 if policy != "cache-aware" or resumed else -length,
                order,
            )

        candidates = sorted((o for o in facts if o not in aside), key=rank)
        best = queue.peek(0.0)
        if not candidates:
            assert best is None
            continue
        # Namespaces that were served alike go in the order in which they came to wait.
        assert best is not None
        assert rank(int(best[1:]))[:3] == rank(candidates[0])[:3]
        same = facts[int(best[1:])][2]
        alike = [o for o in candidates if rank(o)[1] is False or facts[o][2] == same]
        assert int(best[1:]) == min(alike, key=rank)
        assert len(queue) == len(facts)
