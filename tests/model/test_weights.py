from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_fakes import TINY
from safetensors.torch import save_file

from radixkv.errors import ConfigError
from radixkv.model.config import ModelConfig
from radixkv.model.layers import DecoderWeights, weight_shapes
from radixkv.model.weights import dummy_weights, load_weights

CPU = torch.device("cpu")
CONFIG = ModelConfig.from_hf({"model_type": "qwen3"} | TINY)
TIED = ModelConfig.from_hf({"model_type": "llama", "tie_word_embeddings": True} | TINY)

Tensors = dict[str, torch.Tensor]


def tensors_of(config: ModelConfig) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator)
        for name, shape in weight_shapes(config).items()
    }


def load(path: Path, config: ModelConfig, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    return load_weights(path, config, dtype=dtype, device=CPU)


def test_tensors_land_in_the_fused_layout(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    save_file(tensors, tmp_path / "model.safetensors")
    layer = load(tmp_path, CONFIG).layers[1]
    prefix = "model.layers.1."
    names = [f"{prefix}self_attn.{n}_proj.weight" for n in "qkv"]
    assert torch.equal(layer.qkv, torch.cat([tensors[name] for name in names]))
    names = [f"{prefix}mlp.{n}_proj.weight" for n in ("gate", "up")]
    assert torch.equal(layer.gate_up, torch.cat([tensors[name] for name in names]))
    assert layer.qk_norm is not None
    assert torch.equal(layer.qk_norm[3], tensors[f"{prefix}self_attn.q_norm.weight"])
    assert torch.equal(layer.qk_norm[4], tensors[f"{prefix}self_attn.k_norm.weight"])
    assert layer.qkv_bias is None


def test_shards_are_found_through_the_index(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(load(tmp_path, CONFIG).norm, tensors["model.norm.weight"])
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"missing: b\.safetensors"):
        load(tmp_path, CONFIG)


def test_weights_are_converted_to_the_wanted_dtype(tmp_path: Path) -> None:
    tensors = tensors_of(TIED)
    save_file(tensors, tmp_path / "model.safetensors")
    weights = load(tmp_path, TIED, torch.bfloat16)
    assert torch.equal(weights.embed, tensors["model.embed_tokens.weight"].bfloat16())
    assert weights.lm_head is weights.embed


def drop(tensors: Tensors) -> None:
    del tensors["model.layers.2.mlp.down_proj.weight"]


def add(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)


def transpose(tensors: Tensors) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].T.contiguous()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop, r"lacks 1 tensors: model\.layers\.2\.mlp\.down_proj"),
        (add, r"doesn't use: model\.layers\.0\.self_attn\.q_proj\.bias"),
        (transpose, r"up_proj\.weight must have shape \(48, 32\), got \(32, 48\)"),
    ],
)
def test_wrong_checkpoint_is_refused(
    spoil: Callable[[Tensors], None], message: str, tmp_path: Path
) -> None:
    tensors = tensors_of(CONFIG)
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, CONFIG)


def test_redundant_tensors_are_ignored(tmp_path: Path) -> None:
    tensors = tensors_of(TIED)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, tmp_path / "model.safetensors")
    assert len(load(tmp_path, TIED).layers) == 3


@pytest.mark.parametrize("content", [None, b"", b"12345678 no safetensors"])
def test_unreadable_checkpoint_is_refused(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"safetensors|checkpoint"):
        load(tmp_path, CONFIG)


def test_dummy_weights_repeat_with_the_seed() -> None:
    first, again, other = (
        dummy_weights(CONFIG, dtype=torch.float32, device=CPU, seed=seed) for seed in (3, 3, 4)
    )
    assert torch.equal(first.layers[2].down, again.layers[2].down)
    assert not torch.equal(first.layers[2].down, other.layers[2].down)
    assert first.layers[0].input_norm.eq(1).all()
    assert 0.015 < first.embed.std().item() < 0.025
