"""An accepted request (or a batch of them) from submission to its end, whatever the end is."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from radixkv.engine import namespace_label
from radixkv.errors import RequestRejectedError
from radixkv.request import (
    FinishReason,
    Namespace,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)
from radixkv.server.errors import ApiError, api_error_from
from radixkv.server.logs import log_prompt
from radixkv.server.metrics import Metrics
from radixkv.server.request_ids import engine_ids
from radixkv.server.scope import RequestScope, current_scope

if TYPE_CHECKING:
    from radixkv.engine import AsyncEngine, RequestStream
    from radixkv.engine.grammar import Grammar
    from radixkv.server.limits import KeyUse

__all__ = ["Answer", "Generation"]


@dataclass(slots=True)
class Answer:
    """Everything that was given of one choice so far.

    Attributes:
        num_prompt_tokens, num_cached_tokens: 0 but for the first choice of a prompt, so that their
            sums count a prompt once.
    """

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0

    def add(self, output: RequestOutput) -> None:
        """Append one increment."""
        if output.text:
            self.text.append(output.text)
        self.token_ids.extend(output.token_ids)
        if output.logprobs:
            self.logprobs.extend(output.logprobs)
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason
        self.num_completion_tokens = output.num_completion_tokens

    def count_prompt(self, output: RequestOutput) -> None:
        """Note the size of the prompt, from an increment of any of its choices."""
        self.num_prompt_tokens = output.num_prompt_tokens
        self.num_cached_tokens = output.num_cached_tokens

    def num_pinned_tokens(self, block_size: int | None) -> int:
        """Return the prompt tokens that were computed and pinned: whole blocks.

        Args:
            block_size: of the cache; None if the prompt was not to be pinned.
        """
        if block_size is None:
            return 0
        whole = self.num_prompt_tokens // block_size * block_size
        return max(0, whole - self.num_cached_tokens)

    def full_text(self) -> str:
        """Return the text so far."""
        return "".join(self.text)


class Generation:
    """The streams of one HTTP request; iterate it once, and always `close()` it.

    Choice `i` of prompt `p` is number `p * n + i`. Iteration yields (number, increment) until every
    choice has ended. An increment that ends one by "abort" or "error" is not yielded: it raises the
    `ApiError` the client shall see.

    Attributes:
        id: a new unique id, for the answer's own `id` field; the engine's names for the requests
            are made of it (see `engine_ids`).
        n: choices per prompt.
        answers: one per choice; each increment is added before it is yielded.
    """

    def __init__(
        self, streams: Sequence[RequestStream], n: int, metrics: Metrics, generation_id: str
    ) -> None:
        self.id = generation_id
        self.n = n
        self.answers = [Answer() for _ in range(n * len(streams))]
        self._streams = streams
        self._metrics = metrics
        self._scope: RequestScope | None = None
        self._reason: ApiError | None = None
        self._pumps: list[asyncio.Task[None]] = []
        self._use: KeyUse | None = None
        self._branches = n
        self._closed = False

    @classmethod
    def submit(
        cls,
        engine: AsyncEngine,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        namespace: Namespace,
        metrics: Metrics,
        grammar: Grammar | None = None,
        param: str,
        use: KeyUse | None = None,
    ) -> Generation:
        """Hand `prompts` to the engine, all of them or none.

        Args:
            grammar: that of `params`, if they have one.
            param: the request field the prompts came from; named when the engine refuses one.
            use: of the caller's key, if it has limits.

        Raises:
            ApiError: the engine refuses one of the prompts, or the key has no tokens left.
        """
        num_tokens = sum(map(len, prompts))
        if use is not None:
            params = use.cut(params)
            use.begin_tokens(num_tokens)
        streams: list[RequestStream] = []
        # Never the client's own id, which may come twice at once.
        generation_id = uuid.uuid4().hex
        names = engine_ids(generation_id, len(prompts))
        try:
            streams.extend(
                engine.submit(ids, params, namespace=namespace, request_id=name, grammar=grammar)
                for ids, name in zip(prompts, names, strict=True)
            )
        except RequestRejectedError as error:
            for stream in streams:
                stream.abort()
            if use is not None:
                use.add_tokens(-num_tokens)
            refusal = api_error_from(error)
            if refusal.status == 400 and refusal.param in (None, "prompt"):
                refusal.param = param
            raise refusal from error
        generation = cls(streams, params.n, metrics, generation_id)
        generation._use, generation._branches = use, params.num_branches
        if (scope := current_scope()) is not None:
            generation._scope = scope
            label = namespace_label(namespace)
            scope.begin(names, streams, generation.by_prompt(), prompts, params, label)
            if scope.log_prompts:
                for name, ids in zip(names, prompts, strict=True):
                    log_prompt(engine.tokenizer, name, ids)
        return generation

    def by_prompt(self) -> list[list[Answer]]:
        """Return the answers by the prompt that they are to."""
        starts = range(0, len(self.answers), self.n)
        return [self.answers[start : start + self.n] for start in starts]

    def abort(self, reason: ApiError) -> None:
        """End the streams early; the iteration then raises `reason`."""
        if self._reason is None:
            self._reason = reason
        for stream in self._streams:
            stream.abort()

    def close(self) -> None:
        """Abort what still runs and record what happened. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for pump in self._pumps:
            pump.cancel()
        for stream, answers in zip(self._streams, self.by_prompt(), strict=True):
            stream.abort()
            self._metrics.observe_request(stream.timings, answers)
        if self._scope is not None:
            self._scope.end()
        if self._use is not None:
            # Answers that were generated and not chosen count like the others.
            told = sum(answer.num_completion_tokens for answer in self.answers)
            self._use.add_tokens(told * self._branches // self.n)

    async def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        if len(self._streams) == 1:
            async for output in self._streams[0]:
                yield self._checked(0, output)
            self._check_ended()
            return
        queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue()
        self._pumps = [
            asyncio.create_task(_pump(i, stream, queue)) for i, stream in enumerate(self._streams)
        ]
        running = len(self._pumps)
        while running:
            index, item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield self._checked(index, item)
        self._check_ended()

    def _checked(self, prompt: int, output: RequestOutput) -> tuple[int, RequestOutput]:
        number = prompt * self.n + output.index
        self.answers[number].add(output)
        self.answers[prompt * self.n].count_prompt(output)
        if output.finish_reason == "timeout":
            raise ApiError(504, output.error or "The answer took too long", code="request_timeout")
        if output.finish_reason == "error":
            raise ApiError(500, output.error or "The engine failed", code="engine_error")
        if output.finish_reason == "abort":
            raise self._abort_error()
        return number, output

    def _check_ended(self) -> None:
        # A stream that stops without saying why must not look like a complete answer.
        if any(answer.finish_reason is None for answer in self.answers):
            raise self._abort_error()

    def _abort_error(self) -> ApiError:
        return self._reason or ApiError(
            503,
            "The server ended the request before its answer was complete",
            code="request_aborted",
            headers={"Retry-After": "5"},
        )


async def _pump(
    index: int,
    stream: RequestStream,
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]],
) -> None:
    try:
        async for output in stream:
            queue.put_nowait((index, output))
        queue.put_nowait((index, None))
    except Exception as error:
        # Handed to the one who iterates, since a task's own exception would go unseen.
        queue.put_nowait((index, error))
