"""From what a caller gives as a prompt to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from radixkv.errors import RequestRejectedError
from radixkv.options import namespace_of_salt
from radixkv.request import Namespace

if TYPE_CHECKING:
    from radixkv.model.tokenizer import TokenizerLike

__all__ = ["Message", "Prompt", "PromptLike", "chat_prompt", "prompt_of", "prompts_of"]

Message = Mapping[str, Any]
"""`{"role": ..., "content": ...}`, the content a text or a list of text parts."""

PromptLike = str | Sequence[int] | np.ndarray | Mapping[str, Any]
"""A text, token ids, or `{"prompt": text}` or `{"prompt_token_ids": ids}`, with `cache_salt`."""

KEYS = {"prompt", "prompt_token_ids", "cache_salt"}
MAX_SALT_CHARS = 256
PART_SEPARATOR = "\n"  # as in the server


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the engine takes it.

    Attributes:
        text: None if token ids were given.
        token_ids: `[n]`, not yet checked.
        namespace: what it shares KV with.
    """

    text: str | None
    token_ids: list[int]
    namespace: Namespace


def prompts_of(
    given: PromptLike | Sequence[PromptLike], tokenizer: TokenizerLike, cache_salt: str | None
) -> list[Prompt]:
    """Return one prompt, or those of a list.

    Raises:
        RequestRejectedError: one of them is none; a note tells which.
    """
    if isinstance(given, str | Mapping | np.ndarray) or _is_ids(given):
        return [prompt_of(given, tokenizer, cache_salt)]  # type: ignore[arg-type]
    prompts = []
    for index, item in enumerate(given):
        try:
            prompts.append(prompt_of(item, tokenizer, cache_salt))  # type: ignore[arg-type]
        except RequestRejectedError as error:
            error.add_note(f"in prompt {index}")
            raise
    return prompts


def prompt_of(given: PromptLike, tokenizer: TokenizerLike, cache_salt: str | None) -> Prompt:
    """Return one prompt, tokenized if it is a text.

    Raises:
        RequestRejectedError: it is neither a text nor token ids, or has keys that nobody knows.
    """
    if isinstance(given, Mapping):
        unknown = set(given) - KEYS
        if unknown:
            raise _refusal(f"a prompt has no {sorted(map(str, unknown))[0]!r}")
        if ("prompt" in given) == ("prompt_token_ids" in given):
            raise _refusal("a prompt must have either 'prompt' or 'prompt_token_ids'")
        cache_salt = given.get("cache_salt", cache_salt)
        given = given["prompt"] if "prompt" in given else given["prompt_token_ids"]
    namespace = _namespace(cache_salt)
    if isinstance(given, str):
        return Prompt(given, tokenizer.encode(given, add_special_tokens=True), namespace)
    if isinstance(given, np.ndarray):
        given = given.tolist()
    if not (_is_ids(given) or given == []):
        raise _refusal(f"a prompt must be a text or token ids, got {repr(given)[:64]}")
    return Prompt(None, list(given), namespace)  # type: ignore[arg-type]


def chat_prompt(
    messages: Sequence[Message],
    tokenizer: TokenizerLike,
    *,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
    cache_salt: str | None = None,
) -> Prompt:
    """Return a conversation as the model's chat template writes it.

    Raises:
        RequestRejectedError: there is no template, it refuses the messages or knows no tools.
    """
    if tools and not tokenizer.template_supports_tools:
        raise _refusal("the model's chat template doesn't show tools to the model", "tools")
    text = tokenizer.render_chat(
        [_template_message(message) for message in messages],
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        **(template_kwargs or {}),
    )
    # The template writes the special tokens itself.
    return Prompt(text, tokenizer.encode(text), _namespace(cache_salt))


def _template_message(message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise _refusal(f"a message must have a role, got {repr(message)[:64]}", "messages")
    content = message.get("content")
    if isinstance(content, list | tuple):
        if not all(
            isinstance(part, Mapping)
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
            for part in content
        ):
            raise _refusal("only text parts are supported in a message", "messages")
        content = PART_SEPARATOR.join(part["text"] for part in content)
    role = "system" if message["role"] == "developer" else message["role"]
    return {**message, "role": role, "content": "" if content is None else content}


def _namespace(cache_salt: str | None) -> Namespace:
    if cache_salt is not None and not (
        isinstance(cache_salt, str) and 0 < len(cache_salt) <= MAX_SALT_CHARS
    ):
        raise _refusal(f"cache_salt must have 1 to {MAX_SALT_CHARS} characters", "cache_salt")
    return namespace_of_salt(cache_salt)


def _is_ids(given: object) -> bool:
    return (
        isinstance(given, Sequence)
        and not isinstance(given, str)
        and len(given) > 0
        and all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in given)
    )


def _refusal(message: str, param: str = "prompt") -> RequestRejectedError:
    return RequestRejectedError(message, param=param)
