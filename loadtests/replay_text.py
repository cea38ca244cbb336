"""Text of an exact length in tokens, from the ids of a trace's blocks."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt

from loadtests.serving_workloads import WORDS

__all__ = ["BlockText", "FolderCounter", "ServerCounter", "TokenCounter", "single_token_words"]

MIN_WORDS = 16


class TokenCounter(ABC):
    """Counts the tokens of a prompt as the server will."""

    @abstractmethod
    async def count(self, prompt: str) -> int:
        """Return the tokens of a prompt of completions."""

    @abstractmethod
    async def count_chat(self, messages: list[dict[str, Any]]) -> int:
        """Return the tokens of a chat."""


class ServerCounter(TokenCounter):
    """Asks the server's `POST /tokenize`, which RadixKV and vLLM have."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session = session
        self._url = url
        self._model = model

    async def count(self, prompt: str) -> int:
        """See `TokenCounter.count`."""
        return await self._ask({"prompt": prompt})

    async def count_chat(self, messages: list[dict[str, Any]]) -> int:
        """See `TokenCounter.count_chat`."""
        return await self._ask({"messages": messages})

    async def _ask(self, body: dict[str, Any]) -> int:
        body = {"model": self._model, **body}
        async with self._session.post(f"{self._url}/tokenize", json=body) as response:
            if response.status != 200:
                raise ValueError(
                    f"{self._url}/tokenize answers {response.status}: give --tokenizer, a directory"
                )
            return int((await response.json())["count"])


class FolderCounter(TokenCounter):
    """Uses a tokenizer's files."""

    def __init__(self, folder: Path) -> None:
        """Load it.

        Raises:
            ValueError: there is none.
        """
        if not folder.is_dir():
            raise ValueError(f"--tokenizer {folder} is no directory")
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)

    async def count(self, prompt: str) -> int:
        """See `TokenCounter.count`."""
        return len(self._tokenizer.encode(prompt))

    async def count_chat(self, messages: list[dict[str, Any]]) -> int:
        """See `TokenCounter.count_chat`."""
        text = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return len(self._tokenizer.encode(text, add_special_tokens=False))


async def single_token_words(counter: TokenCounter) -> tuple[list[str], int]:
    """Return words that are one token each wherever they stand, and how many a prompt has beside.

    Raises:
        ValueError: the tokenizer has too few such words.
    """
    words = sorted(set(WORDS.split()))
    first = words[0]
    beside = await counter.count(first) - 1
    if await counter.count(" ".join(words)) - beside != len(words):
        double = [await counter.count(f"{first} {word} {word}") - beside == 3 for word in words]
        words = [word for word, fits in zip(words, double, strict=True) if fits]
    if len(words) < MIN_WORDS or await counter.count(" ".join(words)) - beside != len(words):
        raise ValueError(f"the tokenizer has only {len(words)} words of one token: text can't do")
    return words, beside


class BlockText:
    """Turns block ids into words, so that equal ids are equal text and others differ at once.

    Attributes:
        unit: words of a block.
    """

    def __init__(self, words: Sequence[str], unit: int, num_blocks: int) -> None:
        """Make a text of blocks 0 to `num_blocks`.

        Raises:
            ValueError: so many blocks of so few words can't differ.
        """
        self.unit = unit
        self._words = list(words)
        self._digits = 1
        while len(words) ** self._digits < num_blocks:
            self._digits += 1
        if unit < self._digits:
            raise ValueError(
                f"{num_blocks} blocks need {self._digits} tokens each to differ, got {unit}: "
                "a larger --scale-length"
            )
        self._block = lru_cache(maxsize=4096)(self._make_block)

    def prompt(self, blocks: npt.NDArray[np.int32], num_words: int, name: str) -> str:
        """Return a prompt of `num_words` words.

        Args:
            blocks: `[n]` ids of its beginning; what is too much is cut off.
            num_words: in all.
            name: of the request: what no block tells is its own.
        """
        whole = min(len(blocks), num_words // self.unit)
        parts = [self._block(block) for block in blocks[:whole].tolist()]
        rest = num_words - whole * self.unit
        if whole < len(blocks):
            parts += [" ".join(self._block(int(blocks[whole])).split()[:rest])]
        elif rest:
            parts += [" ".join(random.Random(f"rest {name}").choices(self._words, k=rest))]
        return " ".join(filter(None, parts))

    def _make_block(self, block: int) -> str:
        base = len(self._words)
        # The lowest digit first: neighbours differ in their first word.
        start = [self._words[block // base**n % base] for n in range(self._digits)]
        rest = random.Random(f"block {block}").choices(self._words, k=self.unit - self._digits)
        return " ".join([*start, *rest])
