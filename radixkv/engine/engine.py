"""The step loop: schedule, run, sample, publish."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from radixkv.cache import RadixCache
from radixkv.engine.batch import build_batch
from radixkv.engine.detokenizer import Decoder
from radixkv.engine.kv_events import KVEventStream
from radixkv.engine.request import EngineRequest
from radixkv.engine.runner import Runner
from radixkv.engine.sampler import SampledToken, Sampler
from radixkv.engine.scheduler import ScheduledChunk, Scheduler
from radixkv.engine.stats import EngineStats, hit_rate, namespace_label
from radixkv.engine.tiering import Tiering
from radixkv.errors import ContextLengthError, RequestRejectedError
from radixkv.request import FinishReason, Namespace, RequestOutput, SamplingParams

__all__ = ["Engine", "EngineLimits", "Output"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Bounds of the engine.

    Attributes:
        max_model_len: tokens of prompt and answer together.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens computed in one step.
    """

    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 256


@dataclass(frozen=True, slots=True)
class Output:
    """An increment together with the request it belongs to."""

    request_id: str
    output: RequestOutput


class Engine:
    """Owns the cache, the scheduler, the sampler and the runner. One thread drives it.

    Every accepted request gets exactly one output with a `finish_reason`, and holds nothing after
    it: finished, aborted and failed requests all leave through `_finish`.
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
        self.scheduler = Scheduler(
            cache,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            tiers=tiers,
        )
        self.tiers = tiers
        self.explanations = self.scheduler.explanations
        self.kv_events: KVEventStream | None = None
        self.sampler = Sampler(self.eos_token_ids)
        self.requests: dict[str, EngineRequest] = {}
        self.finished: Counter[str] = Counter()
        self.num_rejected = 0
        self.tokens_computed = 0
        self.tokens_recomputed = 0
        self.tokens_generated = 0
        self.num_steps = 0
        self.step_time_s = 0.0
        self._clock = clock
        self._started = clock()
        self._last_step = self._started
        self._next_order = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.requests)

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> np.ndarray:
        """Return the prompt as `[n]` int32 if it can be accepted. Safe from any thread.

        Raises:
            ContextLengthError: it leaves no room for an answer.
            RequestRejectedError: it is empty or has ids outside the vocabulary.
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
        vocab = self.runner.vocab_size
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
        return ids.astype(np.int32)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | np.ndarray,
        params: SamplingParams,
        *,
        namespace: Namespace = (),
        arrival: float | None = None,
    ) -> EngineRequest:
        """Queue a request.

        Raises:
            RequestRejectedError: see `validate`; or the id is in use.
        """
        prompt = self.validate(prompt_token_ids, params)  # type: ignore[arg-type]
        if request_id in self.requests:
            raise RequestRejectedError(f"request id {request_id!r} is in use")
        max_total = self.max_model_len
        if params.max_tokens is not None:
            max_total = min(max_total, len(prompt) + params.max_tokens)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        request = EngineRequest(
            request_id,
            self.cache.create_sequence(prompt, namespace),
            params,
            order=self._next_order,
            seed=seed,
            max_total_tokens=max_total,
            arrival=self._clock() if arrival is None else arrival,
            tokenizer=self.tokenizer,
        )
        self._next_order += 1
        self.requests[request_id] = request
        self.scheduler.add(request)
        return request

    def abort(self, request_id: str) -> list[Output]:
        """End a request now; nothing happens if it is unknown or has ended."""
        request = self.requests.get(request_id)
        return [] if request is None else [self._finish(request, "abort")]

    def step(self, lock: AbstractContextManager[object] | None = None) -> list[Output]:
        """Run one step; return what it produced. An error in the model ends the step's requests.

        Args:
            lock: held while the engine's own state changes, free while the model runs.
        """
        begin = self._clock()
        lock = nullcontext() if lock is None else lock
        with lock:
            chunks = self.scheduler.schedule(begin)
            if chunks:
                copies = self.cache.take_copies()
                batch, chunks = build_batch(chunks, self.cache.block_size, copies)
        if self.tiers is not None:
            # What was evicted is still in its blocks, until the step writes to them.
            self.tiers.flush()
            if not chunks:
                self.tiers.wait()
        if not chunks:
            return []
        started = self._clock()
        try:
            logits = self.runner.execute(batch)
            with lock:
                outputs = self._publish(chunks, logits)
        except Exception as error:  # one bad step must not take the other requests down
            log.exception("a step failed; its %d requests end with an error", len(chunks))
            with lock:
                for chunk in chunks:
                    # Whether the step's copies were made isn't known.
                    chunk.request.sequence.free(keep_tail=False)
                outputs = [self._fail(c.request, error) for c in chunks]
        self._last_step = self._clock()
        self.num_steps += 1
        self.step_time_s += self._last_step - begin
        if self.tiers is not None:
            num_tokens = sum(chunk.count for chunk in chunks)
            self.tiers.costs.record_step(num_tokens, self._last_step - started)
        return outputs

    def _publish(self, chunks: list[ScheduledChunk], logits: torch.Tensor) -> list[Output]:
        """File what was computed, and take one token for every request that is due one."""
        due = [c.request for c in chunks if c.samples]
        tokens = self._sample(logits, due)
        for chunk in chunks:
            self._count_computed(chunk)
            chunk.request.sequence.commit(chunk.start + chunk.count)
        now = self._clock()
        outputs = []
        for request, token in zip(due, tokens, strict=True):
            try:
                outputs.append(self._accept(request, token, now))
            except Exception as error:  # a tokenizer's failure is this request's alone
                log.exception("request %s failed", request.request_id)
                outputs.append(self._fail(request, error))
        return outputs

    def _sample(self, logits: torch.Tensor, requests: list[EngineRequest]) -> list[SampledToken]:
        with torch.inference_mode():
            return self.sampler.sample(logits, requests) if requests else []

    def _count_computed(self, chunk: ScheduledChunk) -> None:
        request, end = chunk.request, chunk.start + chunk.count
        new = max(chunk.start, request.num_ever_computed)
        self.tokens_recomputed += max(0, min(end, new) - chunk.start)
        self.tokens_computed += max(0, min(end, request.num_prompt_tokens) - new)
        request.num_ever_computed = max(end, request.num_ever_computed)

    def _accept(self, request: EngineRequest, token: SampledToken, now: float) -> Output:
        """Append a token, decide whether the answer ends, and say what is new."""
        params, token_id = request.params, token.token_id
        request.sequence.append((token_id,))
        if request.penalties is not None:
            request.penalties.count(token_id)
        self.tokens_generated += 1
        timings = request.timings
        if timings.first_token is None:
            timings.first_token = now
        elif timings.last_token is not None:
            timings.inter_token.append(now - timings.last_token)
        timings.last_token = now

        text, stop = "", None
        logprobs = None if token.logprob is None else (token.logprob,)
        may_stop = request.num_output_tokens >= params.min_tokens
        is_eos = token_id in self.eos_token_ids and not params.ignore_eos
        if may_stop and (is_eos or token_id in params.stop_token_ids):
            # The end token is not part of the text.
            reason: FinishReason | None = "stop"
            stop_reason: str | int | None = None if is_eos else token_id
        else:
            text, stop = request.stop_matcher.push(request.detokenizer.push(token_id))
            reason, stop_reason = ("stop", stop) if stop is not None else (None, None)
        if reason is None and len(request.sequence) >= request.max_total_tokens:
            reason = "length"
        if reason is None:
            return Output(request.request_id, self._output(request, text, token_id, logprobs))
        if stop is None:
            more, stop = request.stop_matcher.push(request.detokenizer.flush())
            text += more
            if stop is not None:
                reason, stop_reason = "stop", stop
            else:
                text += request.stop_matcher.flush()
        return self._finish(
            request,
            reason,
            last=self._output(request, text, token_id, logprobs),
            stop_reason=stop_reason,
        )

    def _output(
        self, request: EngineRequest, text: str, token_id: int, logprobs: object
    ) -> RequestOutput:
        return RequestOutput(
            text=text,
            token_ids=(token_id,),
            logprobs=logprobs,  # type: ignore[arg-type]
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens or 0,
            num_completion_tokens=request.num_output_tokens,
        )

    def _fail(self, request: EngineRequest, error: Exception) -> Output:
        return self._finish(request, "error", error=f"internal error: {type(error).__name__}")

    def _finish(
        self,
        request: EngineRequest,
        reason: FinishReason,
        *,
        last: RequestOutput | None = None,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> Output:
        """The only way out: release everything and make the last output."""
        self.scheduler.remove(request)
        del self.requests[request.request_id]
        request.finish_reason = reason
        request.timings.finished = self._clock()
        self.finished[reason] += 1
        return Output(
            request.request_id,
            RequestOutput(
                text=last.text if last else "",
                token_ids=last.token_ids if last else (),
                logprobs=last.logprobs if last else None,
                finish_reason=reason,
                stop_reason=stop_reason,
                error=error,
                num_prompt_tokens=request.num_prompt_tokens,
                num_cached_tokens=request.num_cached_tokens or 0,
                num_completion_tokens=request.num_output_tokens,
                timings=request.timings,
            ),
        )

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

    def stats(self) -> EngineStats:
        """Return a snapshot of all counters."""
        cache, stats, now = self.cache, self.cache.stats, self._clock()
        waiting = self.scheduler.waiting
        windows = {"all": (stats.tokens_looked_up, stats.tokens_hit)}
        windows |= {name: stats.window(name) for name in stats.windows}
        return EngineStats(
            uptime_s=now - self._started,
            num_running=len(self.scheduler.running),
            num_waiting=len(waiting),
            oldest_wait_s=now - waiting.peekitem(0)[1].timings.arrival if waiting else 0.0,
            tokens_looked_up=stats.tokens_looked_up,
            tokens_hit=stats.tokens_hit,
            tokens_rehit=stats.tokens_rehit,
            tokens_computed=self.tokens_computed,
            tokens_recomputed=self.tokens_recomputed,
            tokens_generated=self.tokens_generated,
            requests_admitted=self.scheduler.num_admitted,
            requests_rejected=self.num_rejected,
            requests_finished=dict(self.finished),
            preemptions=self.scheduler.num_preemptions,
            block_size=cache.block_size,
            bytes_per_block=self.bytes_per_block,
            blocks_total=cache.num_blocks,
            blocks_free=cache.num_free_blocks,
            blocks_cached=cache.num_evictable_blocks,
            blocks_referenced=cache.num_referenced_blocks,
            evicted_blocks=stats.blocks_evicted,
            copied_blocks=stats.blocks_copied,
            nodes=cache.tree.num_nodes,
            leaves=len(cache.evictor),
            steps=self.num_steps,
            step_time_s=self.step_time_s,
            last_step_age_s=now - self._last_step,
            windows={
                name: {"looked_up": looked_up, "hit": hit, "hit_rate": hit_rate(hit, looked_up)}
                for name, (looked_up, hit) in windows.items()
            },
            namespaces={
                namespace_label(namespace): {
                    "requests": entry.requests,
                    "looked_up": entry.tokens_looked_up,
                    "hit": entry.tokens_hit,
                    "hit_rate": hit_rate(entry.tokens_hit, entry.tokens_looked_up),
                    "blocks": self._namespace_blocks(namespace),
                }
                for namespace, entry in stats.namespaces.items()
            },
            kv_events=self.kv_events.counters() if self.kv_events is not None else {},
            tokens_hit_by_tier=dict(self.scheduler.tokens_hit_by_tier),
            tiers=self.tiers.stats() if self.tiers is not None else {},
        )

    def _namespace_blocks(self, namespace: Namespace) -> int:
        root = self.cache.tree.roots.get(namespace)
        return root.root.num_blocks if root is not None else 0
