"""From the name of a model to a decoder that is ready to run."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from radixkv.errors import ConfigError
from radixkv.model.config import ModelConfig, parse_dtype
from radixkv.model.cpu_speed import float32_is_faster
from radixkv.model.decoder import Decoder
from radixkv.model.gguf import convert_gguf
from radixkv.model.layers import DecoderWeights
from radixkv.model.pull import DEFAULT_MODEL_NAME, ensure_default_model
from radixkv.model.quantized_linear import check_quantization
from radixkv.model.tokenizer import ByteTokenizer, Tokenizer, TokenizerLike
from radixkv.model.weights import dummy_weights, load_weights

__all__ = ["LOAD_FORMATS", "LoadedModel", "load_model"]

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
_HUB_FILES = ("*.safetensors", "*.json", "tokenizer.model", "merges.txt", "*.jinja")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory.

    Attributes:
        decoder: weights and forward pass.
        tokenizer: of the same model; bytes for random weights without a tokenizer.
        config: its `eos_token_ids` are the tokenizer's, which include the config files' own.
        model_path: directory that was loaded.
        name: what clients call the model.
        weight_bytes: memory that the decoder takes.
    """

    decoder: Decoder
    tokenizer: TokenizerLike
    config: ModelConfig
    model_path: Path
    name: str
    weight_bytes: int


def load_model(
    model: str | None = None,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    load_format: str = "auto",
    cache_dir: Path | None = None,
    max_model_len: int | None = None,
    float32_products: bool | None = None,
    quantization: str = "none",
    console: Console | None = None,
) -> LoadedModel:
    """Load a model and its tokenizer.

    Args:
        model: a directory, a .gguf file, or the id of a model on the Hugging Face hub; None is
            the default model, fetched on first use.
        dtype: bfloat16, float16, float32, or auto for the checkpoint's own.
        device: a torch device.
        load_format: auto, safetensors, gguf, or dummy for random weights, which needs no file
            but config.json.
        cache_dir: where converted models are kept; `default_cache_dir()` if None.
        max_model_len: positions that will be used, if fewer than the model can; spares memory.
        float32_products: keep float32 copies of bf16 weights, for products of many rows, on a CPU;
            None: if they are faster there and take no more than a sixteenth of its memory.
        quantization: "none", or "int8" for weights of 8 bits, on a CPU.
        console: where progress is shown; stderr if None.

    Raises:
        ConfigError: an argument is wrong, or the model can't be found, read or run.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"load_format must be one of {', '.join(LOAD_FORMATS)}, got {load_format!r}"
        )
    torch_device = _parse_device(device)
    check_quantization(quantization, torch_device)
    wanted_dtype = None if dtype == "auto" else parse_dtype(dtype)
    path, name = _resolve(model, load_format, cache_dir, console)
    config = ModelConfig.from_directory(path)
    is_dummy = load_format == "dummy"
    tokenizer = _load_tokenizer(path, config, is_dummy)
    config = replace(config, eos_token_ids=tokenizer.eos_token_ids)
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, more than the model's vocab_size of "
            f"{config.vocab_size}"
        )
    final_dtype = wanted_dtype or config.dtype
    if is_dummy:
        weights = dummy_weights(config, dtype=final_dtype, device=torch_device)
    else:
        weights = load_weights(
            path, config, dtype=final_dtype, device=torch_device, console=console
        )
    limit = min(max_model_len or config.max_model_len, config.max_model_len)
    if float32_products is None:
        can_use = torch_device.type == "cpu" and quantization == "none"
        float32_products = can_use and _can_afford_float32(weights)
    decoder = Decoder(
        config,
        weights,
        max_positions=limit,
        has_float32=float32_products,
        quantization=quantization,
    )
    return LoadedModel(decoder, tokenizer, config, path, name, decoder.weight_bytes)


def _resolve(
    model: str | None, load_format: str, cache_dir: Path | None, console: Console | None
) -> tuple[Path, str]:
    """Return the directory to load and the name to serve it under."""
    if model is None:
        return ensure_default_model(cache_dir, console=console), DEFAULT_MODEL_NAME
    path = Path(model).expanduser()
    is_gguf = path.suffix == ".gguf"
    if load_format == "gguf" and not is_gguf:
        raise ConfigError(f"load_format gguf needs a .gguf file, got {model!r}")
    if is_gguf:
        if load_format == "safetensors":
            raise ConfigError(f"load_format safetensors needs a directory, got {model!r}")
        return convert_gguf(path, cache_dir, console=console), path.stem
    if path.is_dir():
        return path, path.resolve().name
    # A hub id is "owner/name"; anything else can only have been meant as a path.
    if model.count("/") > 1 or model.startswith((".", "/", "~")):
        raise ConfigError(f"no such model directory: {model}")
    return _download(model, dummy=load_format == "dummy"), model


def _download(model: str, *, dummy: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [p for p in _HUB_FILES if not (dummy and p == "*.safetensors")]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:
        # The hub client raises errors of half a dozen libraries when it can't reach or find it.
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{model!r} is no local directory or .gguf file, and it can't be had from the Hugging "
            f"Face hub: {reason}"
        ) from error


def _load_tokenizer(path: Path, config: ModelConfig, is_dummy: bool) -> TokenizerLike:
    try:
        return Tokenizer.from_directory(path, eos_token_ids=config.eos_token_ids)
    except ConfigError:
        if not is_dummy:
            raise
        return ByteTokenizer()


def _can_afford_float32(weights: DecoderWeights) -> bool:
    matrices = [
        matrix
        for layer in weights.layers
        for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down)
    ]
    if weights.embed.dtype != torch.bfloat16 or not matrices:
        return False
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return sum(4 * matrix.numel() for matrix in matrices) <= memory // 16 and float32_is_faster()


def _parse_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"device {name!r} can't be used: {reason}") from error
    return device
