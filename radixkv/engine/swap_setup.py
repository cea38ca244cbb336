"""Makes the swap space that a configuration asks for."""

from __future__ import annotations

from radixkv.cache import RadixCache
from radixkv.config import ServeConfig, format_bytes
from radixkv.engine.swap import SwapSpace
from radixkv.errors import ConfigError
from radixkv.model.kv_pool import KVPool

__all__ = ["build_swap"]

AUTO_LIMIT = 4 * 1024**3
AUTO_SHARE = 8  # auto takes at most this part of the host memory left


def build_swap(
    config: ServeConfig, pool: KVPool, cache: RadixCache, memory: int
) -> SwapSpace | None:
    """Return the swap space of preempted requests, its transfers measured; None if there is none.

    Args:
        config: checked options.
        pool: holds the content of the blocks.
        cache: says which blocks are whose.
        memory: bytes of host memory that are left.

    Raises:
        ConfigError: `--swap-space` doesn't fit; the message names it.
    """
    if config.preemption_mode == "recompute" or config.swap_space == 0:
        return None
    content_bytes = pool.nbytes // pool.num_blocks
    size = config.swap_space
    if size is None:
        size = min(AUTO_LIMIT, max(memory, 0) // AUTO_SHARE)
        if size < content_bytes:
            return None
    elif not content_bytes <= size <= memory:
        raise ConfigError(
            f"--swap-space must be auto, 0 or from {format_bytes(content_bytes)} (a block of this "
            f"model) to {format_bytes(max(memory, 0))} (the memory left), got {format_bytes(size)}"
        )
    swap = SwapSpace(pool, cache, content_bytes, size, pinned=pool.device.type != "cpu")
    swap.measure()
    return swap
