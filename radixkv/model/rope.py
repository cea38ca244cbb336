"""Rotary position embedding: the table of cosines and sines, and its application."""

from __future__ import annotations

from typing import Any

import torch

from radixkv.model.config import ModelConfig

__all__ = ["RotaryTable", "inverse_frequencies"]

_CHUNK = 65536


class RotaryTable:
    """Owns the cosines and sines of every position up to a limit, in the model's dtype.

    Computed in fp32 and then rounded, as transformers does. The sine of the first half of a head
    is stored negated, so that one rotation is `x * cos + roll(x) * sin`: the second halves change
    places with the first ones, and rotate-half's sign is in the table already.
    """

    def __init__(
        self, config: ModelConfig, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_positions = num_positions
        self._half = config.head_dim // 2
        inv_freq, scale = inverse_frequencies(config)
        shape = (num_positions, 1, config.head_dim)
        self._cos = torch.empty(shape, dtype=dtype)
        self._sin = torch.empty(shape, dtype=dtype)
        for start in range(0, num_positions, _CHUNK):
            stop = min(start + _CHUNK, num_positions)
            angles = torch.arange(start, stop).float()[:, None] * inv_freq
            cos = (angles.cos() * scale).to(dtype)
            sin = (angles.sin() * scale).to(dtype)
            self._cos[start:stop, 0] = torch.cat((cos, cos), dim=-1)
            self._sin[start:stop, 0] = torch.cat((-sin, sin), dim=-1)
        self._cos = self._cos.to(device)
        self._sin = self._sin.to(device)

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self._cos.nbytes + self._sin.nbytes

    def gather(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and signed sines of `positions` (`[T]` int64), `[T, 1, head_dim]`."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return `x` (`[T, heads, head_dim]`) rotated by what `gather` returned."""
        return (x * cos).addcmul_(x.roll(self._half, -1), sin)


def inverse_frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """Return the angle per position of each pair, `[head_dim / 2]` fp32, and the cos/sin scale.

    Source: transformers' ROPE_INIT_FUNCTIONS for every scaled type.
    """
    rope = config.rope
    if rope.rope_type == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float) / config.head_dim
        return 1.0 / (rope.theta**exponents), 1.0
    # Imported here: it takes more than a second, and most models have no scaling.
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    hf_config = LlamaConfig(
        hidden_size=config.num_heads * config.head_dim,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(rope.parameters),
    )
    result: Any = ROPE_INIT_FUNCTIONS[rope.rope_type](hf_config, torch.device("cpu"))
    inv_freq, scale = result
    return inv_freq.float(), float(scale)
