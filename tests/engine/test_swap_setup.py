from __future__ import annotations

import pytest
import torch

from radixkv.cache import RadixCache
from radixkv.config import ServeConfig, load_config
from radixkv.engine.swap_setup import AUTO_SHARE, build_swap
from radixkv.errors import ConfigError
from radixkv.model.kv_pool import KVPool

BLOCKS = 16


def build(memory: int = 10**9, **options: str) -> object:
    config = load_config(options, environ={})
    pool = KVPool(2, BLOCKS, config.block_size, 1, 8, torch.float32)
    return build_swap(config, pool, RadixCache(BLOCKS, config.block_size), memory)


def test_auto_takes_a_part_of_the_memory_and_measures_both_ways() -> None:
    pool = KVPool(2, BLOCKS, 16, 1, 8, torch.float32)
    swap = build_swap(ServeConfig(), pool, RadixCache(BLOCKS), 10**8)
    assert swap is not None
    assert swap.capacity == 10**8 // AUTO_SHARE // (pool.nbytes // BLOCKS)
    assert all(rate > 0 and rate != 2e9 for rate in swap.rates.values())
    assert not pool.data.any()


@pytest.mark.parametrize(
    "options", [{"swap_space": "0"}, {"preemption_mode": "recompute", "swap_space": "1MiB"}]
)
def test_no_swap_space_where_none_is_wanted(options: dict[str, str]) -> None:
    assert build(**options) is None


def test_auto_on_a_full_machine_is_none() -> None:
    assert build(memory=1000) is None


@pytest.mark.parametrize("size", ["100", "2GB"])
def test_size_that_does_not_fit_is_named(size: str) -> None:
    with pytest.raises(ConfigError, match="--swap-space"):
        build(swap_space=size)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scheduling_policy", "sjf"),
        ("itl_target", "0"),
        ("max_queue_skip", "-1"),
        ("preemption_mode", "drop"),
    ],
)
def test_option_out_of_range_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        load_config({name: value}, environ={})
