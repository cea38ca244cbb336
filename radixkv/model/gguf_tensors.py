"""The tensors of a GGUF file, under the checkpoint's names and in its order of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console

from radixkv.errors import ConfigError
from radixkv.model.config import ModelConfig
from radixkv.model.layers import weight_shapes
from radixkv.model.progress import progress

__all__ = ["ROPE_FACTORS", "write_tensors"]

ROPE_FACTORS = "rope_freqs.weight"
"""A table that stands for the parameters of Llama 3's RoPE scaling; it is no weight."""

_SHARD_BYTES = 2 * 1024**3
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_tensors(
    reader: Any, config: ModelConfig, directory: Path, *, console: Console | None = None
) -> None:
    """Write every tensor in bf16, as model.safetensors or, past 2 GiB, as shards with an index.

    At most one shard and one tensor in fp32 are in memory at a time.

    Raises:
        ConfigError: a tensor is missing, unexpected, of the wrong shape or can't be decoded.
    """
    from gguf import dequantize

    shapes = weight_shapes(config)
    shards = _Shards(directory)
    with progress("Converting weights", len(reader.tensors), console=console) as task:
        for tensor in reader.tensors:
            task.advance()
            if tensor.name == ROPE_FACTORS:
                continue
            name = _hf_name(tensor.name)
            if name not in shapes:
                raise ConfigError(f"the GGUF file has a tensor of no use: {tensor.name}")
            try:
                values = dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError:
                raise ConfigError(
                    f"GGUF quantization {tensor.tensor_type.name} ({tensor.name}) is not supported"
                ) from None
            values = _unpermute(config, tensor.name, values)
            if values.shape != shapes[name]:
                raise ConfigError(
                    f"GGUF tensor {tensor.name} must have shape {shapes[name]}, got {values.shape}"
                )
            # Through a writable copy: torch warns about the file's read-only pages.
            shards.add(name, torch.from_numpy(np.array(values)).to(torch.bfloat16))
    missing = sorted(set(shapes) - set(shards.weight_map))
    if missing:
        raise ConfigError(f"the GGUF file lacks {len(missing)} tensors, {missing[0]} the first")
    shards.finish()


class _Shards:
    """Collects tensors and writes a file whenever there are enough of them."""

    def __init__(self, directory: Path) -> None:
        self.weight_map: dict[str, str] = {}
        self._directory = directory
        self._tensors: dict[str, torch.Tensor] = {}
        self._num_bytes = 0
        self._files: list[str] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._tensors and self._num_bytes + tensor.nbytes > _SHARD_BYTES:
            self._flush()
        self._tensors[name] = tensor
        self._num_bytes += tensor.nbytes
        self.weight_map[name] = self._next_file

    def finish(self) -> None:
        self._flush()
        if len(self._files) == 1:
            (self._directory / self._files[0]).rename(self._directory / "model.safetensors")
            return
        index = {"metadata": {}, "weight_map": self.weight_map}
        path = self._directory / "model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    @property
    def _next_file(self) -> str:
        return f"model-{len(self._files) + 1:05}.safetensors"

    def _flush(self) -> None:
        from safetensors.torch import save_file

        file = self._next_file
        save_file(self._tensors, self._directory / file, metadata={"format": "pt"})
        self._files.append(file)
        self._tensors, self._num_bytes = {}, 0


def _hf_name(name: str) -> str | None:
    """Return the checkpoint name of a GGUF tensor; None if the model has no such tensor."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return None


def _unpermute(
    config: ModelConfig, name: str, values: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's order of the rows of Q and K.

    For the llama family its converter interleaves the two halves of each head, since it rotates
    neighbours; the other families keep the order of the checkpoint.
    """
    part = name.split(".")[2] if name.startswith("blk.") else ""
    if config.family != "llama" or part not in ("attn_q", "attn_k"):
        return values
    heads = config.num_heads if part == "attn_q" else config.num_kv_heads
    pairs = values.reshape(heads, config.head_dim // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
