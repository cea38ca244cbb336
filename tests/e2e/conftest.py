"""The default model in float32, loaded once, and engines around it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from radixkv.config import ServeConfig
from radixkv.engine import Engine
from radixkv.engine.factory import BuiltEngine, assemble_engine
from radixkv.model.loader import LoadedModel, load_model


@pytest.fixture(scope="session")
def default_model(default_model_dir: Path) -> LoadedModel:
    # float32, so that cold and warm, alone and batched can be compared token by token: their
    # sums are taken in different orders, and in bfloat16 a near tie would flip.
    return load_model(str(default_model_dir), dtype="float32")


@pytest.fixture(scope="session")
def build(default_model: LoadedModel) -> Callable[..., BuiltEngine]:
    def build(**options: object) -> BuiltEngine:
        options = {
            "kv_cache_memory": 512 * 1024**2,
            "served_model_name": "SmolLM2-135M-Instruct",
            **options,
        }
        return assemble_engine(default_model, ServeConfig(**options))  # type: ignore[arg-type]

    return build


@pytest.fixture
def engine(build: Callable[..., BuiltEngine]) -> Engine:
    return build().engine.engine
