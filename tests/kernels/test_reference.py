import pytest
import torch
import torch.nn.functional as nnf

from radixkv.kernels.reference import merge_partials, paged_attention


def _paged(lens: list[int], block_size: int, kv_heads: int, dim: int) -> tuple[torch.Tensor, ...]:
    """Return K and V pools of random values and a block table `[num_seqs, max_blocks]`."""
    gen = torch.Generator().manual_seed(0)
    max_blocks = max(-(-n // block_size) for n in lens)
    num_blocks = len(lens) * max_blocks + 3
    shape = (num_blocks, block_size, kv_heads, dim)
    k = torch.randn(shape, generator=gen, dtype=torch.float64)
    v = torch.randn(shape, generator=gen, dtype=torch.float64)
    order = torch.randperm(num_blocks, generator=gen)[: len(lens) * max_blocks]
    return k, v, order.view(len(lens), max_blocks)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_paged_attention_equals_sdpa_of_contiguous_kv(heads: int, kv_heads: int) -> None:
    lens, query_lens, dim = [1, 4, 5, 11], [1, 4, 2, 1], 8
    k, v, tables = _paged(lens, 4, kv_heads, dim)
    loc = torch.tensor([0, 1, 5, 7, 8])
    query = torch.randn(8, heads, dim, dtype=torch.float64)

    out, lse = paged_attention(query, k, v, tables, torch.tensor(lens), loc, 0.3)

    for i, (n, m) in enumerate(zip(lens, query_lens, strict=True)):
        keys = k[tables[i]].flatten(0, 1)[:n].transpose(0, 1)
        values = v[tables[i]].flatten(0, 1)[:n].transpose(0, 1)
        mask = torch.ones(m, n, dtype=torch.bool).tril(n - m)
        rows = query[loc[i] : loc[i + 1]].transpose(0, 1)
        want = nnf.scaled_dot_product_attention(
            rows[None], keys[None], values[None], attn_mask=mask, scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(out[loc[i] : loc[i + 1]], want[0].transpose(0, 1))
        scores = (rows @ keys.repeat_interleave(heads // kv_heads, 0).mT) * 0.3
        want_lse = scores.masked_fill(~mask, float("-inf")).logsumexp(-1).T
        torch.testing.assert_close(lse[loc[i] : loc[i + 1]], want_lse)


def test_paged_attention_ignores_slots_and_table_entries_past_the_end() -> None:
    k, v, tables = _paged([5], 4, 1, 8)
    query = torch.randn(1, 2, 8, dtype=torch.float64)
    args = (torch.tensor([5]), torch.tensor([0, 1]), 1.0)
    want, _ = paged_attention(query, k, v, tables, *args)
    k[tables[0, 1], 1:] = float("nan")
    v[tables[0, 1], 1:] = float("nan")
    out, _ = paged_attention(query, k, v, [torch.tensor([*tables[0].tolist(), 10**6])], *args)
    assert torch.equal(out, want)


def test_paged_attention_of_half_precision_computes_in_float32() -> None:
    k, v, tables = _paged([9], 4, 1, 8)
    k, v, query = k.bfloat16(), v.bfloat16(), torch.randn(3, 2, 8).bfloat16()
    args = (tables, torch.tensor([9]), torch.tensor([0, 3]), 1.0)
    out, lse = paged_attention(query, k, v, *args)
    want, want_lse = paged_attention(query.double(), k.double(), v.double(), *args)
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-6)


def test_merge_partials_of_disjoint_parts_equals_attention_over_all() -> None:
    scores, values = torch.randn(3, 12, dtype=torch.float64), torch.randn(12, 8).double()
    outs, lses = [], []
    for part in (slice(0, 1), slice(1, 9), slice(9, 12)):
        outs.append(scores[:, part].softmax(-1) @ values[part])
        lses.append(scores[:, part].logsumexp(-1))
    out, lse = merge_partials(torch.stack(outs), torch.stack(lses))
    torch.testing.assert_close(out, scores.softmax(-1) @ values)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_merge_partials_ignores_a_part_without_tokens() -> None:
    out, lse = torch.randn(2, 3, 8), torch.randn(2, 3)
    outs = torch.stack([out, torch.full_like(out, 7.0)])
    lses = torch.stack([lse, torch.full_like(lse, float("-inf"))])
    merged, merged_lse = merge_partials(outs, lses)
    assert torch.equal(merged, out)
    assert torch.equal(merged_lse, lse)
