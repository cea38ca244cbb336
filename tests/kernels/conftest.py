"""Run the kernels through Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch

# Triton reads the variable when a kernel is defined: before the kernels are imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels' tensors live: the GPU, or the CPU under the interpreter."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
