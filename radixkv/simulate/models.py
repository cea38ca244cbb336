"""What a simulation must know of a model: its shape, and from it the bytes of KV a token takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixkv.errors import ConfigError

__all__ = ["MODELS", "ModelShape", "load_model", "shape_from_config"]

_ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of a decoder-only transformer.

    Attributes:
        num_params: all weights.
        max_len: positions it is made for.
        item_bytes: of one weight.
        kv_item_bytes: of one number of K or V.
    """

    name: str
    num_params: float
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_len: int
    item_bytes: int = 2
    kv_item_bytes: int = 2

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V a token takes, all layers: `2 * L * H_kv * D * itemsize`."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.kv_item_bytes

    @property
    def ungrouped_kv_bytes(self) -> int:
        """What a token would take if every query head had a KV head of its own."""
        return self.kv_bytes // self.num_kv_heads * self.num_heads

    @property
    def layer_row_bytes(self) -> int:
        """Bytes of K (or of V) that one token takes in one layer."""
        return self.num_kv_heads * self.head_dim * self.kv_item_bytes

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return self.num_params * self.item_bytes


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("opt-13b", 12.85e9, 40, 5120, 40, 40, 128, 2048),
        ModelShape("opt-66b", 65.7e9, 64, 9216, 72, 72, 128, 2048),
        ModelShape("opt-175b", 174.6e9, 96, 12288, 96, 96, 128, 2048),
        ModelShape("llama-13b", 13.0e9, 40, 5120, 40, 40, 128, 2048),
        ModelShape("llama-2-70b", 69.0e9, 80, 8192, 64, 8, 128, 4096),
        ModelShape("llama-3-8b", 8.03e9, 32, 4096, 32, 8, 128, 8192),
        ModelShape("llama-3-70b", 70.6e9, 80, 8192, 64, 8, 128, 8192),
        ModelShape("smollm2-135m", 134.5e6, 30, 576, 9, 3, 64, 8192),
    )
}
"""Presets, from the models' published configurations; 16-bit weights and KV."""


def load_model(name: str) -> ModelShape:
    """Return a preset by name, or the shape that a directory's `config.json` describes.

    Raises:
        ConfigError: neither, or the file lacks something; the message says what.
    """
    preset = MODELS.get(name.lower())
    if preset is not None:
        return preset
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(
            f"model {name!r} is neither a directory with config.json nor one of {', '.join(MODELS)}"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold an object, got {type(config).__name__}")
    return shape_from_config(config, path.resolve().parent.name)


def shape_from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape of a Hugging Face config; weights are counted from it, biases left out.

    Raises:
        ConfigError: a size is missing or not a positive integer.
    """
    inner = config.get("text_config")
    if isinstance(inner, Mapping):  # of models that also see or hear
        config = {**inner, "torch_dtype": inner.get("torch_dtype", config.get("torch_dtype"))}
    layers = _size(config, ("num_hidden_layers", "n_layer"))
    hidden = _size(config, ("hidden_size", "n_embd"))
    heads = _size(config, ("num_attention_heads", "n_head"))
    kv_heads = _size(config, ("num_key_value_heads",), heads)
    head_dim = _size(config, ("head_dim",), hidden // heads)
    vocab = _size(config, ("vocab_size",))
    feed_forward = _size(config, ("intermediate_size", "ffn_dim", "n_inner"), 4 * hidden)
    max_len = _size(config, ("max_position_embeddings", "n_positions"), 2048)
    gated = config.get("hidden_act") in ("silu", "swish", "gelu_pytorch_tanh")
    attention = 2 * hidden * (heads + kv_heads) * head_dim
    mlp = (3 if gated else 2) * hidden * feed_forward
    tables = 1 if config.get("tie_word_embeddings", False) else 2
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float16")
    if dtype not in _ITEM_BYTES:
        raise ConfigError(f"dtype must be one of {', '.join(_ITEM_BYTES)}, got {dtype!r}")
    params = layers * (attention + mlp) + tables * vocab * hidden
    item_bytes = _ITEM_BYTES[dtype]
    return ModelShape(
        name,
        params,
        layers,
        hidden,
        heads,
        kv_heads,
        head_dim,
        max_len,
        item_bytes,
        # No server keeps KV in less than 16 bits unless told to.
        max(item_bytes, 2),
    )


def _size(config: Mapping[str, Any], names: tuple[str, ...], default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"config.json: {name} must be a positive integer, got {value!r}")
        return value
    if default is None:
        raise ConfigError(f"config.json lacks {names[0]}")
    return default
