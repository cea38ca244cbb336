from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import TOLERANCE, make_paged_batch, random_tensor

from radixkv.kernels.paged_prefill import choose_tile_rows, paged_prefill, plan_tiles
from radixkv.kernels.reference_prefill import tree_reference
from radixkv.kernels.tree_verify import pack_tree_mask, tree_verify

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
INT8, FP8 = torch.int8, torch.float8_e4m3fn


class Case:
    """Sequences with drafted tokens, ready to be launched and compared with the reference."""

    def __init__(
        self,
        query_lens: list[int],
        context_lens: list[int],
        device: torch.device,
        *,
        mask: torch.Tensor | None = None,
        dtype: torch.dtype = F32,
        kv_dtype: torch.dtype | None = None,
        group_size: int = 2,
        num_kv_heads: int = 1,
        head_dim: int = 64,
        block_size: int = 16,
        tile_rows: int | None = None,
        seed: int = 0,
        **pool: Any,
    ) -> None:
        self.batch = make_paged_batch(
            [n + m for n, m in zip(context_lens, query_lens, strict=True)],
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=kv_dtype or dtype,
            device=device,
            seed=seed,
            **pool,
        )
        generator = torch.Generator().manual_seed(seed)
        shape = (sum(query_lens), group_size * num_kv_heads, head_dim)
        self.query = random_tensor(shape, dtype, generator, device)
        self.mask = mask
        if mask is None:  # any mask, with bits past a sequence's last token set too
            self.mask = torch.rand((shape[0], max(query_lens)), generator=generator) < 0.4
        starts = [0, *accumulate(query_lens)]
        self.starts = torch.tensor(starts, dtype=torch.int32, device=device)
        self.tile_rows = tile_rows or choose_tile_rows(max(query_lens), group_size, head_dim, dtype)
        self.tiles = plan_tiles(query_lens, self.tile_rows, context_lens).to(device)
        self.lse = torch.full(shape[:2], math.nan, device=device)

    @property
    def args(self) -> tuple[Any, ...]:
        batch = self.batch
        tensors = (self.query, batch.k_pool, batch.v_pool, batch.block_tables, batch.seq_lens)
        return (*tensors, self.starts, self.query.shape[-1] ** -0.5)

    def run(self, **options: Any) -> torch.Tensor:
        base = {
            "tree_mask": pack_tree_mask(self.mask).to(self.query.device),
            "tiles": self.tiles,
            "tile_rows": self.tile_rows,
            "k_scale": self.batch.k_scale,
            "v_scale": self.batch.v_scale,
            "lse": self.lse,
        }
        return tree_verify(*self.args, **(base | options))

    def check(self, **options: Any) -> None:
        out = self.run(**options)
        want, want_lse = tree_reference(
            *self.args,
            tree_mask=self.mask,
            k_scale=self.batch.k_scale,
            v_scale=self.batch.v_scale,
            **options,
        )
        tolerance = TOLERANCE[self.query.dtype]
        torch.testing.assert_close(out.cpu().double(), want, rtol=0, atol=tolerance)
        tolerance = 1e-5 if self.batch.k_scale is None else tolerance
        torch.testing.assert_close(self.lse.cpu().double(), want_lse, rtol=1e-6, atol=tolerance)


def ancestors(parents: list[int]) -> torch.Tensor:
    """Return for each node which nodes are its ancestors or itself; a root's parent is -1."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


DRAFTS = ([1, 7, 40], [30, 0, 77])  # drafted tokens and contexts, one of them empty


@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype", "group_size", "num_kv_heads"),
    [
        (64, 16, F32, 3, 3),
        (80, 8, F16, 1, 2),
        (96, 32, BF16, 2, 1),
        (128, 128, BF16, 4, 1),
        (256, 64, F16, 2, 1),
    ],
)
def test_verify_of_any_mask_equals_reference(
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    group_size: int,
    num_kv_heads: int,
    device: torch.device,
) -> None:
    Case(
        *DRAFTS,
        device,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        group_size=group_size,
        num_kv_heads=num_kv_heads,
    ).check()


@pytest.mark.parametrize("kv_dtype", [INT8, FP8])
def test_verify_of_quantised_pool_equals_reference(
    kv_dtype: torch.dtype, device: torch.device
) -> None:
    Case(*DRAFTS, device, dtype=F16, kv_dtype=kv_dtype, per_channel=True).check(softcap=5.0)


def test_verify_of_a_tree_equals_causal_attention_along_each_path(device: torch.device) -> None:
    parents, context = [-1, 0, 0, 1, 1, 2, -1, 6], 21
    case = Case([len(parents)], [context], device, mask=ancestors(parents))
    out = case.run()
    k, v = (x[:, 0].to(device) for x in case.batch.dense(0))
    for leaf in (3, 4, 5, 7):
        path = case.mask[leaf].nonzero()[:, 0].tolist()
        seen = [*range(context), *(context + node for node in path)]
        for head in range(2):
            query = case.query[leaf, head].double()
            weights = (k[seen] @ query * case.args[-1]).softmax(0)
            want = (weights @ v[seen]).float()
            torch.testing.assert_close(out[leaf, head], want, rtol=0, atol=TOLERANCE[F32])


def test_verify_of_a_chain_equals_prefill(device: torch.device) -> None:
    mask = torch.cat([torch.ones(n, 40, dtype=torch.bool).tril() for n in DRAFTS[0]])
    case = Case(*DRAFTS, device, mask=mask)
    want = paged_prefill(*case.args, tiles=case.tiles, tile_rows=case.tile_rows, window=33)
    torch.testing.assert_close(case.run(window=33), want, rtol=0, atol=2e-6)


def test_verify_of_beams_that_share_a_tail_equals_reference(device: torch.device) -> None:
    """Three beams of two tokens behind a common tail of five; no beam sees another."""
    mask = torch.zeros(11, 11, dtype=torch.bool)
    mask[:5, :5] = torch.ones(5, 5).tril().bool()
    for beam in (5, 7, 9):
        mask[beam : beam + 2, :5] = True
        mask[beam, beam] = mask[beam + 1, beam] = mask[beam + 1, beam + 1] = True
    Case([11], [43], device, mask=mask).check()


def test_verify_row_that_sees_only_the_context_equals_reference(device: torch.device) -> None:
    case = Case([6], [19], device, mask=torch.zeros(6, 6, dtype=torch.bool))
    case.check()
    assert bool(case.lse.isfinite().all())


def test_verify_row_that_sees_nothing_gets_zeros(device: torch.device) -> None:
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[2] = False
    case = Case([6], [0], device, mask=mask)
    out = case.run()
    assert bool((out[2] == 0).all())
    assert bool((case.lse[2] == -math.inf).all())
    case.check()


@pytest.mark.parametrize("window", [1, 2, 20, 60])
def test_verify_with_window_counts_positions_by_depth(window: int, device: torch.device) -> None:
    parents = [-1, *(node // 3 for node in range(39))]
    mask = ancestors(parents)
    depth = (mask.sum(1) - 1).to(torch.int32)
    case = Case([40, 40], [50, 9], device, mask=mask.repeat(2, 1), block_size=8)
    positions = torch.cat([50 + depth, 9 + depth]).to(device)
    case.check(window=window, positions=positions)


def test_verify_with_window_sees_siblings_that_are_deeper_than_it_is_wide(
    device: torch.device,
) -> None:
    case = Case([40], [9], device, mask=torch.ones(40, 40, dtype=torch.bool))
    case.check(window=5, positions=torch.full((40,), 100, dtype=torch.int32, device=device))


@pytest.mark.parametrize("window", [1, 15, 70])
def test_verify_with_window_counts_slots_by_default(window: int, device: torch.device) -> None:
    Case(*DRAFTS, device).check(window=window)


@pytest.mark.parametrize("num_tokens", [33, 256])
def test_verify_of_many_nodes_equals_reference(num_tokens: int, device: torch.device) -> None:
    Case([num_tokens], [13], device, group_size=1, dtype=F16).check()


def test_verify_reads_words_of_64_bits(device: torch.device) -> None:
    case = Case([100, 3], [13, 40], device, group_size=1, dtype=F16)
    want = case.run()
    bits = torch.zeros(103, 128, dtype=torch.int64)
    bits[:, :100] = case.mask
    words = (bits.view(103, 2, 64) << torch.arange(64)).sum(-1)  # bit 63 is the sign
    assert torch.equal(case.run(tree_mask=words.to(device)), want)


def test_verify_takes_nodes_past_the_words_as_unseen(device: torch.device) -> None:
    case = Case([40], [13], device)
    case.mask[:, 32:] = False
    want = case.run()
    words = pack_tree_mask(case.mask).to(device)
    words[:, 1] = -1
    assert torch.equal(case.run(tree_mask=words[:, :1]), want)


def test_verify_with_padding_tiles_leaves_other_rows_alone(device: torch.device) -> None:
    case = Case([3, 5], [20, 0], device)
    want = case.run().clone()
    case.query = torch.cat([case.query, torch.full_like(case.query, math.nan)])
    case.mask = torch.cat([case.mask, ~case.mask])
    case.lse = torch.full(case.query.shape[:2], 7.0, device=device)
    case.tiles = plan_tiles([3, 5], case.tile_rows, num_tiles=4).to(device)
    out = case.run(out=torch.full_like(case.query, 7.0))
    assert torch.equal(out[:8], want)
    assert bool((out[8:] == 7.0).all())


@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_verify_of_any_ragged_batch_equals_reference(
    device: torch.device, data: st.DataObject
) -> None:
    lengths = st.tuples(st.integers(1, 40), st.integers(0, 70))
    pairs = data.draw(st.lists(lengths, min_size=1, max_size=3))
    query_lens, context_lens = [m for m, _ in pairs], [n for _, n in pairs]
    window = data.draw(st.none() | st.integers(1, 50))
    positions = None
    if data.draw(st.booleans()):
        depths = [n + data.draw(st.integers(0, j)) for m, n in pairs for j in range(m)]
        positions = torch.tensor(depths, dtype=torch.int32, device=device)
    case = Case(
        query_lens,
        context_lens,
        device,
        group_size=data.draw(st.integers(1, 4)),
        block_size=data.draw(st.sampled_from([8, 16, 64])),
        tile_rows=data.draw(st.sampled_from([None, 1, 5])),
        seed=data.draw(st.integers(0, 9)),
    )
    case.check(window=window, positions=positions)


@given(
    st.integers(1, 70).flatmap(
        lambda width: st.lists(
            st.lists(st.booleans(), min_size=width, max_size=width), min_size=1, max_size=4
        )
    )
)
def test_packed_mask_has_bit_j_of_a_row_in_word_j_by_32(rows: list[list[bool]]) -> None:
    words = pack_tree_mask(torch.tensor(rows)).tolist()
    assert len(words[0]) == -(-len(rows[0]) // 32)
    for row, packed in zip(rows, words, strict=True):
        assert [bool(packed[j // 32] >> j % 32 & 1) for j in range(len(row))] == row


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tree_mask": torch.zeros(3, 1, dtype=torch.int32)}, "tree_mask must have shape"),
        ({"tree_mask": torch.zeros(4, 1)}, "tree_mask must be int32 or int64"),
        ({"positions": torch.zeros(5, dtype=torch.int32)}, "positions must have shape"),
        ({"positions": torch.zeros(4, dtype=torch.int64)}, "positions must be int32"),
        ({"tiles": torch.zeros(1, 3, dtype=torch.int32)}, "tiles must have shape"),
    ],
)
def test_verify_rejects_a_bad_argument(change: dict[str, Any], message: str) -> None:
    case = Case([4], [20], torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        case.run(**change)
