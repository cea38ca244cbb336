"""A model's vocabulary in the form that the grammar library reads."""

from __future__ import annotations

from typing import Protocol

from llguidance import LLTokenizer

__all__ = ["Vocabulary", "build_vocabulary"]

MARK = "\x02"  # before a text, so that the tokenizer doesn't take it for the start of a word


class Vocabulary(Protocol):
    """The part of a tokenizer that grammars need."""

    @property
    def special_token_ids(self) -> frozenset[int]: ...  # noqa: D102
    @property
    def vocab_size(self) -> int: ...  # noqa: D102

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of `text`."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for; empty for an id without a token."""
        ...


def build_vocabulary(
    tokenizer: Vocabulary, vocab_size: int, eos_token_ids: frozenset[int]
) -> LLTokenizer:
    """Return the library's own view of a tokenizer.

    Args:
        tokenizer: says what each token stands for.
        vocab_size: columns of the model's logits; those beyond the tokenizer's never match.
        eos_token_ids: end tokens; may be empty.

    Cost: half a second for 50,000 tokens, and as much again for every 50,000 more.
    """
    table = _TokenTable(tokenizer, vocab_size, eos_token_ids)
    return LLTokenizer(table, eos_token=sorted(eos_token_ids) or [table.eos_token_id])  # type: ignore[arg-type]


class _TokenTable:
    """Has the attributes that `LLTokenizer` looks for."""

    is_tokenizer_wrapper = True
    bos_token_id: int | None = None

    def __init__(
        self, tokenizer: Vocabulary, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        known = min(vocab_size, tokenizer.vocab_size)
        self.tokens = [tokenizer.token_bytes(i) for i in range(known)]
        self.tokens += [b""] * (vocab_size - known)
        self.special_token_ids = sorted(tokenizer.special_token_ids | eos_token_ids)
        self.special_token_ids = [i for i in self.special_token_ids if i < vocab_size]
        if not eos_token_ids:  # the library can't do without; this one is never drawn
            self.special_token_ids.append(vocab_size)
            self.tokens.append(b"<end>")
        self.eos_token_id = min(eos_token_ids, default=vocab_size)
        self._tokenizer = tokenizer
        self._specials = set(self.special_token_ids)
        # The first token for some bytes; later ones with the same bytes are duplicates.
        self._ids: dict[bytes, int] = {}
        for token_id, content in enumerate(self.tokens):
            if content and token_id not in self._specials:
                self._ids.setdefault(content, token_id)
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the tokens of a text that the grammar prescribes, as the model would write it."""
        content = text if isinstance(text, bytes) else text.encode()
        for mark in ("", MARK):
            ids = self._tokenizer.encode(mark + content.decode(errors="replace"))
            for skip in range(3):  # the mark, and the space that some tokenizers put before it
                if self._spells(ids[skip:], content):
                    return ids[skip:]
        return self._greedy(content)

    def _spells(self, ids: list[int], content: bytes) -> bool:
        size = len(self.tokens)
        # The text of a special token is text here, not that token.
        if any(i >= size or i in self._specials for i in ids):
            return False
        return b"".join(self.tokens[i] for i in ids) == content

    def _greedy(self, content: bytes) -> list[int]:
        """Return the tokens found by always taking the longest."""
        ids: list[int] = []
        start = 0
        while start < len(content):
            for end in range(min(len(content), start + self._longest), start, -1):
                token_id = self._ids.get(content[start:end])
                if token_id is not None:
                    ids.append(token_id)
                    break
            else:
                return ids  # the library goes on byte by byte where there is no token
            start = end
        return ids
