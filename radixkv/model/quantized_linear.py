"""The matrix product with weights of 8 bits."""

from __future__ import annotations

from functools import lru_cache

import torch

from radixkv.errors import ConfigError
from radixkv.model.layers import Linear

__all__ = ["QUANTIZATIONS", "AnyLinear", "Int8Linear", "build_linear", "check_quantization"]

QUANTIZATIONS = ("none", "int8")
_MAX = 127
# What is left of an element after `high` is at most a half, which makes 127 of `low`.
_LOW = 2 * _MAX
# Rows of a weight that are converted at a time, so that it never exists in float32 as a whole.
_CHUNK_ROWS = 8192
_TINY = 1e-30
_FEW_ROWS = 4
_ONES = 1.5 * 2**23


class Int8Linear:
    """`x @ weight.T + bias` in whole numbers, summed exactly; scales bring the sums back.

    A weight is rounded to 8 bits, with a scale per output row, found once. A row of `x` is written
    with two numbers of 8 bits for each element, `x = s * (high + low / 254)`, and a scale found at
    each call: a single one costs several percent of perplexity, since a few channels are much
    larger than the others, while the second one only adds rows to a product whose time goes into
    reading the weights. A row's result depends on no other row.

    Up to four rows of bfloat16 are multiplied as they are, which spares the small steps around the
    product: with that few they cost more than it.

    With `t` the scale of the weight and `k` the terms of the sum, a result differs from the exact
    one by at most `t / 2 * sum|x| + s / 508 * sum|w| + k * s * t / 1016`, and by the rounding of
    float32 and of the dtype of `x`.
    """

    __slots__ = ("_bias", "_few_scale", "_scale", "_weight", "is_packed", "nbytes")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        largest = weight.abs().amax(1).float()
        # The product of few rows takes the scales in bfloat16, so they are numbers of that type.
        scale = largest.clamp_min_(_TINY).div_(_MAX).bfloat16().float()
        rows = torch.empty(weight.shape, dtype=torch.int8)
        for start in range(0, len(weight), _CHUNK_ROWS):
            chunk = slice(start, start + _CHUNK_ROWS)
            # Not in place: a float32 weight may be the embedding, too.
            scaled = weight[chunk].float() / scale[chunk, None]
            # A scale that was rounded down makes the largest element more than 127.
            rows[chunk] = scaled.round_().clamp_(-_MAX, _MAX).to(torch.int8)
        self._few_scale = scale.bfloat16()
        # Times the largest element of a row of `x`, what a sum is multiplied by.
        self._scale = scale.div_(_MAX)
        # `_int_mm` wants `[in, out]`; of the layouts measured, this view is the fastest.
        self._weight = rows.t()
        self._bias = None if bias is None else bias.float()
        self.is_packed = True
        self.nbytes = rows.nbytes + self._scale.nbytes + self._few_scale.nbytes
        self.nbytes += 0 if self._bias is None else self._bias.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[rows, out]` for contiguous `x` `[rows, in]`, in the dtype of `x`."""
        if not len(x):
            return x.new_empty(0, self._weight.shape[1])
        rows, columns = x.shape
        if rows <= _FEW_ROWS and x.dtype == torch.bfloat16:
            few: torch.Tensor = torch._weight_int8pack_mm(x, self._weight.t(), self._few_scale)
            return few if self._bias is None else few.add_(self._bias)
        largest = x.abs().amax(1, keepdim=True).float().clamp_min_(_TINY)
        scaled = x * (_MAX / largest)
        # Where the last bit of a float32 is 1, sums are rounded as `round` would, faster.
        high = scaled.add(_ONES).sub_(_ONES)
        parts = torch.empty((2, rows, columns), dtype=torch.int8)
        parts[0] = high
        parts[1] = scaled.sub_(high).mul_(_LOW).add_(_ONES).sub_(_ONES)
        sums = torch._int_mm(parts.view(2 * rows, columns), self._weight)
        result = sums[:rows].float().add_(sums[rows:], alpha=1 / _LOW)
        result.mul_(largest).mul_(self._scale)
        if self._bias is not None:
            result.add_(self._bias)
        return result.to(x.dtype)


AnyLinear = Linear | Int8Linear


def build_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    quantization: str = "none",
    has_float32: bool = False,
) -> AnyLinear:
    """Return the product with `weight` in the form that `quantization` names."""
    if quantization == "int8":
        return Int8Linear(weight, bias)
    return Linear(weight, bias, has_float32=has_float32)


def check_quantization(quantization: str, device: torch.device) -> None:
    """Check that weights can be quantized like this on `device`.

    Raises:
        ConfigError: an unknown name, not on a CPU, or on a CPU whose products of 8 bits aren't
            exact.
    """
    if quantization not in QUANTIZATIONS:
        raise ConfigError(
            f"--quantization must be one of {', '.join(QUANTIZATIONS)}, got {quantization!r}"
        )
    if quantization == "none":
        return
    if device.type != "cpu":
        raise ConfigError(
            f"--quantization {quantization} can't be used on {device}: it computes on a CPU only"
        )
    if not _products_are_exact():
        raise ConfigError(
            f"--quantization {quantization} can't be used on this CPU: its sums of products of 8 "
            f"bits overflow; it needs VNNI or AMX"
        )


@lru_cache(maxsize=1)
def _products_are_exact() -> bool:
    """Return whether `_int_mm` sums without overflow; before VNNI, CPUs sum pairs in 16 bits."""
    for sign in (1, -1):
        x = torch.full((4, 64), _MAX, dtype=torch.int8)
        weight = torch.full((64, 16), sign * _MAX, dtype=torch.int8)
        if not (torch._int_mm(x, weight) == sign * 64 * _MAX**2).all():
            return False
    return True
