from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_fakes import Stepper, round_parameters, tiny_hf_model, write_gguf
from safetensors.torch import load_file

from radixkv.errors import ConfigError
from radixkv.model import gguf as gguf_module
from radixkv.model import gguf_tensors
from radixkv.model.config import ModelConfig
from radixkv.model.decoder import Decoder
from radixkv.model.gguf import convert_gguf
from radixkv.model.rope import inverse_frequencies
from radixkv.model.tokenizer import Tokenizer
from radixkv.model.weights import load_weights


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {"head_dim": 8}),
        ("qwen3", {"head_dim": 128}),  # the one width transformers assumes
    ],
)
def test_converted_weights_equal_what_transformers_reads(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, GgufConfig

    write_gguf(tmp_path / "tiny.gguf", tiny_hf_model(family, **options))
    directory = convert_gguf(tmp_path / "tiny.gguf", tmp_path / "cache")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file="tiny.gguf",
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    ).state_dict()
    ours = load_file(directory / "model.safetensors")
    if options.get("tie_word_embeddings"):
        theirs.pop("lm_head.weight")
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_converted_model_gives_the_logits_of_the_original(tmp_path: Path) -> None:
    model = tiny_hf_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    round_parameters(model)  # to what bf16 can hold, so that nothing is lost on the way
    write_gguf(tmp_path / "tiny.gguf", model)
    directory = convert_gguf(tmp_path / "tiny.gguf", tmp_path / "cache")
    config = ModelConfig.from_directory(directory)
    weights = load_weights(directory, config, dtype=torch.float32, device=torch.device("cpu"))
    ids = [5, 9, 60, 33, 12, 70]
    # The embedding went through 8 bits per weight.
    model.get_input_embeddings().weight.data = weights.embed
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    got = Stepper(Decoder(config, weights), 1, 8).step([ids])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_config_and_source_files_tell_the_origin(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_hf_model("llama", attention_bias=True, mlp_bias=True))
    directory = convert_gguf(tmp_path / "tiny.gguf", tmp_path / "cache")
    config = ModelConfig.from_directory(directory)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, True)
    assert config.eos_token_ids == {0, 2}
    assert config.dtype == torch.bfloat16
    source = json.loads((directory / "source.json").read_text())
    assert source["source_bytes"] == (tmp_path / "tiny.gguf").stat().st_size
    assert source["source_sha256"][:16] in directory.name
    assert source["converter_version"] == gguf_module.CONVERTER_VERSION
    assert source["files"]["model.safetensors"] > 0


def test_smollm_tokenizer_splits_digits_from_line_breaks(tmp_path: Path) -> None:
    """Read as GPT-2, "\\n\\n1" lost the token for two line breaks before every numbered list."""
    write_gguf(tmp_path / "tiny.gguf", tiny_hf_model("llama"))
    directory = convert_gguf(tmp_path / "tiny.gguf", tmp_path / "cache")
    tokenizer = Tokenizer.from_directory(directory)
    ids = tokenizer.encode("hello\n\n12")
    assert [tokenizer.token_str(i) for i in ids] == ["hello", "\n\n", "1", "2"]
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "user: x"


def test_second_call_neither_reads_nor_converts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_hf_model("llama"))
    first = convert_gguf(tmp_path / "tiny.gguf", tmp_path / "cache")
    for name in ("sha256_of", "install_gguf"):
        monkeypatch.setattr(gguf_module, name, lambda *_, **__: pytest.fail("called again"))
    assert convert_gguf(tmp_path / "tiny.gguf", tmp_path / "cache") == first


def test_changed_file_is_converted_anew(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_hf_model("llama"))
    first = convert_gguf(path, tmp_path / "cache")
    model = tiny_hf_model("llama")
    model.lm_head.weight.data.zero_()
    write_gguf(path, model)
    os.utime(path, ns=(1, 1))
    second = convert_gguf(path, tmp_path / "cache")
    assert second != first
    assert not load_file(second / "model.safetensors")["lm_head.weight"].any()


def test_large_model_is_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_hf_model("llama"))
    whole = convert_gguf(tmp_path / "tiny.gguf", tmp_path / "whole")
    monkeypatch.setattr(gguf_tensors, "_SHARD_BYTES", 9000)
    parts = convert_gguf(tmp_path / "tiny.gguf", tmp_path / "parts")
    assert len(list(parts.glob("*.safetensors"))) > 2
    config = ModelConfig.from_directory(parts)
    one, many = (
        load_weights(path, config, dtype=torch.bfloat16, device=torch.device("cpu"))
        for path in (whole, parts)
    )
    assert torch.equal(one.layers[2].gate_up, many.layers[2].gate_up)
    assert torch.equal(one.lm_head, many.lm_head)


def rope_factors(factor: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return llama.cpp's table for a Llama 3 of this factor and `TINY`'s heads."""
    shape = tiny_hf_model("llama", num_hidden_layers=1).config.to_dict()
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain, _ = inverse_frequencies(ModelConfig.from_hf(shape))
    scaled, _ = inverse_frequencies(ModelConfig.from_hf(shape | {"rope_parameters": llama3}))
    return (plain / scaled).numpy()


def test_llama3_rope_table_becomes_parameters(tmp_path: Path) -> None:
    """The table was ignored, and Llama 3 rotated as if its context had never been extended."""
    model = tiny_hf_model("llama", num_hidden_layers=1)
    # Longer wavelengths than the tiny model's are needed to reach the scaled range.
    factors = rope_factors(8.0)
    assert factors.max() == 8.0
    write_gguf(tmp_path / "tiny.gguf", model, tensors={"rope_freqs.weight": factors})
    config = ModelConfig.from_directory(convert_gguf(tmp_path / "tiny.gguf", tmp_path / "cache"))
    assert config.rope.rope_type == "llama3"
    assert config.rope.parameters["factor"] == 8.0


def test_unknown_rope_table_is_refused(tmp_path: Path) -> None:
    factors = rope_factors(8.0)
    factors[2] *= 3
    model = tiny_hf_model("llama", num_hidden_layers=1)
    write_gguf(tmp_path / "tiny.gguf", model, tensors={"rope_freqs.weight": factors})
    with pytest.raises(ConfigError, match="not Llama 3's"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "cache")


def test_unknown_tensor_is_refused(tmp_path: Path) -> None:
    extra = {"blk.0.ffn_gate_inp.weight": np.zeros((4, 32), dtype=np.float32)}
    write_gguf(tmp_path / "tiny.gguf", tiny_hf_model("llama"), tensors=extra)
    with pytest.raises(ConfigError, match=r"of no use: blk\.0\.ffn_gate_inp"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "cache")
    assert list((tmp_path / "cache" / "gguf").glob("*tmp*")) == []


@pytest.mark.parametrize("content", [b"", b"not a model at all", b"GGUF\x03\x00\x00\x00"])
def test_broken_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match="not a GGUF file"):
        convert_gguf(tmp_path / "bad.gguf", tmp_path / "cache")


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        convert_gguf(tmp_path / "none.gguf", tmp_path / "cache")
