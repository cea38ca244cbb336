from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_fakes import TINY

from radixkv.errors import ConfigError
from radixkv.model.config import SUPPORTED_FAMILIES, ModelConfig, parse_dtype
from radixkv.model.rope import inverse_frequencies

REQUIRED = {
    name: TINY[name]
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
}


def config_of(family: str = "llama", **options: Any) -> ModelConfig:
    return ModelConfig.from_hf({"model_type": family} | TINY | options)


@pytest.mark.parametrize("family", SUPPORTED_FAMILIES)
def test_missing_keys_mean_the_defaults_of_transformers(family: str) -> None:
    from transformers import AutoConfig

    # 32 heads: Qwen's own default of 32 KV heads must divide them.
    given = REQUIRED | {"num_attention_heads": 32, "hidden_size": 256}
    theirs = AutoConfig.for_model(family, **given)
    bare = ModelConfig.from_hf({"model_type": family} | given)
    assert bare.num_kv_heads == theirs.num_key_value_heads
    assert bare.head_dim == getattr(theirs, "head_dim", 8)
    assert bare.rms_norm_eps == theirs.rms_norm_eps
    assert bare.rope.theta == theirs.rope_parameters["rope_theta"]
    assert bare.max_position_embeddings == theirs.max_position_embeddings
    assert bare.tie_word_embeddings == theirs.tie_word_embeddings
    assert bare.sliding_window == theirs.sliding_window if family == "mistral" else True
    written = ModelConfig.from_hf(theirs)
    for name in ("num_kv_heads", "head_dim", "max_position_embeddings", "sliding_window"):
        assert getattr(written, name) == getattr(bare, name)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}, "Gemma2ForCausalLM"),
        ({"model_type": "llama", "architectures": ["LlamaForTokenClassification"]}, "Token"),
        ({"model_type": None}, "None"),
    ],
)
def test_other_architecture_is_refused_in_one_line(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ModelConfig.from_hf(data | REQUIRED)
    text = str(caught.value)
    assert "\n" not in text
    assert all(name in text for name in SUPPORTED_FAMILIES.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "'longrope'"),
        ({"rope_scaling": {"type": "mrope"}}, "'mrope'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"hidden_size": 0}, "hidden_size in config.json"),
        ({"hidden_size": "32"}, "hidden_size in config.json"),
        ({"dtype": "float64"}, "float64"),
    ],
)
def test_unsupported_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(**options)


@pytest.mark.parametrize(
    ("family", "options", "limit"),
    [
        ("llama", {}, 64),
        ("llama", {"sliding_window": 8}, 64),
        ("mistral", {"sliding_window": 8}, 8),
        ("mistral", {"sliding_window": 80}, 64),
        ("mistral", {"sliding_window": None}, 64),
        ("qwen2", {"sliding_window": 8}, 64),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True}, 64),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}, 8),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 64),
        (
            "qwen2",
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            256,
        ),
    ],
)
def test_max_model_len_is_what_can_be_computed_exactly(
    family: str, options: dict[str, Any], limit: int
) -> None:
    assert config_of(family, **options).max_model_len == limit


def test_old_and_new_rope_keys_mean_the_same() -> None:
    old = config_of(rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0})
    new = config_of(rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0})
    assert old.rope == new.rope
    plain, _ = inverse_frequencies(config_of(rope_theta=500.0))
    torch.testing.assert_close(inverse_frequencies(old)[0], plain / 2)


def test_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | TINY))
    assert ModelConfig.from_directory(tmp_path).eos_token_ids == {2}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert ModelConfig.from_directory(tmp_path).eos_token_ids == {2, 7}


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_unreadable_config_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_directory(tmp_path)


def test_dtype_names_with_and_without_prefix() -> None:
    assert parse_dtype("torch.bfloat16") == parse_dtype("bfloat16") == torch.bfloat16
    assert config_of(torch_dtype="float16").dtype == torch.float16
