"""GPUs, and the setups (model, GPUs, KV memory) that published figures were measured on."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GPUS", "SETUPS", "Gpu", "Setup"]

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a data sheet says, and the part of it that kernels reach.

    Attributes:
        flops: dense 16-bit operations a second.
        bandwidth: bytes a second of its memory.
        pcie: bytes a second to the host, one way.
        link: bytes a second to the other GPUs, one way.
        flops_share, bandwidth_share: what large kernels reach of it; assumptions, not data.
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    pcie: float
    link: float
    flops_share: float = 0.55
    bandwidth_share: float = 0.8


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40gb", 40 * GIB, 312e12, 1.555e12, 25e9, 300e9),
        Gpu("a100-80gb", 80 * GIB, 312e12, 2.039e12, 25e9, 300e9),
        Gpu("h100", 80 * GIB, 989e12, 3.35e12, 50e9, 450e9),
        Gpu("h200", 141e9, 989e12, 4.8e12, 50e9, 450e9),
    )
}
"""Presets: SXM modules; memory as sold, PCIe at about 80 % of the slot's rate."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A model on GPUs with the KV memory that its authors had left.

    Source: PagedAttention (arXiv:2309.06180), table 1.
    """

    model: str
    gpu: str
    num_gpus: int
    kv_bytes: float


SETUPS = {
    "opt-13b": Setup("opt-13b", "a100-40gb", 1, 12 * GIB),
    "opt-66b": Setup("opt-66b", "a100-40gb", 4, 21 * GIB),
    "opt-175b": Setup("opt-175b", "a100-80gb", 8, 264 * GIB),
    "llama-13b": Setup("llama-13b", "a100-40gb", 1, 12 * GIB),
}
"""The paper's setups; LLaMA-13B has OPT-13B's shape, so its memory is taken to be the same."""
