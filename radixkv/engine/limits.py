"""What the engine can take on, and the check of a request against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from radixkv.errors import ContextLengthError, RequestRejectedError
from radixkv.request import SamplingParams

__all__ = ["Capacity", "EngineLimits"]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Bounds of the engine.

    Attributes:
        max_model_len: tokens of prompt and answer together.
        max_num_seqs: sequences (requests, or answers of requests with several) that run at once.
        max_num_batched_tokens: tokens computed in one step.
        request_timeout_s: seconds from arrival after which any request is ended; None is never.
    """

    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 256
    request_timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one request may take, at most, so that it can finish when it is alone.

    Attributes:
        max_num_seqs: see `EngineLimits`.
        vocab_size: ids are below this.
        num_blocks, block_size: of the pool.
        max_model_len: tokens of prompt and answer; no more than the pool holds.
        shares: whether branches find what they have in common in the cache.
    """

    max_num_seqs: int
    vocab_size: int
    num_blocks: int
    block_size: int
    max_model_len: int
    shares: bool

    def max_total_tokens(self, num_prompt_tokens: int, num_branches: int) -> int:
        """Return the length to which all branches of a prompt can grow in the pool."""
        if num_branches == 1:
            return self.max_model_len
        shared = num_prompt_tokens // self.block_size if self.shares else 0
        # A block that several share stays until all who write to it have their copies.
        own = (self.num_blocks - shared - num_branches // 2) // num_branches
        return min(self.max_model_len, (shared + max(own, 0)) * self.block_size)

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> np.ndarray:
        """Return the prompt as `[n]` int32 if it can be accepted. Safe from any thread.

        Raises:
            ContextLengthError: it leaves no room for an answer.
            RequestRejectedError: it is empty or has ids outside the vocabulary, or so many answers
                can't be given at once.
        """
        length = len(prompt_token_ids)
        if length == 0:
            raise RequestRejectedError("the prompt must not be empty", param="prompt")
        if length >= self.max_model_len:
            raise ContextLengthError(length, self.max_model_len)
        try:
            ids = np.asarray(prompt_token_ids)
        except (ValueError, OverflowError):  # ragged, or beyond 64 bits
            ids = np.empty(0, dtype=np.object_)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise RequestRejectedError("token ids must be integers", param="prompt")
        vocab = self.vocab_size
        if int(ids.min()) < 0 or int(ids.max()) >= vocab:
            raise RequestRejectedError(
                f"token ids must be between 0 and {vocab - 1}, got "
                f"{int(ids.min())}..{int(ids.max())}",
                param="prompt",
            )
        for name, values in (
            ("logit_bias", [i for i, _ in params.logit_bias]),
            ("stop_token_ids", params.stop_token_ids),
        ):
            for value in values:
                if not 0 <= value < vocab:
                    raise RequestRejectedError(
                        f"{name} has token id {value}, outside 0..{vocab - 1}", param=name
                    )
        self._check_branches(length, params)
        return ids.astype(np.int32)

    def _check_branches(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        count = params.num_branches
        name = "n" if params.best_of is None else "best_of"
        if count > self.max_num_seqs:
            raise RequestRejectedError(
                f"{name} must be at most {self.max_num_seqs} (the sequences that run at once), "
                f"got {count}",
                param=name,
            )
        if params.use_beam_search and 2 * count > self.vocab_size:
            raise RequestRejectedError(
                f"{name} must be at most half the vocabulary ({self.vocab_size}), got {count}",
                param=name,
            )
        if self.max_total_tokens(num_prompt_tokens, count) <= num_prompt_tokens:
            raise RequestRejectedError(
                f"{count} answers to a prompt of {num_prompt_tokens} tokens don't fit the KV cache "
                f"of {self.num_blocks * self.block_size} tokens; reduce {name}",
                param=name,
            )
