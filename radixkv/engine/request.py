"""A request while the engine works on it."""

from __future__ import annotations

import enum

from radixkv.cache import Sequence
from radixkv.engine.beam_search import BeamSearch
from radixkv.engine.branch import Branch
from radixkv.engine.detokenizer import Decoder
from radixkv.engine.grammar import Grammar
from radixkv.request import Namespace, RequestTimings, SamplingParams

__all__ = ["EngineRequest", "Status"]


class Status(enum.Enum):
    """Where a request is. Preempted requests are WAITING again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class EngineRequest:
    """Owns the state of one request from submission to its last output.

    Its branches are admitted, preempted and resumed together, and decode in the same steps.

    Attributes:
        order: position in the order of arrival; lower goes first, the highest is preempted first.
        branches: all of its continuations, ended ones too.
        live: those that go on, in order; never empty before the request has ended.
        num_prompt_tokens: tokens before the answer.
        max_total_tokens: prompt and one answer may not grow past this.
        num_cached_tokens: prompt tokens reused, fixed at the first admission; None before.
        num_cached_by_tier: the same by where they were: device, host, disk.
        has_forked: its prompt was computed and all of its branches were made.
        beams: the search, if it is one.
        ended: choices that have had their last output.
        grammar: what each answer must look like, if the request says so.
    """

    def __init__(
        self,
        request_id: str,
        sequence: Sequence,
        params: SamplingParams,
        *,
        order: int,
        seed: int,
        max_total_tokens: int,
        arrival: float,
        tokenizer: Decoder,
        grammar: Grammar | None = None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.order = order
        self.seed = seed
        self.tokenizer = tokenizer
        self.grammar = grammar
        self.max_total_tokens = max_total_tokens
        self.num_prompt_tokens = len(sequence)
        self.status = Status.WAITING
        self.num_cached_tokens: int | None = None
        self.num_cached_by_tier: dict[str, int] = {}
        self.timings = RequestTimings(arrival=arrival)
        self.branches = [Branch(self, sequence)]
        self.live = list(self.branches)
        self.has_forked = False
        self.beams = BeamSearch(self) if params.use_beam_search else None
        self.ended: set[int] = set()

    @property
    def namespace(self) -> Namespace:
        """What it shares KV with."""
        return self.branches[0].sequence.namespace

    @property
    def num_preemptions(self) -> int:
        """How often it was preempted."""
        return self.timings.num_preemptions

    @property
    def width(self) -> int:
        """Branches that go on, or will once the prompt is computed."""
        if self.has_forked and self.beams is None:
            return len(self.live)
        return self.params.num_branches

    @property
    def is_prefilling(self) -> bool:
        """Whether it runs, and a branch of it has more to compute before all can go on."""
        return self.status is Status.RUNNING and any(not b.is_ready for b in self.live)

    def branch_out(self) -> list[Branch]:
        """Make the branches of a prompt that is computed, once; return all of them, else none.

        They still have one sequence, see `Branch.spawn`.
        """
        if self.has_forked or self.params.num_branches == 1:
            return []
        first = self.branches[0]
        self.branches += [first.spawn(i) for i in range(1, self.params.num_branches)]
        self.live = list(self.branches)
        self.has_forked = True
        return list(self.branches)

    def ranked(self) -> list[Branch]:
        """Return the ended branches of a request that held them back, best first.

        Beams have their scores; without beam search the log-probability per token decides.
        """
        if self.beams is not None:
            return self.beams.finished
        for branch in self.branches:
            branch.score = branch.cumulative_logprob / max(branch.num_output_tokens, 1)
        return sorted(self.branches, key=lambda b: -(b.score or 0.0))

    def last_of(self, index: int) -> Branch:
        """Return the branch of an answer that ends early, an empty one if there is none."""
        if index < len(self.branches) and not self.params.holds_back:
            return self.branches[index]
        sequence = self.branches[0].sequence
        prompt = sequence.token_ids[: self.num_prompt_tokens]
        return Branch(self, sequence.cache.create_sequence(prompt, sequence.namespace), index)
