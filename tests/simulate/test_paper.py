"""The published figures, with few requests: bounds that hold whatever the seed."""

from __future__ import annotations

import pytest

from radixkv.simulate.hardware import GPUS, SETUPS
from radixkv.simulate.models import MODELS
from radixkv.simulate.outcome import Outcome
from radixkv.simulate.paper import BLOCK_SIZES, check_paper
from radixkv.simulate.scenario import Scenario, run_scenario
from radixkv.simulate.sustained import OVERLOAD, sustainable_rate
from radixkv.simulate.traffic import DATASETS, Synthetic

TRAFFIC = Synthetic(DATASETS["sharegpt"], max_requests=1200)
SETUP = SETUPS["opt-13b"]


def scenario(name: str, rate: float | None = OVERLOAD) -> Scenario:
    return Scenario(name, MODELS[SETUP.model], GPUS[SETUP.gpu], SETUP.kv_bytes, rate=rate)


@pytest.fixture(scope="module")
def overloaded() -> dict[str, Outcome]:
    names = ("orca-max", "orca-pow2", "orca-oracle", "paged")
    return {name: run_scenario(scenario(name), TRAFFIC) for name in names}


def test_contiguous_managers_hold_token_states_in_a_fifth_to_two_fifths(
    overloaded: dict[str, Outcome],
) -> None:
    for name in ("orca-max", "orca-pow2", "orca-oracle"):
        usage = overloaded[name].full_usage
        assert usage is not None
        assert 0.18 < usage.used < 0.42


def test_blocks_hold_token_states_in_over_96_percent(overloaded: dict[str, Outcome]) -> None:
    usage = overloaded["paged"].full_usage
    assert usage is not None
    assert usage.used > 0.96


def test_oracle_batches_more_than_pow2_and_that_more_than_max(
    overloaded: dict[str, Outcome],
) -> None:
    batches = [outcome.mean_batch for outcome in overloaded.values()]
    assert batches == sorted(batches)
    assert batches[0] == pytest.approx(7, abs=0.1)


def test_the_sustainable_rate_is_kept_and_a_fifth_more_is_not() -> None:
    rate = sustainable_rate(scenario("orca-oracle", None), TRAFFIC)
    kept = run_scenario(scenario("orca-oracle", rate), TRAFFIC)
    exceeded = run_scenario(scenario("orca-oracle", 1.2 * rate), TRAFFIC)
    assert kept.latency_s[0] <= 0.2 < exceeded.latency_s[0]


def test_a_latency_that_nothing_reaches_sustains_no_rate() -> None:
    few = Synthetic(DATASETS["alpaca"], max_requests=50)
    assert sustainable_rate(scenario("paged", None), few, latency_limit_s=1e-4) == 0


def test_check_paper_compares_every_published_figure() -> None:
    progress = []
    checks = check_paper(
        max_requests=40, on_done=lambda done, total: progress.append((done, total))
    )
    text = "\n".join(f"{check.what}: {check.published}" for check in checks)
    for figure in ("20.4 %", "96.3 %", "1.7 to 2.7", "2.7 to 8", "1.67", "3.58", "16 to 128"):
        assert figure in text
    assert progress[-1][0] == progress[-1][1] == len(progress)
    assert all(f"{size}:" in checks[-1].simulated for size in BLOCK_SIZES)
