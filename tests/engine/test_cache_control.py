"""Pins that requests ask for, in an engine that is short of blocks."""

from __future__ import annotations

import random

import pytest
from fakes import Harness, cold, prompt_of

from radixkv.engine.cache_control import pin_computed

OPTIONS = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}


def test_a_prompt_is_pinned_when_it_is_computed_and_not_before() -> None:
    harness = Harness(num_blocks=32, max_num_batched_tokens=16)
    harness.add("a", prompt_of(30), **OPTIONS, cache_pin_ttl=60)
    harness.step()
    assert len(harness.cache.pins) == 0
    harness.step()
    (pin,) = harness.cache.pins
    assert (pin.source, harness.cache.num_pinned_blocks) == ("request a", 7)
    harness.add("b", prompt_of(30, seed=1), **OPTIONS, cache_pin_ttl=60)
    harness.step()
    harness.abort("b")
    assert len(harness.cache.pins) == 1


def test_a_shorter_wish_never_shortens_a_pin() -> None:
    harness = Harness(num_blocks=32)
    harness.ask(prompt_of(9), **OPTIONS)
    for ttl_s in (10.0, 500.0, 20.0):
        pin_computed(harness.cache, prompt_of(9), (), ttl_s, f"r{ttl_s:g}")
        harness.cache.check_integrity()
    (pin,) = harness.cache.pins
    assert (pin.ttl_s, pin.source) == (500.0, "request r20")


def test_a_persons_pin_is_not_replaced_by_a_requests() -> None:
    harness = Harness(num_blocks=32)
    harness.ask(prompt_of(9), **OPTIONS)
    assert harness.cache.pin(prompt_of(9), (), 5.0) is not None
    pin_computed(harness.cache, prompt_of(9), (), 50.0, "r")
    assert [pin.ttl_s for pin in harness.cache.pins] == [5.0, 50.0]


@pytest.mark.parametrize("seed", range(4))
def test_stress_requests_that_pin_all_end_as_if_alone(seed: int) -> None:
    rng = random.Random(seed)
    harness = Harness(
        num_blocks=14, max_num_seqs=3, max_num_batched_tokens=12, host_blocks=rng.choice([0, 8])
    )
    now = 0.0
    harness.cache.clock = lambda: now
    base = [prompt_of(30, seed=s) for s in range(4)]
    asked = {}
    for number in range(40):
        prompt = rng.choice(base)[: rng.randrange(1, 31)]
        namespace = rng.choice([(), ("t",)])
        ttl_s = rng.choice([None, 3.0, 1000.0])
        asked[f"r{number}"] = prompt
        harness.add(
            f"r{number}", prompt, namespace, **OPTIONS,
            cache_pin_ttl=ttl_s, cache_priority=rng.randrange(3),
        )  # fmt: skip
        for _ in range(rng.randrange(6)):
            harness.step()
            assert harness.cache.num_pinned_blocks <= 7
        if rng.random() < 0.1:
            harness.cache.reset_namespace(("t",))
            harness.cache.check_integrity()
        now += rng.random()
    for _ in range(3000):
        if not harness.engine.has_work:
            break
        harness.step()
    assert not harness.engine.has_work, "pins keep the engine from getting done"
    for name, prompt in asked.items():
        assert harness.answers[name].token_ids == cold(prompt, **OPTIONS).token_ids
    assert harness.cache.pins.num_lapsed + harness.cache.pins.num_expired > 0
    harness.cache.pins.clear()
    assert harness.cache.num_referenced_blocks == 0
