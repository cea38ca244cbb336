"""Fill a decoder's weights from safetensors files, or at random."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from radixkv.errors import ConfigError
from radixkv.model.config import ModelConfig
from radixkv.model.layers import DecoderWeights, LayerWeights, weight_shapes
from radixkv.model.progress import progress

__all__ = ["dummy_weights", "load_weights"]

_Source = Callable[[str, torch.Tensor], None]
"""Copies the checkpoint's tensor of that name into the given one, which has its shape."""


def load_weights(
    path: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    console: Console | None = None,
) -> DecoderWeights:
    """Read `model.safetensors`, or the shards that `model.safetensors.index.json` names.

    Every tensor is copied straight to its place in the fused layout and converted on the way.

    Raises:
        ConfigError: no checkpoint, or a tensor is missing, unexpected or of the wrong shape.
    """
    from safetensors import SafetensorError, safe_open

    shapes = weight_shapes(config)
    files = _checkpoint_files(path)
    try:
        handles: list[Any] = [safe_open(file, framework="pt") for file in files]
        where = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"can't read the checkpoint in {path}: {error}") from error
    _check_names(set(where), set(shapes), config)
    for name, shape in shapes.items():
        found = tuple(where[name].get_slice(name).get_shape())
        if found != shape:
            raise ConfigError(f"tensor {name} must have shape {shape}, got {found}")
    with progress("Loading weights", len(shapes), console=console) as task:

        def read(name: str, destination: torch.Tensor) -> None:
            destination.copy_(where[name].get_tensor(name))
            task.advance()

        return _assemble(config, dtype, device, read)


def dummy_weights(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> DecoderWeights:
    """Return random weights: norms 1, the rest normal with standard deviation 0.02.

    The same seed gives the same weights, up to rounding to `dtype`.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, destination: torch.Tensor) -> None:
        if name.endswith("norm.weight"):
            destination.fill_(1.0)
        else:
            values = torch.empty(destination.shape, dtype=torch.float32)
            destination.copy_(values.normal_(0.0, 0.02, generator=generator))

    return _assemble(config, dtype, device, draw)


def _checkpoint_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(weight_map.values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"can't read {index}: {error!r}") from error
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise ConfigError(f"shards named by {index.name} are missing: {', '.join(missing)}")
        return [path / name for name in names]
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    raise ConfigError(f"no model.safetensors or model.safetensors.index.json in {path}")


def _check_names(found: set[str], wanted: set[str], config: ModelConfig) -> None:
    missing = sorted(wanted - found)
    if missing:
        raise ConfigError(f"the checkpoint lacks {len(missing)} tensors: {_some(missing)}")
    # Old checkpoints store the RoPE frequencies, and some store a tied head twice.
    extra = sorted(
        name
        for name in found - wanted
        if not name.endswith("rotary_emb.inv_freq")
        and not (name == "lm_head.weight" and config.tie_word_embeddings)
    )
    if extra:
        raise ConfigError(
            f"the checkpoint has {len(extra)} tensors that a {config.family} model of this config "
            f"doesn't use: {_some(extra)}"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _assemble(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, read: _Source
) -> DecoderWeights:
    shapes = weight_shapes(config)

    def stack(prefix: str, names: tuple[str, ...], suffix: str) -> torch.Tensor:
        keys = [f"{prefix}{name}.{suffix}" for name in names]
        rows = [shapes[key][0] for key in keys]
        result = torch.empty((sum(rows), *shapes[keys[0]][1:]), dtype=dtype, device=device)
        for key, part in zip(keys, result.split_with_sizes(rows), strict=True):
            read(key, part)
        return result

    def layer(index: int) -> LayerWeights:
        prefix = f"model.layers.{index}."
        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        out, down = ("self_attn.o_proj",), ("mlp.down_proj",)
        gate_up = ("mlp.gate_proj", "mlp.up_proj")
        qk_norm = None
        if config.qk_norm:
            query, key = (stack(prefix, (f"self_attn.{n}_norm",), "weight") for n in "qk")
            qk_norm = torch.cat(
                (query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1))
            )
        return LayerWeights(
            input_norm=stack(prefix, ("input_layernorm",), "weight"),
            qkv=stack(prefix, qkv, "weight"),
            qkv_bias=stack(prefix, qkv, "bias") if config.qkv_bias else None,
            qk_norm=qk_norm,
            out=stack(prefix, out, "weight"),
            out_bias=stack(prefix, out, "bias") if config.o_bias else None,
            post_norm=stack(prefix, ("post_attention_layernorm",), "weight"),
            gate_up=stack(prefix, gate_up, "weight"),
            gate_up_bias=stack(prefix, gate_up, "bias") if config.mlp_bias else None,
            down=stack(prefix, down, "weight"),
            down_bias=stack(prefix, down, "bias") if config.mlp_bias else None,
        )

    embed = stack("model.", ("embed_tokens",), "weight")
    return DecoderWeights(
        embed=embed,
        layers=[layer(index) for index in range(config.num_layers)],
        norm=stack("model.", ("norm",), "weight"),
        lm_head=embed if config.tie_word_embeddings else stack("", ("lm_head",), "weight"),
    )
