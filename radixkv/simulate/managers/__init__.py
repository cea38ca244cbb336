"""Ways to give out KV memory, each as published, behind one interface (`base`).

`make_manager` makes one by name; `MANAGERS` names them in the order of reports.
"""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.errors import ConfigError
from radixkv.simulate.managers.base import Allocation, MemoryManager, Usage
from radixkv.simulate.managers.contiguous import ContiguousGrowth
from radixkv.simulate.managers.hash_blocks import HashBlocks
from radixkv.simulate.managers.orca import OrcaMax, OrcaOracle, OrcaPow2
from radixkv.simulate.managers.paged import PagedBlocks, VirtualPages
from radixkv.simulate.managers.radix import RadixTreeBlocks
from radixkv.simulate.managers.static import StaticReservation

__all__ = [
    "MANAGERS",
    "Allocation",
    "ManagerOptions",
    "MemoryManager",
    "Usage",
    "make_manager",
]

MANAGERS = (
    StaticReservation.name,
    OrcaMax.name,
    OrcaPow2.name,
    OrcaOracle.name,
    ContiguousGrowth.name,
    VirtualPages.name,
    PagedBlocks.name,
    HashBlocks.name,
    RadixTreeBlocks.name,
)


@dataclass(frozen=True, slots=True)
class ManagerOptions:
    """What managers differ by beside the memory they have.

    Attributes:
        max_len: the longest request that is possible, which reservations are made for.
        block_size: tokens per block.
        page_tokens: tokens per page of vAttention; see `VirtualPages`.
        policy: eviction policy of the radix tree.
    """

    max_len: int
    block_size: int = 16
    page_tokens: float = 1024.0
    policy: str = "lru"


def make_manager(name: str, total: int, options: ManagerOptions) -> MemoryManager:
    """Make a manager of `total` slots.

    Raises:
        ConfigError: there is no such manager.
    """
    match name:
        case StaticReservation.name:
            return StaticReservation(total, options.max_len)
        case OrcaMax.name:
            return OrcaMax(total, options.max_len)
        case OrcaPow2.name:
            return OrcaPow2(total, options.max_len)
        case OrcaOracle.name:
            return OrcaOracle(total, options.max_len)
        case ContiguousGrowth.name:
            return ContiguousGrowth(total)
        case VirtualPages.name:
            return VirtualPages(total, options.page_tokens)
        case PagedBlocks.name:
            return PagedBlocks(total, options.block_size)
        case HashBlocks.name:
            return HashBlocks(total, options.block_size)
        case RadixTreeBlocks.name:
            return RadixTreeBlocks(total, options.block_size, options.policy)
    raise ConfigError(f"--manager must be one of {', '.join(MANAGERS)}, got {name!r}")
