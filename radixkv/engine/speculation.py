"""Decides which guesses of the next tokens a step verifies, and learns whether they pay."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.engine.branch import Branch
from radixkv.engine.prompt_lookup import Acceptance, Draft, find_occurrences, grow_draft
from radixkv.engine.step_cost import StepCost, StepLoad

__all__ = ["Speculator"]

MAX_DEPTH = 8
UNKNOWN_COST_CHANCE = 0.5  # what a guess needs while the cost of a step isn't known
LEAST_CHANCE = 0.05
# Steps with drafts are judged in batches; after one that didn't pay there is a pause, which grows.
TRIAL_STEPS = 24
FIRST_PAUSE = 64
MAX_PAUSE = 1024


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
        self._trial_steps = 0
        self._trial_gain = 0.0  # seconds saved in the trial, negative if lost

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
        parent = -1
        for token_id in sampled:
            for node in range(parent + 1, len(draft)):
                if draft.parents[node] == parent:
                    self._acceptance.record(draft.kinds[node], draft.token_ids[node] == token_id)
            child = draft.child(parent, token_id)
            if child is None:
                return
            parent = child

    def record_step(self, without: StepLoad, num_decodes: int, made: int, seconds: float) -> None:
        """Judge a step that verified drafts.

        Args:
            without: what the step would have done without them.
            num_decodes: tokens it would have made.
            made: tokens it made.
            seconds: it took.
        """
        predicted = self._cost.predict(without)
        if predicted is None or not num_decodes:
            return
        # What the same tokens would have taken, step by step, other work of the step included once.
        extra = StepLoad(num_decodes, without.attended, num_decodes)
        alone = self._cost.predict(extra) or predicted
        self._trial_gain += predicted + alone * (made - num_decodes) / num_decodes - seconds
        self._trial_steps += 1
        if self._trial_steps < TRIAL_STEPS:
            return
        if self._trial_gain < 0:
            self.num_pauses += 1
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, MAX_PAUSE)
        else:
            self._next_pause = FIRST_PAUSE
        self._trial_steps, self._trial_gain = 0, 0.0

    def _least_chances(self, branches: Sequence[Branch]) -> list[float]:
        """Return the chance that a token drafted for each branch must have to be worth its time."""
        coefficients = self._cost.coefficients
        lengths = [len(branch.sequence) for branch in branches]
        load = StepLoad(len(branches), sum(lengths), len(branches))
        seconds = self._cost.predict(load)
        if coefficients is None or not seconds:
            return [UNKNOWN_COST_CHANCE] * len(branches)
        _, per_token, per_pair, per_sample = coefficients
        rate = len(branches) / seconds
        return [
            max(LEAST_CHANCE, rate * (per_token + per_pair * length + per_sample))
            for length in lengths
        ]

    def _longest(self, branch: Branch) -> int:
        """Return how many drafted tokens a branch could still take; one more is drawn anyway."""
        request = branch.request
        if request.params.use_beam_search:
            return 0
        return request.max_total_tokens - len(branch.sequence) - 1
