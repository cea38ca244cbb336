"""One cell of a comparison: a manager with a memory, on a machine, under a traffic."""

from __future__ import annotations

from dataclasses import dataclass, field

from radixkv.errors import ConfigError
from radixkv.simulate.hardware import Gpu
from radixkv.simulate.managers import ManagerOptions, make_manager
from radixkv.simulate.models import ModelShape
from radixkv.simulate.outcome import Outcome
from radixkv.simulate.simulation import SchedulerOptions, Simulation
from radixkv.simulate.step_time import MeasuredStepTime, RooflineStepTime, StepTime
from radixkv.simulate.traffic import Traffic

__all__ = ["Scenario", "run_scenario"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that decides a run, beside its requests.

    Attributes:
        kv_memory: bytes for KV.
        max_len: the longest request that reservations are made for; default the model's.
        page_bytes: of vAttention's pages.
        rate: requests a second; None is the traffic's own.
        measured: a live server's step times, in place of those of the GPU.
    """

    manager: str
    model: ModelShape
    gpu: Gpu
    kv_memory: float
    num_gpus: int = 1
    max_len: int | None = None
    block_size: int = 16
    page_bytes: int = 2 * 1024**2
    policy: str = "lru"
    rate: float | None = None
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    measured: MeasuredStepTime | None = None

    @property
    def total(self) -> int:
        """Tokens whose KV fits."""
        return int(self.kv_memory // self.model.kv_bytes)

    @property
    def manager_options(self) -> ManagerOptions:
        """What the manager is made with."""
        return ManagerOptions(
            max_len=self.max_len or self.model.max_len,
            block_size=self.block_size,
            page_tokens=self.page_bytes / self.model.layer_row_bytes,
            policy=self.policy,
        )

    @property
    def step_time(self) -> StepTime:
        """What steps take. Only blocks make attention slower; virtual memory is contiguous."""
        if self.measured is not None:
            return self.measured
        is_paged = self.manager in ("paged", "hash-blocks", "radix")
        size = self.block_size if is_paged else 0
        return RooflineStepTime(self.model, self.gpu, self.num_gpus, block_size=size)


def run_scenario(scenario: Scenario, traffic: Traffic) -> Outcome:
    """Simulate one cell.

    Args:
        scenario: the cell.
        traffic: what arrives.

    Raises:
        ConfigError: the memory holds not even one block, or the block size doesn't suit the trace.
    """
    if scenario.total < scenario.block_size:
        raise ConfigError(
            f"{scenario.kv_memory:.0f} bytes hold {scenario.total} tokens of "
            f"{scenario.model.kv_bytes} bytes: not one block of {scenario.block_size}"
        )
    requests = traffic.requests(scenario.rate, scenario.block_size)
    manager = make_manager(scenario.manager, scenario.total, scenario.manager_options)
    return Simulation(requests, manager, scenario.step_time, scenario.scheduler).run()
