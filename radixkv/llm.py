"""The engine as a library: prompts in, whole answers out, no server."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from radixkv.batch_progress import BatchProgress
from radixkv.errors import EngineClosedError, RequestRejectedError
from radixkv.openmp import set_wait_policy
from radixkv.options import config_of, naming_keywords, quotas_of
from radixkv.outputs import AnswerCollector, RequestOutput
from radixkv.prompts import Message, Prompt, PromptLike, chat_prompt, prompts_of
from radixkv.request import SamplingParams

if TYPE_CHECKING:
    from radixkv.engine import AsyncEngine, EngineStats, RequestStream
    from radixkv.model.tokenizer import TokenizerLike

__all__ = ["LLM", "BeamSearchParams"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """How to look for the likeliest answers. See `SamplingParams` for the ranges.

    Attributes:
        beam_width: beams, and answers.
        max_tokens: most tokens of an answer.
        ignore_eos: the model's end tokens do not end an answer.
        length_penalty: see `SamplingParams`.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class _Job:
    prompt: Prompt
    params: SamplingParams


class LLM:
    """Owns an engine, and a thread with the event loop that its answers come to.

    May be used from several threads, also inside another event loop (a notebook's). Close it, or
    use it as a context manager; at the latest it closes when the program ends.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any) -> None:
        """Load a model.

        Args:
            model: a directory, a .gguf file or a hub id; None is the default model.
            options: those of `radixkv serve`, as in `max_num_seqs=8` or `kv_cache_memory="1GiB"`.
                What concerns HTTP has no effect.

        Raises:
            ConfigError: an option is unknown, out of range, or doesn't fit the model or machine.
        """
        config = config_of(model, options)
        # As on the command line: read when torch is loaded, if that is still to come.
        set_wait_policy()
        from radixkv.engine.factory import build_engine

        with naming_keywords():
            built = build_engine(config, quotas=quotas_of(config))
        self._serve(built.engine)

    @classmethod
    def from_engine(cls, engine: AsyncEngine) -> LLM:
        """Wrap an engine that was built already and is not started; it is closed with the `LLM`."""
        llm = cls.__new__(cls)
        llm._serve(engine)
        return llm

    def _serve(self, engine: AsyncEngine) -> None:
        engine.max_num_waiting = sys.maxsize  # whoever calls waits for the answers anyway
        self._engine = engine
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_run_loop, args=(self._loop,), name="radixkv-llm", daemon=True
        )
        self._thread.start()
        self._close = weakref.finalize(self, _close, engine, self._loop, self._thread)
        self._wait(engine.start())

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts; all of them at once, as far as there is room.

        Args:
            prompts: a text, token ids, a mapping (see `PromptLike`), or a list of these.
            sampling_params: for all prompts, or one for each; None is `SamplingParams()`.
            use_tqdm: show a bar, on a terminal.
            cache_salt: prompts share KV with those of the same salt only.

        Returns:
            One output per prompt, in their order. An answer that the engine failed to give has the
            `finish_reason` "error".

        Raises:
            RequestRejectedError: a prompt, or its parameters, can't be accepted. Nothing was run.
            EngineClosedError: it is closed.
            ValueError: there are not as many parameters as prompts.
            KeyboardInterrupt: all of its requests were aborted.
        """
        found = prompts_of(prompts, self.get_tokenizer(), cache_salt)
        return self._run(self._jobs(found, sampling_params), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several.

        Args:
            messages: of one conversation, or a list of conversations.
            sampling_params, use_tqdm, cache_salt: as for `generate`.
            tools: shown to the model by its template.
            add_generation_prompt: begin the assistant's turn.
            chat_template_kwargs: more variables of the template.

        Raises:
            RequestRejectedError: as for `generate`, or the template can't render the messages.
        """
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        prompts = []
        for index, conversation in enumerate(conversations):
            try:
                prompts.append(
                    chat_prompt(
                        conversation,
                        self.get_tokenizer(),
                        tools=tools,
                        add_generation_prompt=add_generation_prompt,
                        template_kwargs=chat_template_kwargs,
                        cache_salt=cache_salt,
                    )
                )
            except RequestRejectedError as error:
                error.add_note(f"in conversation {index}")
                raise
        return self._run(self._jobs(prompts, sampling_params), use_tqdm)

    def beam_search(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Return the likeliest answers to each prompt, best first, with their `score`.

        Raises:
            RequestRejectedError: as for `generate`.
        """
        sampling = SamplingParams(
            n=params.beam_width,
            use_beam_search=True,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            length_penalty=params.length_penalty,
            logprobs=0,
        )
        return self.generate(prompts, sampling, use_tqdm=use_tqdm, cache_salt=cache_salt)

    def get_tokenizer(self) -> TokenizerLike:
        """Return the model's tokenizer."""
        return self._engine.tokenizer

    def stats(self) -> EngineStats:
        """Return all counters of the engine."""
        return self._engine.stats()

    def reset_prefix_cache(self) -> int:
        """Drop all that is cached; return how many blocks became free.

        Raises:
            RequestRejectedError: requests of another thread run.
        """
        return self._wait(self._engine.flush_cache())

    def check_integrity(self) -> None:
        """Recount the cache from scratch.

        Raises:
            CacheCorruptionError: see `RadixCache.check_integrity`.
        """
        self._wait(self._engine.check_integrity())

    def close(self) -> None:
        """Abort what runs, write the cache to disk if it has a disk tier, and stop. Idempotent."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _jobs(
        self,
        prompts: list[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[_Job]:
        """Pair prompts with parameters, and check them all."""
        if params is None:
            params = SamplingParams()
        given = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(given) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts, but {len(given)} sampling_params")
        for index, (prompt, wanted) in enumerate(zip(prompts, given, strict=True)):
            try:
                self._engine.engine.validate(prompt.token_ids, wanted)
            except RequestRejectedError as error:
                error.add_note(f"in prompt {index}")
                raise
        return [_Job(prompt, wanted) for prompt, wanted in zip(prompts, given, strict=True)]

    def _run(self, jobs: list[_Job], use_tqdm: bool) -> list[RequestOutput]:
        with BatchProgress(len(jobs), enabled=use_tqdm) as progress:
            return self._wait(self._answer(jobs, progress))

    async def _answer(self, jobs: list[_Job], progress: BatchProgress) -> list[RequestOutput]:
        engine = self._engine
        # Before anything runs: a grammar can be refused, too.
        specs = [job.params.grammar for job in jobs]
        grammars = [None if s is None else await engine.compile_grammar(s) for s in specs]
        streams: list[RequestStream] = []
        try:
            for job, grammar in zip(jobs, grammars, strict=True):
                prompt = job.prompt
                streams.append(
                    engine.submit(
                        prompt.token_ids, job.params, namespace=prompt.namespace, grammar=grammar
                    )
                )
            follow = [
                self._follow(job, stream, progress)
                for job, stream in zip(jobs, streams, strict=True)
            ]
            return await asyncio.gather(*follow)
        finally:
            for stream in streams:
                stream.abort()
            for stream in streams:
                if stream.is_open:
                    async for _ in stream:  # until the engine has let go of it
                        pass

    async def _follow(
        self, job: _Job, stream: RequestStream, progress: BatchProgress
    ) -> RequestOutput:
        collector = AnswerCollector(
            stream.request_id,
            job.prompt.text,
            job.prompt.token_ids,
            job.params,
            self.get_tokenizer().token_str,
        )
        async for increment in stream:
            collector.add(increment)
            progress.add(increment)
        output = collector.result()
        progress.finish(output)
        return output

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop's thread; if this thread is interrupted, cancel it first."""
        if not self._close.alive:
            work.close()
            raise EngineClosedError("the LLM is closed")
        done: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(finish)

        def finish(task: asyncio.Task[T]) -> None:
            if task.cancelled():
                done.set_exception(CancelledError())
            elif (error := task.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result(task.result())

        self._loop.call_soon_threadsafe(begin)
        try:
            return done.result()
        except BaseException:
            # Interrupted, it would go on unseen.
            if not done.done():
                self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                wait([done])
            raise


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.run_until_complete(_end_calls())
    loop.close()


async def _end_calls() -> None:
    """Let the calls of other threads return, whose requests were aborted or are refused by now."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)


def _close(engine: AsyncEngine, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    stopping = asyncio.run_coroutine_threadsafe(engine.shutdown(), loop)
    stopping.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
    # The last reference can be dropped by the loop's own thread.
    if thread is not threading.current_thread():
        stopping.result()
        thread.join()
