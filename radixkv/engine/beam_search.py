"""Beam search over the branches of one request."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from radixkv.engine.branch import Branch
from radixkv.engine.sampler import Expansion

if TYPE_CHECKING:
    from radixkv.engine.request import EngineRequest

__all__ = ["BeamSearch"]


class BeamSearch:
    """Owns the finished beams of a request and decides which continuations run on.

    Each step takes the best continuations of all running beams. Of those that end, the ones among
    the best `width` compete for the `width` places of finished beams; of the others the best
    `width` are the next running beams. Beams that come from one parent are forks of it, so that
    only a partly filled last block is ever copied.

    The answers and scores are those of transformers' `generate(num_beams=width)`, which also
    defines what `length_penalty` and `early_stopping` mean.

    Attributes:
        finished: at most `width` ended branches, best first, each with its `score`.
    """

    def __init__(self, request: EngineRequest) -> None:
        self.width = request.params.num_branches
        self.finished: list[Branch] = []
        self._request = request

    def num_candidates(self, end_token_ids: Collection[int]) -> int:
        """Return how many continuations to look at, so that `width` of them can't all end.

        Args:
            end_token_ids: the model's own.
        """
        params = self._request.params
        ends = set(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= set(end_token_ids)
        return max(2, 1 + len(ends)) * self.width

    def advance(self, candidates: Sequence[Expansion], end_token_ids: Collection[int]) -> int:
        """Replace the running beams by their best continuations, none when the search is over.

        Args:
            candidates: best first; the KV of their branches is committed.
            end_token_ids: the model's own.

        Returns:
            The number of tokens that were appended to a beam, running or finished.

        Cost: a fork for each running beam.
        """
        request, parents = self._request, self._request.live
        survivors: list[Branch] = []
        sources: list[Expansion] = []
        num_finished = 0
        for rank, candidate in enumerate(candidates):
            if rank >= self.width and len(survivors) == self.width:
                break
            child = self._child(candidate, len(survivors), end_token_ids)
            if child.finish_reason is None:
                if len(survivors) < self.width:
                    survivors.append(child)
                    sources.append(candidate)
            elif rank < self.width:
                num_finished += 1
                self.finished.append(child)
        # Now that nothing can fail any more, a tokenizer or a grammar: what is forked holds blocks.
        for child, candidate in zip(survivors, sources, strict=True):
            child.sequence = candidate.branch.sequence.fork()
            child.sequence.append((candidate.token_id,))
        self.finished.sort(key=lambda b: -_score(b))
        del self.finished[self.width :]
        for parent in parents:
            # What was computed for a beam that lost is of no use to anyone.
            parent.sequence.free(keep_tail=False)
        if not self._can_improve(survivors):
            for branch in survivors:
                branch.sequence.free(keep_tail=False)
            survivors = []
        request.has_forked = True
        request.live = survivors
        request.branches = list(survivors or self.finished)
        return len(survivors) + num_finished

    def _child(self, candidate: Expansion, index: int, end_token_ids: Collection[int]) -> Branch:
        """Return the continuation as a branch that holds no blocks."""
        parent = candidate.branch
        child = parent.spawn(index)
        sequence = parent.sequence
        child.sequence = sequence.cache.create_sequence(sequence.token_ids, sequence.namespace)
        child.append(candidate.token_id)
        child.keep(child.read(candidate.token_id, end_token_ids), candidate.logprob)
        child.cumulative_logprob = candidate.score
        child.score = candidate.score / _length_factor(child, child.num_output_tokens)
        return child

    def _can_improve(self, survivors: list[Branch]) -> bool:
        """Whether a running beam could still become one of the best."""
        if not survivors:
            return False
        if len(self.finished) < self.width:
            return True
        params, request = self._request.params, self._request
        if params.early_stopping is True:
            return False
        length = survivors[0].num_output_tokens
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = request.max_total_tokens - request.num_prompt_tokens
        best = survivors[0].cumulative_logprob / _length_factor(survivors[0], length)
        return best > _score(self.finished[-1])


def _score(branch: Branch) -> float:
    assert branch.score is not None
    return branch.score


def _length_factor(branch: Branch, length: int) -> float:
    return math.pow(length, branch.params.length_penalty)
