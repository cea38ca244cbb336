"""Compiles grammars aside, keeps the latest, and computes their masks while the model runs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from llguidance import LLTokenizer

from radixkv.engine.grammar import Grammar, GrammarState, build_grammar
from radixkv.engine.grammar_vocabulary import Vocabulary, build_vocabulary
from radixkv.errors import GrammarError, QueueFullError, RequestRejectedError
from radixkv.request import GrammarSpec

__all__ = ["GrammarCompiler", "MaskWorker"]

MAX_CACHED = 128
MAX_PENDING = 64
NUM_THREADS = 2
# Compiling recurses as deeply as a grammar is nested. Only what is used of it takes memory.
STACK_BYTES = 256 * 1024**2
# Of processor time, so that a busy machine refuses nothing that an idle one takes.
MAX_COMPILE_S = 5.0


class GrammarCompiler:
    """Owns the threads that compile, and the most recently used grammars. Safe from any thread.

    Equal specs share one grammar, while it is being compiled too. A failure isn't kept.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        *,
        max_cached: int = MAX_CACHED,
        max_compile_s: float = MAX_COMPILE_S,
    ) -> None:
        """Make a compiler; threads are started and the vocabulary is read at the first request.

        Args:
            vocabulary: of the model's tokenizer.
            vocab_size: columns of the model's logits.
            eos_token_ids: the model's end tokens.
            max_cached: grammars kept.
            max_compile_s: processor time that a grammar may take; it is refused afterwards.
        """
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_cached = max_cached
        self._max_compile_s = max_compile_s
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._grammars: OrderedDict[GrammarSpec, Future[Grammar]] = OrderedDict()
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="radixkv-grammar")

    @property
    def num_cached(self) -> int:
        """Grammars kept, those being compiled included."""
        return len(self._grammars)

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Return a spec's grammar; blocks until it is compiled.

        Raises:
            RequestRejectedError: see `prepare`.
        """
        future = self._future(spec)
        try:
            return future.result()
        except GrammarError as error:
            raise _rejection(spec, error) from error

    async def prepare(self, spec: GrammarSpec) -> Grammar:
        """Return a spec's grammar without blocking the event loop.

        Raises:
            RequestRejectedError: it is malformed, unsupported, too complex or unsatisfiable;
                `param` is the spec's.
            QueueFullError: too many are being compiled.
        """
        future = self._future(spec)
        try:
            # Shielded, since others may wait for the same grammar.
            return await asyncio.shield(asyncio.wrap_future(future))
        except GrammarError as error:
            raise _rejection(spec, error) from error

    def close(self) -> None:
        """Stop the threads once they are done with what they do."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _future(self, spec: GrammarSpec) -> Future[Grammar]:
        with self._lock:
            future = self._grammars.get(spec)
            if future is not None:
                self._grammars.move_to_end(spec)
                return future
            if sum(not f.done() for f in self._grammars.values()) >= MAX_PENDING:
                raise QueueFullError("too many grammars are being compiled; try again later")
            # The size is read when a thread starts, which `submit` does if it wants one more.
            before = threading.stack_size(STACK_BYTES)
            try:
                future = self._pool.submit(self._build, spec)
            finally:
                threading.stack_size(before)
            self._grammars[spec] = future
            while len(self._grammars) > self._max_cached:
                self._grammars.popitem(last=False)
        # Outside the lock: called at once if the grammar is ready already.
        future.add_done_callback(lambda done: self._forget_failure(spec, done))
        return future

    def _forget_failure(self, spec: GrammarSpec, future: Future[Grammar]) -> None:
        if future.cancelled() or future.exception() is not None:
            with self._lock:
                if self._grammars.get(spec) is future:
                    del self._grammars[spec]

    def _build(self, spec: GrammarSpec) -> Grammar:
        with self._vocabulary_lock:
            if self._tokenizer is None:
                self._tokenizer = build_vocabulary(
                    self._vocabulary, self._vocab_size, self._eos_token_ids
                )
        begin = time.thread_time()
        grammar = build_grammar(spec, self._tokenizer, self._vocab_size, self._eos_token_ids)
        if time.thread_time() - begin > self._max_compile_s:
            raise GrammarError(f"it takes more than {self._max_compile_s:g} s to compile")
        return grammar


class MaskWorker:
    """Owns a thread that computes the masks of a step while the model runs."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="radixkv-masks")

    @contextmanager
    def computing(self, states: Sequence[GrammarState]) -> Iterator[None]:
        """Compute the masks of some answers beside the body; they are there when it ends.

        Nobody else may use the states meanwhile.
        """
        missing = [state for state in states if not state.has_mask]
        if not missing:
            yield
            return
        future = self._pool.submit(_compute_masks, missing)
        try:
            yield
        finally:
            future.result()

    def close(self) -> None:
        """Stop the thread."""
        self._pool.shutdown()


def _compute_masks(states: Sequence[GrammarState]) -> None:
    for state in states:
        state.compute_mask()


def _rejection(spec: GrammarSpec, error: GrammarError) -> RequestRejectedError:
    return RequestRejectedError(f"{spec.param}: {error}", param=spec.param, code="invalid_grammar")
