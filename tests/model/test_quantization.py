from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_fakes import tiny_hf_model

from radixkv.errors import ConfigError
from radixkv.kernels.reference import paged_attention
from radixkv.model import quantized_linear
from radixkv.model.attention import AttentionMetadata, PrefixGroup
from radixkv.model.backends import build_attention
from radixkv.model.config import ModelConfig
from radixkv.model.cpu_attention import CpuAttention
from radixkv.model.cpu_attention_plan import Tuning
from radixkv.model.decoder import Decoder
from radixkv.model.kv_pool import KVPool
from radixkv.model.kv_staging import KVStaging
from radixkv.model.loader import load_model
from radixkv.model.quantization import calibrate_kv, quantize
from radixkv.model.quantized_linear import Int8Linear, check_quantization
from radixkv.model.weights import load_weights

CPU = torch.device("cpu")
KV_DTYPES = [torch.int8, torch.float8_e4m3fn]
LAYERS, BLOCK_SIZE, HEADS, KV_HEADS, DIM = 2, 4, 6, 2, 16


def factors(
    rows: int, *, columns: int = 80, out: int = 48, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `x`, a weight and a bias; rows differ in size, and a few columns are large."""
    gen = torch.Generator().manual_seed(rows)
    x = (
        torch.randn((rows, columns), generator=gen)
        * torch.logspace(-3, 3, max(rows, 1))[:rows, None]
    )
    x[:, :3] *= 40
    weight = torch.randn((out, columns), generator=gen) * torch.logspace(-2, 1, out)[:, None]
    bias = torch.randn(out, generator=gen)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


def bound(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return how far a result may lie from the exact one (see `Int8Linear`)."""
    x, weight = x.double(), weight.double()
    s = x.abs().amax(1, keepdim=True) / 127
    t = weight.abs().amax(1) / 127
    sum_x, sum_w = x.abs().sum(1, keepdim=True), weight.abs().sum(1)
    error = t / 2 * sum_x + s / 508 * sum_w + x.shape[1] * s * t / 1016
    # A few roundings of float32, of numbers no larger than these.
    error += 1e-6 * (sum_x * weight.abs().amax(1) + (0 if bias is None else bias.double().abs()))
    return error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 17, 300])
def test_product_is_within_its_bound_and_leaves_its_factors_alone(
    rows: int, has_bias: bool, dtype: torch.dtype
) -> None:
    x, weight, full_bias = factors(rows, dtype=dtype)
    bias = full_bias if has_bias else None
    before = x.clone(), weight.clone()
    result = Int8Linear(weight, bias)(x)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    allowed = bound(x, weight, bias) + exact.abs() * torch.finfo(dtype).eps
    assert result.dtype == dtype
    assert torch.equal(x, before[0])
    assert torch.equal(weight, before[1])
    assert ((result.double() - exact).abs() <= allowed).all()


def test_product_is_far_more_exact_than_rows_of_8_bits_would_make_it() -> None:
    x, weight, _ = factors(16)
    weight = (weight / weight.abs().amax(1, keepdim=True) * 127).round()  # exact in 8 bits
    exact = x.double() @ weight.double().T
    step = x.double().abs().amax(1, keepdim=True) / 127
    once = (x / step).round() * step @ weight.double().T
    result = Int8Linear(weight, None)(x)
    assert (result - exact).norm() < 0.01 * (once - exact).norm()


def test_product_of_no_rows_is_empty() -> None:
    x, weight, bias = factors(0, dtype=torch.bfloat16)
    result = Int8Linear(weight, bias)(x)
    assert result.shape == (0, 48)
    assert result.dtype == torch.bfloat16


def test_rows_are_the_same_alone_and_in_any_batch() -> None:
    x, weight, bias = factors(40, dtype=torch.bfloat16)
    linear = Int8Linear(weight, bias)
    together = linear(x)
    assert torch.equal(linear(x[3:20]), together[3:20])
    assert torch.equal(linear(x.flip(0)), together.flip(0))
    # Few rows are multiplied in another way, which rounds differently, but not by what is beside.
    alone = torch.cat([linear(row[None]) for row in x])
    assert torch.equal(torch.cat([linear(x[i : i + 4]) for i in range(0, 40, 4)]), alone)
    assert torch.equal(linear(x[5:8]), alone[5:8])
    torch.testing.assert_close(alone, together, rtol=2**-7, atol=float(together.abs().max()) / 500)


def test_rows_of_zeros_give_the_bias() -> None:
    _, weight, bias = factors(1)
    result = Int8Linear(weight, bias)(torch.zeros(2, weight.shape[1]))
    assert torch.equal(result, bias.expand(2, -1))


def test_weight_rows_of_zeros_give_zeros() -> None:
    x, weight, _ = factors(3)
    weight[5] = 0
    assert torch.equal(Int8Linear(weight, None)(x)[:, 5], torch.zeros(3))


def test_nan_stays_in_its_row() -> None:
    x, weight, _ = factors(3)
    linear = Int8Linear(weight, None)
    clean = linear(x)
    x[1, 7] = float("nan")
    result = linear(x)
    assert result[1].isnan().all()
    assert torch.equal(result[[0, 2]], clean[[0, 2]])


def test_weight_is_converted_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, _ = factors(3)
    whole = Int8Linear(weight, None)(x)
    monkeypatch.setattr(quantized_linear, "_CHUNK_ROWS", 7)
    assert torch.equal(Int8Linear(weight, None)(x), whole)


def test_a_weight_takes_a_byte_an_element_and_a_scale_a_row() -> None:
    _, weight, bias = factors(1)
    assert Int8Linear(weight, bias).nbytes == weight.numel() + 6 * len(weight) + 4 * len(bias)


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("int4", "cpu", "--quantization must be one of none, int8, got 'int4'"),
        ("int8", "cuda", "--quantization int8 can't be used on cuda: it computes on a CPU only"),
    ],
)
def test_quantization_that_cannot_be_had_is_rejected(name: str, device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_quantization(name, torch.device(device))


def test_a_cpu_whose_sums_overflow_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_linear, "_products_are_exact", lambda: False)
    with pytest.raises(ConfigError, match="it needs VNNI or AMX"):
        check_quantization("int8", CPU)
    check_quantization("none", CPU)


def test_load_model_quantizes_every_matrix(tmp_path: Path) -> None:
    model = tiny_hf_model("llama", vocab_size=260)
    model.config.save_pretrained(tmp_path)
    plain = load_model(str(tmp_path), load_format="dummy", dtype="bfloat16")
    small = load_model(str(tmp_path), load_format="dummy", dtype="bfloat16", quantization="int8")
    per_layer = (64 + 64) * 32 + 32 * 64 + 96 * 32 + 32 * 48
    scales = 128 + 32 + 96 + 32
    embed = 2 * 260 * 32
    # The embedding of a model that doesn't tie it stays in bf16, its head does not.
    norms = small.decoder.weight_bytes - embed - 3 * (per_layer + 6 * scales) - 260 * (32 + 6)
    assert norms == plain.decoder.weight_bytes - 2 * embed - 3 * 2 * per_layer - float32_bytes(
        plain
    )


def float32_bytes(loaded: Any) -> int:
    """Return the bytes of float32 copies that a model has where they are fast."""
    linears = [
        linear
        for layer in loaded.decoder._layers
        for linear in (layer._qkv, layer._out, layer._gate_up, layer._down)
    ]
    return sum(4 * linear._weight32.numel() for linear in linears if linear._weight32 is not None)


def tiny_decoder(path: Path, quantization: str = "none") -> Decoder:
    tiny_hf_model("llama").save_pretrained(path)
    config = ModelConfig.from_directory(path)
    weights = load_weights(path, config, dtype=torch.float32, device=CPU)
    return Decoder(config, weights, quantization=quantization)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_quantize_rounds_to_even_and_cuts_off(dtype: torch.dtype) -> None:
    scale = torch.tensor([[0.5, 2.0]])
    x = torch.tensor([[[0.25, 1e9]], [[0.75, -1e9]], [[-6.0, 5.0]]])
    stored = quantize(x, scale, dtype)
    assert stored.dtype == dtype
    if dtype == torch.int8:
        expected = torch.tensor([[[0.0, 127]], [[2, -128]], [[-12, 2]]])
    else:
        expected = torch.tensor([[[0.5, 448]], [[1.5, -448]], [[-12, 2.5]]])
    assert torch.equal(stored.float(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_float8_is_converted_exactly(dtype: torch.dtype) -> None:
    staging = KVStaging(quantized_pool(2, torch.float8_e4m3fn), dtype, [])
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    numbers = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    converted = staging.to_dtype(numbers)
    assert converted.dtype == dtype
    assert torch.equal(converted.float(), numbers.float())


def quantized_pool(num_blocks: int, dtype: torch.dtype) -> KVPool:
    gen = torch.Generator().manual_seed(5)
    shape = (LAYERS, KV_HEADS, DIM)
    highest = 127 if dtype == torch.int8 else 448
    k_scale, v_scale = ((torch.rand(shape, generator=gen) * 3 + 1) * 4 / highest for _ in range(2))
    pool = KVPool(
        LAYERS, num_blocks, BLOCK_SIZE, KV_HEADS, DIM, dtype, k_scale=k_scale, v_scale=v_scale
    )
    garbage = torch.randint(0, 256, pool.data.shape, generator=gen, dtype=torch.uint8)
    if dtype == torch.float8_e4m3fn:
        garbage.fill_(0x7F)  # NaN
    pool.data.view(torch.uint8).copy_(garbage)
    return pool


GROUPS = (PrefixGroup(0, 4, 0, 30), PrefixGroup(0, 2, 30, 33))
BATCHES: dict[str, tuple[list[tuple[int, int]], tuple[PrefixGroup, ...]]] = {
    "one decode": ([(70, 1)], ()),
    "one chunk": ([(0, 40)], ()),
    "chunk on a context": ([(90, 37)], ()),
    "decodes": ([(5, 1), (70, 1), (0, 1), (131, 1)], ()),
    "groups": ([(133, 1), (140, 1), (121, 1), (150, 50), (9, 1), (12, 3), (20, 2)], GROUPS),
}


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ["consecutive", "shuffled"])
@pytest.mark.parametrize("name", BATCHES)
def test_attention_equals_the_reference_over_what_is_stored(
    name: str, order: str, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    seqs, groups = BATCHES[name]
    gen = torch.Generator().manual_seed(3)
    needed = [-(-(old + new) // BLOCK_SIZE) for old, new in seqs]
    ids = np.arange(sum(needed) + 3, dtype=np.int32)
    if order == "shuffled":
        np.random.default_rng(1).shuffle(ids)
    tables = np.split(ids, np.cumsum(needed))[: len(seqs)]
    for group in groups:
        for seq in range(group.first_seq, group.last_seq):
            shared = slice(group.first_block, group.last_block)
            tables[seq][shared] = tables[group.first_seq][shared]
    pool = quantized_pool(len(ids), kv_dtype)
    slots = [
        table[np.arange(old + new) // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
        + np.arange(old + new) % BLOCK_SIZE
        for table, (old, new) in zip(tables, seqs, strict=True)
    ]
    layer = 1
    assert pool.k_scales is not None
    assert pool.v_scales is not None
    for own, (old, _) in zip(slots, seqs, strict=True):
        for where, scales in ((pool.k_slots, pool.k_scales), (pool.v_slots, pool.v_scales)):
            past = torch.randn((old, KV_HEADS, DIM), generator=gen)
            stored = quantize(past, scales[layer], kv_dtype).view(torch.uint8)
            where[layer].view(torch.uint8)[own[:old]] = stored
    num_tokens = sum(new for _, new in seqs)
    fused = torch.randn((num_tokens, HEADS + 2 * KV_HEADS, DIM), generator=gen).to(dtype)
    query, key, value = torch.split(fused, [HEADS, KV_HEADS, KV_HEADS], dim=1)
    metadata = AttentionMetadata(
        query_start_loc=np.cumsum([0] + [new for _, new in seqs], dtype=np.int32),
        seq_lens=np.array([old + new for old, new in seqs], dtype=np.int32),
        block_tables=tuple(tables),
        slot_mapping=np.concatenate([own[old:] for own, (old, _) in zip(slots, seqs, strict=True)]),
        groups=groups,
    )
    backend = CpuAttention(
        pool,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        scale=DIM**-0.5,
        tuning=Tuning(min_run=16, min_split=16, min_wide_split=16),
        query_dtype=dtype,
    )
    backend.plan(metadata)
    out = backend.run(layer, query, key, value)
    new = torch.from_numpy(metadata.slot_mapping)
    assert_stored(pool.k_slots[layer], new, quantize(key, pool.k_scales[layer], kv_dtype))
    assert_stored(pool.v_slots[layer], new, quantize(value, pool.v_scales[layer], kv_dtype))
    expected, _ = paged_attention(
        query.double(),
        pool.k[layer],
        pool.v[layer],
        [torch.from_numpy(table) for table in tables],
        torch.from_numpy(metadata.seq_lens),
        torch.from_numpy(metadata.query_start_loc),
        DIM**-0.5,
        k_scale=pool.k_scales[layer],
        v_scale=pool.v_scales[layer],
    )
    assert out.dtype == dtype
    tol = 2e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out.double(), expected, rtol=tol, atol=tol)


def assert_stored(where: torch.Tensor, slots: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(where.view(torch.uint8)[slots], expected.view(torch.uint8))


def test_a_plain_pool_refuses_queries_of_another_dtype() -> None:
    pool = KVPool(1, 2, BLOCK_SIZE, KV_HEADS, DIM, torch.float32)
    with pytest.raises(ValueError, match=r"query_dtype must be the pool's torch\.float32"):
        CpuAttention(
            pool, num_heads=6, num_kv_heads=2, head_dim=DIM, scale=1.0, query_dtype=torch.bfloat16
        )


def test_a_quantized_pool_needs_a_query_dtype() -> None:
    with pytest.raises(ValueError, match="query_dtype must be a float of 16 or 32 bits"):
        CpuAttention(
            quantized_pool(2, torch.int8), num_heads=6, num_kv_heads=2, head_dim=DIM, scale=1.0
        )


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_scales_cover_what_was_seen_wherever_it_stands(tmp_path: Path, dtype: torch.dtype) -> None:
    decoder = tiny_decoder(tmp_path)
    tokens = [[5, 9, 80, 33, 2, 41], [77, 4, 4, 61]]
    config = decoder.config

    def build(pool: KVPool) -> Any:
        return build_attention("cpu", pool, config, torch.float32)

    scales = calibrate_kv(decoder, tokens, dtype, build)
    assert scales.k.shape == scales.v.shape == (3, 2, 16)
    assert scales.k.dtype == torch.float32
    assert torch.equal(scales.k, calibrate_kv(decoder, tokens, dtype, build).k)
    # The first layer's K and V are the same tokens' wherever they stand, but for K's rotation.
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    pool = KVPool(3, 16, 4, 2, 16, torch.float32)
    backend = build(pool)
    highest = 127 if dtype == torch.int8 else 448
    for start in (0, 3, 50):
        positions = np.arange(start, start + 6, dtype=np.int64)
        backend.plan(
            AttentionMetadata(
                query_start_loc=np.array([0, 6], dtype=np.int32),
                seq_lens=np.array([start + 6], dtype=np.int32),
                block_tables=(np.arange(16, dtype=np.int32),),
                slot_mapping=positions,
            )
        )
        with torch.inference_mode():
            ids = torch.tensor(tokens[0])
            decoder.forward(ids, torch.from_numpy(positions), backend, torch.tensor([5]))
        rows = slice(start, start + 6)
        seen.append((pool.k_slots[0][rows].clone(), pool.v_slots[0][rows].clone()))
    for key, value in seen:
        assert (key.abs() <= scales.k[0] * highest).all()
        assert (value.abs() <= scales.v[0] * highest).all()
    # And they are no wider than the margin: some channel comes near its end.
    assert (seen[0][1].abs().amax(0) / scales.v[0] / highest).max() > 0.5
