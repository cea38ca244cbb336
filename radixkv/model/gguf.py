"""Turn a GGUF file into a directory of the usual files, once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from radixkv.errors import ConfigError
from radixkv.model.config import SUPPORTED_FAMILIES, ModelConfig
from radixkv.model.gguf_tensors import ROPE_FACTORS, write_tensors
from radixkv.model.progress import progress
from radixkv.model.rope import inverse_frequencies
from radixkv.model.store import default_cache_dir, install_once, sha256_of

__all__ = ["CONVERTER_VERSION", "convert_gguf", "install_gguf"]

CONVERTER_VERSION = 1
"""Part of the directory's name: a converter that writes something else never reuses old output."""

_LLAMA3_ORIGINAL_POSITIONS = 8192


def convert_gguf(
    source: Path, cache_dir: Path | None = None, *, console: Console | None = None
) -> Path:
    """Return the directory that holds the model of `source`, converting it on first use.

    The directory's name carries the SHA-256 of the file, so that a changed file is converted
    anew. Reading the whole file for it takes a second per gigabyte or so; a record of path, size
    and time of change spares that on later calls.

    Raises:
        ConfigError: no such file, or its model isn't supported.
    """
    if not source.is_file():
        raise ConfigError(f"no such file: {source}")
    base = (cache_dir or default_cache_dir()) / "gguf"
    source = source.resolve()
    stat = source.stat()
    stamp = [str(source), stat.st_size, stat.st_mtime_ns]
    key = hashlib.sha256(str(source).encode()).hexdigest()[:16]
    record = base / f"{source.stem}-{key}.seen.json"
    remembered = _remembered(record, stamp)
    digest = remembered or sha256_of(source, console=console)
    target = base / f"{source.stem}-{digest[:16]}-v{CONVERTER_VERSION}"

    def build(work: Path) -> dict[str, object]:
        return install_gguf(source, work, sha256=digest, console=console)

    install_once(target, build, console=console)
    if remembered is None:
        # A cache that can't be written costs the reading of the file again, and nothing else.
        with suppress(OSError):
            _write_json(record, {"stamp": stamp, "sha256": digest})
    return target


def install_gguf(
    source: Path, work: Path, *, sha256: str, console: Console | None = None
) -> dict[str, object]:
    """Write config, tokenizer and bf16 weights of a GGUF file into `work`.

    Returns:
        What source.json is to say about the origin.

    Raises:
        ConfigError: the file can't be read, or its model isn't supported.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(source)
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"{source} is not a GGUF file that can be read: {error}") from error
    names = {tensor.name for tensor in reader.tensors}
    data, generation = _config_of(reader, names)
    config = ModelConfig.from_hf(data, generation)
    if ROPE_FACTORS in names:
        data["rope_parameters"] = _llama3_rope(reader, config)
    _write_json(work / "config.json", data)
    _write_json(work / "generation_config.json", generation)
    write_tensors(reader, config, work, console=console)
    _write_tokenizer(source, _field(reader, "tokenizer.ggml.pre"), work, console)
    return {
        "source": source.name,
        "source_sha256": sha256,
        "source_bytes": source.stat().st_size,
        "converter_version": CONVERTER_VERSION,
    }


def _remembered(record: Path, stamp: list[object]) -> str | None:
    try:
        seen = json.loads(record.read_text(encoding="utf-8"))
        return str(seen["sha256"]) if seen["stamp"] == stamp else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _field(reader: Any, name: str, default: Any = None) -> Any:
    field = reader.get_field(name)
    return default if field is None else field.contents()


def _config_of(reader: Any, names: set[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config.json and generation_config.json for the file's metadata."""
    family = _field(reader, "general.architecture")
    if family not in SUPPORTED_FAMILIES:
        supported = ", ".join(SUPPORTED_FAMILIES)
        raise ConfigError(f"GGUF architecture {family!r} is not supported; supported: {supported}")

    def key(name: str, default: Any = None) -> Any:
        value = _field(reader, f"{family}.{name}", default)
        if value is None:
            raise ConfigError(f"the GGUF file lacks the key {family}.{name}")
        return value

    hidden_size, num_heads = key("embedding_length"), key("attention.head_count")
    end_names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = [_field(reader, f"tokenizer.ggml.{name}") for name in end_names]
    eos = sorted({token_id for token_id in ends if token_id is not None})
    data = {
        "architectures": [SUPPORTED_FAMILIES[family]],
        "model_type": family,
        "vocab_size": _vocab_size(reader),
        "hidden_size": hidden_size,
        "intermediate_size": key("feed_forward_length"),
        "num_hidden_layers": key("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": key("attention.head_count_kv", num_heads),
        "head_dim": key("attention.key_length", hidden_size // num_heads),
        "max_position_embeddings": key("context_length"),
        "rms_norm_eps": key("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope_of(reader, family),
        # The output matrix is written only where it is not the embedding.
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": family != "qwen2" and "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_down.bias" in names,
        "hidden_act": "silu",
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos,
        "dtype": "bfloat16",
    }
    generation = {name: data[name] for name in ("bos_token_id", "eos_token_id")}
    return data, generation


def _vocab_size(reader: Any) -> int:
    for tensor in reader.tensors:
        if tensor.name == "token_embd.weight":
            # The reader gives shapes in GGUF's order, the fastest dimension first.
            return int(tensor.shape[-1])
    raise ConfigError("the GGUF file lacks the tensor token_embd.weight")


def _rope_of(reader: Any, family: str) -> dict[str, Any]:
    theta = _field(reader, f"{family}.rope.freq_base", 10000.0)
    kind = _field(reader, f"{family}.rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"GGUF RoPE scaling {kind!r} is not supported; supported: linear, yarn")
    scaling = {
        "rope_type": kind,
        "rope_theta": theta,
        "factor": _field(reader, f"{family}.rope.scaling.factor", 1.0),
    }
    original = _field(reader, f"{family}.rope.scaling.original_context_length")
    return scaling | ({"original_max_position_embeddings": original} if original else {})


def _llama3_rope(reader: Any, config: ModelConfig) -> dict[str, Any]:
    """Return the llama3 RoPE parameters that give the file's table of frequency factors.

    GGUF keeps the result of the scaling and not its parameters. All Llama 3 models differ in
    the factor alone, which is the table's largest entry; that it is so is checked.

    Raises:
        ConfigError: the table isn't Llama 3's.
    """
    (table,) = (tensor for tensor in reader.tensors if tensor.name == ROPE_FACTORS)
    factors = torch.from_numpy(np.array(table.data, dtype=np.float32)).flatten()
    parameters = {
        "rope_type": "llama3",
        "rope_theta": config.rope.theta,
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL_POSITIONS,
    }
    data = {"model_type": config.family, "rope_parameters": parameters}
    shape = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
    }
    scaled, _ = inverse_frequencies(ModelConfig.from_hf(shape | data))
    plain, _ = inverse_frequencies(config)
    if factors.shape != plain.shape or not torch.allclose(plain / factors, scaled, rtol=1e-3):
        raise ConfigError(f"the GGUF file's RoPE factors ({ROPE_FACTORS}) are not Llama 3's")
    return parameters


def _write_tokenizer(
    source: Path, pre_tokenizer: str | None, work: Path, console: Console | None
) -> None:
    from transformers import AutoTokenizer

    with progress("Converting tokenizer", 1, console=console) as task:
        try:
            tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        except Exception as error:
            # transformers raises bare Exceptions of several kinds for what it can't read.
            raise ConfigError(f"can't convert the tokenizer of {source.name}: {error}") from error
        fix = _PRE_TOKENIZER_FIXES.get(pre_tokenizer or "")
        if fix is not None:
            fix(tokenizer.backend_tokenizer)
        tokenizer.save_pretrained(work)
        task.advance()


def _split_digits(backend: Any) -> None:
    """Cut text at every digit before the byte-level split, as SmolLM's own tokenizer does.

    transformers doesn't know the pre-tokenizer that a GGUF calls "smollm" and keeps GPT-2's, with
    which "\\n\\n1" becomes two line breaks where the model was trained on one token for both.
    """
    from tokenizers import pre_tokenizers

    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


_PRE_TOKENIZER_FIXES: dict[str, Callable[[Any], None]] = {"smollm": _split_digits}


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
