"""The forward pass of a Llama-shaped decoder over a flat batch."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional

from radixkv.model.attention import AttentionBackend
from radixkv.model.config import ModelConfig
from radixkv.model.layers import DecoderWeights, LayerWeights
from radixkv.model.quantized_linear import build_linear
from radixkv.model.rope import RotaryTable

__all__ = ["Decoder"]


class Decoder:
    """Computes logits for a batch of new tokens. Holds weights and nothing about a request.

    Call under `torch.inference_mode()`. The constructor takes the weights over: it packs the
    matrices where that makes them faster and lets go of the plain copies.

    Attributes:
        config: shape of the model.
        dtype, device: of weights and activations; the KV pool must have the same.
        max_positions: positions must be below this.
        weight_bytes: memory of the weights, a packed copy of tied embeddings and the RoPE table
            included.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        *,
        max_positions: int | None = None,
        has_float32: bool = False,
        quantization: str = "none",
    ) -> None:
        self.config = config
        self.dtype = weights.embed.dtype
        self.device = weights.embed.device
        self.max_positions = max_positions or config.max_model_len
        self._embed = weights.embed
        self._norm = weights.norm
        self._rotary = RotaryTable(config, self.max_positions, self.dtype, self.device)
        self._layers: list[_Layer] = []
        # Popped one by one, so that a packed layer and its plain form exist together only once.
        weights.layers.reverse()
        while weights.layers:
            self._layers.append(_Layer(config, weights.layers.pop(), has_float32, quantization))
        self._lm_head = build_linear(weights.lm_head, None, quantization=quantization)
        tied = weights.lm_head is weights.embed and not self._lm_head.is_packed
        self.weight_bytes = (
            self._embed.nbytes
            + self._norm.nbytes
            + self._rotary.nbytes
            + sum(layer.nbytes for layer in self._layers)
            + (0 if tied else self._lm_head.nbytes)
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        logits_rows: torch.Tensor | None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write K and V of the new tokens and return the logits of some of them.

        The caller has called `attention.plan()` for this batch.

        Args:
            token_ids: `[T]` int64.
            positions: `[T]` int64, each token's position in its own sequence.
            attention: holds the KV pool that is read and written.
            logits_rows: `[R]` int64, rows of the batch whose logits are wanted; may be empty. None
                is all of them.
            out: `[R, vocab_size]` float32 to write to.

        Returns:
            `[R, vocab_size]` float32; `out` if given.
        """
        hidden = self._embed.index_select(0, token_ids)
        cos, sin = self._rotary.gather(positions)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            rows = logits_rows if index == last else None
            hidden = layer.forward(hidden, index, attention, self._rotary, cos, sin, rows)
        hidden = _rms_norm(hidden, self._norm, self.config.rms_norm_eps)
        logits = self._lm_head(hidden)
        return logits.float() if out is None else out.copy_(logits)


class _Layer:
    """One layer's weights, ready to multiply."""

    def __init__(
        self, config: ModelConfig, weights: LayerWeights, has_float32: bool, quantization: str
    ) -> None:
        self._eps = config.rms_norm_eps
        self._query_and_key = (config.num_heads, config.num_kv_heads)
        self._rotated_and_value = (config.num_heads + config.num_kv_heads, config.num_kv_heads)
        self._heads_shape = (-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        self._input_norm = weights.input_norm
        self._post_norm = weights.post_norm
        self._qk_norm = weights.qk_norm
        build = partial(build_linear, quantization=quantization, has_float32=has_float32)
        self._qkv = build(weights.qkv, weights.qkv_bias)
        self._out = build(weights.out, weights.out_bias)
        self._gate_up = build(weights.gate_up, weights.gate_up_bias)
        self._down = build(weights.down, weights.down_bias)
        norms = (self._input_norm, self._post_norm, self._qk_norm)
        linears = (self._qkv, self._out, self._gate_up, self._down)
        self.nbytes = sum(norm.nbytes for norm in norms if norm is not None)
        self.nbytes += sum(linear.nbytes for linear in linears)

    def forward(
        self,
        hidden: torch.Tensor,
        index: int,
        attention: AttentionBackend,
        rotary: RotaryTable,
        cos: torch.Tensor,
        sin: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the layer's output, of `rows` only if given. May overwrite `hidden`."""
        qkv = self._qkv(_rms_norm(hidden, self._input_norm, self._eps)).view(self._heads_shape)
        rotated, value = qkv.split_with_sizes(self._rotated_and_value, dim=1)
        if self._qk_norm is not None:
            rotated = _rms_norm(rotated, self._qk_norm, self._eps)
        rotated = rotary.rotate(rotated, cos, sin)
        query, key = rotated.split_with_sizes(self._query_and_key, dim=1)
        mixed = attention.run(index, query, key, value).flatten(1)
        if rows is not None:
            mixed = mixed.index_select(0, rows)
            hidden = hidden.index_select(0, rows)
            if rows.shape[0] == 0:
                return hidden
        hidden.add_(self._out(mixed))
        gate_up = self._gate_up(_rms_norm(hidden, self._post_norm, self._eps))
        gate, up = gate_up.chunk(2, dim=-1)
        return hidden.add_(self._down(functional.silu(gate).mul_(up)))


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension in fp32, round to the dtype of `x`, then multiply by `weight`.

    The weight is applied apart from `rms_norm`, which would multiply before it rounds; like this
    the result equals transformers' bit for bit.
    """
    return functional.rms_norm(x, (x.shape[-1],), None, eps).mul_(weight)
