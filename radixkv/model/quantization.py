"""K and V of 8 bits: the formats, and the scales that a model needs for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from radixkv.model.attention import AttentionBackend, AttentionMetadata
from radixkv.model.decoder import Decoder
from radixkv.model.kv_pool import KVPool
from radixkv.model.tokenizer import TokenizerLike

__all__ = [
    "CALIBRATION_TEXTS",
    "KV_CACHE_DTYPES",
    "KVScales",
    "calibrate_kv",
    "calibration_tokens",
    "quantize",
]

KV_CACHE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""What --kv-cache-dtype may name beside auto."""

_LIMITS = {torch.int8: (-128.0, 127.0), torch.float8_e4m3fn: (-448.0, 448.0)}
# Larger than anything seen in the calibration by this factor, since other texts go further.
_MARGIN = 1.25
_BLOCK_SIZE = 16
_MAX_TOKENS = 512
_TINY = 1e-6

CALIBRATION_TEXTS = (
    "When in the Course of human events, it becomes necessary for one people to dissolve the "
    "political bands which have connected them with another, and to assume among the powers of "
    "the earth, the separate and equal station to which the Laws of Nature and of Nature's God "
    "entitle them, a decent respect to the opinions of mankind requires that they should declare "
    "the causes which impel them to the separation.\n\nWe hold these truths to be self-evident.",
    "def binary_search(items, wanted):\n    low, high = 0, len(items)\n    while low < high:\n"
    "        middle = (low + high) // 2\n        if items[middle] < wanted:\n"
    "            low = middle + 1\n        else:\n            high = middle\n    return low\n\n\n"
    "print(binary_search([1, 3, 5, 7, 11, 13, 17, 19], 11))  # -> 4\n"
    '{"id": 42, "tags": ["a", "b"]}',
    "Q: A train leaves at 9:45 and arrives at 13:20. How long does it take?\nA: 3 hours and 35 "
    "minutes. From 9:45 to 12:45 are 3 hours, and from 12:45 to 13:20 are 35 minutes.\n\n"
    "| city | people | area (km²) |\n|---|---:|---:|\n| Oslo | 717,710 | 454 |\n| Kyoto | "
    "1,463,723 | 827.83 |\n\nFranz jagt im komplett verwahrlosten Taxi quer durch Bayern. "
    "Où est la gare ? "
    "日本の首都は東京です。 Привет, мир! !!! ??? ... --- ### 0 0 0 0 1 1 1 1\n\n\n\n",
)
"""What the ranges of K and V are measured on: prose, code and data, numbers and languages."""


@dataclass(frozen=True, slots=True)
class KVScales:
    """What stored K and V are multiplied by.

    Attributes:
        k, v: float32 `[num_layers, num_kv_heads, head_dim]`.
    """

    k: torch.Tensor
    v: torch.Tensor


def quantize(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `x / scale`, divided in float32 and rounded to `dtype`, to even at a tie.

    What is out of range is cut off.
    """
    low, high = _LIMITS[dtype]
    scaled = x.div(scale).clamp_(low, high)
    return (scaled if dtype.is_floating_point else scaled.round_()).to(dtype)


def calibration_tokens(tokenizer: TokenizerLike) -> list[list[int]]:
    """Return the built-in texts as tokens, once plain and, where there is a template, as a chat."""
    sequences = [tokenizer.encode(text) for text in CALIBRATION_TEXTS]
    if tokenizer.has_chat_template:
        messages = [
            {"role": "user", "content": CALIBRATION_TEXTS[1]},
            {"role": "assistant", "content": CALIBRATION_TEXTS[2]},
        ]
        sequences.append(tokenizer.encode(tokenizer.render_chat(messages)))
    return sequences


def calibrate_kv(
    decoder: Decoder,
    sequences: Sequence[Sequence[int]],
    dtype: torch.dtype,
    build_attention: Callable[[KVPool], AttentionBackend],
) -> KVScales:
    """Measure the ranges of K and V and return the scales that spread them over `dtype`.

    K is measured before its rotation matters: both channels that are rotated into each other get
    the length of the pair, which no position changes. So a range that was seen at position 100
    holds at position 8,000.

    Args:
        decoder: the model, which is run on each sequence.
        sequences: tokens, of each the first 512 (or as many as the model has positions).
        dtype: of the pool, int8 or float8_e4m3fn.
        build_attention: makes the attention of a pool in the model's own dtype.

    Cost: one forward pass over the tokens.
    """
    config = decoder.config
    limit = min(_MAX_TOKENS, decoder.max_positions)
    chunks = [list(sequence[:limit]) for sequence in sequences if sequence]
    longest = max(map(len, chunks))
    pool = KVPool(
        config.num_layers,
        -(-longest // _BLOCK_SIZE),
        _BLOCK_SIZE,
        config.num_kv_heads,
        config.head_dim,
        decoder.dtype,
        decoder.device,
    )
    ranges = _Ranges(build_attention(pool))
    with torch.inference_mode():
        for chunk in chunks:
            ranges.run_alone(decoder, chunk)
    highest = _LIMITS[dtype][1]
    return KVScales(*(_scales(seen, highest) for seen in (ranges.k, ranges.v)))


class _Ranges(AttentionBackend):
    """Passes everything on to another backend, and keeps the largest K and V of each channel."""

    def __init__(self, inner: AttentionBackend) -> None:
        super().__init__(
            inner.pool,
            num_heads=inner.num_heads,
            num_kv_heads=inner.num_kv_heads,
            head_dim=inner.head_dim,
            scale=inner.scale,
        )
        self._inner = inner
        shape = (inner.pool.num_layers, inner.num_kv_heads, inner.head_dim)
        self.k = torch.zeros(shape, device=inner.pool.device)
        self.v = torch.zeros(shape, device=inner.pool.device)

    def run_alone(self, decoder: Decoder, token_ids: Sequence[int]) -> None:
        """Run the decoder on one sequence."""
        count = len(token_ids)
        positions = np.arange(count, dtype=np.int64)
        metadata = AttentionMetadata(
            query_start_loc=np.array([0, count], dtype=np.int32),
            seq_lens=np.array([count], dtype=np.int32),
            block_tables=(np.arange(-(-count // _BLOCK_SIZE), dtype=np.int32),),
            slot_mapping=positions,
        )
        inputs = (np.array(token_ids, dtype=np.int64), positions, positions[-1:])
        ids, where, rows = self._inner.plan_step(metadata, inputs)
        decoder.forward(ids, where, self, rows)

    def plan(self, metadata: AttentionMetadata) -> None:
        self._inner.plan(metadata)

    def run(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        first, second = key.float().chunk(2, dim=-1)
        pairs = torch.hypot(first, second).amax(0)
        self.k[layer] = torch.maximum(self.k[layer], torch.cat((pairs, pairs), dim=-1))
        self.v[layer] = torch.maximum(self.v[layer], value.abs().amax(0).float())
        return self._inner.run(layer, query, key, value)


def _scales(ranges: torch.Tensor, highest: float) -> torch.Tensor:
    """Return what brings `ranges` (`[layers, heads, dim]`), with a margin, to `highest`."""
    # A channel that was always zero must still get a scale that can be divided by.
    floor = ranges.amax(-1, keepdim=True).mul(1e-3).clamp_min(_TINY)
    return torch.maximum(ranges, floor).mul_(_MARGIN / highest)
