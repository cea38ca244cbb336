"""What all tests share."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

# As the command line does, before torch is loaded: the tests may share their cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

# Kernels are interpreted or compiled as they are defined, whichever test imports them first.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from radixkv.errors import ConfigError
from radixkv.model.pull import ensure_default_model

# A shell that starts pytest in the background has it ignore Ctrl-C, and with it all it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The converted default model, fetched on first use and kept in the user's cache."""
    try:
        return ensure_default_model()
    except ConfigError as error:
        pytest.skip(f"the default model can't be had: {error}")
