from __future__ import annotations

import json
from pathlib import Path

import pytest

from radixkv.errors import ConfigError
from radixkv.simulate.hardware import SETUPS
from radixkv.simulate.models import MODELS, load_model, shape_from_config

LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "intermediate_size": 128,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [
        ("llama-3-8b", 131_072),
        ("llama-3-70b", 327_680),
        ("llama-2-70b", 327_680),
        ("opt-13b", 800 * 1024),
        ("smollm2-135m", 23_040),
    ],
)
def test_kv_bytes_of_presets_are_the_published_ones(name: str, kv_bytes: int) -> None:
    assert load_model(name).kv_bytes == kv_bytes


def test_llama_2_70b_without_grouped_queries_would_take_eight_times_as_much() -> None:
    assert MODELS["llama-2-70b"].ungrouped_kv_bytes == 2_621_440


def test_the_papers_setup_of_opt_13b_has_15_7_thousand_slots() -> None:
    setup = SETUPS["opt-13b"]
    assert round(setup.kv_bytes / MODELS["opt-13b"].kv_bytes, -2) == 15_700


def test_shape_from_config_counts_every_matrix() -> None:
    shape = shape_from_config(LLAMA, "tiny")
    attention = 64 * 64 * 2 + 64 * 32 * 2
    assert shape.num_params == 2 * (attention + 3 * 64 * 128) + 2 * 100 * 64
    assert shape.kv_bytes == 2 * 2 * 2 * 16 * 2


def test_shape_from_config_counts_what_the_preset_says_for_llama_3_8b() -> None:
    config = {
        **LLAMA,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "intermediate_size": 14_336,
    }
    preset = MODELS["llama-3-8b"]
    assert shape_from_config(config, "x").num_params == pytest.approx(preset.num_params, rel=0.001)


def test_load_model_reads_a_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert load_model(str(tmp_path)) == shape_from_config(LLAMA, tmp_path.name)


def test_a_quantized_models_kv_has_16_bits() -> None:
    assert shape_from_config({**LLAMA, "torch_dtype": "int8"}, "x").kv_item_bytes == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "lacks num_hidden_layers"),
        ({"hidden_size": -1}, "hidden_size must be a positive integer"),
        ({"torch_dtype": "float4"}, "dtype must be one of"),
    ],
)
def test_a_config_that_lacks_something_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shape_from_config({**LLAMA, **change}, "x")


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[]", "must hold an object")])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_model(str(tmp_path))


def test_an_unknown_model_is_refused_with_the_names_of_the_presets() -> None:
    with pytest.raises(ConfigError, match="llama-3-8b"):
        load_model("gpt-9")
