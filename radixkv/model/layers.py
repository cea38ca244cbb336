"""The weights of a decoder in the layout it computes with, and the matrix product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from radixkv.model.config import ModelConfig

__all__ = ["DecoderWeights", "LayerWeights", "Linear", "weight_shapes"]

# The row count that oneDNN is told to lay a packed weight out for. Measured from 1 to 512 rows: the
# layouts for 32 and 256 rows are equally good at all of them.
_PACK_ROWS = 256
# Past this many rows the product of a packed weight costs more than that of a plain one, and more
# than two packed products of half the rows.
_MAX_PACKED_ROWS = 256
# From this many rows on a float32 product is faster, where it is faster at all. With fewer, reading
# the weights costs more than multiplying, and bf16 ones are half the bytes.
_MIN_FLOAT32_ROWS = 24


@dataclass(slots=True)
class LayerWeights:
    """One layer. Rows of `qkv` are all query heads, then key heads, then value heads; rows of
    `gate_up` are the gate, then the up projection. A bias is None where the model has none.

    `qk_norm` is `[num_heads + num_kv_heads, head_dim]`: the query norm once per query head, then
    the key norm once per key head.
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass(slots=True)
class DecoderWeights:
    """All weights. `lm_head` is `embed` itself when the model ties them."""

    embed: torch.Tensor
    layers: list[LayerWeights]
    norm: torch.Tensor
    lm_head: torch.Tensor


class Linear:
    """`x @ weight.T + bias` for few rows at a time.

    On a CPU a bf16 weight is packed once into oneDNN's blocked layout, which makes products of 1
    to 256 rows 1.2 to 1.5 times faster than `linear`, that packs it anew at every call. The packed
    copy replaces the plain weight unless the caller keeps that one too.

    With `has_float32`, a float32 copy of a packed weight multiplies many rows: 1.3 times as fast
    for 64 rows and 1.6 times for 256 on a CPU where `float32_is_faster`. Results are rounded
    to bf16 either way.
    """

    __slots__ = ("_bias", "_bias32", "_weight", "_weight32", "is_packed", "nbytes")

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, has_float32: bool = False
    ) -> None:
        self._bias = bias
        self.is_packed = _can_pack(weight)
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._weight = weight
        self._weight32: torch.Tensor | None = None
        self._bias32: torch.Tensor | None = None
        if self.is_packed:
            if has_float32:
                wide = weight.float()
                self.nbytes += wide.nbytes
                self._weight32 = torch.ops.mkldnn._reorder_linear_weight(wide, _PACK_ROWS)
                self._bias32 = None if bias is None else bias.float()
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[rows, out]` for contiguous `x` `[rows, in]`, in the dtype of `x`."""
        if not self.is_packed:
            return functional.linear(x, self._weight, self._bias)
        if self._weight32 is not None and x.shape[0] >= _MIN_FLOAT32_ROWS:
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x.float(), self._weight32, self._bias32, "none", [], ""
            )
            return product.to(x.dtype)
        if x.shape[0] <= _MAX_PACKED_ROWS:
            return self._product(x)
        starts = range(0, x.shape[0], _MAX_PACKED_ROWS)
        return torch.cat([self._product(x[i : i + _MAX_PACKED_ROWS]) for i in starts])

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return result


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the checkpoint's tensor names and shapes, as transformers stores them."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * dim, config.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    linears = {
        "self_attn.q_proj": (q_rows, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_rows, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_rows, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_rows, config.o_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (dim,)
        for name, (rows, columns, has_bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes


def _can_pack(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch._C._has_mkldnn
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
