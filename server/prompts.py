"""From text and messages to token ids, without blocking the event loop."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from radixkv.server.errors import ApiError
from radixkv.server.messages import TemplateMessage, with_tools

if TYPE_CHECKING:
    from radixkv.engine import AsyncEngine

__all__ = ["PromptBuilder"]

T = TypeVar("T")

# Below this many characters a render plus an encode takes less time than a hop to a thread costs.
INLINE_CHARS = 4096


class PromptBuilder:
    """Renders chat templates and tokenizes; owns the threads that do it for long texts.

    Two threads are enough: the tokenizer releases the GIL, and more would only compete with the
    model for cores.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._tokenizer = engine.tokenizer
        self._max_chars = engine.max_model_len * max(1, engine.tokenizer.max_token_chars)
        self._max_model_len = engine.max_model_len
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="radixkv-tokenize")

    @property
    def supports_tools(self) -> bool:
        """Whether the chat template renders tools, tool calls and tool answers itself."""
        return self._tokenizer.template_supports_tools

    def close(self) -> None:
        """Stop the threads; texts not yet begun are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode_text(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        """Return the ids of `text`.

        Raises:
            ApiError: 400, when the text cannot fit the context by its length alone.
        """
        self.check_chars(len(text), param)
        return await self.offload(
            len(text),
            lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens),
        )

    async def encode_chat(
        self,
        messages: list[TemplateMessage],
        tools: list[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the ids of a rendered conversation.

        Raises:
            ApiError: 400, too long, or no chat template.
            RequestRejectedError: the template refuses the messages, in its own words.
        """
        chars = sum(len(message["content"]) for message in messages)
        self.check_chars(chars, "messages")

        def work() -> list[int]:
            text = self.render(messages, tools, add_generation_prompt=add_generation_prompt)
            self.check_chars(len(text), "messages")
            return self._tokenizer.encode(text, add_special_tokens=False)

        return await self.offload(chars + (INLINE_CHARS if tools else 0), work)

    def render(
        self,
        messages: list[TemplateMessage],
        tools: list[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the conversation as the chat template writes it; may take long, see `offload`.

        Raises:
            ApiError: 400, when the model has no chat template or tools are nested too deeply.
            RequestRejectedError: the template refuses the messages, in its own words.
        """
        if not self._tokenizer.has_chat_template:
            raise ApiError(
                400,
                "This model has no chat template; use /v1/completions",
                code="no_chat_template",
            )
        if tools and not self.supports_tools:
            messages, tools = with_tools(messages, tools), None
        try:
            return self._tokenizer.render_chat(
                messages, tools=tools, add_generation_prompt=add_generation_prompt
            )
        except RecursionError as error:
            raise ApiError(400, "The messages or tools are nested too deeply") from error

    def render_open(
        self, messages: list[TemplateMessage], tools: list[dict[str, Any]] | None
    ) -> str:
        """Return the conversation up to the end of its last message's content, to go on in it.

        Raises:
            ApiError: as `render`, or 400: the last message is not the assistant's, or the template
                does not write it as it is.
            RequestRejectedError: the template refuses the messages, in its own words.
        """
        *before, last = messages
        if last["role"] != "assistant":
            raise ApiError(
                400,
                "continue_final_message needs the last message to be the assistant's",
                param="continue_final_message",
                code="invalid_value",
            )
        # Random, so that no message of a client can contain it.
        marker = f"end-{secrets.token_hex(12)}"
        marked = {**last, "content": last["content"] + marker}
        text = self.render([*before, marked], tools, add_generation_prompt=False)
        head, found, _ = text.partition(marker)
        if not found or not head.endswith(last["content"]):
            raise ApiError(
                400,
                "This model's chat template can't leave the last message open",
                param="continue_final_message",
                code="invalid_value",
            )
        return head

    def encode(self, text: str) -> list[int]:
        """Return the ids of rendered text; may take long, see `offload`.

        Raises:
            RequestRejectedError: `text` holds half of a surrogate pair.
        """
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `ids`."""
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def check_chars(self, chars: int, param: str) -> None:
        """Refuse a text too long for the context whatever its tokens are, before tokenizing it.

        Raises:
            ApiError: 400, code context_length_exceeded.
        """
        if chars > self._max_chars:
            raise ApiError(
                400,
                f"This model's maximum context length is {self._max_model_len} tokens. The "
                f"{param} field has {chars} characters, more than {self._max_chars}, the most that "
                "so many tokens can hold.",
                param=param,
                code="context_length_exceeded",
            )

    async def offload(self, chars: int, work: Callable[[], T]) -> T:
        """Run `work` on a thread if a text of `chars` characters would hold up the event loop."""
        if chars <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
