"""Time of CPU attention over the paged pool against torch's own over contiguous K and V.

Run as `python -m loadtests.bench_attention [--quick] [--rounds N]`. The contenders of a case take
turns in one process; each figure is the median over rounds and layers of one layer's call, for ours
with the writes of the new K and V. The shapes are those of the default model: bfloat16, 9 query and
3 KV heads of 64, blocks of 16 tokens. "runs" says whether a sequence's blocks are consecutive
("yes") or in random order ("no"). On a machine that does other work too, set
OMP_WAIT_POLICY=passive in the environment: threads that spin at OpenMP's barriers otherwise make
calls wait for whole time slices.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as nnf
from rich.console import Console
from rich.table import Table

from radixkv.kernels.reference import paged_attention
from radixkv.model.attention import AttentionMetadata, PrefixGroup
from radixkv.model.cpu_attention import CpuAttention
from radixkv.model.kv_pool import KVPool

__all__ = ["main"]

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
SCALE = HEAD_DIM**-0.5
DTYPE = torch.bfloat16
# Enough that a layer's K and V aren't still in a core's own cache when its turn comes again.
NUM_LAYERS = 4


@dataclass(frozen=True, slots=True)
class Case:
    """`num_seqs` sequences of `num_shared` + `num_private` tokens and `num_new` new ones each."""

    name: str
    num_seqs: int
    num_shared: int
    num_private: int
    num_new: int = 1
    fragmented: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """Figures of a case: medians, and the largest differences from the float32 reference."""

    case: str
    fragmented: bool
    ours_ms: float
    ungrouped_ms: float
    sdpa_ms: float
    plan_ms: float
    max_error: float
    sdpa_max_error: float


def main() -> None:
    """Run the cases, print a table, and print the figures as one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contender")
    parser.add_argument("--quick", action="store_true", help="few cases, five rounds")
    args = parser.parse_args()
    rounds = min(args.rounds, 5) if args.quick else args.rounds
    table = Table(title=f"Attention, ms a layer, {torch.get_num_threads()} threads")
    table.add_column("case", no_wrap=True)
    table.add_column("runs")
    for column in ("ours", "no groups", "SDPA", "no groups / ours", "SDPA / ours"):
        table.add_column(column, justify="right")
    results = []
    with torch.inference_mode():
        for case in _cases(quick=args.quick):
            result = _measure(case, rounds)
            results.append(result)
            table.add_row(
                case.name,
                "no" if case.fragmented else "yes",
                *(f"{ms:.3f}" for ms in (result.ours_ms, result.ungrouped_ms, result.sdpa_ms)),
                f"{result.ungrouped_ms / result.ours_ms:.2f}",
                f"{result.sdpa_ms / result.ours_ms:.2f}",
            )
    Console().print(table)
    report = {
        "bench": "attention",
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "results": [asdict(result) for result in results],
    }
    print(json.dumps(report))


def _cases(*, quick: bool) -> list[Case]:
    cases = [Case("1 decode, 1000", 1, 0, 999), Case("1 decode, 4096", 1, 0, 4095)]
    for num_seqs in (8,) if quick else (8, 32):
        for num_shared in (1024, 4096):
            for num_private in (128, 1000):
                name = f"{num_seqs} decodes, {num_shared} shared + {num_private}"
                cases.append(Case(name, num_seqs, num_shared, num_private))
    cases.append(Case("chunk of 128 on 4096", 1, 0, 4096, 128))
    cases.append(Case("chunk of 256 on 4096", 1, 0, 4096, 256))
    cases.append(Case("chunk of 128, no context", 1, 0, 0, 128))
    return [replace(case, fragmented=f) for case in cases for f in (False, True)]


def _measure(case: Case, rounds: int) -> Result:
    pool, metadata = _batch(case)
    gen = torch.Generator().manual_seed(1)
    shape = (case.num_seqs * case.num_new, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
    fused = torch.randn(shape, generator=gen).to(DTYPE)
    query, key, value = torch.split(fused, [NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
    query = query.contiguous()

    backends = [_backend(pool), _backend(pool)]
    ours, ungrouped = backends
    ungrouped.plan(replace(metadata, groups=()))
    plan_ms = []
    for _ in range(rounds):
        start = time.perf_counter()
        ours.plan(metadata)
        plan_ms.append((time.perf_counter() - start) * 1e3)
    outs = [
        backend.run(layer, query, key, value) for layer in range(NUM_LAYERS) for backend in backends
    ]
    contiguous = _contiguous(pool, metadata)
    expected, _ = paged_attention(
        query,
        pool.k[0],
        pool.v[0],
        [torch.from_numpy(table) for table in metadata.block_tables],
        torch.from_numpy(metadata.seq_lens),
        torch.from_numpy(metadata.query_start_loc),
        SCALE,
    )
    error = max(float((out.float() - expected).abs().max()) for out in outs[:2])
    sdpa_error = float((_sdpa(query, contiguous[0], case.num_new) - expected).abs().max())
    medians = _race(
        [
            lambda layer: ours.run(layer, query, key, value),
            lambda layer: ungrouped.run(layer, query, key, value),
            lambda layer: _sdpa(query, contiguous[layer], case.num_new),
        ],
        rounds,
    )
    return Result(
        case=case.name,
        fragmented=case.fragmented,
        ours_ms=medians[0],
        ungrouped_ms=medians[1],
        sdpa_ms=medians[2],
        plan_ms=statistics.median(plan_ms),
        max_error=error,
        sdpa_max_error=sdpa_error,
    )


def _race(contenders: list[Callable[[int], torch.Tensor]], rounds: int) -> list[float]:
    """Return the median milliseconds of a call of each contender, given a layer."""
    times: list[list[float]] = [[] for _ in contenders]
    turns = list(zip(contenders, times, strict=True))
    for _ in range(rounds):
        # Who goes after a contender with the same pool finds more of it in the caches.
        turns.reverse()
        for contender, elapsed in turns:
            for layer in range(NUM_LAYERS):
                start = time.perf_counter()
                contender(layer)
                elapsed.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(elapsed) for elapsed in times]


def _backend(pool: KVPool) -> CpuAttention:
    return CpuAttention(
        pool, num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, scale=SCALE
    )


def _batch(case: Case) -> tuple[KVPool, AttentionMetadata]:
    """Return a pool of random K and V, just large enough, and the batch."""
    shared_blocks = case.num_shared // BLOCK_SIZE
    private_tokens = case.num_private + case.num_new
    private_blocks = -(-private_tokens // BLOCK_SIZE)
    num_blocks = shared_blocks + case.num_seqs * private_blocks
    ids = np.arange(num_blocks, dtype=np.int32)
    if case.fragmented:
        np.random.default_rng(0).shuffle(ids)
    shared, private = ids[:shared_blocks], ids[shared_blocks:].reshape(case.num_seqs, -1)
    tables = tuple(np.concatenate([shared, own]) for own in private)
    pool = KVPool(NUM_LAYERS, num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, DTYPE)
    pool.data.normal_(generator=torch.Generator().manual_seed(0))
    context, seq_len = case.num_shared + case.num_private, case.num_shared + private_tokens
    positions = np.arange(context, seq_len)
    slots = [_slots(table, positions) for table in tables]
    group = PrefixGroup(0, case.num_seqs, 0, shared_blocks)
    metadata = AttentionMetadata(
        query_start_loc=np.arange(case.num_seqs + 1, dtype=np.int32) * case.num_new,
        seq_lens=np.full(case.num_seqs, seq_len, dtype=np.int32),
        block_tables=tables,
        slot_mapping=np.concatenate(slots),
        groups=(group,) if case.num_seqs > 1 and shared_blocks else (),
    )
    return pool, metadata


def _slots(table: npt.NDArray[np.int32], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return table[positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE


def _contiguous(
    pool: KVPool, metadata: AttentionMetadata
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return per layer and sequence copies of K and V, `[1, num_kv_heads, seq_len, head_dim]`."""
    layers = []
    for layer in range(NUM_LAYERS):
        copies = []
        for table, seq_len in zip(metadata.block_tables, metadata.seq_lens.tolist(), strict=True):
            slots = torch.from_numpy(_slots(table, np.arange(seq_len)))
            k, v = (
                data[layer][slots].transpose(0, 1).contiguous().unsqueeze(0)
                for data in (pool.k_slots, pool.v_slots)
            )
            copies.append((k, v))
        layers.append(copies)
    return layers


def _sdpa(
    query: torch.Tensor, kv: list[tuple[torch.Tensor, torch.Tensor]], num_new: int
) -> torch.Tensor:
    outs = []
    seq_len = kv[0][0].shape[2]
    mask = None
    if num_new > 1 and seq_len > num_new:
        mask = torch.ones(num_new, seq_len, dtype=torch.bool).tril_(seq_len - num_new)
    for i, (k, v) in enumerate(kv):
        rows = query[i * num_new : (i + 1) * num_new].transpose(0, 1).unsqueeze(0)
        out = nnf.scaled_dot_product_attention(
            rows,
            k,
            v,
            attn_mask=mask,
            is_causal=num_new == seq_len and num_new > 1,
            scale=SCALE,
            enable_gqa=True,
        )
        outs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outs)


if __name__ == "__main__":
    main()
