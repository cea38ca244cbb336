"""The runner with a tiny model and the Triton kernels, with and without recorded steps."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from radixkv.engine import factory
from radixkv.engine.batch import ForwardBatch
from radixkv.engine.runner import ModelRunner, launch
from radixkv.errors import ConfigError
from radixkv.model.attention import AttentionMetadata
from radixkv.model.backends import build_attention
from radixkv.model.config import ModelConfig, RopeConfig
from radixkv.model.cuda_graphs import DecodeGraphs
from radixkv.model.decoder import Decoder
from radixkv.model.kv_pool import KVPool
from radixkv.model.weights import dummy_weights

BLOCK_SIZE = 8
VOCAB = 61
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
CONFIG = ModelConfig(
    family="llama",
    vocab_size=VOCAB,
    hidden_size=96,
    intermediate_size=48,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(10000.0),
    max_position_embeddings=64,
)


class Repeater:
    """Records by keeping the call."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_replays = 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()

        def replay() -> None:
            self.num_replays += 1
            run()

        return replay


def make_runner(num_blocks: int = 8, *, attention: str = "triton") -> ModelRunner:
    device = DEVICE if attention == "triton" else torch.device("cpu")
    decoder = Decoder(CONFIG, dummy_weights(CONFIG, dtype=torch.float32, device=device))
    pool = KVPool(2, num_blocks, BLOCK_SIZE, 1, 64, torch.float32, device)
    return ModelRunner(decoder, pool, build_attention(attention, pool, CONFIG, torch.float32))


def make_graphs(monkeypatch: pytest.MonkeyPatch, runner: ModelRunner) -> tuple[DecodeGraphs, list]:
    """Graphs as the factory records them, by a recorder that needs no GPU."""
    recorders: list[Repeater] = []

    def capture(device: torch.device) -> Repeater:
        recorders.append(Repeater(device))
        return recorders[-1]

    monkeypatch.setattr(factory, "CudaGraphCapture", capture)
    return factory._record_graphs(runner, 2, 64, None), recorders


def make_batch(
    seqs: list[tuple[int, int]], *, rows: list[int] | None = None, seed: int = 0
) -> ForwardBatch:
    """Sequence i has blocks 4i to 4i + 3; per sequence (tokens before, new tokens)."""
    starts = np.cumsum([0] + [new for _, new in seqs]).astype(np.int32)
    tables = tuple(np.arange(4 * i, 4 * i + 4, dtype=np.int32) for i in range(len(seqs)))
    positions = np.concatenate([np.arange(old, old + new) for old, new in seqs])
    first = np.repeat([4 * i * BLOCK_SIZE for i in range(len(seqs))], [new for _, new in seqs])
    return ForwardBatch(
        token_ids=np.random.default_rng(seed).integers(0, VOCAB, len(positions)),
        positions=positions,
        logits_rows=np.array(starts[1:] - 1 if rows is None else rows, dtype=np.int64),
        attention=AttentionMetadata(
            query_start_loc=starts,
            seq_lens=np.array([old + new for old, new in seqs], dtype=np.int32),
            block_tables=tables,
            slot_mapping=(first + positions).astype(np.int64),
        ),
    )


def check_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=1e-4, atol=1e-5)


def test_recorded_steps_give_the_logits_of_steps_that_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, recorded = make_runner(attention="cpu"), make_runner()
    recorded.graphs, recorders = make_graphs(monkeypatch, recorded)
    warmed_up = len(recorded.graphs.shapes)
    assert warmed_up == 3  # two sequences with and without groups, and one alone
    prefill = make_batch([(0, 9), (0, 4)])
    check_close(recorded.execute(prefill), plain.execute(prefill))
    replays = recorders[0].num_replays
    for step in range(3):
        batch = make_batch([(9 + step, 1), (4 + step, 1)], seed=step)
        check_close(recorded.execute(batch), plain.execute(batch))
    assert recorders[0].num_replays == replays + 3
    assert len(recorded.graphs.shapes) == warmed_up
    check_close(recorded.pool.data, plain.pool.data)


def test_step_that_wants_not_every_row_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner()
    runner.graphs, recorders = make_graphs(monkeypatch, runner)
    runner.execute(make_batch([(0, 5), (0, 5)]))
    every = runner.execute(make_batch([(5, 1), (5, 1)])).clone()
    replays = recorders[0].num_replays
    second = runner.execute(make_batch([(5, 1), (5, 1)], rows=[1]))
    assert recorders[0].num_replays == replays
    check_close(second, every[1:])


def test_copies_come_before_the_step() -> None:
    runner = make_runner(attention="cpu")
    expected = runner.execute(make_batch([(0, 9)]))
    moved = make_batch([(8, 1)])
    moved.attention.block_tables[0][0] = 6
    copied = ForwardBatch(
        make_batch([(0, 9)]).token_ids[8:],
        moved.positions,
        moved.logits_rows,
        moved.attention,
        copies=((0, 6),),
    )
    check_close(runner.execute(copied), expected)


def test_launch_of_a_runner_that_can_only_execute() -> None:
    batch, logits = make_batch([(0, 3)]), torch.ones(1, VOCAB)
    runner = SimpleNamespace(vocab_size=VOCAB, execute=lambda given: logits * (given is batch))
    step = launch(runner, batch)
    assert torch.equal(step.logits(), logits)
    assert torch.equal(step.result(), logits)


def test_launched_step_has_the_logits_of_execute() -> None:
    runner = make_runner(attention="cpu")
    batch = make_batch([(0, 5), (0, 3)])
    step = launch(runner, batch)
    assert torch.equal(step.result(), runner.execute(batch))


def test_memory_left_on_a_gpu_is_measured_with_the_largest_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runners: list[ModelRunner] = []
    batches: list[ForwardBatch] = []

    def tiny(num_blocks: int) -> ModelRunner:
        runner = make_runner(num_blocks, attention="cpu")
        monkeypatch.setattr(
            runner, "launch", lambda b: batches.append(b) or ModelRunner.launch(runner, b)
        )
        runners.append(runner)
        return runner

    cuda = SimpleNamespace(
        reset_peak_memory_stats=lambda _: None,
        memory_allocated=lambda _: 500,
        max_memory_allocated=lambda _: 720,
        empty_cache=lambda: None,
        mem_get_info=lambda _: (10_000, 20_000),
    )
    monkeypatch.setattr(factory.torch, "cuda", cuda)
    free = factory._free_gpu_memory(tiny, BLOCK_SIZE, num_tokens=100, num_logits=7)
    assert free == 10_000 - 220
    assert runners[0].pool.num_blocks == 13
    assert len(batches[0].token_ids) == 100
    assert len(batches[0].logits_rows) == 7
    assert batches[0].positions.max() == CONFIG.max_position_embeddings - 1


def test_memory_for_blocks_outside_of_its_range_is_rejected() -> None:
    assert factory._num_blocks(1000, 100, 5000) == 10
    for memory in (199, 5001):
        with pytest.raises(ConfigError, match="--kv-cache-memory must be from 200 B"):
            factory._num_blocks(memory, 100, 5000)
