from __future__ import annotations

from pathlib import Path

import pytest

from radixkv.errors import ConfigError
from radixkv.model.pull import ensure_default_model


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The converted default model, fetched on first use and kept in the user's cache."""
    try:
        return ensure_default_model()
    except ConfigError as error:
        pytest.skip(f"the default model can't be had: {error}")
