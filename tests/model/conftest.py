"""What the model tests share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where Triton kernels run: the GPU, or the CPU under the interpreter."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
