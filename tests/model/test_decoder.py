from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_fakes import Stepper, round_parameters, tiny_hf_model

from radixkv.model.config import ModelConfig
from radixkv.model.decoder import Decoder
from radixkv.model.layers import Linear
from radixkv.model.tokenizer import Tokenizer
from radixkv.model.weights import dummy_weights, load_weights

CPU = torch.device("cpu")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    ),
    "llama-dynamic-rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 32}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "head_dim": 8}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN, "head_dim": 8}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
}


def decoder_of(model: Any, path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    model.save_pretrained(path)
    config = ModelConfig.from_directory(path)
    return Decoder(config, load_weights(path, config, dtype=dtype, device=CPU))


def hf_logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float()


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(97, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers_in_fp32(name: str, tmp_path: Path) -> None:
    family, options = MODELS[name]
    model = tiny_hf_model(family, **options)
    decoder = decoder_of(model, tmp_path)
    ids = prompts(3, 17, 30)
    stepper = Stepper(decoder, len(ids), 32)
    expected = [hf_logits(model, seq) for seq in ids]
    # A ragged prefill, a second chunk that leaves one token, then one token at a time.
    cuts = [max(len(seq) - 6, 0) for seq in ids]
    got = stepper.step([seq[:cut] for seq, cut in zip(ids, cuts, strict=True)])
    want = torch.cat([logits[:cut] for logits, cut in zip(expected, cuts, strict=True)])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    for _ in range(6):
        at = list(stepper.lens)
        chunk = [seq[pos : pos + 1] for seq, pos in zip(ids, at, strict=True)]
        got = stepper.step(chunk)
        rows = [logits[pos : pos + 1] for logits, pos in zip(expected, at, strict=True)]
        torch.testing.assert_close(got, torch.cat(rows), atol=1e-4, rtol=1e-4)


def test_logits_rows_are_the_rows_of_the_whole(tmp_path: Path) -> None:
    decoder = decoder_of(tiny_hf_model("llama"), tmp_path)
    ids = prompts(9, 5)
    every = Stepper(decoder, 2, 16).step(ids)
    last = Stepper(decoder, 2, 16).step(ids, last_only=True)
    assert last.dtype == torch.float32
    torch.testing.assert_close(last, every[[8, 13]], atol=1e-5, rtol=1e-5)


def test_no_logits_rows_still_fill_the_pool(tmp_path: Path) -> None:
    """A chunk in mid-prompt wants no logits, but its K and V must be there in every layer."""
    model = tiny_hf_model("qwen2", head_dim=8)
    decoder = decoder_of(model, tmp_path)
    (ids,) = prompts(12)
    stepper = Stepper(decoder, 1, 16)
    none = torch.empty(0, dtype=torch.int64)
    forward = decoder.forward
    decoder.forward = lambda t, p, a, _: forward(t, p, a, none)  # type: ignore[method-assign]
    assert stepper.step([ids[:11]]).shape == (0, 97)
    decoder.forward = forward  # type: ignore[method-assign]
    got = stepper.step([ids[11:]])
    torch.testing.assert_close(got, hf_logits(model, ids)[11:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bf16_logits_stay_within_rounding_of_transformers(family: str, tmp_path: Path) -> None:
    """Both round differently; neither may be further from the fp32 truth than the other by much."""
    model = tiny_hf_model(family)
    round_parameters(model)
    decoder = decoder_of(model, tmp_path, torch.bfloat16)
    ids = prompts(30)
    truth = hf_logits(model, ids[0])
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    theirs = hf_logits(model, ids[0])
    got = Stepper(decoder, 1, 32).step(ids)
    assert (theirs - truth).norm() > 0
    assert (got - truth).norm() <= 1.3 * (theirs - truth).norm()


def test_chunk_longer_than_a_packed_product_equals_short_chunks() -> None:
    """Products of a packed weight are cut at 256 rows; the cut must not show."""
    config = ModelConfig.from_hf(tiny_hf_model("llama", max_position_embeddings=512).config)
    decoder = Decoder(config, dummy_weights(config, dtype=torch.bfloat16, device=CPU))
    ids = prompts(300)[0]
    whole = Stepper(decoder, 1, 300).step([ids])
    parts = Stepper(decoder, 1, 300)
    again = torch.cat([parts.step([ids[:150]]), parts.step([ids[150:]])])
    torch.testing.assert_close(whole, again, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("rows", [1, 23, 24, 300])
@pytest.mark.parametrize("has_bias", [False, True])
def test_float32_copy_of_a_weight_multiplies_as_exactly(rows: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(80, 48).bfloat16(), torch.randn(rows, 48).bfloat16()
    bias = torch.randn(80).bfloat16() if has_bias else None
    linear = Linear(weight.clone(), bias, has_float32=True)
    truth = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert linear(x).dtype == torch.bfloat16
    torch.testing.assert_close(linear(x).double(), truth, rtol=2**-8, atol=2**-8)
    if linear.is_packed:
        assert linear.nbytes == 3 * weight.nbytes + (bias.nbytes if bias is not None else 0)


def test_float32_copies_serve_products_of_many_rows() -> None:
    config = ModelConfig.from_hf(tiny_hf_model("llama").config)
    plain, copied = (
        Decoder(
            config, dummy_weights(config, dtype=torch.bfloat16, device=CPU), has_float32=has_float32
        )
        for has_float32 in (False, True)
    )
    ids = prompts(30)[:1]
    few, many = [ids[0][:10]], [ids[0]]
    assert torch.equal(Stepper(plain, 1, 32).step(few), Stepper(copied, 1, 32).step(few))
    torch.testing.assert_close(
        Stepper(plain, 1, 32).step(many), Stepper(copied, 1, 32).step(many), atol=2e-2, rtol=2e-2
    )


def test_weight_bytes_count_tied_embeddings_once_in_fp32() -> None:
    tied = ModelConfig.from_hf(tiny_hf_model("llama", tie_word_embeddings=True).config)
    plain = ModelConfig.from_hf(tiny_hf_model("llama").config)
    sizes = [
        Decoder(config, dummy_weights(config, dtype=torch.float32, device=CPU)).weight_bytes
        for config in (tied, plain)
    ]
    assert sizes[1] - sizes[0] == 97 * 32 * 4


@pytest.mark.model
def test_default_model_logits_equal_transformers_in_fp32(default_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.from_directory(default_model_dir)
    text = tokenizer.render_chat([{"role": "user", "content": "List three rivers:\n\n1. Nile"}])
    ids = tokenizer.encode(text)
    model = AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32)
    expected = hf_logits(model, ids)
    config = ModelConfig.from_directory(default_model_dir)
    weights = load_weights(default_model_dir, config, dtype=torch.float32, device=CPU)
    stepper = Stepper(Decoder(config, weights, max_positions=64), 1, len(ids))
    chunks = ids[:20], ids[20:-1], ids[-1:]
    got = torch.cat([stepper.step([chunk]) for chunk in chunks])
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-4)
    assert torch.equal(got.argmax(-1), expected.argmax(-1))
