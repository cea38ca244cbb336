from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from loadtests.replay_text import BlockText, TokenCounter, single_token_words

WORDS = [f"w{n}" for n in range(16)]


class WordCounter(TokenCounter):
    """Counts words, and those it doesn't know twice."""

    def __init__(self, unknown: tuple[str, ...] = (), beside: int = 2) -> None:
        self._unknown = unknown
        self._beside = beside

    async def count(self, prompt: str) -> int:
        words = prompt.split()
        return self._beside + len(words) + sum(word in self._unknown for word in words)

    async def count_chat(self, messages: list[dict[str, Any]]) -> int:
        return await self.count(messages[0]["content"])


def blocks(*ids: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(ids, np.int32)


async def test_words_are_those_of_one_token_and_the_rest_is_told() -> None:
    words, beside = await single_token_words(WordCounter())
    assert beside == 2
    assert len(words) == len(set(words)) > 80
    fewer, _ = await single_token_words(WordCounter(("time", "year")))
    assert set(words) - set(fewer) == {"time", "year"}


async def test_a_tokenizer_with_too_few_whole_words_is_refused() -> None:
    words, _ = await single_token_words(WordCounter())
    with pytest.raises(ValueError, match="only 10 words of one token"):
        await single_token_words(WordCounter(tuple(words[10:])))


@pytest.mark.parametrize("length", [1, 5, 8, 9, 16, 23, 40])
def test_prompts_have_exactly_so_many_words(length: int) -> None:
    text = BlockText(WORDS, 8, 100)
    assert len(text.prompt(blocks(3, 7), length, "r").split()) == length


def test_equal_blocks_are_equal_text_and_all_else_differs() -> None:
    text = BlockText(WORDS, 8, 100)
    one = text.prompt(blocks(3, 7, 9), 30, "one").split()
    two = text.prompt(blocks(3, 7, 11), 30, "two").split()
    assert one[:16] == two[:16]
    assert one[16] != two[16]
    # What no block tells is the request's own.
    three = text.prompt(blocks(3, 7, 9), 30, "three").split()
    assert one[:24] == three[:24]
    assert one[24:] != three[24:]


def test_text_is_the_same_in_every_process() -> None:
    text = BlockText(WORDS, 4, 300)
    assert text.prompt(blocks(258), 6, "r") == "w2 w0 w1 w1 w12 w14"


def test_a_cut_block_keeps_its_beginning() -> None:
    text = BlockText(WORDS, 8, 100)
    whole = text.prompt(blocks(5, 6), 16, "r").split()
    assert text.prompt(blocks(5, 6), 13, "r").split() == whole[:13]


def test_all_blocks_differ_even_if_they_are_short() -> None:
    text = BlockText(WORDS, 2, 256)
    assert len({text.prompt(blocks(n), 2, "r") for n in range(256)}) == 256
    with pytest.raises(ValueError, match="257 blocks need 3 tokens each"):
        BlockText(WORDS, 2, 257)
