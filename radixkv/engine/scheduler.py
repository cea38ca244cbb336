"""Decides what each step computes: who is admitted, who waits, who is preempted."""

from __future__ import annotations

from dataclasses import dataclass

from sortedcontainers import SortedDict

from radixkv.cache import RadixCache
from radixkv.cache.explain import Explanation
from radixkv.engine.explanations import ExplanationLog
from radixkv.engine.request import EngineRequest, Status
from radixkv.engine.tiering import TIERS, Tiering
from radixkv.engine.tiering_plan import LoadPlan
from radixkv.errors import OutOfBlocksError

__all__ = ["ScheduledChunk", "Scheduler"]


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens `start` to `start + count` of a request, computed in one step.

    The step yields a new token for the request if the chunk reaches the end of its tokens.
    """

    request: EngineRequest
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the step's logits for this chunk's last token are needed."""
        return self.start + self.count == len(self.request.sequence)


class Scheduler:
    """Owns the waiting and the running requests.

    First come, first served. A step has at most `max_num_batched_tokens` tokens: one for each
    decoding request, the rest for chunks of prompts. A request is admitted only if the whole of
    its tokens fits, so a prefill never stalls half-way; when a decoding request finds no block,
    the latest request is preempted: it gives its blocks to the tree (where, if they last, it finds
    them again), and waits at its old place in the queue.
    """

    def __init__(
        self,
        cache: RadixCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        tiers: Tiering | None = None,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs ({max_num_seqs}), "
                f"got {max_num_batched_tokens}"
            )
        self.cache = cache
        self.tiers = tiers
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: SortedDict = SortedDict()  # order -> request
        self.running: SortedDict = SortedDict()  # order -> request
        self.num_preemptions = 0
        self.num_admitted = 0
        self.tokens_hit_by_tier = dict.fromkeys(TIERS, 0)
        self.explanations = ExplanationLog()

    def add(self, request: EngineRequest) -> None:
        """Queue a request."""
        self.waiting[request.order] = request

    def remove(self, request: EngineRequest) -> None:
        """Take a request out, wherever it is, and release what it holds. Idempotent."""
        self.waiting.pop(request.order, None)
        self.running.pop(request.order, None)
        if self.tiers is not None:
            self.tiers.forget(request.order)
        request.status = Status.FINISHED
        request.leader = None
        request.sequence.free()

    def schedule(self, now: float) -> list[ScheduledChunk]:
        """Choose the chunks of the next step; their blocks are reserved on return."""
        budget = self.max_num_batched_tokens
        preemptions = self.num_preemptions
        chunks = self._schedule_decodes()
        budget -= len(chunks)
        for request in self.running.values():
            if budget > 0 and request.is_prefilling:
                budget -= self._add_prefill(chunks, request, budget)
        # Admitting right after a preemption would only take back what it freed.
        if self.num_preemptions == preemptions:
            self._admit(chunks, budget, now)
        return chunks

    def _schedule_decodes(self) -> list[ScheduledChunk]:
        chunks = []
        for request in list(self.running.values()):
            # A preemption for an older request may have taken this one out.
            if request.status is not Status.RUNNING or request.is_prefilling:
                continue
            if self._reserve_or_preempt(request):
                chunks.append(ScheduledChunk(request, request.sequence.num_computed, 1))
        return chunks

    def _reserve_or_preempt(self, request: EngineRequest) -> bool:
        """Make room for the request's next token; False if it was itself the one to go."""
        while True:
            try:
                request.sequence.reserve(len(request.sequence))
            except OutOfBlocksError:
                victim = self.running.peekitem(-1)[1]
                self.preempt(victim)
                if victim is request:
                    return False
            else:
                return True

    def preempt(self, request: EngineRequest) -> None:
        """Send a running request back to the queue; its blocks stay in the tree while they can."""
        del self.running[request.order]
        request.sequence.free()
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.waiting[request.order] = request
        self.num_preemptions += 1

    def _add_prefill(
        self, chunks: list[ScheduledChunk], request: EngineRequest, budget: int
    ) -> int:
        count = min(request.num_uncomputed_tokens, budget)
        chunks.append(ScheduledChunk(request, request.sequence.num_computed, count))
        return count

    def _admit(self, chunks: list[ScheduledChunk], budget: int, now: float) -> None:
        for request in list(self.waiting.values()):
            if budget <= 0 or len(self.running) >= self.max_num_seqs:
                return
            if self._waits_for_leader(request):
                continue
            plan = None
            if self.tiers is not None:
                plan = self.tiers.find(request.order, request.sequence)
                if plan is None:
                    continue  # blocks of it are being read
            if not self._try_start(request, plan):
                return
            del self.waiting[request.order]
            self.running[request.order] = request
            request.status = Status.RUNNING
            if request.timings.first_scheduled is None:
                request.timings.first_scheduled = now
            budget -= self._add_prefill(chunks, request, budget)

    def _waits_for_leader(self, request: EngineRequest) -> bool:
        """Whether a running prefill is about to compute the next whole block of this prompt."""
        leader = request.leader
        if leader is None:
            leader = request.leader = self._find_leader(request)
        elif not leader.is_prefilling or (
            leader.sequence.num_tree_blocks > request.num_matched_blocks
        ):
            # It has moved on (or is gone): look again from where the tree is now.
            leader = request.leader = self._find_leader(request)
        return leader is not None

    def _find_leader(self, request: EngineRequest) -> EngineRequest | None:
        prefilling: list[EngineRequest] = [
            r
            for r in self.running.values()
            if r.is_prefilling and r.sequence.namespace == request.sequence.namespace
        ]
        if not prefilling or not self.cache.enabled:
            return None
        sequence, block_size = request.sequence, self.cache.block_size
        tokens = sequence.token_ids
        handle = self.cache.match_prefix(tokens, sequence.namespace, len(sequence) - 1)
        matched = handle.match.num_blocks if handle.match else 0
        end = (matched + 1) * block_size
        request.num_matched_blocks = matched
        if end > len(sequence):
            return None
        for leader in prefilling:
            other = leader.sequence
            if (
                len(other) >= end > other.num_computed
                and (other.token_ids[:end] == tokens[:end]).all()
            ):
                return leader
        return None

    def _try_start(self, request: EngineRequest, plan: LoadPlan | None) -> bool:
        """Take the cached prefix and blocks for all the rest, or change nothing.

        Whole blocks that a tier has go before a part of one that the tree has.
        """
        load = plan is not None and bool(plan.blocks)
        sequence = request.sequence
        # Each running request may soon want a block; without this margin an admission would be
        # undone by the next preemption.
        margin = len(self.running)
        explanation = self._explain(request)
        for partial in (False,) if load else (True, False):
            cached = sequence.reuse(partial=partial)
            try:
                sequence.reserve(len(sequence))
            except OutOfBlocksError:
                sequence.free()
                continue
            if margin > self.cache.num_available_blocks:
                sequence.free()
                return False
            by_tier = {"device": cached}
            if self.tiers is not None and plan is not None:
                # Nothing can fail any more, so what is loaded now is filed at once.
                loaded = self.tiers.load(sequence, plan)
                self.tiers.forget(request.order)
                if loaded:
                    by_tier |= loaded
                    cached += sum(loaded.values())
                    sequence.commit(cached)
                    sequence.num_cached_tokens = cached
                    # What was brought back is no miss: the first one lies behind it.
                    explanation = self._explain(request)
            if request.num_cached_tokens is None:
                request.num_cached_by_tier = by_tier
                for tier, count in by_tier.items():
                    self.tokens_hit_by_tier[tier] += count
            self._record_admission(request, cached, explanation)
            return True
        return False

    def _explain(self, request: EngineRequest) -> Explanation | None:
        """Say what the request will find, before it takes it; None if it was admitted before."""
        if request.num_cached_tokens is not None:
            return None
        sequence = request.sequence
        return self.cache.explain(sequence.token_ids, sequence.namespace, len(sequence) - 1)

    def _record_admission(
        self, request: EngineRequest, cached: int, explanation: Explanation | None
    ) -> None:
        if explanation is not None:
            self.explanations.record(request, explanation, cached)
        if request.num_cached_tokens is not None:
            self.cache.stats.tokens_rehit += cached
            return
        self.num_admitted += 1
        request.num_cached_tokens = cached
        self.cache.stats.record_lookup(
            request.sequence.namespace, request.num_prompt_tokens, cached
        )
