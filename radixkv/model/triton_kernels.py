"""The Triton kernels, imported as the device needs them: compiled, or interpreted on a CPU."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from radixkv.errors import ConfigError

__all__ = ["Kernels", "load_kernels"]

_Kernel = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Kernels:
    """The functions of `radixkv.kernels` that the model calls; see their docstrings there.

    Handed around as a value, since importing them decides for the whole process whether they are
    compiled or interpreted.
    """

    choose_num_splits: _Kernel
    paged_decode: _Kernel
    decode_groups: _Kernel
    prefix_decode: _Kernel
    choose_tile_rows: _Kernel
    plan_tiles: _Kernel
    paged_prefill: _Kernel
    tree_verify: _Kernel
    write_kv: _Kernel
    copy_blocks: _Kernel
    gather_blocks: _Kernel
    scatter_blocks: _Kernel


def load_kernels(device: torch.device) -> Kernels:
    """Import the kernels for a device.

    On a CPU they run through Triton's interpreter, which takes the place of the compiler for the
    whole process: it has to be chosen before Triton is imported for the first time.

    Raises:
        ConfigError: Triton isn't installed, or it has been imported in the other way.
    """
    if device.type == "cpu" and "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        language = importlib.import_module("triton.language")
    except ImportError as error:
        raise ConfigError(
            f"--attention triton needs Triton, which can't be imported: {error}"
        ) from None
    # Triton's own functions, such as sum, are kernels too: they tell how it was imported.
    is_interpreted = type(language.sum).__name__ == "InterpretedFunction"
    if device.type == "cpu" and not is_interpreted:
        raise ConfigError(
            "--attention triton on a CPU needs Triton's interpreter, but this process has imported "
            "Triton to compile; set TRITON_INTERPRET=1 before it is imported"
        )
    if device.type != "cpu" and is_interpreted:
        raise ConfigError(
            f"--attention triton on {device} needs Triton's compiler, but TRITON_INTERPRET is set"
        )

    def get(module: str, name: str) -> _Kernel:
        function: _Kernel = getattr(importlib.import_module(f"radixkv.kernels.{module}"), name)
        return function

    return Kernels(
        choose_num_splits=get("paged_decode", "choose_num_splits"),
        paged_decode=get("paged_decode", "paged_decode"),
        decode_groups=get("prefix_decode", "DecodeGroups"),
        prefix_decode=get("prefix_decode", "prefix_decode"),
        choose_tile_rows=get("tile_plan", "choose_tile_rows"),
        plan_tiles=get("tile_plan", "plan_tiles"),
        paged_prefill=get("paged_prefill", "paged_prefill"),
        tree_verify=get("tree_verify", "tree_verify"),
        write_kv=get("write_kv", "write_kv"),
        copy_blocks=get("copy_blocks", "copy_blocks"),
        gather_blocks=get("copy_blocks", "gather_blocks"),
        scatter_blocks=get("copy_blocks", "scatter_blocks"),
    )
