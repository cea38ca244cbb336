"""Text to token ids and back, and chat messages to text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from radixkv.errors import ConfigError, RequestRejectedError

__all__ = ["ByteTokenizer", "Tokenizer", "TokenizerLike"]

_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "probe",
        "parameters": {"type": "object", "properties": {}},
    },
}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class TokenizerLike(Protocol):
    """What the engine and the server ask of a tokenizer. All methods may be called from threads.

    Attributes:
        eos_token_ids: ids that end an answer.
        special_token_ids: ids that `decode` leaves out by default.
        vocab_size: one more than the highest id there is a token for; a model's logits may have
            more columns, which belong to no token.
        max_token_chars: most characters of text that one token stands for, so that text of n
            characters has at least `n / max_token_chars` tokens.
        has_chat_template: whether `render_chat` can work.
        chat_template: its source, if it has one.
        template_supports_tools: whether the template shows the tools to the model.
    """

    @property
    def eos_token_ids(self) -> frozenset[int]: ...  # noqa: D102
    @property
    def special_token_ids(self) -> frozenset[int]: ...  # noqa: D102
    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def max_token_chars(self) -> int: ...  # noqa: D102
    @property
    def has_chat_template(self) -> bool: ...  # noqa: D102
    @property
    def chat_template(self) -> str | None: ...  # noqa: D102
    @property
    def template_supports_tools(self) -> bool: ...  # noqa: D102

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of `text`.

        Raises:
            RequestRejectedError: `text` holds half of a surrogate pair.
        """
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; bytes that are no UTF-8 (yet) become U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for; empty for an id without a token."""
        ...

    def token_str(self, token_id: int) -> str:
        """Return `token_bytes` as text, with U+FFFD where it is no UTF-8."""
        ...

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """Return the prompt text of a conversation; encode it without adding special tokens.

        Raises:
            RequestRejectedError: the template refuses the messages, or there is none.
        """
        ...


class Tokenizer:
    """A Hugging Face tokenizer.

    Text goes straight to the Rust tokenizer: transformers' own `encode` sets truncation and
    padding on it at every call, which fails when threads do so at once.
    """

    def __init__(self, hf_tokenizer: Any, *, eos_token_ids: frozenset[int] = frozenset()) -> None:
        """Wrap a fast tokenizer of transformers; `eos_token_ids` are added to its own."""
        self._hf = hf_tokenizer
        self._backend = hf_tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        own = hf_tokenizer.eos_token_id
        self._eos = eos_token_ids | (frozenset() if own is None else {own})
        added = self._backend.get_added_tokens_decoder()
        self._added: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self._special = frozenset(i for i, token in added.items() if token.special)
        vocab: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        self._vocab_size = max(vocab.values(), default=-1) + 1
        # A normalizer may compose characters, so that a token stands for more than it shows.
        composed = 1 if self._backend.normalizer is None else 4
        self._max_token_chars = composed * max(map(len, vocab), default=1)
        self._byte_level = "ByteLevel" in _decoder_types(self._backend.decoder)

    @classmethod
    def from_directory(
        cls, path: Path, *, eos_token_ids: frozenset[int] = frozenset()
    ) -> Tokenizer:
        """Load the tokenizer of a model directory.

        Raises:
            ConfigError: there is none, or it can't be loaded.
        """
        if not any((path / name).is_file() for name in _TOKENIZER_FILES):
            raise ConfigError(f"no tokenizer in {path}; looked for {', '.join(_TOKENIZER_FILES)}")
        try:
            if (path / "tokenizer.json").is_file():
                # The class that reads tokenizer.json as it is: AutoTokenizer takes a second longer
                # to import, and is needed only where a tokenizer must be built from other files.
                from transformers import PreTrainedTokenizerFast

                hf_tokenizer = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
            else:
                from transformers import AutoTokenizer

                hf_tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except Exception as error:
            # transformers and tokenizers raise bare Exception for a malformed file.
            raise ConfigError(f"can't load the tokenizer in {path}: {error}") from error
        if not hasattr(hf_tokenizer, "backend_tokenizer"):
            raise ConfigError(f"the tokenizer in {path} has no fast implementation")
        return cls(hf_tokenizer, eos_token_ids=eos_token_ids)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end an answer."""
        return self._eos

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out by default."""
        return self._special

    @property
    def vocab_size(self) -> int:
        """One more than the highest id there is a token for."""
        return self._vocab_size

    @property
    def max_token_chars(self) -> int:
        """Most characters of text that one token stands for."""
        return self._max_token_chars

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer came with a chat template."""
        return bool(self._hf.chat_template)

    @property
    def chat_template(self) -> str | None:
        """Source of the template; of several, the one for tools, or the first."""
        template = self._hf.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use") or next(iter(template.values()), None)
        return template or None

    @cached_property
    def template_supports_tools(self) -> bool:
        """Whether a rendered conversation changes when tools are given."""
        messages = [{"role": "user", "content": "probe"}]
        try:
            return self.render_chat(messages, tools=[_PROBE_TOOL]) != self.render_chat(messages)
        except RequestRejectedError:
            return False

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of `text`. Releases the GIL.

        Raises:
            RequestRejectedError: `text` holds half of a surrogate pair, as JSON's "\\ud800" does.
        """
        _refuse_surrogates(text)
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`, spaces as they were; ids without a token are left out."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token: exact for byte-level BPE and for sentencepiece's byte
        tokens, else the text of the token with its word mark as a space.
        """
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            values = [_BYTE_OF_CHAR.get(char) for char in token]
            if None not in values:
                return bytes(value for value in values if value is not None)
            return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("\u2581", " ").encode()

    def token_str(self, token_id: int) -> str:
        """Return `token_bytes` as text, with U+FFFD where it is no UTF-8."""
        return self.token_bytes(token_id).decode(errors="replace")

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """Return the prompt text of a conversation, by the model's own chat template.

        Raises:
            RequestRejectedError: the template refuses the messages, or the model has none.
        """
        from jinja2 import TemplateError

        if not self.has_chat_template:
            raise RequestRejectedError(
                "This model has no chat template; use the completions endpoint.", param="messages"
            )
        try:
            text: str = self._hf.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **template_kwargs,
            )
        except TemplateError as error:
            raise RequestRejectedError(str(error), param="messages") from error
        except Exception as error:
            # A template is a program that ran on what the client sent: whatever it raises, say
            # adding a string and a null, is for the client to know and not the server's failure.
            raise RequestRejectedError(
                f"The model's chat template can't render these messages: {error}", param="messages"
            ) from error
        return text


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 is the end token. For models with random weights."""

    eos_token_ids: frozenset[int] = frozenset({256})
    special_token_ids: frozenset[int] = frozenset({256})
    vocab_size: int = 257
    max_token_chars: int = 1
    has_chat_template: bool = True
    chat_template: str | None = None
    template_supports_tools: bool = True

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the UTF-8 bytes of `text`; there are no special tokens to add."""
        _refuse_surrogates(text)
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of the bytes; ids above 256 are left out."""
        end = b"" if skip_special_tokens else b"<end>"
        parts = (bytes((i,)) if i < 256 else end if i == 256 else b"" for i in ids)
        return b"".join(parts).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the byte, or `<end>`."""
        if token_id == 256:
            return b"<end>"
        return bytes((token_id,)) if 0 <= token_id < 256 else b""

    def token_str(self, token_id: int) -> str:
        """Return `token_bytes` as text, with U+FFFD where it is no UTF-8."""
        return self.token_bytes(token_id).decode(errors="replace")

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """Return one line per message, the tools first."""
        lines = [f"tools: {json.dumps(tools)}\n"] if tools else []
        lines += [f"{turn.get('role')}: {turn.get('content') or ''}\n" for turn in messages]
        return "".join(lines) + ("assistant: " if add_generation_prompt else "")


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestRejectedError(
            f"The text holds half of a surrogate pair at character {error.start}."
        ) from None


def _decoder_types(decoder: Any) -> set[str]:
    """Return the types of a Rust decoder and, if it is a sequence, of its parts."""
    if decoder is None:
        return set()
    state = json.loads(decoder.__getstate__())
    return {part["type"] for part in [state, *state.get("decoders", [])]}


def _byte_of_char() -> dict[str, int]:
    """Return the inverse of the alphabet in which byte-level BPE spells bytes.

    Printable Latin-1 bytes spell themselves; the others take the characters from U+0100 on, in
    order. Source: the GPT-2 tokenizer.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(rest)
    }


_BYTE_OF_CHAR = _byte_of_char()
