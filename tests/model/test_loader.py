from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from model_fakes import TINY, Stepper, tiny_hf_model, write_gguf

from radixkv.errors import ConfigError
from radixkv.model import loader
from radixkv.model.loader import load_model
from radixkv.model.tokenizer import ByteTokenizer, Tokenizer


@pytest.fixture
def tiny_dir(tmp_path: Path) -> Path:
    """A directory with nothing but the config of a model of 300 tokens."""
    path = tmp_path / "Tiny-Model"
    path.mkdir()
    (path / "config.json").write_text(
        json.dumps({"model_type": "llama"} | TINY | {"vocab_size": 300})
    )
    return path


def test_dummy_model_needs_a_config_only(tiny_dir: Path) -> None:
    loaded = load_model(str(tiny_dir), load_format="dummy", dtype="bfloat16")
    assert isinstance(loaded.tokenizer, ByteTokenizer)
    assert loaded.config.eos_token_ids == {256}
    assert loaded.name == "Tiny-Model"
    assert loaded.decoder.dtype == torch.bfloat16
    assert loaded.weight_bytes > 2 * 300 * 32 * 2
    logits = Stepper(loaded.decoder, 1, 8).step([loaded.tokenizer.encode("hello")])
    assert logits.shape == (5, 300)
    assert logits.isfinite().all()


def test_directory_with_weights_and_tokenizer(tmp_path: Path) -> None:
    model = tiny_hf_model("llama")
    write_gguf(tmp_path / "tiny.gguf", model)
    converted = load_model(str(tmp_path / "tiny.gguf"), cache_dir=tmp_path / "cache")
    assert converted.name == "tiny"
    assert converted.decoder.dtype == torch.bfloat16
    assert isinstance(converted.tokenizer, Tokenizer)
    # The file's own end-of-turn token counts, which only generation_config.json knows.
    assert converted.config.eos_token_ids == converted.tokenizer.eos_token_ids == {0, 2}
    again = load_model(str(converted.model_path), dtype="float32", max_model_len=16)
    assert again.name == converted.model_path.name
    assert again.decoder.dtype == torch.float32
    assert again.decoder.max_positions == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"load_format": "onnx"}, "load_format must be one of"),
        ({"load_format": "gguf"}, r"needs a \.gguf file"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"device": "abacus"}, "device 'abacus' can't be used"),
        ({"load_format": "safetensors"}, "no tokenizer"),
    ],
)
def test_wrong_argument_is_refused(options: dict[str, Any], message: str, tiny_dir: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(str(tiny_dir), **options)


def test_tokenizer_larger_than_the_model_is_refused(tiny_dir: Path) -> None:
    config = {"model_type": "llama"} | TINY | {"vocab_size": 100}
    (tiny_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="257 tokens, more than the model's vocab_size of 100"):
        load_model(str(tiny_dir), load_format="dummy")


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/model", "a/b/c"])
def test_missing_path_is_not_looked_up_on_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ConfigError, match="no such model directory"):
        load_model(name)


def test_hub_model_is_fetched_by_its_files_and_keeps_its_id(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def snapshot_download(model: str, *, allow_patterns: list[str]) -> str:
        asked.append((model, "*.safetensors" in allow_patterns))
        return str(tiny_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert load_model("owner/tiny", load_format="dummy").name == "owner/tiny"
    assert asked == [("owner/tiny", False)]


def test_unreachable_hub_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise OSError("connection refused\nand a page of advice")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ConfigError, match=r"'owner/tiny' is no local directory.*refused$"):
        load_model("owner/tiny")


@pytest.mark.model
def test_default_model_loads_in_bf16_with_its_name(default_model_dir: Path) -> None:
    loaded = load_model(max_model_len=64)
    assert loaded.name == "SmolLM2-135M-Instruct"
    assert loaded.model_path == default_model_dir
    ids = loaded.tokenizer.encode("The capital of France is")
    logits = Stepper(loaded.decoder, 1, 16).step([ids], last_only=True)
    assert loaded.tokenizer.token_str(int(logits.argmax())) == " Paris"
