"""An engine in a thread of its own, beside an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from radixkv.cache.explain import Explanation
from radixkv.engine.cache_control import CacheControl
from radixkv.engine.engine import Engine, Output
from radixkv.engine.explanations import RequestExplanation
from radixkv.engine.grammar import Grammar
from radixkv.engine.request_progress import RequestProgress
from radixkv.engine.stats import EngineHealth, EngineStats, namespace_label
from radixkv.errors import EngineClosedError, QueueFullError, RequestRejectedError
from radixkv.request import GrammarSpec, Namespace, RequestOutput, RequestTimings, SamplingParams

if TYPE_CHECKING:
    from radixkv.model.tokenizer import TokenizerLike

__all__ = ["AsyncEngine", "RequestStream"]

log = logging.getLogger(__name__)
T = TypeVar("T")


class RequestStream:
    """An async iterator over one request's increments; the last of each answer says why it ended.

    Belongs to the event loop. Abort it on every way out that isn't its end.
    """

    def __init__(self, request_id: str, abort: Callable[[str], None], num_answers: int = 1) -> None:
        self.request_id = request_id
        self.num_answers = num_answers
        self.timings = RequestTimings()
        self._abort = abort
        self._outputs: deque[RequestOutput] = deque()
        self._arrived = asyncio.Event()
        self._open = set(range(num_answers))  # answers whose end has not come
        self._num_ends_read = 0
        self._aborted = False

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._outputs:
            if self._num_ends_read == self.num_answers:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        output = self._outputs.popleft()
        self._num_ends_read += output.finish_reason is not None
        return output

    @property
    def is_open(self) -> bool:
        """Whether the engine still owes increments."""
        return bool(self._open)

    def abort(self) -> None:
        """End the request now; no more text is delivered. Idempotent, and harmless at the end."""
        if self._num_ends_read == self.num_answers or self._aborted:
            return
        self._aborted = True
        # Answers that have ended before anyone read the end: it is still owed.
        ends = [output for output in self._outputs if output.finish_reason is not None]
        self._outputs.clear()
        for output in ends:
            self._enqueue(output)
        if self.is_open:
            self._abort(self.request_id)

    def _deliver(self, output: RequestOutput) -> None:
        if output.index not in self._open:
            return  # a failure that was sent to all answers, ended ones too
        if output.finish_reason is not None:
            self._open.remove(output.index)
        self._enqueue(output)

    def _enqueue(self, output: RequestOutput) -> None:
        if self._aborted:
            if output.finish_reason is None:
                return
            # Whatever the engine was about to say, the client was told that it is over.
            output = RequestOutput(
                index=output.index,
                finish_reason="abort",
                num_prompt_tokens=output.num_prompt_tokens,
                num_cached_tokens=output.num_cached_tokens,
                num_completion_tokens=output.num_completion_tokens,
                timings=output.timings,
            )
        if output.timings is not None:
            self.timings = output.timings
        self._outputs.append(output)
        self._arrived.set()


class AsyncEngine:
    """Owns the thread that drives an `Engine`, and the streams of its requests.

    The event loop's side only appends to an inbox and reads plain numbers; the engine's state is
    touched by its own thread alone, under a lock that is free while the model runs.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: TokenizerLike,
        *,
        model_name: str,
        max_num_waiting: int = 1024,
    ) -> None:
        """Wrap an engine; `start` runs it.

        Args:
            engine: not used by anyone else from now on.
            tokenizer: for the server.
            model_name: the name the model is served under.
            max_num_waiting: requests that may wait beside those that run; more are refused.
        """
        self.engine = engine
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.max_model_len = engine.max_model_len
        self.vocab_size = engine.runner.vocab_size
        self.block_size = engine.cache.block_size
        self.max_num_waiting = max_num_waiting
        self.control = CacheControl(engine, self._call)
        self._streams: dict[str, RequestStream] = {}
        self._done = asyncio.Event()  # the thread has ended
        self._idle = asyncio.Event()  # no streams
        self._idle.set()
        self._inbox: deque[Callable[[], None]] = deque()
        self._calls: set[Future[Any]] = set()
        self._wake = threading.Condition()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._accepting = False
        self._stopping = False
        self._ended = False  # the thread takes nothing more from the inbox
        self._failure: BaseException | None = None
        self._step_started: float | None = None

    async def start(self) -> None:
        """Start the thread. The running event loop gets the outputs."""
        self._loop = asyncio.get_running_loop()
        self._accepting = True
        self._thread = threading.Thread(target=self._main, name="radixkv-engine", daemon=True)
        self._thread.start()

    async def shutdown(self, drain_timeout_s: float = 0.0) -> None:
        """Refuse new requests, let the running ones finish, end the rest, stop the thread.

        Args:
            drain_timeout_s: how long to let accepted requests go on; then they are aborted.
        """
        self._accepting = False
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), drain_timeout_s)
        for request_id in list(self._streams):
            self._post(lambda request_id=request_id: self._engine_abort(request_id))  # type: ignore[misc]
        await self._idle.wait()
        self._stopping = True
        self._notify()
        if (thread := self._thread) is not None:
            # Not joined in a worker thread, which a step that never ends would keep for ever.
            await self._done.wait()
            thread.join()
            self._thread = None

    def submit(
        self,
        prompt_token_ids: Sequence[int] | np.ndarray,
        params: SamplingParams,
        *,
        namespace: Namespace = (),
        request_id: str | None = None,
        grammar: Grammar | None = None,
    ) -> RequestStream:
        """Hand a request to the engine; return its stream. Never blocks.

        Args:
            prompt_token_ids: `[n]` ids, 1 <= n < max_model_len.
            params: how to sample and when to stop.
            namespace: KV is shared within equal namespaces only.
            request_id: must be unique among live requests; made up if None.
            grammar: of a request whose `params` have one, from `compile_grammar`.

        Raises:
            ContextLengthError: the prompt leaves no room for an answer.
            QueueFullError: too many requests wait already.
            EngineClosedError: the engine is draining, stopped or failed.
            RequestRejectedError: the prompt is empty or has ids outside the vocabulary.
            ValueError: the grammar is missing.
        """
        if params.grammar is not None and grammar is None:
            raise ValueError("compile_grammar must be awaited before submit")
        if self._failure is not None:
            raise EngineClosedError("the engine has failed; the server must be restarted")
        if not self._accepting:
            raise EngineClosedError("the server is shutting down")
        try:
            prompt = self.engine.validate(prompt_token_ids, params)  # type: ignore[arg-type]
            if len(self._streams) >= self.engine.limits.max_num_seqs + self.max_num_waiting:
                raise QueueFullError(
                    f"{len(self._streams)} requests are running or waiting; try again later"
                )
            request_id = request_id or f"req-{uuid.uuid4().hex}"
            if request_id in self._streams:
                raise RequestRejectedError(f"request id {request_id!r} is in use")
        except RequestRejectedError:
            self.engine.num_rejected += 1
            raise
        self._idle.clear()
        stream = RequestStream(request_id, self._request_abort, params.n)
        self._streams[request_id] = stream
        arrival = time.monotonic()

        def add() -> None:
            try:
                request = self.engine.add_request(
                    stream.request_id,
                    prompt,
                    params,
                    namespace=namespace,
                    arrival=arrival,
                    grammar=grammar,
                )
                stream.timings = request.timings
            except Exception as error:  # its stream must end all the same
                log.exception("request %s could not be added", stream.request_id)
                self._send(_failures(stream, error))

        if not self._post(add):
            self._forget(request_id)
            raise EngineClosedError("the engine isn't running")
        return stream

    async def compile_grammar(self, spec: GrammarSpec) -> Grammar:
        """Return what `submit` needs of a request with a grammar. Compiles on another thread.

        Raises:
            RequestRejectedError: see `GrammarCompiler.prepare`; counted as a rejected request.
        """
        try:
            return await self.engine.grammar_compiler().prepare(spec)
        except RequestRejectedError:
            self.engine.num_rejected += 1
            raise

    def stats(self) -> EngineStats:
        """Return a consistent snapshot; waits for the bookkeeping of a step at most."""
        with self._lock:
            return self.engine.stats()

    def progress(self) -> dict[str, RequestProgress]:
        """Return how far each live request has come, by its name; waits as `stats` does.

        Requests that the engine's thread has not yet seen are left out.
        """
        with self._lock:
            return {r.request_id: RequestProgress.of(r) for r in self.engine.requests.values()}

    def health(self) -> EngineHealth:
        """Return whether the engine is fit to answer. Never blocks."""
        started = self._step_started
        return EngineHealth(
            alive=self._thread is not None and self._thread.is_alive() and self._failure is None,
            accepting=self._accepting and self._failure is None,
            busy=bool(self._streams),
            seconds_in_step=0.0 if started is None else time.monotonic() - started,
            num_running=len(self.engine.scheduler.running),
            num_waiting=len(self.engine.scheduler.waiting),
        )

    def explain(self, request_id: str) -> RequestExplanation | None:
        """Return what a request found at its admission, and why no more.

        None if it was not admitted yet, or too long ago. Waits as `stats` does.
        """
        with self._lock:
            return self.engine.explanations.get(request_id)

    def recent_explanations(
        self, limit: int, *, misses_only: bool = False
    ) -> list[RequestExplanation]:
        """Return the latest explanations, latest first; see `ExplanationLog.recent`."""
        with self._lock:
            return self.engine.explanations.recent(limit, misses_only=misses_only)

    async def explain_prompt(
        self, prompt_token_ids: Sequence[int], namespace: Namespace = ()
    ) -> Explanation:
        """Say what a request with this prompt would find now.

        Raises:
            RequestRejectedError: as `submit`, for a prompt it would refuse.
        """
        prompt = self.engine.validate(prompt_token_ids, SamplingParams())
        cache = self.engine.cache
        return await self._call(lambda: cache.explain(prompt, namespace, len(prompt) - 1))

    async def tree_report(
        self,
        max_depth: int,
        max_breadth: int,
        namespace: str | None = None,
        sessions: Iterable[tuple[str, Namespace, Iterable[int]]] = (),
    ) -> dict[str, Any]:
        """Return the cached tree as plain types; see `radixkv.cache.inspection.tree_report`.

        Args:
            max_depth: nodes on a path at most.
            max_breadth: children of a node at most.
            namespace: label of the one to show (see `namespace_label`); None shows all.
            sessions: (name, namespace, token ids) of conversations to be found in the tree.
        """

        def look() -> dict[str, Any]:
            cache = self.engine.cache
            wanted = None
            if namespace is not None:
                known = {namespace_label(name): name for name in cache.tree.roots}
                wanted = known.get(namespace)
                if wanted is None:
                    raise RequestRejectedError(
                        f"nothing is cached under the namespace {namespace!r}", param="namespace"
                    )
            report = cache.tree_report(max_depth, max_breadth, namespace=wanted, sessions=sessions)
            for entry in report["namespaces"]:
                entry["namespace"] = namespace_label(tuple(entry["namespace"]))
            return report

        return await self._call(look)

    async def check_integrity(self) -> None:
        """Recompute the cache's counts between two steps.

        Raises:
            CacheCorruptionError: see `RadixCache.check_integrity`.
        """
        await self._call(self.engine.cache.check_integrity)

    async def flush_cache(self) -> int:
        """Drop everything cached; return how many blocks became free.

        Raises:
            RequestRejectedError: requests hold blocks (code "busy").
        """

        def flush() -> int:
            if self.engine.has_work:
                held = self.engine.cache.num_referenced_blocks
                raise RequestRejectedError(
                    f"the cache is in use: {len(self.engine.requests)} requests hold {held} blocks",
                    code="busy",
                )
            return self.engine.cache.reset()

        return await self._call(flush)

    def stop_saving(self) -> None:
        """Write no more of the cache to disk than has been begun, at the end. Never blocks."""
        if self.engine.tiers is not None:
            self.engine.tiers.stop_saving()

    async def _call(self, function: Callable[[], T]) -> T:
        """Run a function in the engine's thread, between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            self._calls.discard(future)
            if not future.set_running_or_notify_cancel():
                return  # the caller has given up
            try:
                future.set_result(function())
            except Exception as error:  # handed to the caller, whatever it is
                future.set_exception(error)

        self._calls.add(future)
        if self._thread is None or not self._post(run):
            self._calls.discard(future)
            raise EngineClosedError("the engine isn't running")
        return await asyncio.wrap_future(future)

    def _request_abort(self, request_id: str) -> None:
        self._post(lambda: self._engine_abort(request_id))

    def _engine_abort(self, request_id: str) -> None:
        self._send(self.engine.abort(request_id))

    def _post(self, action: Callable[[], None]) -> bool:
        """Queue an action for the engine's thread; False if it will never run."""
        with self._wake:
            if self._ended:
                return False
            self._inbox.append(action)
            self._wake.notify()
            return True

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _main(self) -> None:
        try:
            while self._wait_for_work():
                with self._lock:
                    while self._inbox:
                        self._inbox.popleft()()
                self._step_started = time.monotonic()
                self._send(self.engine.step(self._lock))
                self._step_started = None
                self.engine.flush_kv_events()
        except BaseException as error:
            log.exception("the engine's thread failed")
            self._failure = error
        finally:
            try:
                self.engine.close(save=self._failure is None)
            finally:
                self._end()

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (self._inbox or self.engine.has_work or self._stopping):
                self._wake.wait()
            return bool(self._inbox or self.engine.has_work) or not self._stopping

    def _end(self) -> None:
        """Answer everyone who still waits for the thread, which is about to end."""
        with self._wake:
            self._ended = True
            self._inbox.clear()
        for future in list(self._calls):
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineClosedError("the engine isn't running"))
        self._calls.clear()
        if self._failure is not None:
            error = self._failure
            for stream in list(self._streams.values()):
                self._send(_failures(stream, error))
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._done.set)

    def _send(self, outputs: list[Output]) -> None:
        if outputs and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: list[Output]) -> None:
        for item in outputs:
            stream = self._streams.get(item.request_id)
            if stream is None:
                continue
            stream._deliver(item.output)
            if not stream.is_open:
                self._forget(item.request_id)

    def _forget(self, request_id: str) -> None:
        del self._streams[request_id]
        if not self._streams:
            self._idle.set()


def _failures(stream: RequestStream, error: BaseException) -> list[Output]:
    message = f"the engine failed: {type(error).__name__}"
    return [
        Output(stream.request_id, RequestOutput(index=index, finish_reason="error", error=message))
        for index in range(stream.num_answers)
    ]
