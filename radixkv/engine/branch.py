"""One continuation of a request's prompt while the engine works on it."""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from radixkv.cache import Sequence
from radixkv.engine.detokenizer import IncrementalDetokenizer, StopMatcher
from radixkv.engine.grammar import GrammarState
from radixkv.engine.penalties import Penalties
from radixkv.request import FinishReason, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from radixkv.engine.request import EngineRequest

__all__ = ["Branch", "branch_seed"]


class Branch:
    """Owns the tokens and the text of one continuation, and what its next token depends on.

    A request starts with one branch and forks it when its prompt is computed. A branch of a running
    request holds blocks, except while a resumed one waits for a sibling's prefill.

    Attributes:
        index: which of the request's continuations it is.
        sequence: prompt and answer so far.
        seed: what its draws depend on, beside the position.
        cumulative_logprob: sum over its tokens, where the request holds its answers back.
        finish_reason: why it ended; None while it goes on.
        stop_reason: the stop string or token id that ended it, if one did.
        score: what it was chosen by, if it was chosen among others.
        text: pieces sent or, where the request holds its answers back, to be sent.
        logprobs: of its tokens, where the request holds its answers back.
        last_token_time: when its latest token came, in seconds of the engine's clock.
        num_ever_computed: tokens from the start that were computed (or reused) at some time,
            whatever a preemption gave back since.
        num_matched_blocks: whole blocks the tree held of these tokens when it was last looked up.
        matched_version: of the tree at that time.
        grammar: where it is in the request's grammar, if that has one.
    """

    def __init__(self, request: EngineRequest, sequence: Sequence, index: int = 0) -> None:
        self.request = request
        self.index = index
        self.sequence = sequence
        self.seed = branch_seed(request.seed, index)
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.score: float | None = None
        self.text: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.last_token_time: float | None = None
        self.num_ever_computed = 0
        self.num_matched_blocks = 0
        self.matched_version = -1
        params = request.params
        self.detokenizer = IncrementalDetokenizer(
            request.tokenizer, skip_special_tokens=params.skip_special_tokens
        )
        self.stop_matcher = StopMatcher(params.stop)
        self.penalties = Penalties(sequence.token_ids) if params.has_penalties else None
        self.grammar: GrammarState | None = None
        if request.grammar is not None:
            self.grammar = request.grammar.start(
                stop_token_ids=params.stop_token_ids,
                min_tokens=params.min_tokens,
                ignore_eos=params.ignore_eos,
            )

    @property
    def params(self) -> SamplingParams:
        """The request's."""
        return self.request.params

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.sequence) - self.request.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        ids: list[int] = self.sequence.token_ids[self.request.num_prompt_tokens :].tolist()
        return ids

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.sequence) - self.sequence.num_computed

    @property
    def is_prefilling(self) -> bool:
        """Whether it holds blocks and has more to compute before its next token can be drawn.

        These are prompt tokens or, after a preemption, earlier answer tokens too.
        """
        return self.sequence.is_open and self.num_uncomputed_tokens > 1

    @property
    def is_ready(self) -> bool:
        """Whether a decode step would give its next token."""
        return self.sequence.is_open and self.num_uncomputed_tokens == 1

    def spawn(self, index: int) -> Branch:
        """Return a sibling with the same past; it has this one's sequence, not one of its own.

        `Sequence.fork` makes it one, once the KV that they share is committed.
        """
        child = Branch(self.request, self.sequence, index)
        child.cumulative_logprob = self.cumulative_logprob
        child.text = list(self.text)
        child.logprobs = list(self.logprobs)
        child.last_token_time = self.last_token_time
        child.num_ever_computed = self.num_ever_computed
        child.detokenizer = self.detokenizer.copy()
        child.stop_matcher = self.stop_matcher.copy()
        child.penalties = self.penalties.copy() if self.penalties is not None else None
        child.grammar = self.grammar.fork() if self.grammar is not None else None
        return child

    def append(self, token_id: int) -> None:
        """Add a chosen token.

        Raises:
            GrammarError: the answer can't follow its grammar any further.
        """
        if self.grammar is not None:
            self.grammar.accept(token_id)
        self.sequence.append((token_id,))
        if self.penalties is not None:
            self.penalties.count(token_id)

    def keep(self, text: str, logprob: TokenLogprob | None) -> None:
        """Hold back what is new, to be sent when the answers are chosen."""
        self.text.append(text)
        if logprob is not None:
            self.logprobs.append(logprob)

    def read(self, token_id: int, end_token_ids: Collection[int]) -> str:
        """Decide whether the token that was just appended ends the answer; return the new text.

        Sets `finish_reason` and `stop_reason` if it does; the text is then complete.

        Args:
            end_token_ids: the model's own.
        """
        params, text = self.params, ""
        is_end = token_id in end_token_ids and not params.ignore_eos
        may_stop = self.num_output_tokens >= params.min_tokens
        if may_stop and (is_end or token_id in params.stop_token_ids):
            # The end token is not part of the text.
            self.finish_reason = "stop"
            self.stop_reason = None if is_end else token_id
        else:
            text = self._match(self.detokenizer.push(token_id))
            if self.finish_reason is None and self.grammar is not None and self.grammar.is_complete:
                self.finish_reason = "stop"
        if self.finish_reason is None and len(self.sequence) >= self.request.max_total_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None and not isinstance(self.stop_reason, str):
            text += self._match(self.detokenizer.flush())
            if not isinstance(self.stop_reason, str):
                text += self.stop_matcher.flush()
        return text

    def _match(self, text: str) -> str:
        text, stop = self.stop_matcher.push(text)
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
        return text


def branch_seed(seed: int, index: int) -> int:
    """Return the seed of a request's branch: its own for the first, unrelated ones for the others.

    >>> branch_seed(7, 0), branch_seed(7, 1) != branch_seed(7, 2)
    (7, True)
    """
    if index == 0:
        return seed
    return xxh3_64_intdigest(struct.pack("<qq", seed, index)) - (1 << 63)
