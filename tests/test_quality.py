from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from radixkv import quality
from radixkv.cli import app
from radixkv.config import ServeConfig, load_config
from radixkv.engine import Engine, SamplingParams
from radixkv.engine.factory import assemble_engine
from radixkv.engine.runner import ModelRunner
from radixkv.engine.runner_setup import prepare_runner
from radixkv.engine.tiering_setup import kv_fingerprint
from radixkv.errors import ConfigError
from radixkv.model.loader import LoadedModel, load_model
from radixkv.quality import QualitySettings, compare, perplexity, quality_text

NUM_TOKENS = 6
TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "float32",
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that reads bytes."""
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(TINY))
    return path


def load(path: Path, quantization: str = "none", dtype: str = "float32") -> LoadedModel:
    return load_model(
        str(path), load_format="dummy", dtype=dtype, device="cpu", quantization=quantization
    )


def text_tokens(loaded: LoadedModel, count: int) -> list[int]:
    return loaded.tokenizer.encode(quality_text())[:count]


def answer(engine: Engine, prompt: list[int]) -> tuple[list[int], int]:
    """Return the greedy answer to a prompt, and how many of its tokens were cached."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    engine.add_request("a", prompt, params)
    tokens: list[int] = []
    cached = 0
    while engine.has_work:
        for item in engine.step():
            tokens += item.output.token_ids
            if item.output.finish_reason is not None:
                cached = item.output.num_cached_tokens
    engine.cache.check_integrity()
    return tokens, cached


def test_perplexity_equals_that_of_one_step_over_all_tokens(tiny_dir: Path) -> None:
    loaded = load(tiny_dir)
    ids = text_tokens(loaded, 60)
    runner = prepare_runner(loaded, block_size=4).build(15)
    chunked, count = perplexity(runner, ids, window=60, chunk=7)
    with torch.inference_mode():
        logits = runner.execute(quality._batch(runner, torch.tensor(ids).numpy(), 0, 60)).double()
    picked = logits.log_softmax(-1)[torch.arange(59), torch.tensor(ids[1:])]
    assert count == 59
    assert chunked == pytest.approx(math.exp(-picked.mean()), rel=1e-5)


def test_windows_know_nothing_of_each_other(tiny_dir: Path) -> None:
    loaded = load(tiny_dir)
    ids = text_tokens(loaded, 50)
    runner = prepare_runner(loaded, block_size=4).build(5)
    both, count = perplexity(runner, ids, window=20, chunk=8)
    parts = [
        perplexity(runner, part, window=20, chunk=8) for part in (ids[:20], ids[20:40], ids[40:])
    ]
    assert count == sum(n for _, n in parts) == 47
    assert math.log(both) * 47 == pytest.approx(sum(math.log(p) * n for p, n in parts))


def test_perplexity_of_one_token_is_refused(tiny_dir: Path) -> None:
    runner = prepare_runner(load(tiny_dir), block_size=4).build(5)
    with pytest.raises(ValueError, match="needs two tokens or more, got 1"):
        perplexity(runner, [5], window=20, chunk=8)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_what_the_pool_rounds_reaches_the_perplexity(tiny_dir: Path, kv_cache_dtype: str) -> None:
    loaded = load(tiny_dir)
    ids = text_tokens(loaded, 120)
    values = {}
    for name in ("auto", kv_cache_dtype):
        runner = prepare_runner(loaded, block_size=4, kv_cache_dtype=name).build(30)
        values[name], _ = perplexity(runner, ids, window=120, chunk=16)
    assert values[kv_cache_dtype] != values["auto"]
    assert values[kv_cache_dtype] == pytest.approx(values["auto"], rel=0.01)


def test_chunks_do_not_change_what_a_quantized_pool_gives(tiny_dir: Path) -> None:
    """New tokens once read each other's unrounded K and V, and only later chunks the pool's."""
    loaded = load(tiny_dir)
    ids = text_tokens(loaded, 64)
    runner = prepare_runner(loaded, block_size=4, kv_cache_dtype="int8").build(16)
    values = [perplexity(runner, ids, window=64, chunk=chunk)[0] for chunk in (64, 16, 1)]
    assert values[1:] == pytest.approx([values[0]] * 2, rel=1e-6)


def test_compare_reports_both(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_tiny(model: str | None, **options: Any) -> LoadedModel:
        return load_model(model, load_format="dummy", **options)

    monkeypatch.setattr(quality, "load_model", load_tiny)
    settings = QualitySettings(
        model=str(tiny_dir), device="cpu", quantization="int8", kv_cache_dtype="int8",
        num_tokens=80, window=64, chunk=32,
    )  # fmt: skip
    report = compare(settings)
    assert report.num_tokens == 78
    assert report.quantized != report.baseline
    assert abs(report.change) < 0.05
    assert report.weight_bytes < report.baseline_weight_bytes
    assert compare(replace(settings, quantization="none", kv_cache_dtype="auto")).change == 0
    options = ["--model", str(tiny_dir), "--device", "cpu", "--tokens", "80", "--window", "64"]
    result = CliRunner().invoke(
        app, ["bench", "quality", *options, "--quantization", "int8", "--kv-cache-dtype", "int8"]
    )
    assert result.exit_code == 0, result.output
    line = json.loads(result.stdout.strip().splitlines()[-1])
    assert line["baseline"] == pytest.approx(report.baseline, rel=1e-3)
    assert line["change"] == line["quantized"] / line["baseline"] - 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--quantization", "int4"], "--quantization must be one of none, int8, got 'int4'"),
        (["--kv-cache-dtype", "fp4"], "--kv-cache-dtype must be one of auto, int8, fp8, got 'fp4'"),
    ],
)
def test_bench_refuses_what_it_does_not_know(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "quality", "--device", "cpu", *options])
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("option", ["quantization", "kv_cache_dtype"])
def test_serve_refuses_what_it_does_not_know(option: str) -> None:
    flag = "--" + option.replace("_", "-")
    with pytest.raises(ConfigError, match=f"^{flag} must be one of .*, got 'int4'$"):
        load_config({option: "int4"}, environ={})


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
def test_an_engine_answers_alike_cold_and_warm(tiny_dir: Path, kv_cache_dtype: str) -> None:
    loaded = load(tiny_dir, "int8")
    config = ServeConfig(
        device="cpu", kv_cache_dtype=kv_cache_dtype, kv_cache_memory=10**6, block_size=4
    )
    engine = assemble_engine(loaded, config).engine.engine
    prompt = text_tokens(loaded, 70)
    cold, cached = answer(engine, prompt)
    assert cached == 0
    warm, cached = answer(engine, prompt)
    assert cached >= 64
    assert warm == cold


def test_8_bits_double_the_blocks(tiny_dir: Path) -> None:
    loaded = load(tiny_dir, dtype="bfloat16")
    built = {
        name: assemble_engine(
            loaded, ServeConfig(device="cpu", kv_cache_dtype=name, kv_cache_memory=10**6)
        )
        for name in ("auto", "int8", "fp8")
    }
    assert built["auto"].kv_dtype == built["auto"].dtype == "bfloat16"
    for name, dtype in (("int8", "int8"), ("fp8", "float8_e4m3fn")):
        assert built[name].kv_dtype == dtype
        assert built[name].dtype == "bfloat16"
        assert 2 * built[name].bytes_per_block == built["auto"].bytes_per_block
        assert built[name].num_blocks == 10**6 // built[name].bytes_per_block
        runner = built[name].engine.engine.runner
        assert isinstance(runner, ModelRunner)
        assert runner.pool.nbytes == built[name].kv_bytes


def test_fingerprint_differs_with_scales_and_quantization(tiny_dir: Path) -> None:
    loaded, config = load(tiny_dir), ServeConfig()
    setup = prepare_runner(loaded, block_size=4, kv_cache_dtype="int8")
    assert setup.scales is not None
    pool = setup.build(3).pool
    first = kv_fingerprint(loaded, config, pool)
    again = prepare_runner(loaded, block_size=4, kv_cache_dtype="int8").build(3).pool
    assert kv_fingerprint(loaded, config, again) == first
    seen = {first, kv_fingerprint(loaded, replace(config, quantization="int8"), pool)}
    for name in ("k", "v"):
        changed = getattr(setup.scales, name).clone()
        changed[2, 1, 15] *= 1.001
        other = replace(setup, scales=replace(setup.scales, **{name: changed}))
        seen.add(kv_fingerprint(loaded, config, other.build(3).pool))
    assert len(seen) == 4


@pytest.mark.model
@pytest.mark.timeout(300)
def test_default_model_in_8_bits_answers_sensibly(default_model_dir: Path) -> None:
    loaded = load_model(str(default_model_dir), quantization="int8", device="cpu")
    config = ServeConfig(
        device="cpu", quantization="int8", kv_cache_dtype="int8", kv_cache_memory=128 * 1024**2
    )
    built = assemble_engine(loaded, config)
    prompt = loaded.tokenizer.encode(
        "The capital of Germany is Berlin. The capital of Italy is Rome. The capital of France is"
    )
    cold, _ = answer(built.engine.engine, prompt)
    warm, cached = answer(built.engine.engine, prompt)
    assert cached >= 16
    assert warm == cold
    assert loaded.tokenizer.decode(cold).startswith(" Paris")
    assert built.bytes_per_block == 184_320
    assert built.weight_bytes < 200 * 10**6
