from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from fakes import Harness, cold, prompt_of
from hypothesis import example, given, settings

from radixkv.engine.detokenizer import IncrementalDetokenizer, StopMatcher


class BytesTokenizer:
    """Id i under 256 is the byte i; 256 is special; above, ids are the given byte strings."""

    def __init__(self, *extra: bytes) -> None:
        self.extra = extra

    def raw(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return self.extra[token_id - 257] if token_id > 256 else b""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(map(self.raw, ids)).decode("utf-8", "replace")


class SpaceTokenizer:
    """Words with a leading space that the first one of a text loses, as SentencePiece does."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(f" w{i}" if i else "" for i in ids).removeprefix(" ")


def stream(ids: Sequence[int], tokenizer: BytesTokenizer | None = None) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer or BytesTokenizer())
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


def test_emoji_in_four_bytes_is_one_delta() -> None:
    assert stream("hi😀!".encode()) == ["h", "i", "", "", "", "😀", "!", ""]


def test_family_emoji_arrives_by_code_points() -> None:
    family = "👨‍👩‍👧‍👦"
    deltas = stream(family.encode())
    assert "".join(deltas) == family
    assert "\ufffd" not in "".join(deltas)


def test_two_byte_letter_split_in_two() -> None:
    assert stream("né".encode()) == ["n", "", "é", ""]


def test_character_cut_by_the_end_is_a_replacement_mark() -> None:
    assert stream("a😀".encode()[:3]) == ["a", "", "", "\ufffd"]


def test_invalid_byte_does_not_stall_the_stream() -> None:
    assert stream(b"a\xffbc") == ["a", "", "\ufffdb", "c", ""]


def test_run_of_invalid_bytes_does_not_stall_the_stream() -> None:
    """Text was held back as long as it ended with U+FFFD, and decoded over and over."""
    deltas = stream(b"\xff" * 20)
    assert "".join(deltas) == "\ufffd" * 20
    assert all(len("".join(deltas[: n + 1])) >= n - 3 for n in range(20))


def test_window_of_decoded_ids_is_bounded() -> None:
    detokenizer = IncrementalDetokenizer(BytesTokenizer())
    for token_id in (b"\xff" * 50 + b"text" * 20) * 2:
        detokenizer.push(token_id)
        assert len(detokenizer._ids) - detokenizer._context <= 9


def test_skipped_tokens_do_not_lose_the_space_after_them() -> None:
    detokenizer = IncrementalDetokenizer(SpaceTokenizer())
    assert [detokenizer.push(i) for i in (1, 0, 0, 2, 0, 3)] == ["w1", "", "", " w2", "", " w3"]


EXTRA = ("😀".encode()[:2], "😀".encode()[2:] + b"\xc3", "é".encode() + b"\xff", b"\xa9\xf0\x9f")
token_ids = st.integers(0, 256 + len(EXTRA)) | st.sampled_from([*"é😀a".encode(), 257, 258])


@settings(deadline=None)
@given(st.lists(token_ids, max_size=40))
@example([257, 258, 260, 258, 260, 258])
def test_deltas_join_to_the_whole_decode(ids: list[int]) -> None:
    tokenizer = BytesTokenizer(*EXTRA)
    deltas = stream(ids, tokenizer)
    whole = tokenizer.decode(ids)
    assert "".join(deltas) == whole
    # What is sent never runs ahead, and lags by no more than an unfinished character's ids.
    sent = ""
    for n, delta in enumerate(deltas[:-1], 1):
        sent += delta
        assert whole.startswith(sent)
        if 256 not in ids and n >= 4:
            assert len(sent) >= len(tokenizer.decode(ids[: n - 4])) - 1


def match(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, str | None]:
    matcher, sent = StopMatcher(stops), ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        sent += text
        if stop is not None:
            return sent, stop
    return sent + matcher.flush(), None


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["own fox"], ["The", " quick", " br", "own", " fox"], ("The quick br", "own fox")),
        (["ab"], ["a", "a", "b"], ("a", "ab")),
        (["###"], ["x", "##"], ("x##", None)),
        (["stop", "sto"], ["a sto"], ("a ", "sto")),
        (["sto", "stop"], ["a stop"], ("a ", "stop")),
        (["lazy"], ["the lazy dog"], ("the ", "lazy")),
        (["b", "ab"], ["xab"], ("x", "ab")),
        (["aab"], ["a", "a", "a", "b"], ("a", "aab")),
        ([], ["a", "b"], ("ab", None)),
        (["😀"], ["hi ", "😀", "x"], ("hi ", "😀")),
    ],
)
def test_stop_string_is_never_sent(
    stops: list[str], pieces: list[str], expected: tuple[str, str | None]
) -> None:
    assert match(stops, pieces) == expected


letters = st.text("ab", max_size=3)


@settings(deadline=None)
@given(st.lists(letters, max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_matcher_holds_back_only_what_may_be_a_stop(pieces: list[str], stops: list[str]) -> None:
    matcher, text, sent = StopMatcher(stops), "", ""
    for piece in pieces:
        text += piece
        new, stop = matcher.push(piece)
        sent += new
        if stop is not None:
            first = min(at for s in stops if (at := text.find(s)) >= 0)
            assert (sent, text[first : first + len(stop)]) == (text[:first], stop)
            return
        assert not any(s in text for s in stops)
        held = text[len(sent) :]
        assert text.startswith(sent)
        longest = max((n for s in stops for n in range(len(s)) if text.endswith(s[:n])), default=0)
        assert len(held) == longest
    assert sent + matcher.flush() == text


def test_stream_and_whole_text_agree_through_the_engine() -> None:
    prompt = prompt_of(9)
    plain = cold(prompt, max_tokens=40, temperature=0.0)
    stop = plain.text[20:23]
    answer = Harness().ask(prompt, max_tokens=40, temperature=0.0, stop=("never", stop))
    assert answer.text == plain.text[: plain.text.index(stop)]
    assert (answer.last.finish_reason, answer.last.stop_reason) == ("stop", stop)
    assert plain.token_ids[: len(answer.token_ids)] == answer.token_ids


def test_held_back_text_is_delivered_at_the_end() -> None:
    prompt = prompt_of(9)
    plain = cold(prompt, max_tokens=10, temperature=0.0)
    answer = Harness().ask(
        prompt, max_tokens=10, temperature=0.0, stop=(plain.text[-2:] + "never",)
    )
    assert answer.text == plain.text
    assert answer.last.finish_reason == "length"
