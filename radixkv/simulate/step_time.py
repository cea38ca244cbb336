"""How long a step takes: from first principles, or as measured on a live server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from radixkv.simulate.hardware import Gpu
from radixkv.simulate.models import ModelShape

__all__ = ["MeasuredStepTime", "RooflineStepTime", "StepTime"]


class StepTime(ABC):
    """Says how long one step takes, and what moving KV costs, in seconds."""

    @abstractmethod
    def seconds(self, tokens: int, attended: float, context: float, samples: int) -> float:
        """Return the seconds of a step.

        Args:
            tokens: query rows.
            attended: (query row, token it attends to) pairs.
            context: tokens whose K and V are read.
            samples: rows that a token is drawn from.
        """

    @abstractmethod
    def swap_seconds(self, tokens: float) -> float:
        """Return the seconds that moving the KV of tokens to or from the host takes."""

    @abstractmethod
    def move_seconds(self, tokens: float) -> float:
        """Return the seconds that copying the KV of tokens within the device takes."""

    def decode(self, num_seqs: int, context: float) -> tuple[float, float]:
        """Return the seconds of a step in which each sequence decodes, and the growth per step.

        Every term is linear in the context, so `k` steps take
        `k * first + growth * k * (k - 1) / 2`, exactly.
        """
        first = self.seconds(num_seqs, context, context, num_seqs)
        after = context + num_seqs
        return first, self.seconds(num_seqs, after, after, num_seqs) - first


@dataclass(frozen=True)
class RooflineStepTime(StepTime):
    """Weights and attention are two kernels in turn; each takes its arithmetic or its bytes.

    Attributes:
        block_size: tokens of a run that attention reads in one piece; 0 for contiguous memory.
        block_lookup_tokens: reading a block costs as much as this many tokens more: its address
            has to be fetched first, and the part of a memory transaction that a short run leaves
            unused. An assumption.
        launch_s: a step's launches, scheduling and sampling on the host.
        reduce_s: latency of one all-reduce; a layer has two.
    """

    model: ModelShape
    gpu: Gpu
    num_gpus: int = 1
    block_size: int = 0
    block_lookup_tokens: float = 2.0
    launch_s: float = 4e-3
    reduce_s: float = 12e-6

    def __post_init__(self) -> None:
        """Work out the rates; they never change."""
        shape, gpu, n = self.model, self.gpu, self.num_gpus
        flops = gpu.flops * gpu.flops_share * n
        bandwidth = gpu.bandwidth * gpu.bandwidth_share * n
        lookup = 1 + self.block_lookup_tokens / self.block_size if self.block_size else 1.0
        layers = 2 * shape.num_layers
        reduce = layers * self.reduce_s if n > 1 else 0.0
        # A ring moves every byte twice, less the share that stays.
        ring = 2 * (n - 1) / n * shape.hidden_size * shape.item_bytes * layers / gpu.link
        rates = {
            "_fixed": self.launch_s + reduce,
            "_token_flops": 2 * shape.num_params / flops,
            "_token_link": ring + shape.kv_bytes / bandwidth,
            "_weights": shape.weight_bytes / bandwidth,
            "_pair": 2 * layers * shape.num_heads * shape.head_dim / flops,
            "_read": shape.kv_bytes * lookup / bandwidth,
            "_swap": shape.kv_bytes / (gpu.pcie * n),
            "_move": 2 * shape.kv_bytes / bandwidth,
        }
        for name, value in rates.items():
            object.__setattr__(self, name, value)

    _fixed: float = 0.0
    _token_flops: float = 0.0
    _token_link: float = 0.0
    _weights: float = 0.0
    _pair: float = 0.0
    _read: float = 0.0
    _swap: float = 0.0
    _move: float = 0.0

    def seconds(self, tokens: int, attended: float, context: float, samples: int) -> float:
        """Return the seconds of a step, see `StepTime.seconds`."""
        return (
            self._fixed
            + max(tokens * self._token_flops, self._weights)
            + tokens * self._token_link
            + max(attended * self._pair, context * self._read)
        )

    def swap_seconds(self, tokens: float) -> float:
        """Return what PCIe takes; nothing is taken to overlap."""
        return tokens * self._swap

    def move_seconds(self, tokens: float) -> float:
        """Return what reading and writing the KV takes."""
        return tokens * self._move


@dataclass(frozen=True, slots=True)
class MeasuredStepTime(StepTime):
    """The linear model that a RadixKV server has learned from its own steps.

    Attributes:
        step, token, attended_pair, sample: seconds, `scheduling.step_cost_s` of `/admin/cache`.
    """

    step: float
    token: float
    attended_pair: float
    sample: float

    def seconds(self, tokens: int, attended: float, context: float, samples: int) -> float:
        """Return the seconds of a step, see `StepTime.seconds`."""
        return (
            self.step + tokens * self.token + attended * self.attended_pair + samples * self.sample
        )

    def swap_seconds(self, tokens: float) -> float:
        """Return an upper bound: what computing the tokens would take."""
        return tokens * self.token

    def move_seconds(self, tokens: float) -> float:
        """Return an upper bound: what computing the tokens would take."""
        return tokens * self.token
