"""What the CPU's attention does to read a pool of 8-bit numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from radixkv.model.kv_pool import KVPool
from radixkv.model.quantization import quantize

__all__ = ["KVStaging"]

# Tokens in consecutive slots from which copying them by a call of their own is cheaper than
# gathering them with others.
_MIN_PIECE = 64
# Sign, the lower 4 bits of the exponent and the upper 3 of the mantissa, as an int16.
_BFLOAT16_BITS = 0x87F0 - 0x10000


class KVStaging:
    """Converts between the numbers in a pool of 8 bits and a dtype that can be computed with.

    K and V of the step are converted as they are stored, without their scales: `query * k_scale`
    multiplies stored K to the right scores, and `output * v_scale` puts stored V right.
    """

    def __init__(
        self, pool: KVPool, dtype: torch.dtype, layer_rows: Sequence[torch.Tensor]
    ) -> None:
        """Prepare for `pool`, which must have scales.

        Args:
            pool: K and V.
            dtype: of queries.
            layer_rows: per layer, `[rows, num_kv_heads * head_dim]` of the pool, all that is ever
                gathered for it.

        Raises:
            ValueError: `dtype` can't hold every number of the pool.
        """
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"query_dtype must be a float of 16 or 32 bits, got {dtype}")
        assert pool.k_scales is not None
        assert pool.v_scales is not None
        self._pool = pool
        self._dtype = dtype
        self._k_scales = pool.k_scales
        self._v_scales = pool.v_scales
        self._layer_rows = layer_rows
        self._pieces: list[tuple[slice, slice]] = []
        self._rest = torch.empty(0, dtype=torch.int64)
        self._rest_rows = torch.empty(0, dtype=torch.int64)

    def plan(self, rows: npt.NDArray[np.int64]) -> None:
        """Set which rows of a layer `gather` reads, until the next call."""
        self._pieces = []
        if not len(rows):
            self._rest = self._rest_rows = torch.empty(0, dtype=torch.int64)
            return
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        lengths = np.diff([0, *breaks.tolist(), len(rows)])
        is_long = lengths >= _MIN_PIECE
        if is_long.any():
            bounds = [0, *breaks.tolist(), len(rows)]
            for (lo, hi), long in zip(pairwise(bounds), is_long.tolist(), strict=True):
                if long:
                    row = int(rows[lo])
                    self._pieces.append((slice(lo, hi), slice(row, row + hi - lo)))
        rest = np.flatnonzero(~np.repeat(is_long, lengths))
        self._rest = torch.from_numpy(rest)
        self._rest_rows = torch.from_numpy(rows[rest])

    def gather(self, layer: int, out: torch.Tensor) -> None:
        """Write the planned rows to `out`, `[planned, num_kv_heads * head_dim]` of the dtype."""
        stored = self._layer_rows[layer]
        for to, rows in self._pieces:
            _convert(stored[rows], out[to])
        if len(self._rest):
            # torch gathers numbers of 8 bits by index as integers only.
            picked = stored.view(torch.uint8).index_select(0, self._rest_rows).view(stored.dtype)
            if self._pieces:
                out.index_copy_(0, self._rest, self.to_dtype(picked))
            else:
                _convert(picked, out)

    def quantize(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return new K and V (`[tokens, num_kv_heads, head_dim]`) as the pool stores them."""
        dtype = self._pool.dtype
        return (
            quantize(key, self._k_scales[layer], dtype),
            quantize(value, self._v_scales[layer], dtype),
        )

    def to_dtype(self, stored: torch.Tensor) -> torch.Tensor:
        """Return what `quantize` returned as numbers that can be computed with."""
        out = torch.empty(stored.shape, dtype=self._dtype)
        _convert(stored, out)
        return out

    def scale_query(self, layer: int, grouped: torch.Tensor) -> torch.Tensor:
        """Return `[tokens, num_kv_heads, group_size, head_dim]` times K's scales."""
        return (grouped * self._k_scales[layer][:, None]).to(self._dtype)

    def scale_output(self, layer: int, grouped: torch.Tensor) -> torch.Tensor:
        """Return an output of the same shape times V's scales, in float32."""
        return grouped * self._v_scales[layer][:, None]


def _convert(stored: torch.Tensor, out: torch.Tensor) -> None:
    """Write the numbers of an 8-bit pool to `out`. A float8's NaN becomes 480.

    torch's own conversion of float8 takes ten times as long. A bfloat16 with the same exponent bits
    (4 of its 8), mantissa bits and sign is the number itself times 2^-120.
    """
    if stored.dtype == torch.int8:
        out.copy_(stored)
        return
    bits = stored.view(torch.int8).to(torch.int16).bitwise_left_shift_(4)
    bits.bitwise_and_(_BFLOAT16_BITS)
    torch.mul(bits.view(torch.bfloat16), 2.0**120, out=out)
