"""What the decoder must know about a model, read from a Hugging Face `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from radixkv.errors import ConfigError

__all__ = ["SUPPORTED_FAMILIES", "ModelConfig", "RopeConfig", "parse_dtype"]

SUPPORTED_FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Model type in config.json, and the one architecture of that type that is a language model."""

SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")

# What a config.json leaves out means what the family's config class in transformers says.
_DEFAULT_MAX_POSITIONS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
_DEFAULT_NUM_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_DEFAULT_SLIDING_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28
_DEFAULT_ROPE_THETA = 10000.0
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: base wavelength.
        rope_type: one of `SUPPORTED_ROPE_TYPES`.
        parameters: every parameter of the scaling as config.json has it, `rope_type` and
            `rope_theta` included.
    """

    theta: float
    rope_type: str = "default"
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of one decoder.

    Attributes:
        family: key of `SUPPORTED_FAMILIES`; decides which checkpoint names are expected.
        head_dim: width of one head; `num_heads * head_dim` may differ from `hidden_size`.
        max_position_embeddings: as config.json says.
        sliding_window: tokens a query sees in the layers that have a window; None if none has.
        qkv_bias, o_bias, mlp_bias: whether these projections have a bias.
        qk_norm: whether each query and key head is RMS-normalised before the rotation.
        eos_token_ids: ids that end an answer.
        dtype: dtype of the checkpoint.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    dtype: torch.dtype = torch.float32

    @classmethod
    def from_directory(cls, path: Path) -> ModelConfig:
        """Read config.json, and the end tokens of generation_config.json if there is one.

        Raises:
            ConfigError: a file can't be read, or the model isn't supported.
        """
        data = _read_json(path / "config.json")
        generation_path = path / "generation_config.json"
        generation = _read_json(generation_path) if generation_path.is_file() else None
        return cls.from_hf(data, generation)

    @classmethod
    def from_hf(cls, config: Any, generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """Take over a parsed config.json or a transformers config object.

        Args:
            config: a mapping, or an object with `to_dict()`.
            generation: parsed generation_config.json; its end tokens are added.

        Raises:
            ConfigError: the architecture or one of its options isn't supported.
        """
        data: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
        family = _check_family(data)
        hidden_size = _positive_int(data, "hidden_size")
        num_heads = _positive_int(data, "num_attention_heads")
        max_positions = _positive_int(
            data, "max_position_embeddings", _DEFAULT_MAX_POSITIONS[family]
        )
        num_layers = _positive_int(data, "num_hidden_layers")
        attention_bias = bool(data.get("attention_bias", False))
        has_attention_bias_option = family in ("llama", "qwen3")
        result = cls(
            family=family,
            vocab_size=_positive_int(data, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive_int(data, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(data, family, num_heads),
            head_dim=_positive_int(
                data, "head_dim", 128 if family == "qwen3" else hidden_size // num_heads
            ),
            rms_norm_eps=float(data.get("rms_norm_eps", 1e-6)),
            rope=_parse_rope(data, max_positions),
            max_position_embeddings=max_positions,
            tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or (has_attention_bias_option and attention_bias),
            o_bias=has_attention_bias_option and attention_bias,
            mlp_bias=family == "llama" and bool(data.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            sliding_window=_sliding_window(data, family, num_layers),
            eos_token_ids=_token_ids(data) | _token_ids(generation or {}),
            dtype=parse_dtype(str(data.get("dtype") or data.get("torch_dtype") or "float32")),
        )
        if result.num_heads % result.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads must be a multiple of num_key_value_heads, got "
                f"{result.num_heads} and {result.num_kv_heads}"
            )
        if result.head_dim % 2:
            raise ConfigError(f"head_dim must be even for RoPE, got {result.head_dim}")
        return result

    @property
    def max_model_len(self) -> int:
        """Tokens of context that the decoder computes exactly as the model was defined.

        A model with a sliding window is served up to the window's length, where the window hides
        nothing yet: the paged KV pool keeps every token, and full attention past the window would
        not be the model's own. Dynamic RoPE scaling is served up to `max_position_embeddings`,
        where it does not scale yet: past it every cached key would have to be rotated anew.
        Linear and YaRN scaling reach `factor` times the original length.
        """
        limit = self.max_position_embeddings
        if self.rope.rope_type in ("linear", "yarn"):
            original = self.rope.parameters.get("original_max_position_embeddings")
            factor = self.rope.parameters.get("factor")
            if original and factor:
                limit = max(limit, int(original * factor))
        if self.sliding_window is not None:
            limit = min(limit, self.sliding_window)
        return limit


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype called `name`, with or without "torch." before it.

    Raises:
        ConfigError: it isn't bfloat16, float16 or float32.
    """
    try:
        return _DTYPES[name.removeprefix("torch.")]
    except KeyError:
        raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}, got {name!r}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no {path.name} in {path.parent}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read {path}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(data).__name__}")
    return data


def _check_family(data: Mapping[str, Any]) -> str:
    family = data.get("model_type")
    architectures = data.get("architectures") or []
    supported = ", ".join(SUPPORTED_FAMILIES.values())
    if family not in SUPPORTED_FAMILIES:
        name = architectures[0] if architectures else family
        raise ConfigError(f"architecture {name!r} is not supported; supported: {supported}")
    if architectures and SUPPORTED_FAMILIES[family] not in architectures:
        raise ConfigError(
            f"architecture {architectures[0]!r} is not supported; supported: {supported}"
        )
    if data.get("quantization_config"):
        method = dict(data["quantization_config"]).get("quant_method", "unknown")
        raise ConfigError(f"quantized checkpoints ({method}) are not supported; use GGUF or bf16")
    if data.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ConfigError(f"hidden_act must be silu, got {data['hidden_act']!r}")
    return str(family)


def _positive_int(data: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = data.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} in config.json must be a positive integer, got {value!r}")
    return value


def _num_kv_heads(data: Mapping[str, Any], family: str, num_heads: int) -> int:
    # A null means multi-head attention in every family; a missing key means the class default.
    if "num_key_value_heads" in data:
        return _positive_int(data, "num_key_value_heads", num_heads)
    return _DEFAULT_NUM_KV_HEADS.get(family, num_heads)


def _sliding_window(data: Mapping[str, Any], family: str, num_layers: int) -> int | None:
    if family == "llama":
        return None
    window = data.get("sliding_window", _DEFAULT_SLIDING_WINDOW)
    if family != "mistral":
        if not data.get("use_sliding_window", False):
            return None
        layer_types = data.get("layer_types")
        if layer_types is not None and "sliding_attention" not in layer_types:
            return None
        first = data.get("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
        if layer_types is None and first >= num_layers:
            return None
    return int(window) if window else None


def _parse_rope(data: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Read `rope_parameters`, or the older pair of `rope_theta` and `rope_scaling`."""
    parameters = dict(data.get("rope_parameters") or data.get("rope_scaling") or {})
    theta = float(parameters.get("rope_theta") or data.get("rope_theta") or _DEFAULT_ROPE_THETA)
    rope_type = str(parameters.pop("type", None) or parameters.get("rope_type") or "default")
    rope_type = str(parameters.get("rope_type") or rope_type)
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise ConfigError(
            f"rope_type {rope_type!r} is not supported; supported: "
            f"{', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    partial = parameters.get("partial_rotary_factor", data.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ConfigError(f"partial_rotary_factor must be 1, got {partial}")
    parameters |= {"rope_type": rope_type, "rope_theta": theta}
    if rope_type in ("yarn", "llama3"):
        parameters.setdefault(
            "original_max_position_embeddings",
            data.get("original_max_position_embeddings") or max_positions,
        )
    return RopeConfig(theta, rope_type, parameters)


def _token_ids(data: Mapping[str, Any]) -> frozenset[int]:
    value = data.get("eos_token_id")
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])
