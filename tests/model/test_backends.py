from __future__ import annotations

import pytest
import torch

from radixkv.errors import ConfigError
from radixkv.model.backends import build_attention, choose_attention, resolve_device
from radixkv.model.config import ModelConfig, RopeConfig
from radixkv.model.cpu_attention import CpuAttention
from radixkv.model.kv_pool import KVPool
from radixkv.model.triton_attention import TritonAttention

MODEL = ModelConfig(
    family="llama",
    vocab_size=97,
    hidden_size=256,
    intermediate_size=48,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(10000.0),
    max_position_embeddings=64,
)


def make_pool(block_size: int = 16, device: torch.device | str = "cpu") -> KVPool:
    return KVPool(1, 4, block_size, 2, 64, torch.float32, device)


@pytest.mark.parametrize(("has_gpu", "expected"), [(False, "cpu"), (True, "cuda")])
def test_auto_runs_on_a_gpu_if_there_is_one(
    has_gpu: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert resolve_device("auto").type == expected
    assert resolve_device("cpu").type == "cpu"


def test_cuda_without_a_gpu_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="--device cuda can't be used: torch"):
        resolve_device("cuda")


def test_attention_suits_the_device() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert [choose_attention("auto", device) for device in (cpu, gpu)] == ["cpu", "triton"]
    assert choose_attention("triton", cpu) == "triton"
    with pytest.raises(ConfigError, match="--attention cpu can't be used on cuda:0"):
        choose_attention("cpu", gpu)


def test_backend_is_the_one_named(device: torch.device) -> None:
    cpu = build_attention("cpu", make_pool(), MODEL, torch.float32)
    triton = build_attention("triton", make_pool(device=device), MODEL, torch.float32)
    assert isinstance(cpu, CpuAttention)
    assert isinstance(triton, TritonAttention)


def test_block_size_without_a_kernel_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"--attention triton can't be used: .*block_size"):
        build_attention("triton", make_pool(12), MODEL, torch.float32)
