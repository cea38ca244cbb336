"""Decides which guesses of the next tokens a step verifies, and learns whether they pay."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.engine.branch import Branch
from radixkv.engine.prompt_lookup import Acceptance, Draft, find_occurrences, grow_draft
from radixkv.engine.request import Status
from radixkv.engine.step_cost import StepCost, StepLoad

__all__ = ["DraftWalk", "Speculator"]

MAX_DEPTH = 8
# What a guess needs, at most, until steps with drafts have shown what drafted tokens cost.
TRIAL_CHANCE = 0.3
LEAST_CHANCE = 0.05
# Steps with drafts are judged in batches; after one that didn't pay there is a pause, which grows.
TRIAL_STEPS = 24
FIRST_PAUSE = 64
MAX_PAUSE = 1024


class DraftWalk:
    """Owns the way of one branch through its draft after a step.

    Attributes:
        tokens: drawn so far; each but the last is the token of a drafted node.
        row: of the logits at the node that is reached.
    """

    def __init__(self, branch: Branch, draft: Draft, row: int, token_id: int) -> None:
        """Start at the branch's last known token, whose row of logits gave `token_id`."""
        self.branch = branch
        self.draft = draft
        self.tokens = [token_id]
        self.row = row
        self._first_row = row
        self._node = -1

    def advance(self) -> bool:
        """Go to the node of the last token drawn, if it was drafted and the answer goes on."""
        request = self.branch.request
        if self.branch.finish_reason is not None or request.status is Status.FINISHED:
            return False
        child = self.draft.child(self._node, self.tokens[-1])
        if child is None:
            return False
        self._node = child
        self.row = self._first_row + 1 + child
        return True

    def take_moves(self, block_size: int) -> list[tuple[int, int]]:
        """Return the (source, destination) slot by which the node's KV gets to its place."""
        sequence = self.branch.sequence
        place = len(sequence) - 1  # of the node's token, which the sequence ends with by now
        written = place - len(self.tokens) + 1 + self._node
        if written == place:
            return []
        table = sequence.block_table
        source, target = (
            int(table[at // block_size]) * block_size + at % block_size for at in (written, place)
        )
        return [(source, target)]


class Speculator:
    """Owns what is known of the guesses of all requests.

    A draft is the tree of the likeliest continuations by prompt lookup: agents repeat tool output,
    code and identifiers. A step computes the drafted tokens together with the last token; each one
    is kept only if it is the very token that the sampler draws there, with the same random number
    that it would have used without drafts. The output is thus the same as without, whatever the
    temperature.

    A token is drafted if its chance of being right, times the rate at which tokens are made, is
    worth the time it adds to the step, by the measured cost of steps. And since that model is
    only a model, the tokens a second that steps with drafts really yield are compared with those
    predicted without; where drafts don't pay, there are none for a while.

    Attributes:
        num_drafted: tokens drafted.
        num_accepted: of them, how many became part of an answer.
        num_pauses: how often drafting was stopped because it didn't pay.
    """

    def __init__(self, cost: StepCost, *, max_tokens: int) -> None:
        """Make a speculator.

        Args:
            cost: predicts the seconds of a step; the engine keeps it up to date.
            max_tokens: most tokens drafted for a branch in a step.
        """
        self.max_tokens = max_tokens
        self.num_drafted = 0
        self.num_accepted = 0
        self.num_pauses = 0
        self._cost = cost
        self._acceptance = Acceptance()
        self._pause = 0
        self._next_pause = FIRST_PAUSE
        self._num_tries = TRIAL_STEPS  # drafts still to be tried whatever they seem to cost
        self._trial_steps = 0
        self._trial_gain = 0.0  # seconds saved in the trial, negative if lost
        self._accepted_in_step = 0

    def draft(self, branches: Sequence[Branch], budget: int) -> dict[Branch, Draft]:
        """Return drafts for some of the branches that decode in a step.

        Args:
            branches: all that decode in it.
            budget: tokens that may be drafted in all.

        Cost: a pass over each branch's tokens.
        """
        if self._pause:
            self._pause -= 1
            return {}
        drafts: dict[Branch, Draft] = {}
        chances = self._least_chances(branches)
        for branch, min_chance in zip(branches, chances, strict=True):
            room = min(self.max_tokens, budget, self._longest(branch))
            if room <= 0 or min_chance >= 1.0:
                continue
            tokens = branch.sequence.token_ids
            draft = grow_draft(
                tokens,
                find_occurrences(tokens),
                self._acceptance,
                min_chance=min_chance,
                max_nodes=room,
                max_depth=min(MAX_DEPTH, room),
            )
            if draft is not None:
                drafts[branch] = draft
                budget -= len(draft)
        return drafts

    def record_walk(self, draft: Draft, sampled: Sequence[int]) -> None:
        """Learn from a verified draft.

        Args:
            draft: what was verified.
            sampled: the tokens drawn, from the sequence's end on; all but the last were drafted.
        """
        self.num_drafted += len(draft)
        self.num_accepted += len(sampled) - 1
        self._accepted_in_step += len(sampled) - 1
        parent = -1
        for token_id in sampled:
            for node in range(parent + 1, len(draft)):
                if draft.parents[node] == parent:
                    self._acceptance.record(draft.kinds[node], draft.token_ids[node] == token_id)
            child = draft.child(parent, token_id)
            if child is None:
                return
            parent = child

    def record_step(self, without: StepLoad, num_decodes: int, seconds: float) -> None:
        """Judge a step that verified drafts, after `record_walk` of each.

        Args:
            without: what the step would have done without drafts.
            num_decodes: tokens it would have made.
            seconds: it took.
        """
        more, self._accepted_in_step = self._accepted_in_step, 0
        predicted = self._cost.predict(without)
        # A step of decodes alone, without the prompts that this one may have computed as well.
        alone = self._cost.predict(StepLoad(num_decodes, without.attended, num_decodes))
        if predicted is None or alone is None or not num_decodes:
            return
        self._trial_gain += predicted + alone * more / num_decodes - seconds
        self._trial_steps += 1
        self._num_tries = max(0, self._num_tries - 1)
        if self._trial_steps < TRIAL_STEPS:
            return
        if self._trial_gain < 0:
            self.num_pauses += 1
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, MAX_PAUSE)
        else:
            self._next_pause = FIRST_PAUSE
        self._trial_steps, self._trial_gain = 0, 0.0

    def stats(self) -> dict[str, int]:
        """Return the counters."""
        return {
            "tokens_drafted": self.num_drafted,
            "tokens_accepted": self.num_accepted,
            "pauses": self.num_pauses,
        }

    def _least_chances(self, branches: Sequence[Branch]) -> list[float]:
        """Return the chance that a token drafted for each branch must have to be worth its time."""
        coefficients = self._cost.coefficients
        lengths = [len(branch.sequence) for branch in branches]
        load = StepLoad(len(branches), sum(lengths), len(branches))
        seconds = self._cost.predict(load)
        if coefficients is None or not seconds:
            return [TRIAL_CHANCE] * len(branches)
        _, per_token, per_pair, per_sample = coefficients
        rate = len(branches) / seconds
        most = TRIAL_CHANCE if self._num_tries else 1.0
        return [
            min(max(LEAST_CHANCE, rate * (per_token + per_pair * length + per_sample)), most)
            for length in lengths
        ]

    def _longest(self, branch: Branch) -> int:
        """Return how many drafted tokens a branch could still take; one more is drawn anyway."""
        request = branch.request
        if request.params.use_beam_search:
            return 0
        return request.max_total_tokens - len(branch.sequence) - 1
