from __future__ import annotations

import pytest

from radixkv.simulate.hardware import GPUS
from radixkv.simulate.models import MODELS
from radixkv.simulate.step_time import MeasuredStepTime, RooflineStepTime

OPT = MODELS["opt-13b"]
A100 = GPUS["a100-40gb"]


def opt(**changes: float) -> RooflineStepTime:
    return RooflineStepTime(OPT, A100, launch_s=0.0, **changes)  # type: ignore[arg-type]


def test_one_decode_takes_the_time_to_read_the_weights() -> None:
    read = 2 * OPT.num_params / (1.555e12 * 0.8)
    assert opt().seconds(1, 1, 1, 1) == pytest.approx(read, rel=0.001)


def test_a_large_prefill_takes_the_time_of_its_arithmetic() -> None:
    linear = 2 * OPT.num_params * 2000
    attention = 4 * OPT.num_layers * OPT.hidden_size * (2000 * 2001 / 2)
    seconds = opt().seconds(2000, 2000 * 2001 / 2, 2000, 1)
    assert seconds == pytest.approx((linear + attention) / (312e12 * 0.55), rel=0.01)


def test_decodes_read_the_kv_of_their_contexts() -> None:
    more = opt().seconds(10, 10_000, 10_000, 10) - opt().seconds(10, 0, 0, 10)
    assert more == pytest.approx(10_000 * OPT.kv_bytes / (1.555e12 * 0.8))


def test_grouped_queries_read_less_than_they_compute() -> None:
    llama = RooflineStepTime(MODELS["llama-3-70b"], GPUS["h100"], launch_s=0.0)
    mha = RooflineStepTime(OPT, GPUS["h100"], launch_s=0.0)
    assert llama.decode(8, 8000)[1] < mha.decode(8, 8000)[1] / 2


def test_small_blocks_make_attention_slower() -> None:
    growth = [opt(block_size=size).decode(1, 100)[1] for size in (0, 256, 16, 1)]
    assert growth == sorted(growth)
    assert growth[3] == pytest.approx(3 * growth[0])
    assert growth[2] == pytest.approx(1.125 * growth[0])


def test_more_gpus_share_the_work_but_wait_for_each_other() -> None:
    one = opt().seconds(1, 1000, 1000, 1)
    four = opt(num_gpus=4).seconds(1, 1000, 1000, 1)
    assert one / 4 < four < one / 2


def test_decode_says_what_steps_one_by_one_would_take() -> None:
    time = RooflineStepTime(OPT, A100, block_size=16)
    first, growth = time.decode(7, 3000)
    for step in range(50):
        context = 3000 + 7 * step
        assert first + growth * step == pytest.approx(time.seconds(7, context, context, 7))


def test_a_swap_takes_what_pcie_takes() -> None:
    assert opt().swap_seconds(1000) == pytest.approx(1000 * OPT.kv_bytes / 25e9)


def test_measured_times_are_the_servers_linear_model() -> None:
    time = MeasuredStepTime(0.01, 2e-4, 3e-7, 4e-4)
    assert time.seconds(10, 1000, 500, 3) == pytest.approx(0.01 + 2e-3 + 3e-4 + 1.2e-3)
    assert time.decode(2, 100) == pytest.approx((0.01 + 4e-4 + 3e-5 + 8e-4, 6e-7))
