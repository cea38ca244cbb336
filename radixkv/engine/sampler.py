"""Chooses the next token of every branch that is due one."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from xxhash import xxh3_64_intdigest

from radixkv.engine.branch import Branch
from radixkv.request import SamplingParams, TokenLogprob

__all__ = ["Expansion", "SampledToken", "Sampler", "uniform"]

# A nucleus is first looked for among this many most likely tokens; sorting all of them is the
# fallback.
NUCLEUS_CANDIDATES = 1024
# The inverse of the cumulative distribution is taken in two levels: chunk sums, then one chunk.
CDF_CHUNK = 256


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token, with its log-probabilities if the request asked for them."""

    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class Expansion:
    """A possible next token of a branch.

    Attributes:
        score: log-probability of the branch with this token.
        logprob: of the token, if the request asked for it.
    """

    branch: Branch
    token_id: int
    score: float
    logprob: TokenLogprob | None = None


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that depends on the seed and the position only.

    Being counter-based, a resumed or repeated request draws the same numbers, whatever ran beside
    it.
    """
    bits: int = xxh3_64_intdigest(struct.pack("<qq", seed, position))
    return (bits >> 11) / float(1 << 53)


class Sampler:
    """Turns logits into tokens. Each row depends on its own branch only, never on the batch."""

    def __init__(self, eos_token_ids: Iterable[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)

    def sample(self, logits: torch.Tensor, branches: Sequence[Branch]) -> list[SampledToken]:
        """Choose one token per row.

        Args:
            logits: `[num_rows, vocab]` float32; changed in place.
            branches: the branch of each row.
        """
        logprobs = [
            logits[i].log_softmax(dim=-1) if _wants_logprobs(b.params) else None
            for i, b in enumerate(branches)
        ]
        for row, branch in enumerate(branches):
            if self._is_adjusted(branch):
                self._adjust(logits[row], branch)
        token_ids = _most_likely(logits)
        drawn = [i for i, b in enumerate(branches) if not b.params.is_greedy]
        if drawn:
            rows = torch.tensor(drawn, device=logits.device)
            token_ids[rows] = _draw(logits[rows], [branches[i] for i in drawn])
        return [
            SampledToken(token_id, _describe(token_id, raw, branch.params))
            for token_id, raw, branch in zip(token_ids.tolist(), logprobs, branches, strict=True)
        ]

    def expand(
        self, logits: torch.Tensor, branches: Sequence[Branch], count: int
    ) -> list[Expansion]:
        """Return the `count` most likely continuations by one token of any of the branches.

        Penalties, biases and masks change the log-probabilities, which aren't normalized again.

        Args:
            logits: `[num_branches, vocab]` float32; not changed.
            branches: of one request; their `cumulative_logprob` counts.
            count: how many, best first; fewer if there aren't as many, or the others are masked.
        """
        raw = logits.log_softmax(dim=-1)
        scores = raw.clone()
        for row, branch in enumerate(branches):
            self._adjust(scores[row], branch)
        before = [b.cumulative_logprob for b in branches]
        scores += torch.tensor(before, dtype=scores.dtype, device=scores.device)[:, None]
        values, places = scores.flatten().topk(min(count, scores.numel()))
        expansions = []
        for score, place in zip(values.tolist(), places.tolist(), strict=True):
            if score == -math.inf:
                break
            row, token_id = divmod(place, scores.shape[-1])
            params = branches[row].params
            wanted = raw[row] if params.logprobs is not None else None
            logprob = _describe(token_id, wanted, params)
            expansions.append(Expansion(branches[row], token_id, score, logprob))
        return expansions

    def _is_adjusted(self, branch: Branch) -> bool:
        """Whether `_adjust` does anything."""
        params = branch.params
        return (
            branch.penalties is not None
            or branch.grammar is not None
            or bool(params.logit_bias)
            or branch.num_output_tokens < params.min_tokens
        )

    def _adjust(self, logits: torch.Tensor, branch: Branch) -> None:
        params = branch.params
        if branch.penalties is not None:
            branch.penalties.apply(logits, params)
        if params.logit_bias:
            ids, biases = zip(*params.logit_bias, strict=True)
            index = torch.tensor(ids, device=logits.device)
            logits[index] += torch.tensor(biases, dtype=logits.dtype, device=logits.device)
        if branch.grammar is not None:  # it knows of min_tokens
            allowed = torch.from_numpy(branch.grammar.allowed(branch.num_output_tokens))
            logits.masked_fill_(~allowed.to(logits.device), -torch.inf)
        elif branch.num_output_tokens < params.min_tokens:
            ends = [*params.stop_token_ids, *self._eos_token_ids]
            logits[torch.tensor(ends, dtype=torch.int64, device=logits.device)] = -torch.inf


def _wants_logprobs(params: SamplingParams) -> bool:
    return params.logprobs is not None or params.holds_back


def _most_likely(logits: torch.Tensor) -> torch.Tensor:
    """Return the greedy token of each row, `[num_rows]` int64."""
    if logits.device.type == "cpu":
        # On a CPU torch's own compares one number at a time, numpy's a vector of them.
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def _describe(
    token_id: int, raw: torch.Tensor | None, params: SamplingParams
) -> TokenLogprob | None:
    if raw is None:
        return None
    top: tuple[tuple[int, float], ...] = ()
    if params.logprobs:
        values, ids = raw.topk(params.logprobs)
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token_id, float(raw[token_id]), top)


def _draw(logits: torch.Tensor, branches: Sequence[Branch]) -> torch.Tensor:
    """Draw one token id per row from the filtered distribution; `[num_rows]` int64."""
    temperatures = torch.tensor(
        [b.params.temperature for b in branches], dtype=torch.float32, device=logits.device
    )
    # Subtracting the maximum first keeps a tiny temperature from overflowing.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures[:, None]
    probs = logits.softmax(dim=-1)
    draws = [uniform(b.seed, b.num_output_tokens) for b in branches]
    token_ids = torch.empty(len(branches), dtype=torch.int64, device=logits.device)
    for row, (branch, draw) in enumerate(zip(branches, draws, strict=True)):
        params = branch.params
        if params.top_k <= 0 and params.top_p >= 1.0 and params.min_p <= 0.0:
            token_ids[row] = _invert_cdf(probs[row], draw)
        else:
            kept, ids = _filter(probs[row], params)
            token_ids[row] = ids[_invert_cdf(kept, draw)]
    return token_ids


def _filter(probs: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (probabilities, token ids) that top_k, top_p and min_p leave, most likely first.

    top_p is taken of what top_k leaves. The first token always stays.
    """
    vocab = probs.shape[-1]
    wanted = params.top_k if params.top_k > 0 else NUCLEUS_CANDIDATES
    values, ids = probs.topk(min(wanted, vocab))
    total = float(values.sum(dtype=torch.float64)) if params.top_k > 0 else 1.0
    if params.top_k <= 0 and len(values) < vocab:
        enough = float(values.sum(dtype=torch.float64)) >= params.top_p < 1.0
        enough |= params.min_p > 0.0 and float(values[-1]) < params.min_p * float(values[0])
        if not enough:
            values, ids = probs.sort(descending=True)
    keep = values >= params.min_p * values[0]
    if params.top_p < 1.0:
        before = values.cumsum(dim=-1, dtype=torch.float64) - values
        keep &= before < params.top_p * total
    keep[0] = True
    return values[keep], ids[keep]


def _invert_cdf(probs: torch.Tensor, draw: float) -> int:
    """Return the index at which the cumulative sum of `probs` passes `draw` times the total."""
    padded = torch.nn.functional.pad(probs, (0, -len(probs) % CDF_CHUNK)).view(-1, CDF_CHUNK)
    chunk_ends = padded.sum(dim=-1, dtype=torch.float64).cumsum(dim=0)
    target = draw * float(chunk_ends[-1])
    chunk = min(int(torch.searchsorted(chunk_ends, target, right=True)), len(chunk_ends) - 1)
    before = float(chunk_ends[chunk - 1]) if chunk else 0.0
    within = padded[chunk].cumsum(dim=0, dtype=torch.float64)
    index = int(torch.searchsorted(within, target - before, right=True))
    index = chunk * CDF_CHUNK + min(index, CDF_CHUNK - 1)
    # Rounding at the very end can point past the last token of non-zero probability.
    while index > 0 and (index >= len(probs) or float(probs[index]) == 0.0):
        index -= 1
    return index
