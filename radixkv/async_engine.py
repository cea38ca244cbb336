"""The engine for programs that have an event loop: increments of an answer as they are made."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any

from radixkv import engine
from radixkv.config import ServeConfig
from radixkv.openmp import set_wait_policy
from radixkv.options import config_of, naming_keywords, quotas_of
from radixkv.prompts import PromptLike, prompt_of
from radixkv.request import RequestOutput, SamplingParams

__all__ = ["AsyncEngine"]


class AsyncEngine(engine.AsyncEngine):
    """An engine that is made of options, takes texts, and is an async context manager.

    It can be served, too: `radixkv.server.create_app` takes any `AsyncEngine`.
    """

    @classmethod
    def from_config(cls, config: ServeConfig | None = None, **options: Any) -> AsyncEngine:
        """Load a model; takes seconds, so call it before the event loop or in a thread.

        Args:
            config: checked options, or None to make them of the following.
            options: as for `LLM`, `model` among them.

        Raises:
            ConfigError: as for `LLM`.
            ValueError: there are both.
        """
        if config is not None and options:
            raise ValueError("give either a config or options")
        if config is None:
            config = config_of(options.pop("model", None), options)
        set_wait_policy()
        from radixkv.engine.factory import build_engine

        with naming_keywords():
            built = build_engine(config, quotas=quotas_of(config)).engine
        return cls(
            built.engine,
            built.tokenizer,
            model_name=built.model_name,
            max_num_waiting=built.max_num_waiting,
        )

    async def __aenter__(self) -> AsyncEngine:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.shutdown()

    async def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield what is new of the answers to a prompt; the last of each says why it ended.

        Leaving the loop early aborts the request when the generator is closed, which
        `contextlib.aclosing` does at once.

        Args:
            prompt: a text, token ids, or a mapping of either.
            sampling_params: None is `SamplingParams()`.
            request_id: unique among live requests; made up if None.
            cache_salt: prompts share KV with those of the same salt only.

        Raises:
            RequestRejectedError: it can't be accepted, the queue is full, or the engine is closed.
        """
        params = sampling_params or SamplingParams()
        found = prompt_of(prompt, self.tokenizer, cache_salt)
        grammar = None if params.grammar is None else await self.compile_grammar(params.grammar)
        stream = self.submit(
            found.token_ids,
            params,
            namespace=found.namespace,
            request_id=request_id,
            grammar=grammar,
        )
        try:
            async for increment in stream:
                yield increment
        finally:
            stream.abort()
