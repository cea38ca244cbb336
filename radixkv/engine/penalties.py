"""Repetition, presence and frequency penalties of one branch."""

from __future__ import annotations

import copy

import torch

from radixkv.cache.int_vector import Int32Array
from radixkv.request import SamplingParams

__all__ = ["Penalties"]


class Penalties:
    """Owns which tokens the prompt has and how often each was generated.

    Kept for the life of the branch, preemption included: what was generated before a preemption
    still counts as output when it is resumed.
    """

    def __init__(self, prompt_ids: Int32Array) -> None:
        self._seen = dict.fromkeys(prompt_ids.tolist(), 0)  # token id -> times generated

    def count(self, token_id: int) -> None:
        """Note a generated token."""
        self._seen[token_id] = self._seen.get(token_id, 0) + 1

    def copy(self) -> Penalties:
        """Return one with the same counts, for a fork."""
        copied = copy.copy(self)
        copied._seen = dict(self._seen)
        return copied

    def apply(self, logits: torch.Tensor, params: SamplingParams) -> None:
        """Change one row of logits in place.

        Args:
            logits: `[vocab]` float32.
            params: the request's; its repetition penalty counts prompt and output, the other two
                the output only.
        """
        ids = torch.tensor(list(self._seen), dtype=torch.int64, device=logits.device)
        counts = torch.tensor(list(self._seen.values()), dtype=torch.float32, device=logits.device)
        values = logits[ids]
        if params.repetition_penalty != 1.0:
            values = torch.where(
                values > 0, values / params.repetition_penalty, values * params.repetition_penalty
            )
        values -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        logits[ids] = values
