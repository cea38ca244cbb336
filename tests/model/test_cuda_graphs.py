"""Recorded decode steps, with a recorder that repeats the calls on the recorded buffers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from triton_cases import DIM, Case, make_case, twins

from radixkv.model import cuda_graphs
from radixkv.model.attention import AttentionMetadata
from radixkv.model.cuda_graphs import CudaGraphCapture, DecodeGraphs, Forward, batch_ladder
from radixkv.model.packed_buffer import PackedBuffer
from radixkv.model.triton_attention import TritonAttention
from radixkv.model.triton_attention_plan import GraphShape
from radixkv.model.triton_kernels import Kernels

VOCAB = 33
MAX_MODEL_LEN = 4096
HEADS = (6, 2)


class Repeater:
    """Records like a GPU does: what was planned when it recorded, and the tensors of then."""

    def __init__(self, *, fails: bool = False) -> None:
        self.num_captures = 0
        self.num_replays = 0
        self.fails = fails

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.num_captures += 1
        if self.fails:
            raise RuntimeError("out of memory")
        run()

        def replay() -> None:
            self.num_replays += 1
            run()

        return replay


def make_forward(attention: TritonAttention) -> Forward:
    """A model of one layer whose logits depend on ids, positions and all of the history."""
    gen = torch.Generator().manual_seed(1)
    device, width = attention.pool.device, (HEADS[0] + 2 * HEADS[1]) * DIM
    by_id = torch.randn((97, width), generator=gen).to(device)
    by_position = torch.randn((MAX_MODEL_LEN, width), generator=gen).to(device)
    head = torch.randn((HEADS[0] * DIM, VOCAB), generator=gen).to(device)

    def forward(ids: torch.Tensor, positions: torch.Tensor, logits: torch.Tensor) -> None:
        fused = by_id.index_select(0, ids) + by_position.index_select(0, positions)
        fused = fused.view(len(ids), -1, DIM)
        query, key, value = fused.split([HEADS[0], HEADS[1], HEADS[1]], dim=1)
        logits.copy_(attention.run(1, query, key, value).flatten(1) @ head)

    return forward


def make_graphs(
    case: Case, capture: Repeater | CudaGraphCapture, kernels: Kernels | None, max_num_seqs: int = 8
) -> DecodeGraphs:
    attention = case.backend(kernels)
    return DecodeGraphs(
        make_forward(attention),
        attention,
        capture,
        max_num_seqs=max_num_seqs,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB,
    )


def inputs_of(metadata: AttentionMetadata, seed: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(seed).integers(0, 97, metadata.num_seqs)
    return ids, (metadata.seq_lens - 1).astype(np.int64)


def eager(case: Case, metadata: AttentionMetadata, seed: int) -> torch.Tensor:
    """What the same model gives with a batch that is neither padded nor recorded."""
    attention = case.backend(twins()[0] if case.pool.device.type == "cpu" else None)
    ids, positions = attention.plan_step(metadata, inputs_of(metadata, seed))
    logits = torch.empty((metadata.num_seqs, VOCAB), device=case.pool.device)
    make_forward(attention)(ids, positions, logits)
    return logits


def part(metadata: AttentionMetadata, first: int, last: int) -> AttentionMetadata:
    """Some of the sequences of a decode batch, without groups."""
    return AttentionMetadata(
        query_start_loc=np.arange(last - first + 1, dtype=np.int32),
        seq_lens=metadata.seq_lens[first:last],
        block_tables=metadata.block_tables[first:last],
        slot_mapping=metadata.slot_mapping[first:last],
    )


def check(graphs: DecodeGraphs, case: Case, metadata: AttentionMetadata, seed: int = 0) -> None:
    logits = graphs.run(*inputs_of(metadata, seed), metadata)
    assert logits is not None
    expected = eager(case, metadata, seed)
    torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-3)


# Three levels of groups over five sequences, and two sequences apart.
SEQS = [(300, 1), (290, 1), (285, 1), (200, 1), (180, 1), (30, 1), (0, 1)]
GROUPS = ((0, 5, 16), (0, 3, 8), (0, 2, 8))


def test_ladder_ends_with_the_largest_batch() -> None:
    assert batch_ladder(1) == (1,)
    assert batch_ladder(3) == (1, 2, 3)
    assert batch_ladder(33) == (1, 2, 4, 8, 16, 24, 32, 33)
    assert batch_ladder(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)


def test_replay_sees_new_data() -> None:
    case, recorder = make_case(SEQS), Repeater()
    graphs = make_graphs(case, recorder, twins()[0])
    for seed in range(3):
        check(graphs, case, case.metadata, seed)
    # The same shape with other sequences, lengths and slots, and fewer of them.
    check(graphs, case, part(case.metadata, 1, 7), seed=3)
    assert (recorder.num_captures, recorder.num_replays) == (1, 4)


def test_padding_writes_nothing() -> None:
    case = make_case(SEQS)
    graphs = make_graphs(case, Repeater(), twins()[0])
    before = case.pool.data.clone()
    check(graphs, case, part(case.metadata, 0, 3))
    slots = torch.from_numpy(case.metadata.slot_mapping[:3])
    assert not torch.equal(case.pool.k_slots[1][slots], before[0, 1].flatten(0, 1)[slots])
    case.pool.data.flatten(2, 3)[:, 1, slots] = before.flatten(2, 3)[:, 1, slots]
    assert torch.equal(case.pool.data.nan_to_num(9.0), before.nan_to_num(9.0))


def test_rows_that_pad_are_empty_whatever_was_there_before() -> None:
    case = make_case(SEQS, GROUPS)
    attention, shape = case.backend(twins()[0]), GraphShape(8, 128, 4)
    buffer = PackedBuffer(
        case.pool.device, capacity=PackedBuffer.size_of(attention.graph_fields(shape, 1))
    )

    def plan(metadata: AttentionMetadata) -> list[int]:
        inputs = (np.arange(1, metadata.num_seqs + 1),)
        split = attention.split(metadata)
        return attention.plan_decode(metadata, split, inputs, shape, buffer)[0].tolist()

    assert plan(case.metadata) == [1, 2, 3, 4, 5, 6, 7, 0]
    assert plan(part(case.metadata, 0, 2)) == [1, 2, 0, 0, 0, 0, 0, 0]
    assert attention.step is not None
    assert attention.step.slot_mapping[2:].tolist() == [-1] * 6
    decodes = attention.step.decodes
    assert decodes is not None
    assert decodes.seq_lens.tolist() == [301, 291, 0, 0, 0, 0, 0, 0]
    assert decodes.groups.start_lens.tolist() == [0] * 8
    assert decodes.groups.last_seq.tolist() == [0] * 7


def test_groups_are_padded_and_those_of_the_step_before_forgotten() -> None:
    nested, recorder = make_case(SEQS, GROUPS), Repeater()
    kernels, calls = twins()
    graphs = make_graphs(nested, recorder, kernels)
    check(graphs, nested, nested.metadata)
    assert graphs.shapes == (GraphShape(8, 128, 4),)
    calls.clear()
    # Three groups at three levels, then the first of them alone: another shape, then the same.
    for count in (3, 1, 2, 3, 1):
        fields = part(nested.metadata, 0, 7)
        some = AttentionMetadata(
            fields.query_start_loc,
            fields.seq_lens,
            fields.block_tables,
            fields.slot_mapping,
            nested.metadata.groups[:count],
        )
        check(graphs, nested, some, seed=count)
    check(graphs, nested, part(nested.metadata, 0, 7))
    assert [shape.num_levels for shape in graphs.shapes] == [4, 1, 2, 0]
    assert calls["prefix_decode"] > calls["paged_decode"] > 0


def test_contexts_are_told_apart_by_powers_of_two() -> None:
    case = make_case([(1023, 1), (1024, 1), (2300, 1)])
    graphs = make_graphs(case, Repeater(), twins()[0])
    for index in range(3):
        check(graphs, case, part(case.metadata, index, index + 1))
    assert [shape.max_blocks * 8 for shape in graphs.shapes] == [1024, 2048, 4096]


def test_steps_that_no_graph_fits_are_left_to_the_caller() -> None:
    case, recorder = make_case(SEQS), Repeater()
    graphs = make_graphs(case, recorder, twins()[0], max_num_seqs=4)
    meta = case.metadata
    assert graphs.run(*inputs_of(meta, 0), meta) is None
    chunk = make_case([(5, 2), (9, 1)])
    assert graphs.run(np.zeros(3, np.int64), np.zeros(3, np.int64), chunk.metadata) is None
    long = make_case([(MAX_MODEL_LEN, 1)]).metadata
    assert graphs.run(*inputs_of(long, 0), long) is None
    assert recorder.num_captures == 0
    check(graphs, case, part(meta, 0, 4))


def test_what_was_recorded_at_warm_up_is_not_recorded_again() -> None:
    case, recorder = make_case(SEQS, GROUPS[:1]), Repeater()
    graphs = make_graphs(case, recorder, twins()[0])
    before = case.pool.data.clone()
    assert [(s.num_rows, s.num_levels) for s in graphs.warm_up_shapes] == [
        *((8, 0), (8, 1), (4, 0), (4, 1), (2, 0), (2, 1), (1, 0))
    ]
    for shape in graphs.warm_up_shapes:
        graphs.record(shape)
    assert torch.equal(case.pool.data.nan_to_num(9.0), before.nan_to_num(9.0))
    num_captures = recorder.num_captures
    for last in (1, 2, 4, 7):
        check(graphs, case, part(case.metadata, 0, last))
    check(graphs, case, case.metadata)
    assert recorder.num_captures == num_captures == 7


def test_failure_to_record_turns_graphs_off(caplog: pytest.LogCaptureFixture) -> None:
    case, recorder = make_case(SEQS), Repeater(fails=True)
    graphs = make_graphs(case, recorder, twins()[0])
    for _ in range(2):
        assert graphs.run(*inputs_of(case.metadata, 0), case.metadata) is None
    assert recorder.num_captures == 1
    assert "can't be recorded" in caplog.text


def test_invalid_batch_is_rejected() -> None:
    case = make_case(SEQS)
    graphs = make_graphs(case, Repeater(), twins()[0])
    meta = part(case.metadata, 0, 2)
    meta.slot_mapping[0] = 10**9
    with pytest.raises(ValueError, match="slot_mapping"):
        graphs.run(*inputs_of(meta, 0), meta)


def test_capture_warms_up_on_its_stream_before_it_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU is asked to do, in which order; whether it can is for a machine with one."""
    events: list[str] = []
    capture_options = inspect.signature(torch.cuda.graph.__init__).parameters

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            events.append(f"{self.name} waits for {other.name}")

    class Graph:
        def replay(self) -> None:
            events.append("replay")

    @contextmanager
    def on(what: str) -> Iterator[None]:
        events.append(f"enter {what}")
        yield
        events.append(f"leave {what}")

    def graph(_: Graph, **options: object) -> AbstractContextManager[None]:
        assert set(options) <= set(capture_options)
        assert isinstance(options["stream"], Stream)
        return on(f"graph in {options['pool']} on {options['stream'].name}")

    cuda = SimpleNamespace(
        graph_pool_handle=lambda: "pool",
        Stream=lambda _: Stream("side"),
        current_stream=lambda _: Stream("main"),
        stream=lambda stream: on(stream.name),
        CUDAGraph=Graph,
        graph=graph,
    )
    monkeypatch.setattr(cuda_graphs.torch, "cuda", cuda)
    capture = CudaGraphCapture(torch.device("cuda"))
    for _ in range(2):
        events.clear()
        capture.capture(lambda: events.append("run"))()
        assert events == [
            *("side waits for main", "enter side", "run", "leave side", "main waits for side"),
            *("enter graph in pool on side", "run", "leave graph in pool on side", "replay"),
        ]


def test_recorded_steps_with_the_kernels(device: torch.device) -> None:
    case = make_case([(90, 1), (85, 1), (0, 1)], ((0, 2, 8),), device=device)
    recorder = Repeater() if device.type == "cpu" else CudaGraphCapture(device)
    graphs = make_graphs(case, recorder, None, max_num_seqs=4)
    check(graphs, case, case.metadata, seed=1)
    check(graphs, case, case.metadata, seed=2)
    check(graphs, case, part(case.metadata, 0, 3), seed=3)
    assert len(graphs.shapes) == 2
