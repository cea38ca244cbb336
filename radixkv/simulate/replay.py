"""Hit rates alone: prompts one after the other, without time, batches or answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from radixkv.simulate.managers import ManagerOptions, make_manager
from radixkv.simulate.traffic import Request

__all__ = ["replay_hits"]


def replay_hits(
    name: str, requests: Sequence[Request], num_blocks: int, options: ManagerOptions
) -> float:
    """Return the share of whole prompt blocks that hit, if each prompt ends before the next begins.

    That is what a cache alone can do: nothing but cached blocks is in the memory when a prompt
    comes. In the full simulation running requests need memory too, so fewer hit. A prompt that is
    longer than the memory counts as missed.

    Args:
        name: of the manager.
        requests: with keys of `options.block_size` tokens.
        num_blocks: blocks that fit.
        options: of the manager.
    """
    manager = make_manager(name, num_blocks * options.block_size, options)
    if not manager.reuses:
        return 0.0
    hit = asked = 0
    for request in requests:
        asked += len(request.keys)
        whole = replace(request, prompt_len=len(request.keys) * options.block_size, num_samples=1)
        allocation = manager.admit(whole)
        if allocation is None:
            continue
        hit += allocation.num_cached // options.block_size
        manager.computed(allocation)
        manager.release(allocation)
    return hit / asked if asked else 0.0
