"""Decides what each step computes: who runs, how much of each prompt, who is preempted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sortedcontainers import SortedDict

from radixkv.cache import RadixCache
from radixkv.engine.admission import Admission
from radixkv.engine.branch import Branch
from radixkv.engine.prompt_lookup import Draft
from radixkv.engine.request import EngineRequest, Status
from radixkv.engine.speculation import Speculator
from radixkv.engine.step_cost import StepCost, StepRoom
from radixkv.engine.swap import SwapSpace
from radixkv.engine.tiering import Tiering
from radixkv.errors import OutOfBlocksError
from radixkv.request import Namespace

__all__ = ["PREEMPTION_MODES", "ScheduledChunk", "Scheduler", "SchedulingOptions"]

PREEMPTION_MODES = ("auto", "recompute", "swap")


@dataclass(frozen=True, slots=True)
class SchedulingOptions:
    """How to choose among requests.

    Attributes:
        policy: the order of those that wait, see `WaitingQueue`.
        max_skip_s: with policy "cache-aware", how long others may go before the oldest.
        itl_target_s: how long a step with decodes should take; None is no limit.
        speculative_tokens: most tokens drafted for a branch in a step; 0 drafts none.
        preemption_mode: whether a preempted request's KV is copied to the swap space: "swap" if
            there is room, "auto" if that is also estimated to be faster than computing it again.
    """

    policy: str = "fcfs"
    max_skip_s: float = 10.0
    itl_target_s: float | None = None
    preemption_mode: str = "auto"
    speculative_tokens: int = 0


@dataclass(slots=True)  # not frozen: one is made for every branch in every step
class ScheduledChunk:
    """Tokens `start` to `start + count` of a branch, computed in one step.

    The step yields a new token for the branch if the chunk reaches the end of its tokens; and more
    if tokens of the `draft` that may follow, computed in the same step, turn out to be right.
    """

    branch: Branch
    start: int
    count: int
    draft: Draft | None = None

    @property
    def num_rows(self) -> int:
        """Query rows of the step, those of drafted tokens included."""
        return self.count if self.draft is None else self.count + len(self.draft)

    @property
    def samples(self) -> bool:
        """Whether the step's logits for this chunk's last token are needed."""
        return self.start + self.count == len(self.branch.sequence)


class Scheduler:
    """Owns the running requests; `admission` owns those that wait.

    A step has at most `max_num_batched_tokens` tokens: one for each decoding branch, the rest for
    chunks of prompts, cut so that the step is expected to keep `itl_target_s`. A request is
    admitted only if the whole of its tokens fits, so a prefill never stalls half-way. When a
    decoding request finds no block, the latest of those of the lowest priority is preempted: it
    gives its blocks to the tree (where, if they last, it finds them again), perhaps leaves a copy
    in the swap space, and waits before all new requests of its priority.

    The branches of a request run together or not at all. When it is resumed, each takes its path
    from the tree; what they share is computed again, at most once, by the first of them.

    Attributes:
        running: by (level, order): the first goes first, the last is preempted first.
        step_cost: what steps take; whoever runs them records them there.
    """

    def __init__(
        self,
        cache: RadixCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        tiers: Tiering | None = None,
        swap: SwapSpace | None = None,
        options: SchedulingOptions | None = None,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs ({max_num_seqs}), "
                f"got {max_num_batched_tokens}"
            )
        self.options = options = options or SchedulingOptions()
        if options.preemption_mode not in PREEMPTION_MODES:
            raise ValueError(
                f"preemption_mode must be one of {', '.join(PREEMPTION_MODES)}, "
                f"got {options.preemption_mode!r}"
            )
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.swap = swap if options.preemption_mode != "recompute" else None
        self.step_cost = StepCost()
        self.speculator: Speculator | None = None
        if options.speculative_tokens:
            self.speculator = Speculator(self.step_cost, max_tokens=options.speculative_tokens)
        self.admission = Admission(
            cache,
            max_num_seqs=max_num_seqs,
            policy=options.policy,
            max_skip_s=options.max_skip_s,
            tiers=tiers,
            swap=self.swap,
        )
        self.waiting = self.admission.waiting
        self.explanations = self.admission.explanations
        self.running: SortedDict = SortedDict()  # (level, order) -> request
        self.num_preemptions = 0
        self.preemptions_by_mode = {"swap": 0, "recompute": 0}
        self.num_decodes = 0  # of the last step
        self._opening: dict[int, EngineRequest] = {}  # those that run, but not all branches yet
        self._prefilling: SortedDict = SortedDict()  # those of the running that don't decode yet

    @property
    def num_admitted(self) -> int:
        """Requests that have started, preempted ones counted once."""
        return self.admission.num_admitted

    @property
    def tokens_hit_by_tier(self) -> dict[str, int]:
        """Prompt tokens found at the first start, by where they were."""
        return self.admission.tokens_hit_by_tier

    def stats(self) -> dict[str, Any]:
        """Return what it is doing and has learned, as plain types."""
        costs = self.step_cost.coefficients
        names = ("step", "token", "attended_pair", "sample")
        return {
            "policy": self.options.policy,
            "num_following": self.admission.leaders.num_followers,
            "limits": {
                "max_num_batched_tokens": self.max_num_batched_tokens,
                "max_num_seqs": self.admission.max_num_seqs,
            },
            "step_cost_s": None if costs is None else dict(zip(names, costs, strict=True)),
            "step_cost_mean_ratio": self.step_cost.mean_ratio,
            "speculation": self.speculator.stats() if self.speculator is not None else {},
            "swap": self.swap.stats() if self.swap is not None else {},
        }

    def add(self, request: EngineRequest) -> None:
        """Queue a request."""
        self.admission.add(request)

    def remove(self, request: EngineRequest) -> None:
        """Take a request out, wherever it is, and release what it holds. Idempotent."""
        self._stop(request)
        self.admission.remove(request)
        request.status = Status.FINISHED
        for branch in request.live:
            branch.sequence.free()

    def release(self, branch: Branch) -> None:
        """Take an ended branch out of its request and release what it holds."""
        branch.request.live.remove(branch)
        branch.sequence.free()

    def schedule(self, now: float) -> list[ScheduledChunk]:
        """Choose the chunks of the next step; their blocks are reserved on return."""
        preemptions = self.num_preemptions
        self.admission.begin_step()
        # Before anything is scheduled, since it can cost a later request its blocks.
        self._open_siblings()
        chunks = self._schedule_decodes()
        self.num_decodes = len(chunks)
        room = StepRoom(
            self.max_num_batched_tokens,
            cost=self.step_cost,
            target_s=self.options.itl_target_s,
            floor=self.cache.block_size,
        )
        room.add_decodes([chunk.start + 1 for chunk in chunks])
        if self.speculator is not None and chunks:
            chunks = self._add_drafts(self.speculator, chunks, room)
        for request in self._prefilling.values():
            if room.num_tokens > 0:
                self._add_prefills(chunks, request, room)
        # Admitting right after a preemption would only take back what it freed.
        if self.num_preemptions == preemptions:
            self._admit(chunks, room, now)
        return chunks

    def reserve_ahead(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Take the slots that the decodes of a step will need in the next one.

        Meant for while the device computes the step: what the next one finds reserved costs it no
        allocation, eviction or note of a copy. Where there is no block, nothing happens; the next
        step sees to it.
        """
        for chunk in chunks:
            sequence, limit = chunk.branch.sequence, chunk.branch.request.max_total_tokens
            # The first token behind a prompt may go to other branches as well, and the last one of
            # an answer is never computed.
            if chunk.count > 1 or not chunk.samples or len(sequence) + 1 >= limit:
                continue
            if not self.cache.num_available_blocks:
                return
            sequence.reserve(len(sequence) + 1)

    def preempt(self, request: EngineRequest) -> None:
        """Send a running request back to the queue; its blocks stay in the tree while they can."""
        self._stop(request)
        self._swap_out(request)
        for branch in request.live:
            branch.sequence.free()
        self.admission.stop(request)
        request.status = Status.WAITING
        request.timings.num_preemptions += 1
        self.num_preemptions += 1
        kept = self.swap is not None and request.order in self.swap
        self.preemptions_by_mode["swap" if kept else "recompute"] += 1
        self.admission.add(request)

    def _key(self, request: EngineRequest) -> tuple[int, int]:
        level = request.params.priority if self.options.policy == "priority" else 0
        return level, request.order

    def _stop(self, request: EngineRequest) -> None:
        key = self._key(request)
        self.running.pop(key, None)
        self._prefilling.pop(key, None)
        self._opening.pop(request.order, None)

    def _swap_out(self, request: EngineRequest) -> None:
        """Copy what would be lost to the swap space, if that is worth it."""
        if self.swap is None or request.order in self.swap:
            return
        plan = self.swap.plan([branch.sequence for branch in request.live])
        if self.options.preemption_mode == "auto":
            compute_s = self.step_cost.prefill_seconds(plan.first_token, plan.num_tokens)
            if compute_s is not None and self.swap.seconds(plan) >= compute_s:
                return
        self.swap.swap_out(request.order, plan)

    def _open_siblings(self) -> None:
        """Let branches of resumed requests go on that waited for a sibling's prefill."""
        for request in list(self._opening.values()):
            for branch in request.live:
                # A preemption for an older request may have taken this one out.
                if request.status is not Status.RUNNING:
                    break
                if not branch.sequence.is_open:
                    while self.admission.open_sibling(branch) is False:
                        if self._preempt_last() is request:
                            break
            if all(branch.sequence.is_open for branch in request.live):
                del self._opening[request.order]
                self.admission.resumed(request)

    def _schedule_decodes(self) -> list[ScheduledChunk]:
        for key, request in list(self._prefilling.items()):
            if not request.is_prefilling:
                del self._prefilling[key]
        chunks: list[ScheduledChunk] = []
        generated: Counter[Namespace] = Counter()
        for key, request in list(self.running.items()):
            # A preemption for an older request may have taken this one out.
            if request.status is not Status.RUNNING or key in self._prefilling:
                continue
            if self._reserve_or_preempt(request):
                for branch in request.live:
                    sequence = branch.sequence
                    chunks.append(ScheduledChunk(branch, sequence.num_computed, 1))
                    generated[sequence.namespace] += 1
        for namespace, count in generated.items():
            self.waiting.charge(namespace, generated=count)
        return chunks

    def _add_drafts(
        self, speculator: Speculator, chunks: list[ScheduledChunk], room: StepRoom
    ) -> list[ScheduledChunk]:
        """Give decodes the tokens that may follow, where there are slots for them."""
        # Half of the room is left to prompts.
        drafts = speculator.draft([chunk.branch for chunk in chunks], room.num_tokens // 2)
        drafted: list[ScheduledChunk] = []
        for chunk in chunks:
            draft = drafts.get(chunk.branch)
            if draft is not None:
                try:
                    chunk.branch.sequence.reserve(len(chunk.branch.sequence) + len(draft))
                except OutOfBlocksError:
                    draft = None
                else:
                    room.add_draft(chunk.start + 1, len(draft))
                    chunk = replace(chunk, draft=draft)
            drafted.append(chunk)
        return drafted

    def _reserve_or_preempt(self, request: EngineRequest) -> bool:
        """Make room for the next token of all branches; False if the request itself had to go."""
        for branch in request.live:
            while True:
                try:
                    branch.sequence.reserve(len(branch.sequence))
                except OutOfBlocksError:
                    if self._preempt_last() is request:
                        return False
                else:
                    break
        return True

    def _preempt_last(self) -> EngineRequest:
        victim: EngineRequest = self.running.peekitem(-1)[1]
        self.preempt(victim)
        return victim

    def _add_prefills(
        self, chunks: list[ScheduledChunk], request: EngineRequest, room: StepRoom
    ) -> None:
        """Add what the branches still have to compute."""
        # Branches decode together, so none computes its last token before the others can too.
        rest = 1 if len(request.live) > 1 else 0
        for branch in request.live:
            start = branch.sequence.num_computed
            count = room.fit(start, branch.num_uncomputed_tokens - rest)
            if branch.sequence.is_open and count > 0:
                chunks.append(ScheduledChunk(branch, start, count))
                room.take(start, count)

    def _admit(self, chunks: list[ScheduledChunk], room: StepRoom, now: float) -> None:
        if not self.waiting:
            return
        num_seqs = sum(request.width for request in self.running.values())
        while room.num_tokens > 0:
            alone = not self.running
            request = self.admission.start_next(now, num_seqs, room, alone=alone)
            if request is None:
                return
            key = self._key(request)
            self.running[key] = self._prefilling[key] = request
            request.status = Status.RUNNING
            if request.timings.first_scheduled is None:
                request.timings.first_scheduled = now
            if len(request.live) > 1:
                self._opening[request.order] = request
            else:
                self.admission.resumed(request)
            num_seqs += request.width
            self._add_prefills(chunks, request, room)
