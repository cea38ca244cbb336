from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.kernels.reference import paged_attention
from radixkv.model.attention import AttentionMetadata, PrefixGroup
from radixkv.model.cpu_attention import CpuAttention
from radixkv.model.cpu_attention_plan import Tuning
from radixkv.model.kv_pool import KVPool

LAYERS, DIM = 2, 16
# Absolute and relative; outputs are means of standard normal values.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
GATHER_ALL = Tuning(min_run=10**9, min_split=10**9)
VIEW_ALL = Tuning(min_run=1, max_runs=10**9, min_split=1, min_wide_split=1)
MIXED = Tuning(min_run=9, max_runs=2, min_split=2, min_wide_split=3, min_bucket=4)
# One kernel head per KV head, as for models with many of them.
B = 4  # block size of the cases with trees
NARROW_GATHER_ALL = replace(GATHER_ALL, max_wide=0)
NARROW_VIEW_ALL = replace(VIEW_ALL, max_wide=0)
NARROW_MIXED = replace(MIXED, max_wide=0)
TUNINGS = [GATHER_ALL, VIEW_ALL, MIXED, NARROW_GATHER_ALL, NARROW_VIEW_ALL, NARROW_MIXED]


@dataclass
class Case:
    """A batch over a pool that is NaN except where the sequences' tokens are."""

    pool: KVPool
    metadata: AttentionMetadata
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def run(self, tuning: Tuning = MIXED, *, groups: bool = True, layer: int = 1) -> torch.Tensor:
        backend = _backend(self.pool, self.query.shape[1], tuning)
        metadata = self.metadata
        if not groups:
            metadata = replace(metadata, groups=())
        backend.plan(metadata)
        return backend.run(layer, self.query, self.key, self.value)

    def expected(self, layer: int = 1) -> torch.Tensor:
        """Return the reference's output; the new tokens must have been written."""
        out: torch.Tensor = paged_attention(
            self.query.double(),
            self.pool.k[layer],
            self.pool.v[layer],
            [torch.from_numpy(table) for table in self.metadata.block_tables],
            torch.from_numpy(self.metadata.seq_lens),
            torch.from_numpy(self.metadata.query_start_loc),
            DIM**-0.5,
        )[0]
        return out

    def expected_of_trees(self, layer: int = 1) -> torch.Tensor:
        """Return what new tokens that see each other as the tree masks say attend to."""
        metadata, query = self.metadata, self.query.double()
        out = torch.empty_like(query)
        starts = metadata.query_start_loc.tolist()
        for seq, mask in enumerate(metadata.tree_masks):
            first, last, seq_len = starts[seq], starts[seq + 1], int(metadata.seq_lens[seq])
            context = seq_len - (last - first)
            blocks = torch.from_numpy(metadata.block_tables[seq][: -(-seq_len // B)].copy())
            k, v = (
                pool[layer][blocks].flatten(0, 1)[:seq_len].double().repeat_interleave(3, 1)
                for pool in (self.pool.k, self.pool.v)
            )
            sees = np.tri(last - first, dtype=np.bool_) if mask is None else mask
            sees = np.concatenate([np.ones((last - first, context), np.bool_), sees], axis=1)
            scores = torch.einsum("qhd,khd->hqk", query[first:last], k) * DIM**-0.5
            scores.masked_fill_(torch.from_numpy(~sees), float("-inf"))
            out[first:last] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        return out

    def check(self, tuning: Tuning = MIXED, *, groups: bool = True) -> None:
        out = self.run(tuning, groups=groups)
        assert out.dtype == self.query.dtype
        tol = TOLERANCE[out.dtype]
        torch.testing.assert_close(out.double(), self.expected(), rtol=tol, atol=tol)


def _backend(pool: KVPool, num_heads: int, tuning: Tuning) -> CpuAttention:
    return CpuAttention(
        pool,
        num_heads=num_heads,
        num_kv_heads=pool.num_kv_heads,
        head_dim=DIM,
        scale=DIM**-0.5,
        tuning=tuning,
    )


def _case(
    seqs: list[tuple[int, int]],
    groups: tuple[tuple[int, int, int], ...] = (),
    *,
    block_size: int = 4,
    heads: tuple[int, int] = (6, 2),
    dtype: torch.dtype = torch.float32,
    order: str = "shuffled",
    num_blocks: int | None = None,
    seed: int = 0,
) -> Case:
    """Build a batch.

    Args:
        seqs: per sequence, tokens in the pool before (those of its groups included) and new ones.
        groups: first and last sequence and number of blocks, parents first.
        order: of the block ids: "consecutive", "shuffled" or "pieces" of three blocks.
        num_blocks: in the pool, of which the last are used; just enough if None.
    """
    rng = np.random.default_rng(seed)
    gen = torch.Generator().manual_seed(seed)
    used = sum(-(-(old + new) // block_size) for old, new in seqs) + 1
    num_blocks = num_blocks or used
    ids = np.arange(num_blocks - used, num_blocks, dtype=np.int32)
    if order == "shuffled":
        rng.shuffle(ids)
    elif order == "pieces":
        pieces = np.array_split(ids, max(1, used // 3))
        ids = np.concatenate([pieces[i] for i in rng.permutation(len(pieces))])
    pool = KVPool(LAYERS, num_blocks, block_size, heads[1], DIM, dtype)
    pool.data.fill_(float("nan"))
    free = iter(ids.tolist())

    tables: list[list[int]] = [[] for _ in seqs]
    prefix_groups = []
    for first, last, count in groups:
        start = len(tables[first])
        shared = [next(free) for _ in range(count)]
        for table in tables[first:last]:
            table += shared
        prefix_groups.append(PrefixGroup(first, last, start, start + count))
    slot_mapping: list[int] = []
    for table, (old, new) in zip(tables, seqs, strict=True):
        while len(table) * block_size < old + new:
            table.append(next(free))
        slots = [table[i // block_size] * block_size + i % block_size for i in range(old + new)]
        slot_mapping += slots[old:]
        shape = (LAYERS, old, heads[1], DIM)
        for data in pool.data.flatten(2, 3):
            data[:, slots[:old]] = torch.randn(shape, generator=gen).to(dtype)
    num_tokens = sum(new for _, new in seqs)
    # The layout of a fused projection: K and V are strided views.
    fused = torch.randn((num_tokens, heads[0] + 2 * heads[1], DIM), generator=gen).to(dtype)
    query, key, value = torch.split(fused, [heads[0], heads[1], heads[1]], dim=1)
    metadata = AttentionMetadata(
        query_start_loc=np.cumsum([0] + [new for _, new in seqs], dtype=np.int32),
        seq_lens=np.array([old + new for old, new in seqs], dtype=np.int32),
        block_tables=tuple(np.array([*t, 2**31 - 1, -7], dtype=np.int32) for t in tables),
        slot_mapping=np.array(slot_mapping, dtype=np.int64),
        groups=tuple(prefix_groups),
    )
    return Case(pool, metadata, query, key, value)


@pytest.fixture(autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(2)


@pytest.mark.parametrize("tuning", TUNINGS)
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize("order", ["consecutive", "shuffled", "pieces"])
def test_decode_at_block_boundaries(tuning: Tuning, block_size: int, order: str) -> None:
    b = block_size
    lens = [1, 2, max(b - 1, 1), b, b + 1, 2 * b - 1, 2 * b, 2 * b + 1, 9 * b + 3]
    _case([(n - 1, 1) for n in lens], block_size=b, order=order).check(tuning)


@pytest.mark.parametrize("tuning", TUNINGS)
@pytest.mark.parametrize("order", ["consecutive", "shuffled", "pieces"])
@pytest.mark.parametrize("context", [0, 1, 3, 4, 5, 8, 61])
def test_single_decode(tuning: Tuning, order: str, context: int) -> None:
    _case([(context, 1)], order=order).check(tuning)


@pytest.mark.parametrize("tuning", TUNINGS)
@pytest.mark.parametrize("order", ["consecutive", "shuffled", "pieces"])
def test_prefill_chunks_mixed_with_decodes(tuning: Tuning, order: str) -> None:
    seqs = [(7, 1), (0, 5), (30, 1), (9, 3), (64, 17), (0, 1), (16, 4)]
    _case(seqs, order=order).check(tuning)


@pytest.mark.parametrize("new", [2, 31, 33, 70, 260])
@pytest.mark.parametrize("old", [0, 3, 130])
def test_single_prefill(old: int, new: int) -> None:
    _case([(old, new)], order="pieces").check(MIXED)


NESTED = (
    [(50, 1), (43, 1), (61, 6), (40, 1), (44, 1), (24, 2), (24, 1), (9, 1)],
    ((0, 7, 6), (0, 5, 3), (3, 5, 1)),
)


@pytest.mark.parametrize("tuning", TUNINGS)
@pytest.mark.parametrize("order", ["consecutive", "shuffled", "pieces"])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (5, 1)])
def test_groups_nested_three_deep(tuning: Tuning, order: str, heads: tuple[int, int]) -> None:
    _case(*NESTED, order=order, heads=heads).check(tuning)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("tuning", TUNINGS)
def test_every_dtype(dtype: torch.dtype, tuning: Tuning) -> None:
    _case(*NESTED, order="pieces", dtype=dtype).check(tuning)


def test_groups_give_the_result_of_no_groups() -> None:
    case = _case(*NESTED, order="pieces")
    with_groups, without = case.run(), case.run(groups=False)
    torch.testing.assert_close(with_groups, without, rtol=2e-5, atol=2e-5)


def test_default_tuning_on_long_runs() -> None:
    seqs = [(2100, 1), (2100, 70), (2900, 1), (2048, 1)]
    case = _case(seqs, ((0, 4, 128),), block_size=16, order="consecutive", dtype=torch.bfloat16)
    case.check(Tuning())
    case.check(Tuning(), groups=False)


def test_block_ids_over_16_bits_give_the_bits_of_low_ones() -> None:
    low = _case(*NESTED, order="pieces")
    high = _case(*NESTED, order="pieces", num_blocks=70_000)
    assert torch.equal(low.run(), high.run())


def test_same_batch_gives_the_same_bits_whatever_ran_between() -> None:
    case = _case(*NESTED, order="pieces", dtype=torch.bfloat16)
    backend = _backend(case.pool, 6, MIXED)
    backend.plan(case.metadata)
    first = backend.run(1, case.query, case.key, case.value)
    for last_seq in (1, 2, 5):
        num_tokens = int(case.metadata.query_start_loc[last_seq])
        backend.plan(
            AttentionMetadata(
                case.metadata.query_start_loc[: last_seq + 1],
                case.metadata.seq_lens[:last_seq],
                case.metadata.block_tables[:last_seq],
                case.metadata.slot_mapping[:num_tokens],
            )
        )
        rows = slice(num_tokens)
        backend.run(1, torch.full_like(case.query[rows], 3.0), case.key[rows], case.value[rows])
        backend.plan(case.metadata)
        assert torch.equal(backend.run(1, case.query, case.key, case.value), first)


@pytest.mark.parametrize("seqs", [NESTED[0], [(12, 40)], [(3, 1)], [(3, 1), (70, 29)]])
@pytest.mark.parametrize("order", ["consecutive", "shuffled"])
def test_writes_land_in_the_slots_of_the_mapping_only(
    seqs: list[tuple[int, int]], order: str
) -> None:
    case = _case(seqs, order=order)
    before = case.pool.data.clone()
    case.run(layer=1)
    slots = torch.from_numpy(case.metadata.slot_mapping)
    assert torch.equal(case.pool.k_slots[1][slots], case.key)
    assert torch.equal(case.pool.v_slots[1][slots], case.value)
    case.pool.data.flatten(2, 3)[:, 1, slots] = before.flatten(2, 3)[:, 1, slots]
    assert torch.equal(case.pool.data.nan_to_num(9.0), before.nan_to_num(9.0))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seqs=st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 1, 2, 5, 18])), min_size=1, max_size=6
    ),
    shares=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    block_size=st.sampled_from([1, 3, 16]),
    order=st.sampled_from(["consecutive", "shuffled", "pieces"]),
    tuning=st.builds(
        Tuning,
        min_run=st.integers(1, 30),
        max_runs=st.integers(0, 3),
        max_wide=st.sampled_from([0, 512]),
        min_wide_split=st.integers(1, 8),
        max_wide_tokens=st.integers(1, 6),
        max_tail_tokens=st.sampled_from([1, 2, 4, 32]),
        min_split=st.integers(1, 20),
        min_bucket=st.integers(0, 30),
    ),
)
def test_any_batch_and_tuning(
    seqs: list[tuple[int, int]],
    shares: tuple[int, int],
    block_size: int,
    order: str,
    tuning: Tuning,
) -> None:
    outer, inner = shares
    half = (len(seqs) + 1) // 2
    groups = ((0, len(seqs), outer), (0, half, inner))
    seqs = [
        (old + (outer + (inner if i < half else 0)) * block_size, new)
        for i, (old, new) in enumerate(seqs)
    ]
    _case(seqs, groups, block_size=block_size, order=order).check(tuning)


@pytest.mark.parametrize(
    ("field", "bad", "message"),
    [
        ("query_start_loc", [0, 0, 2], "at least one new token"),
        ("query_start_loc", [0, 1], "at least one new token"),
        ("seq_lens", [5, 0], "none more than its length"),
        ("seq_lens", [5, 99], "block tables must name"),
        ("slot_mapping", [1, -1], "slot_mapping"),
        ("slot_mapping", [1], "slot_mapping"),
        ("groups", (PrefixGroup(0, 2, 1, 2),), "must start at block 0"),
        ("groups", (PrefixGroup(0, 2, 0, 2),), "within the 4 tokens"),
    ],
)
def test_plan_rejects_what_is_not_a_batch(field: str, bad: object, message: str) -> None:
    case = _case([(4, 1), (6, 1)])
    names = ("query_start_loc", "seq_lens", "block_tables", "slot_mapping", "groups")
    fields = {name: getattr(case.metadata, name) for name in names}
    fields[field] = np.array(bad, dtype=fields[field].dtype) if isinstance(bad, list) else bad
    with pytest.raises(ValueError, match=message):
        _backend(case.pool, 6, MIXED).plan(AttentionMetadata(**fields))


def test_run_rejects_a_batch_that_was_not_planned() -> None:
    case = _case([(4, 1), (6, 1)])
    backend = _backend(case.pool, 6, MIXED)
    with pytest.raises(ValueError, match="planned for None tokens"):
        backend.run(0, case.query, case.key, case.value)
    backend.plan(case.metadata)
    with pytest.raises(ValueError, match="planned for 2 tokens, got 1"):
        backend.run(0, case.query[:1], case.key[:1], case.value[:1])
    with pytest.raises(ValueError, match="query must be"):
        backend.run(0, case.query.half(), case.key.half(), case.value.half())


@pytest.mark.parametrize("order", ["consecutive", "pieces"])
def test_wide_heads_give_the_bits_of_narrow_ones(order: str) -> None:
    """What the zeros beside a query's own KV head add is exactly zero."""
    case = _case([(40, 1), (23, 1), (9, 1)], order=order)
    for wide in (GATHER_ALL, VIEW_ALL):
        unsplit = replace(wide, min_split=10**9, min_wide_split=10**9)
        assert torch.equal(case.run(unsplit), case.run(replace(unsplit, max_wide=0)))


@pytest.mark.parametrize("order", ["consecutive", "pieces"])
@pytest.mark.parametrize("seqs", [[(40, 1), (23, 6), (9, 1)], [(0, 12)], [(30, 9)], [(50, 1)]])
def test_float32_calls_give_what_bfloat16_ones_do(
    order: str, seqs: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixkv.model.cpu_attention.float32_is_faster", lambda: True)
    case = _case(seqs, order=order, dtype=torch.bfloat16)
    always = replace(MIXED, min_float32_rows=1, max_wide=0)
    case.check(always)
    # Operands are rounded alike, so float32 calls are nearer to the truth than bfloat16 ones.
    error = (case.run(always).double() - case.expected()).norm()
    other = (case.run(replace(always, min_float32_rows=10**9)).double() - case.expected()).norm()
    assert error <= 1.05 * other


def _tree_mask(size: int, rng: np.random.Generator) -> np.ndarray:
    """Return what each node of a random tree sees: itself and its ancestors."""
    mask = np.eye(size, dtype=np.bool_)
    for node in range(1, size):
        parent = int(rng.integers(-1, node))
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


@pytest.mark.parametrize("order", ["consecutive", "shuffled"])
@pytest.mark.parametrize("max_tail_tokens", [1, 5, 32])
@pytest.mark.parametrize("seed", range(4))
def test_trees_of_new_tokens_see_their_ancestors_only(
    order: str, max_tail_tokens: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    seqs = [(9, 6), (17, 1), (12, 5), (8, 9), (30, 3), (8, 40)]
    case = _case(seqs, ((0, 5, 2), (2, 4, 0)), order=order, seed=seed)
    masks = tuple(_tree_mask(new, rng) if i % 3 != 1 else None for i, (_, new) in enumerate(seqs))
    case.metadata = replace(case.metadata, tree_masks=masks)
    for tuning in (MIXED, Tuning(), GATHER_ALL):
        out = case.run(replace(tuning, max_tail_tokens=max_tail_tokens)).double()
        torch.testing.assert_close(out, case.expected_of_trees(), rtol=2e-5, atol=2e-5)


def test_lone_tree_with_nothing_before_it() -> None:
    case = _case([(0, 7)])
    case.metadata = replace(case.metadata, tree_masks=(_tree_mask(7, np.random.default_rng(1)),))
    out = case.run(Tuning()).double()
    torch.testing.assert_close(out, case.expected_of_trees(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "mask", [np.ones((2, 2), np.bool_), np.zeros((2, 2), np.bool_), np.eye(3, dtype=np.bool_)]
)
def test_plan_rejects_a_mask_that_is_no_tree(mask: np.ndarray) -> None:
    case = _case([(5, 2), (4, 1)])
    backend = _backend(case.pool, 6, MIXED)
    with pytest.raises(ValueError, match="tree mask of sequence 0"):
        backend.plan(replace(case.metadata, tree_masks=(mask, None)))
    with pytest.raises(ValueError, match="tree_masks must be empty or have 2"):
        backend.plan(replace(case.metadata, tree_masks=(None,)))
