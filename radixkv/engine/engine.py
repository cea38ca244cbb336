"""The step loop: schedule, run, sample, publish."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from radixkv.cache import RadixCache
from radixkv.engine.answers import Output, chosen, ended_early, increment
from radixkv.engine.batch import BatchBuilder
from radixkv.engine.branch import Branch
from radixkv.engine.cache_control import pin_computed
from radixkv.engine.deadlines import Deadlines
from radixkv.engine.detokenizer import Decoder
from radixkv.engine.grammar import Grammar, GrammarState
from radixkv.engine.grammar_compiler import GrammarCompiler, MaskWorker
from radixkv.engine.kv_events import KVEventStream
from radixkv.engine.limits import Capacity, EngineLimits
from radixkv.engine.meter import Meter, StepTokens
from radixkv.engine.request import EngineRequest, Status
from radixkv.engine.runner import Runner, launch
from radixkv.engine.sampler import Expansion, SampledToken, Sampler
from radixkv.engine.scheduler import ScheduledChunk, Scheduler, SchedulingOptions
from radixkv.engine.snapshot import snapshot
from radixkv.engine.stats import EngineStats
from radixkv.engine.step_cost import load_of
from radixkv.engine.swap import SwapSpace
from radixkv.engine.tiering import Tiering
from radixkv.engine.verification import DraftVerifier
from radixkv.errors import GrammarError, RequestRejectedError
from radixkv.request import (
    FinishReason,
    Namespace,
    SamplingParams,
)

__all__ = ["Engine", "EngineLimits", "Output"]

log = logging.getLogger(__name__)


class Engine:
    """Owns the cache, the scheduler, the sampler and the runner. One thread drives it.

    Every accepted request gets exactly one output with a `finish_reason` per answer asked for, and
    holds nothing after the last: finished, aborted and failed requests all leave through `_leave`.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Decoder,
        cache: RadixCache,
        limits: EngineLimits,
        *,
        eos_token_ids: Iterable[int] = (),
        bytes_per_block: int = 0,
        tiers: Tiering | None = None,
        swap: SwapSpace | None = None,
        grammars: GrammarCompiler | None = None,
        scheduling: SchedulingOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.cache = cache
        self.limits = limits
        self.bytes_per_block = bytes_per_block
        self.eos_token_ids = frozenset(eos_token_ids)
        # A request alone in the pool must be able to finish.
        self.max_model_len = min(limits.max_model_len, cache.num_blocks * cache.block_size)
        self.capacity = Capacity(
            max_num_seqs=limits.max_num_seqs,
            vocab_size=runner.vocab_size,
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            max_model_len=self.max_model_len,
            shares=cache.enabled,
        )
        self.scheduler = Scheduler(
            cache,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            tiers=tiers,
            swap=swap,
            options=scheduling,
        )
        self.batches = BatchBuilder(cache)
        self.deadlines = Deadlines(limits.request_timeout_s)
        self.tiers = tiers
        self.explanations = self.scheduler.explanations
        self.kv_events: KVEventStream | None = None
        self.sampler = Sampler(self.eos_token_ids)
        self._verifier: DraftVerifier | None = None
        if (speculator := self.scheduler.speculator) is not None:
            self._verifier = DraftVerifier(speculator, self.sampler, cache.block_size)
        self.grammars = grammars
        self._masks = MaskWorker()
        self.requests: dict[str, EngineRequest] = {}
        self.finished: Counter[str] = Counter()
        self.num_rejected = 0
        self.tokens_computed = 0
        self.tokens_recomputed = 0
        self.tokens_generated = 0
        self.num_steps = 0
        self.step_time_s = 0.0
        self.meter = Meter(cache.quotas.named)
        self._clock = clock
        self.started = clock()
        self.last_step = self.started
        self._next_order = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.requests)

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> np.ndarray:
        """Return the prompt as `[n]` int32 if it can be accepted. Safe from any thread.

        Raises:
            ContextLengthError, RequestRejectedError: see `Capacity.check`.
        """
        return self.capacity.check(prompt_token_ids, params)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | np.ndarray,
        params: SamplingParams,
        *,
        namespace: Namespace = (),
        arrival: float | None = None,
        grammar: Grammar | None = None,
    ) -> EngineRequest:
        """Queue a request.

        Args:
            request_id: must be unique among live requests.
            prompt_token_ids: `[n]`.
            params: how to sample and when to stop.
            namespace: KV is shared within equal namespaces only.
            arrival: in seconds of the engine's clock; None is now.
            grammar: that of `params`, if it is compiled already; else it is compiled here.

        Raises:
            RequestRejectedError: see `validate`; or the id is in use, or the grammar is refused.
        """
        prompt = self.validate(prompt_token_ids, params)  # type: ignore[arg-type]
        if request_id in self.requests:
            raise RequestRejectedError(f"request id {request_id!r} is in use")
        if params.grammar is not None and grammar is None:
            grammar = self.grammar_compiler().compile(params.grammar)
        max_total = self.capacity.max_total_tokens(len(prompt), params.num_branches)
        if params.max_tokens is not None:
            max_total = min(max_total, len(prompt) + params.max_tokens)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        request = EngineRequest(
            request_id,
            self.cache.create_sequence(prompt, namespace, priority=params.cache_priority),
            params,
            order=self._next_order,
            seed=seed,
            max_total_tokens=max_total,
            arrival=self._clock() if arrival is None else arrival,
            tokenizer=self.tokenizer,
            grammar=grammar if params.grammar is not None else None,
        )
        self._next_order += 1
        self.requests[request_id] = request
        self.scheduler.add(request)
        self.deadlines.add(request)
        return request

    def grammar_compiler(self) -> GrammarCompiler:
        """Return what compiles the grammars of requests. Safe from any thread.

        Raises:
            RequestRejectedError: the engine was built without.
        """
        if self.grammars is None:
            raise RequestRejectedError("grammars are not supported by this engine", param="grammar")
        return self.grammars

    def abort(self, request_id: str) -> list[Output]:
        """End a request now; nothing happens if it is unknown or has ended."""
        request = self.requests.get(request_id)
        return [] if request is None else self._finish(request, "abort")

    def step(self, lock: AbstractContextManager[object] | None = None) -> list[Output]:
        """Run one step; return what it produced. An error in the model ends the step's requests.

        Args:
            lock: held while the engine's own state changes, free while the model runs.
        """
        begin = self._clock()
        lock = nullcontext() if lock is None else lock
        with lock:
            ended = self._end_overdue(begin)
            chunks = self.scheduler.schedule(begin)
            if chunks:
                copies = self.cache.take_copies()
                batch, chunks = self.batches.build(chunks, copies)
        if self.tiers is not None:
            # What was evicted is still in its blocks, until the step writes to them.
            self.tiers.flush()
            if not chunks:
                self.tiers.wait()
        if not chunks:
            return ended
        started, model_s = self._clock(), 0.0
        try:
            with self._masks.computing(_grammars(chunks)):
                step = launch(self.runner, batch)
                if step.is_pending:
                    # The host would only wait: get ready what the next step needs.
                    with lock:
                        self.scheduler.reserve_ahead(chunks)
                logits = step.result()
                model_s = self._clock() - started
            with lock:
                outputs = self._publish(chunks, logits)
        except Exception as error:  # one bad step must not take the other requests down
            log.exception("a step failed; its %d requests end with an error", len(chunks))
            with lock:
                outputs = self._fail_step(chunks, error)
        self.last_step = self._clock()
        self.num_steps += 1
        self.step_time_s += self.last_step - begin
        tokens = self._tokens_of(chunks, len(batch.token_ids))
        self.meter.record_step(self.last_step - begin, model_s, len(chunks), tokens)
        load = load_of(batch.attention, len(batch.logits_rows))
        if self._verifier is not None:
            num_decodes = self.scheduler.num_decodes
            self._verifier.judge(chunks, load, num_decodes, self.last_step - begin)
        self.scheduler.step_cost.record(load, self.last_step - begin)
        if self.tiers is not None:
            num_tokens = sum(chunk.count for chunk in chunks)
            self.tiers.costs.record_step(num_tokens, self.last_step - started)
        return ended + outputs

    def _tokens_of(self, chunks: list[ScheduledChunk], num_rows: int) -> StepTokens:
        num_drafted = 0
        if self.scheduler.speculator is not None:
            num_drafted = num_rows - sum(chunk.count for chunk in chunks)
        num_decodes = self.scheduler.num_decodes
        return StepTokens(num_decodes, num_rows - num_decodes - num_drafted, num_drafted)

    def _end_overdue(self, now: float) -> list[Output]:
        """End the requests whose time is over, be they waiting or running."""
        outputs: list[Output] = []
        for request in self.deadlines.expired(now):
            limit = self.deadlines.limit_of(request)
            error = f"The answer was not complete within {limit:g} s"
            outputs += self._finish(request, "timeout", error=error)
        return outputs

    def _publish(self, chunks: list[ScheduledChunk], logits: torch.Tensor) -> list[Output]:
        """File what was computed, and take one token for every branch that is due one."""
        branches, rows, searches = self._due(chunks)
        with torch.inference_mode():
            # Before `sample`, which changes the logits it is given.
            candidates = [self._expand(request, logits, searches[request]) for request in searches]
            wanted = logits if rows == list(range(len(logits))) else logits[rows]
            tokens = self.sampler.sample(wanted, branches) if branches else []
        for chunk in chunks:
            new, again = self.meter.count_chunk(chunk)
            self.tokens_computed += new
            self.tokens_recomputed += again
            chunk.branch.sequence.commit(chunk.start + chunk.count)
        for branch in branches:
            first = branch.request.branches[0]
            if branch is not first and branch.sequence is first.sequence:
                branch.sequence = first.sequence.fork()
                branch.num_ever_computed = first.num_ever_computed
        now = self._clock()
        outputs: list[Output] = []
        for branch, token in zip(branches, tokens, strict=True):
            outputs += self._guarded(branch.request, self._accept, branch, token, now)
        if self._verifier is not None:
            drawn = list(zip(branches, rows, tokens, strict=True))
            outputs += self._verifier.verify(
                chunks,
                drawn,
                logits,
                self.runner,
                lambda branch, token: self._guarded(
                    branch.request, self._go_on, branch, token, now
                ),
            )
        for request, expansions in zip(searches, candidates, strict=True):
            outputs += self._guarded(request, self._advance, request, expansions, now)
        return outputs

    def _guarded(
        self, request: EngineRequest, act: Callable[..., list[Output]], *args: object
    ) -> list[Output]:
        """Do something for one request; what fails, a tokenizer say, is its failure alone."""
        if request.status is Status.FINISHED:
            return []  # it failed with a sibling
        try:
            return act(*args)
        except Exception as error:
            log.exception("request %s failed", request.request_id)
            return self._fail(request, error)

    def _go_on(self, branch: Branch, token: SampledToken, now: float) -> list[Output]:
        """File the drafted token that a branch ends with, and accept the one drawn behind it."""
        branch.sequence.commit(len(branch.sequence))
        branch.num_ever_computed = max(branch.num_ever_computed, len(branch.sequence))
        return self._accept(branch, token, now)

    def _due(
        self, chunks: list[ScheduledChunk]
    ) -> tuple[list[Branch], list[int], dict[EngineRequest, dict[Branch, int]]]:
        """Return the branches that draw a token, the row of logits of each, and the beams' rows.

        Here a request whose prompt is computed gets its other branches; they draw from the one row
        of logits there is.
        """
        branches: list[Branch] = []
        rows: list[int] = []
        searches: dict[EngineRequest, dict[Branch, int]] = {}
        row = 0
        for chunk in chunks:
            if not chunk.samples:
                continue
            branch, request = chunk.branch, chunk.branch.request
            if request.beams is not None:
                searches.setdefault(request, {})[branch] = row
            else:
                made = request.branch_out() or [branch]
                branches += made
                rows += [row] * len(made)
            row += 1 + chunk.num_rows - chunk.count
        return branches, rows, searches

    def _expand(
        self, request: EngineRequest, logits: torch.Tensor, rows: dict[Branch, int]
    ) -> list[Expansion]:
        assert request.beams is not None
        count = request.beams.num_candidates(self.eos_token_ids)
        # All beams are in the step, and equal scores are ranked by the beam.
        beams = request.live
        return self.sampler.expand(logits[[rows[b] for b in beams]], beams, count)

    def _advance(
        self, request: EngineRequest, candidates: list[Expansion], now: float
    ) -> list[Output]:
        """Let a beam search choose; return its answers if that was the last step."""
        assert request.beams is not None
        self._note_time(request, request.live[0], now)
        self.tokens_generated += request.beams.advance(candidates, self.eos_token_ids)
        for branch in request.live:
            branch.last_token_time = now
        if request.live:
            return []
        self._leave(request, request.ranked()[0].finish_reason or "stop")
        return chosen(request)

    def _accept(self, branch: Branch, token: SampledToken, now: float) -> list[Output]:
        """Append a token, decide whether the answer ends, and say what is new."""
        request = branch.request
        branch.append(token.token_id)
        self.tokens_generated += 1
        self._note_time(request, branch, now)
        branch.last_token_time = now
        if token.logprob is not None:
            branch.cumulative_logprob += token.logprob.logprob
        text = branch.read(token.token_id, self.eos_token_ids)
        if branch.finish_reason is not None:
            self.scheduler.release(branch)
            if not request.live:
                self._leave(request, branch.finish_reason)
        if request.params.holds_back:
            branch.keep(text, token.logprob)
            return [] if request.live else chosen(request)
        logprobs = None if token.logprob is None else (token.logprob,)
        return [increment(branch, text, (token.token_id,), logprobs)]

    def _note_time(self, request: EngineRequest, branch: Branch, now: float) -> None:
        """Note when a branch got a token, `last_token_time` being that of the one before."""
        timings = request.timings
        if timings.first_token is None:
            timings.first_token = now
            self.meter.record_first_token(now - timings.arrival)
            if request.params.cache_pin_ttl is not None:
                prompt = branch.sequence.token_ids[: request.num_prompt_tokens]
                ttl_s = request.params.cache_pin_ttl
                pin_computed(self.cache, prompt, request.namespace, ttl_s, request.request_id)
        elif branch.last_token_time is not None:
            timings.inter_token.append(now - branch.last_token_time)
        timings.last_token = now

    def _fail_step(self, chunks: list[ScheduledChunk], error: Exception) -> list[Output]:
        """End all requests that a failed step may have left without their copies."""
        failed = {c.branch.request.order: c.branch.request for c in chunks}
        # A branch that was just opened may be owed a copy and yet have no chunk.
        failed |= {r.order: r for r in self.scheduler.running.values() if len(r.live) > 1}
        outputs: list[Output] = []
        for request in failed.values():
            for branch in request.live:
                branch.sequence.free(keep_tail=False)
            outputs += self._fail(request, error)
        return outputs

    def _fail(self, request: EngineRequest, error: Exception) -> list[Output]:
        message = f"internal error: {type(error).__name__}"
        if isinstance(error, GrammarError):
            message = f"the answer can't follow its grammar: {error}"
        return self._finish(request, "error", error=message)

    def _finish(
        self, request: EngineRequest, reason: FinishReason, *, error: str | None = None
    ) -> list[Output]:
        """End a request before its time: every answer that has not ended ends for this reason."""
        self._leave(request, reason)
        return ended_early(request, reason, error)

    def _leave(self, request: EngineRequest, reason: FinishReason) -> None:
        """Release everything; the only way out."""
        self.scheduler.remove(request)
        self.deadlines.discard(request)
        request.live.clear()
        self.requests.pop(request.request_id, None)
        request.timings.finished = self._clock()
        self.meter.record_request(request, reason)
        self.finished[reason] += 1

    def flush_kv_events(self) -> None:
        """Publish what the cache stored and removed since the last call, if anyone wants it."""
        if self.kv_events is not None:
            self.kv_events.flush()

    def close(self, *, save: bool = True) -> None:
        """Write the cache to disk, if it has a disk tier; stop publishing events. Idempotent.

        Args:
            save: False writes nothing, after a failure.
        """
        if self.tiers is not None:
            try:
                self.tiers.close(save=save)
            except Exception:  # whoever waits for the end must hear of it all the same
                log.exception("the tiers of the cache can't be closed in order")
        if self.kv_events is not None:
            self.kv_events.close()
        if self.grammars is not None:
            self.grammars.close()
        self._masks.close()

    def stats(self) -> EngineStats:
        """Return a snapshot of all counters."""
        return snapshot(self, self._clock())


def _grammars(chunks: Sequence[ScheduledChunk]) -> list[GrammarState]:
    """Return the states of the answers that draw a token in a step."""
    states = (chunk.branch.grammar for chunk in chunks if chunk.samples)
    return [state for state in states if state is not None]
