from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sim_helpers import BLOCK, PlainTime, manager, random_requests, request
from stepwise import stepwise

from radixkv.simulate.managers import MANAGERS
from radixkv.simulate.managers.radix import RadixTreeBlocks
from radixkv.simulate.simulation import SchedulerOptions, Simulation


def test_one_request_takes_a_step_per_token() -> None:
    simulation = Simulation([request(5.0, 10, 4)], manager("paged", 64), PlainTime())
    outcome = simulation.run()
    # The prompt's step reads 10 tokens, the others 11, 12 and 13.
    assert outcome.ttft_s[0] == pytest.approx(1.010)
    assert outcome.latency_s[0] == pytest.approx((4 + 0.046) / 4)
    assert simulation.step == 4
    assert outcome.mean_batch == 1


def test_a_long_prompt_goes_in_chunks_beside_decodes() -> None:
    requests = [request(0.0, 4, 9), request(0.5, 30, 1)]
    options = SchedulerOptions(max_batch_tokens=11)
    simulation = Simulation(requests, manager("paged", 64), PlainTime(read=0.0), options)
    simulation.run()
    # From the second step on 10 tokens a step are left for the second prompt.
    assert simulation.recorder.first_token.tolist() == pytest.approx([1.0, 4.0])


def test_an_arrival_is_seen_after_the_step_in_which_it_comes() -> None:
    requests = [request(0.0, 4, 20), request(7.5, 4, 1)]
    simulation = Simulation(requests, manager("paged", 64), PlainTime(read=0.0))
    simulation.run()
    assert simulation.recorder.first_token[1] == pytest.approx(9.0)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("total", [72, 160, 400])
def test_many_steps_at_once_give_what_one_by_one_gives(seed: int, total: int) -> None:
    requests = random_requests(seed)
    options = SchedulerOptions(max_batch_tokens=24, max_seqs=10)
    simulation = Simulation(requests, manager("paged", total), PlainTime(), options)
    outcome = simulation.run()
    first, last, preemptions = stepwise(requests, total, 24, 10, PlainTime())
    assert simulation.recorder.first_token.tolist() == pytest.approx(first)
    assert simulation.recorder.finish.tolist() == pytest.approx(last)
    assert outcome.preemptions == preemptions


def test_memory_pressure_preempts_and_everything_still_ends() -> None:
    outcome = Simulation(random_requests(3), manager("paged", 72), PlainTime()).run()
    assert outcome.preemptions > 0
    assert outcome.finished == outcome.requests == 60


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("name", MANAGERS)
def test_the_parts_of_the_memory_sum_to_it_at_every_moment(
    name: str, samples: int, swap: bool
) -> None:
    moments = 0

    def check(simulation: Simulation) -> None:
        nonlocal moments
        moments += 1
        for is_blocked in (False, True):
            usage = simulation.manager.usage(simulation.generated, is_blocked=is_blocked)
            assert sum(usage) == pytest.approx(total)
            assert min(usage) >= -1e-9
        counted = sum(
            job.request.num_samples
            * (job.stored + (simulation.step - job.begin if job.is_decoding else 0))
            for job in simulation.jobs
        )
        assert simulation.generated == counted
        if isinstance(simulation.manager, RadixTreeBlocks):
            simulation.manager.cache.check_integrity()

    total = 1024 if name == "contiguous" else 240
    requests = random_requests(7, samples=samples)
    options = SchedulerOptions(max_batch_tokens=32, swap=swap)
    simulation = Simulation(
        requests, manager(name, total, page=6.4), PlainTime(), options, observer=check
    )
    outcome = simulation.run()
    assert outcome.finished + outcome.rejected == 60
    assert outcome.rejected == 0
    assert moments > 60
    assert simulation.generated == simulation.num_seqs == simulation.num_decoding == 0


@pytest.mark.parametrize("name", ["paged", "hash-blocks", "radix"])
def test_blocks_waste_less_than_one_block_per_sequence(name: str) -> None:
    def check(simulation: Simulation) -> None:
        usage = simulation.manager.usage(simulation.generated, is_blocked=False)
        assert usage.reserved + usage.internal < BLOCK * max(simulation.num_seqs, 0.1)

    requests = random_requests(11, samples=2)
    Simulation(requests, manager(name, 400), PlainTime(), observer=check).run()


def test_a_reservation_that_knows_more_batches_more() -> None:
    requests = [request(0.0, 6, 8 + n % 9, []) for n in range(300)]
    batches = [
        Simulation(requests, manager(name, 1024), PlainTime()).run().mean_batch
        for name in ("orca-max", "orca-pow2", "orca-oracle", "paged")
    ]
    assert batches == sorted(batches)
    assert batches[0] < batches[1] < batches[3]


def test_reuse_saves_computation() -> None:
    requests = [request(100.0 * n, 40, 2, list(range(10))) for n in range(10)]
    options = SchedulerOptions(max_batch_tokens=8)
    runs = {}
    for name in ("paged", "radix"):
        simulation = Simulation(requests, manager(name, 64), PlainTime(), options)
        runs[name] = simulation.run(), simulation.recorder
    assert runs["paged"][0].hit_rate == 0
    # The last token of a prompt that is all cached is computed again; the hit counts all the same.
    assert runs["radix"][0].hit_rate == pytest.approx(0.9)
    assert runs["paged"][1].prompt_tokens == 400
    assert runs["radix"][1].prompt_tokens == 40 + 9


def test_a_request_that_can_never_fit_is_rejected_and_the_next_one_served() -> None:
    requests = [request(0.0, 50, 3), request(0.0, 8, 3)]
    outcome = Simulation(requests, manager("paged", 32), PlainTime()).run()
    assert (outcome.rejected, outcome.finished) == (1, 1)


def test_a_request_that_outgrows_the_memory_is_rejected_and_the_next_one_served() -> None:
    requests = [request(0.0, 20, 40), request(0.0, 8, 3)]
    simulation = Simulation(requests, manager("paged", 32), PlainTime())
    outcome = simulation.run()
    assert (outcome.rejected, outcome.finished) == (1, 1)
    assert simulation.manager.usage(0, is_blocked=False).free == 32


def test_swapping_keeps_what_was_computed() -> None:
    requests = random_requests(3)
    computed = {}
    for swap in (False, True):
        simulation = Simulation(
            requests, manager("paged", 72), PlainTime(), SchedulerOptions(swap=swap)
        )
        assert simulation.run().preemptions > 0
        computed[swap] = simulation.recorder.prompt_tokens
    assert computed[True] == sum(r.prompt_len for r in requests)
    assert computed[False] > computed[True]


def test_a_run_repeats_to_the_bit() -> None:
    outcomes = [
        Simulation(random_requests(5), manager("radix", 100), PlainTime()).run() for _ in range(2)
    ]
    assert outcomes[0] == outcomes[1]


def test_prompts_that_begin_alike_compute_what_they_share_once() -> None:
    keys = np.arange(8, dtype=np.int32)
    requests = [replace(request(0.0, 33 + n, 2), keys=keys) for n in range(3)]
    options = SchedulerOptions(max_batch_tokens=16)
    radix = Simulation(requests, manager("radix", 256), PlainTime(read=0.0), options)
    radix.run()
    # The first takes 16, 16 and 1 tokens; the others have a few of their own left.
    assert radix.recorder.cached.tolist() == [0, 32, 32]
    assert radix.recorder.prompt_tokens == 33 + 2 + 3
    assert radix.recorder.first_token.tolist() == pytest.approx([3.0, 3.0, 3.0])


@pytest.mark.parametrize(("output", "expected"), [(2, 8), (41, 0)])
def test_answers_take_their_place_among_what_is_cached(output: int, expected: int) -> None:
    requests = [request(0.0, 8, 2, [1, 2]), request(10.0, 8, output, [3, 4])]
    requests += [request(100.0, 32, 2, list(range(10, 18))), request(200.0, 8, 2, [1, 2])]
    simulation = Simulation(requests, manager("radix", 16 * BLOCK), PlainTime(read=0.0))
    simulation.run()
    # With the ten blocks of the second answer there is no room left for the first prompt.
    assert simulation.recorder.cached.tolist() == [0, 0, 0, expected]
