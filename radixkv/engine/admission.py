"""Lets waiting requests start: who is next, whether it fits, what it finds in the cache."""

from __future__ import annotations

from radixkv.cache import RadixCache
from radixkv.cache import Sequence as CacheSequence
from radixkv.cache.explain import Explanation
from radixkv.cache.radix_tree import Match, Node
from radixkv.engine.branch import Branch
from radixkv.engine.explanations import ExplanationLog
from radixkv.engine.leaders import PrefillLeaders, num_common
from radixkv.engine.request import EngineRequest
from radixkv.engine.step_cost import StepRoom
from radixkv.engine.swap import SwapSpace
from radixkv.engine.tiering import TIERS, Tiering
from radixkv.engine.tiering_plan import LoadPlan
from radixkv.engine.waiting_queue import WaitingQueue
from radixkv.errors import OutOfBlocksError

__all__ = ["Admission"]

MAX_PASSED = 128  # requests that a step passes over because they wait for a prefill or for a disk


class ChangeCount:
    """Counts the changes of a cache's tree: while it stays, a lookup finds the same."""

    def __init__(self) -> None:
        self.count = 0

    def on_stored(self, node: Node, first: int, count: int) -> None:
        """See `CacheObserver`."""
        self.count += 1

    def on_removed(self, node: Node, first: int, count: int) -> None:
        """See `CacheObserver`."""
        self.count += 1

    def on_cleared(self) -> None:
        """See `CacheObserver`; what was cleared was reported as removed."""


class Admission:
    """Owns the waiting requests and opens the branches of those that start.

    Whether a request fits is decided before anything of the cache is locked or counted as used, so
    one that is stuck at the head of the queue leaves no trace, and costs a comparison of numbers
    until the tree changes.

    Attributes:
        num_admitted: requests that have started, preempted ones counted once.
        tokens_hit_by_tier: prompt tokens found at the first start.
    """

    def __init__(
        self,
        cache: RadixCache,
        *,
        max_num_seqs: int,
        policy: str = "fcfs",
        max_skip_s: float = 10.0,
        tiers: Tiering | None = None,
        swap: SwapSpace | None = None,
    ) -> None:
        self.cache = cache
        self.tiers = tiers
        self.swap = swap
        self.max_num_seqs = max_num_seqs
        self.num_admitted = 0
        self.tokens_hit_by_tier = dict.fromkeys(TIERS, 0)
        self.explanations = ExplanationLog()
        self.leaders = PrefillLeaders(cache)
        self._changes = ChangeCount()
        cache.observers.append(self._changes)
        self.waiting: WaitingQueue[EngineRequest] = WaitingQueue(
            policy,
            max_skip_s=max_skip_s,
            num_cached=lambda request: self._num_matched(request.live[0]) * cache.block_size,
            version=lambda: self._changes.count,
        )
        self._reading: list[int] = []  # put aside while blocks are read for them
        # The last that did not fit, and when: (order, changes, available blocks).
        self._refused = (-1, -1, -1)
        self._num_passed = 0

    def add(self, request: EngineRequest) -> None:
        """Queue a new request, or one that was preempted."""
        self.waiting.add(
            request,
            request.order,
            arrival=request.timings.arrival,
            priority=request.params.priority,
            namespace=request.namespace,
            resumed=request.num_preemptions > 0,
        )

    def remove(self, request: EngineRequest) -> None:
        """Forget a request that has ended, wherever it was. Idempotent."""
        self.waiting.remove(request.order)
        self.leaders.forget(request.order)
        if self.tiers is not None:
            self.tiers.forget(request.order)
        if self.swap is not None:
            self.swap.drop(request.order)
        self.stop(request)

    def stop(self, request: EngineRequest) -> None:
        """Note that a request's branches compute no more: who waited for them looks again."""
        for branch in request.live:
            for order in self.leaders.discard(branch):
                self.waiting.recall(order)

    def begin_step(self) -> None:
        """Let those look again whose wait for another one's prefill, or for the disk, is over."""
        for order in [*self.leaders.release(), *self._reading]:
            self.waiting.recall(order)
        self._reading.clear()
        self._num_passed = 0

    def start_next(
        self, now: float, num_seqs: int, room: StepRoom, *, alone: bool
    ) -> EngineRequest | None:
        """Start the request that is next, if it can; return it with its first branch open.

        Args:
            now: seconds.
            num_seqs: branches that run.
            room: what the step can still take.
            alone: nothing runs; the pool is the request's, pinned blocks included.
        """
        size = self.cache.block_size
        while (request := self.waiting.peek(now)) is not None:
            if num_seqs + request.width > self.max_num_seqs or self._num_passed > MAX_PASSED:
                return None
            branch = request.live[0]
            at_hand, swapped = self._at_hand(request, branch)
            found = self.leaders.find(branch.sequence, at_hand)
            if found is not None:
                self.leaders.follow(request.order, *found)
                self._pass(request)
                continue
            rest = len(branch.sequence) - at_hand * size
            margin = 0
            if not alone:
                if not room.fit(at_hand * size, rest):
                    return None
                margin = self._margin(request, num_seqs)
                if not self._fits(branch, margin):
                    return None
            plan = None
            if self.tiers is not None and not swapped:
                plan = self.tiers.find(request.order, branch.sequence)
                if plan is None:  # blocks of it are being read
                    self._reading.append(request.order)
                    self._pass(request)
                    continue
            if not self._start(request, plan, margin):
                return None
            self.waiting.remove(request.order)
            return request
        return None

    def open_sibling(self, branch: Branch) -> bool | None:
        """Let a branch of a resumed request hold blocks again.

        Returns:
            True if it does; None if it waits for what a running branch is about to compute; False
            if there are too few blocks.
        """
        at_hand, _ = self._at_hand(branch.request, branch)
        if self.leaders.find(branch.sequence, at_hand) is not None:
            return None
        cached = self._open(branch, 0)
        if cached is None:
            return False
        self.cache.stats.tokens_rehit += cached
        return True

    def resumed(self, request: EngineRequest) -> None:
        """Note that all branches of a request are open: what was swapped out is back."""
        if self.swap is not None:
            self.swap.drop(request.order, resumed=True)

    def _pass(self, request: EngineRequest) -> None:
        self.waiting.put_aside(request.order)
        self._num_passed += 1

    def _num_matched(self, branch: Branch) -> int:
        """Whole blocks of a closed branch in the tree; looked up when the tree has changed."""
        if branch.matched_version != self._changes.count:
            match = self._match(branch.sequence)
            branch.num_matched_blocks = match.num_blocks if match is not None else 0
            branch.matched_version = self._changes.count
        return branch.num_matched_blocks

    def _match(self, sequence: CacheSequence) -> Match | None:
        return self.cache.match_prefix(
            sequence.token_ids, sequence.namespace, len(sequence) - 1
        ).match

    def _at_hand(self, request: EngineRequest, branch: Branch) -> tuple[int, bool]:
        """Return the whole blocks that needn't be computed, and whether some were swapped out."""
        matched = self._num_matched(branch)
        if self.swap is None or not self.swap.can_restore(request.order, branch.sequence, matched):
            return matched, False
        return self.swap.num_kept(request.order, branch.sequence), True

    def _fits(self, branch: Branch, margin: int) -> bool:
        """Whether a branch finds blocks and `margin` more are left; changes nothing.

        Cost: O(1) if it is far from it or nothing has changed, else that of a lookup.
        """
        cache = self.cache
        state = branch.request.order, self._changes.count, cache.num_available_blocks
        if state == self._refused:
            return False
        fits = self._has_blocks(branch, margin)
        if not fits:
            self._refused = state
        return fits

    def _has_blocks(self, branch: Branch, margin: int) -> bool:
        cache = self.cache
        wanted = -(-len(branch.sequence) // cache.block_size) + margin
        if wanted - self._num_matched(branch) > cache.num_available_blocks:
            return False
        match = self._match(branch.sequence)
        if match is None:
            return True
        # What the lock will protect can't be evicted for the rest.
        unlocked, count = 0, match.num_node_blocks
        node: Node | None = match.node
        while node is not None and node.ref_count == 0:
            unlocked += count
            node = node.parent
            count = node.num_blocks if node is not None else 0
        return wanted - match.num_blocks <= cache.num_available_blocks - unlocked

    def _margin(self, request: EngineRequest, num_seqs: int) -> int:
        """Return how many blocks must be left when the request's first branch has its own.

        Each running branch may soon want a block, and each other branch of this request its own;
        without this margin an admission would be undone by the next preemption.
        """
        margin = num_seqs
        if not request.has_forked:
            return margin + (request.width if request.width > 1 else 0)
        first, block_size = request.live[0].sequence, self.cache.block_size
        for branch in request.live[1:]:
            tokens = branch.sequence.token_ids
            shared = num_common(first.token_ids, tokens) if self.cache.enabled else 0
            margin += -(-len(tokens) // block_size) - shared // block_size
        return margin

    def _start(self, request: EngineRequest, plan: LoadPlan | None, margin: int) -> bool:
        """Open a request's first branch, or change nothing.

        Whole blocks that a tier has go before a part of one that the tree has.

        Args:
            plan: what the tiers have.
            margin: blocks that must still be available then.
        """
        branch = request.live[0]
        sequence = branch.sequence
        explanation = self._explain(request)
        cached = self._open(branch, margin, whole=plan is not None and bool(plan.blocks))
        if cached is None:
            return False
        by_tier = {"device": cached}
        if self.tiers is not None:
            # Nothing can fail any more, so what is loaded now is filed at once.
            loaded = self.tiers.load(sequence, plan) if plan is not None else {}
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
        self._record(request, cached, explanation)
        return True

    def _open(self, branch: Branch, margin: int, *, whole: bool = False) -> int | None:
        """Take the cached prefix, blocks for the rest, and what was swapped out of it.

        Returns:
            The tokens found in the tree; None, and nothing has changed, if `margin` blocks would
            not be left.
        """
        sequence, order = branch.sequence, branch.request.order
        _, swapped = self._at_hand(branch.request, branch)
        for partial in (False,) if whole or swapped else (True, False):
            cached = sequence.reuse(partial=partial)
            try:
                sequence.reserve(len(sequence))
            except OutOfBlocksError:
                sequence.free()
                continue
            if margin > self.cache.num_available_blocks:
                sequence.free()
                continue
            if swapped and self.swap is not None:
                if self.tiers is not None:
                    # What was evicted for these blocks is still in them.
                    self.tiers.flush()
                self.swap.restore(order, sequence)
            self.leaders.add(branch)
            return cached
        return None

    def _explain(self, request: EngineRequest) -> Explanation | None:
        """Say what the request will find, before it takes it; None if it was admitted before."""
        if request.num_cached_tokens is not None:
            return None
        sequence = request.live[0].sequence
        return self.cache.explain(sequence.token_ids, sequence.namespace, len(sequence) - 1)

    def _record(self, request: EngineRequest, cached: int, explanation: Explanation | None) -> None:
        if explanation is not None:
            self.explanations.record(request, explanation, cached)
        if request.num_cached_tokens is not None:
            self.cache.stats.tokens_rehit += cached
            return
        self.num_admitted += 1
        request.num_cached_tokens = cached
        self.waiting.charge(request.namespace, request.num_prompt_tokens - cached)
        self.cache.stats.record_lookup(request.namespace, request.num_prompt_tokens, cached)
