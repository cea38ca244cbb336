"""Follows the drafts of a step as far as they are what the sampler draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from radixkv.engine.answers import Output
from radixkv.engine.branch import Branch
from radixkv.engine.runner import Runner
from radixkv.engine.sampler import SampledToken, Sampler
from radixkv.engine.scheduler import ScheduledChunk
from radixkv.engine.speculation import DraftWalk, Speculator
from radixkv.engine.step_cost import StepLoad

__all__ = ["DraftVerifier"]


class DraftVerifier:
    """Owns what happens to drafts once the model has computed them: draw, compare, keep or stop.

    Source: prompt lookup with the sampler's own draws as the criterion, after Leviathan et al.,
    2023, section 2.3; a draw depends on the seed and the position only, so no correction is needed.
    """

    def __init__(self, speculator: Speculator, sampler: Sampler, block_size: int) -> None:
        self._speculator = speculator
        self._sampler = sampler
        self._block_size = block_size

    def verify(
        self,
        chunks: Sequence[ScheduledChunk],
        drawn: Sequence[tuple[Branch, int, SampledToken]],
        logits: torch.Tensor,
        runner: Runner,
        accept: Callable[[Branch, SampledToken], list[Output]],
    ) -> list[Output]:
        """Go on from the tokens drawn along the drafts, as far as these were right.

        Args:
            chunks: of the step.
            drawn: per branch the row of logits of its last known token, and what was drawn there.
            logits: `[rows, vocab_size]`, all rows of the step, as the model gave them.
            runner: of the step; moves the KV of drafted tokens to where their sequence has them.
            accept: files the drafted token that a branch ends with, and accepts the one drawn
                behind it.

        Returns:
            What `accept` returned.
        """
        drafts = {c.branch: c.draft for c in chunks if c.draft is not None}
        if not drafts:
            return []
        outputs: list[Output] = []
        walks = [
            DraftWalk(branch, drafts[branch], row, token.token_id)
            for branch, row, token in drawn
            if branch in drafts
        ]
        going = walks
        while going := [walk for walk in going if walk.advance()]:
            moves = [move for walk in going for move in walk.take_moves(self._block_size)]
            if moves:
                runner.move_slots(moves)
            with torch.inference_mode():
                tokens = self._sampler.sample(
                    logits[[walk.row for walk in going]], [walk.branch for walk in going]
                )
            for walk, token in zip(going, tokens, strict=True):
                walk.tokens.append(token.token_id)
                outputs += accept(walk.branch, token)
        for walk in walks:
            self._speculator.record_walk(walk.draft, walk.tokens)
        return outputs

    def judge(
        self, chunks: Sequence[ScheduledChunk], load: StepLoad, num_decodes: int, seconds: float
    ) -> None:
        """Tell the speculator what a step took, if it had drafts.

        Args:
            chunks: of the step.
            load: of the step, drafts included.
            num_decodes: branches that decoded. Not counted here: by now the sequences have grown
                past what their chunks computed.
            seconds: it took.
        """
        drafted = [c for c in chunks if c.draft is not None]
        for chunk in drafted:
            load = load.minus(chunk.start + 1, chunk.num_rows - chunk.count)
        if drafted:
            self._speculator.record_step(load, num_decodes, seconds)
