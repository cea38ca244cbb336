"""Random requests with several answers in pools that are too small for them all."""

from __future__ import annotations

import random
from typing import Any

import pytest
from fakes import Answer, Harness, cold_all, prompt_of

PREFIX = prompt_of(14, seed=99)


def random_request(rng: random.Random) -> tuple[list[int], dict[str, Any]]:
    prompt = PREFIX[: rng.choice((0, 5, 8, 14))] + prompt_of(rng.randint(1, 12), rng.randint(0, 9))
    params: dict[str, Any] = {"n": rng.randint(1, 4), "max_tokens": rng.randint(1, 24)}
    if rng.random() < 0.3:
        params |= {"use_beam_search": True, "best_of": params["n"] + rng.randint(0, 1)}
        params["length_penalty"] = rng.choice((0.0, 1.0))
        params["early_stopping"] = rng.choice((True, False, "never"))
    else:
        params |= {"temperature": rng.choice((0.0, 0.9)), "seed": rng.randint(0, 99)}
        if rng.random() < 0.3:
            params["best_of"] = params["n"] + rng.randint(0, 2)
    if rng.random() < 0.3:
        params |= {"frequency_penalty": 0.7, "min_tokens": 3}
    if rng.random() < 0.3:
        params["stop"] = ("a", "bc")
    return prompt, params


def summary(answers: list[Answer]) -> list[tuple[list[int], str, str | None]]:
    return [(a.token_ids, a.text, a.last.finish_reason) for a in answers]


@pytest.mark.parametrize("enabled", [True, False])
def test_everyone_gets_the_answers_of_an_ample_pool(enabled: bool) -> None:
    assert sum(run_load(seed, enabled) for seed in range(5)) > 5


def run_load(seed: int, enabled: bool) -> int:
    """Check a random load; return the number of preemptions."""
    rng = random.Random(seed)
    num_blocks, block_size = rng.choice(((26, 4), (40, 3), (60, 2), (14, 8)))
    harness = Harness(
        num_blocks, block_size, enabled=enabled, max_num_seqs=12, max_num_batched_tokens=12
    )
    capacity = harness.engine.capacity
    wanted: dict[str, tuple[list[int], dict[str, Any]]] = {}
    aborted = set()
    while len(wanted) < 24 or harness.engine.has_work:
        prompt, params = random_request(rng)
        width = params.get("best_of", params["n"])
        longest = len(prompt) + params["max_tokens"]
        fits = capacity.max_total_tokens(len(prompt), width) >= longest
        if fits and len(wanted) < 24 and rng.random() < 0.8:
            request_id = str(len(wanted))
            wanted[request_id] = prompt, params
            harness.add(request_id, prompt, **params)
        if rng.random() < 0.03 and harness.engine.requests:
            request_id = rng.choice(sorted(harness.engine.requests))
            harness.abort(request_id)
            aborted.add(request_id)
        harness.step()
    harness.run()
    for request_id, (prompt, params) in wanted.items():
        if request_id not in aborted:
            expected = summary(cold_all(prompt, **params))
            assert summary(harness.choices[request_id]) == expected, (request_id, params)
    engine = harness.engine
    assert engine.tokens_computed + harness.cache.stats.tokens_hit <= (
        harness.cache.stats.tokens_looked_up
    )
    assert sum(engine.finished.values()) == len(wanted)
    return harness.scheduler.num_preemptions
