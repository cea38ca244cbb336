from __future__ import annotations

from radixkv.engine.fairness import MAX_IDLE, ServiceCounters

A, B, C = ("a",), ("b",), ("c",)


def test_generated_tokens_weigh_more_than_prompt_tokens() -> None:
    counters = ServiceCounters(output_weight=3.0)
    counters.charge(A, prompt_tokens=10, generated=4)
    assert counters.get(A) == 22.0


def test_newcomer_is_lifted_to_the_least_served_that_waits() -> None:
    """Or it would be owed all that the others got while it was away."""
    counters = ServiceCounters()
    counters.join(A)
    counters.join(B)
    counters.charge(A, 100)
    counters.charge(B, 70)
    counters.join(C)
    assert counters.get(C) == 70.0


def test_newcomer_to_an_empty_queue_is_lifted_to_the_last_that_left() -> None:
    counters = ServiceCounters()
    counters.join(A)
    counters.leave(A)
    counters.charge(A, 50)
    counters.join(B)
    assert counters.get(B) == 50.0


def test_return_does_not_forgive_what_was_served() -> None:
    counters = ServiceCounters()
    counters.join(A)
    counters.join(B)
    counters.charge(A, 100)
    counters.leave(A)
    counters.join(A)
    assert counters.get(A) == 100.0
    assert counters.get(B) == 0.0


def test_second_request_of_a_waiting_namespace_lifts_nothing() -> None:
    counters = ServiceCounters()
    counters.join(A)
    counters.charge(A, 5)
    counters.join(B)
    counters.charge(B, 100)
    counters.join(A)
    counters.leave(A)
    counters.join(C)
    assert counters.get(C) == 5.0


def test_counters_of_the_idle_are_bounded() -> None:
    counters = ServiceCounters()
    counters.join(A)
    for i in range(3 * MAX_IDLE):
        namespace = (str(i),)
        counters.join(namespace)
        counters.charge(namespace, 10)
        counters.leave(namespace)
    assert len(counters) <= MAX_IDLE + 1
    assert counters.get(("0",)) == 0.0
    assert counters.get((str(3 * MAX_IDLE - 1),)) == 10.0
