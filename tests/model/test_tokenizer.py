from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from model_fakes import CHAT_TEMPLATE, byte_level_vocab
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from radixkv.errors import ConfigError, RequestRejectedError
from radixkv.model.tokenizer import ByteTokenizer, Tokenizer, TokenizerLike

TOOL_TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHAT_TEMPLATE
STRICT_TEMPLATE = (
    "{% if messages[0]['role'] != 'user' %}{{ raise_exception('the user goes first') }}{% endif %}"
    + CHAT_TEMPLATE
)
USER = [{"role": "user", "content": "hi"}]


def byte_level(template: str | None = CHAT_TEMPLATE, **options: Any) -> Tokenizer:
    """Return a tokenizer that knows every byte, so that any text survives it."""
    _, merges = byte_level_vocab()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(merge.replace(" ", "") for merge in merges)]
    vocab = {token: i for i, token in enumerate(tokens)}
    rust = RustTokenizer(models.BPE(vocab, [tuple(m.split(" ")) for m in merges]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken("<|im_end|>", normalized=False, special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<|im_end|>")
    fast.chat_template = template
    return Tokenizer(fast, **options)


def sentencepiece_like() -> Tokenizer:
    vocab = {"<unk>": 0, "</s>": 1} | {f"<0x{i:02X}>": i + 2 for i in range(256)}
    vocab |= {token: len(vocab) + i for i, token in enumerate(["\u2581", "h", "i", "\u2581h"])}
    rust = RustTokenizer(
        models.BPE(vocab, [("\u2581", "h")], unk_token="<unk>", byte_fallback=True)
    )
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="</s>"))


TEXTS = [
    "hello",
    "a  b \n\n c",
    "wörld \U0001f600 \u4f60\u597d",
    "it 's , fine .",
    "\x00\x7f\xa0",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_survives_encode_and_decode(text: str) -> None:
    for tokenizer in (byte_level(), ByteTokenizer()):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
        assert len(text) <= len(ids) * tokenizer.max_token_chars
        assert all(i < tokenizer.vocab_size for i in ids)


def test_special_tokens_are_left_out_unless_wanted() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("hello<|im_end|>")
    assert ids[-1:] == list(tokenizer.eos_token_ids)
    assert tokenizer.special_token_ids == tokenizer.eos_token_ids
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hello<|im_end|>"
    assert tokenizer.token_str(ids[-1]) == "<|im_end|>"


def test_half_a_character_is_a_replacement_mark_with_exact_bytes() -> None:
    tokenizer = byte_level()
    first = tokenizer.encode("\U0001f600")[0]
    assert tokenizer.token_bytes(first) == b"\xf0"
    assert tokenizer.token_str(first) == tokenizer.decode([first]) == "\ufffd"


def test_sentencepiece_marks_and_byte_tokens_become_bytes() -> None:
    tokenizer = sentencepiece_like()
    ids = tokenizer.encode("hi \u00e9")
    assert b"".join(map(tokenizer.token_bytes, ids)) == " hi \u00e9".encode()


def test_id_without_a_token_is_empty() -> None:
    tokenizer = byte_level()
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.decode([tokenizer.vocab_size]) == ""
    assert ByteTokenizer().token_bytes(257) == b""


@pytest.mark.parametrize("tokenizer", [byte_level(), ByteTokenizer()], ids=["hf", "bytes"])
def test_half_a_surrogate_pair_is_rejected(tokenizer: TokenizerLike) -> None:
    """JSON can spell one; the Rust tokenizer answered with a TypeError."""
    with pytest.raises(RequestRejectedError, match="surrogate pair at character 2"):
        tokenizer.encode("ab\ud800")


def test_threads_may_encode_at_once() -> None:
    """transformers' own encode fails with "Already borrowed" when threads set its truncation."""
    tokenizer = byte_level()
    text = "hello wörld \n\n" * 200
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: tokenizer.encode(text), range(64)))
    assert all(ids == results[0] for ids in results)


def test_given_end_tokens_are_added_to_its_own() -> None:
    own = byte_level().eos_token_ids
    assert byte_level(eos_token_ids=frozenset({5})).eos_token_ids == own | {5}


@pytest.mark.parametrize(
    ("template", "supported"), [(CHAT_TEMPLATE, False), (TOOL_TEMPLATE, True), (None, False)]
)
def test_tool_support_is_what_the_template_shows(template: str | None, supported: bool) -> None:
    tokenizer = byte_level(template)
    assert tokenizer.template_supports_tools is supported
    assert tokenizer.has_chat_template is (template is not None)
    assert tokenizer.chat_template == template


def test_source_of_several_templates_is_the_one_for_tools() -> None:
    tokenizer = byte_level(CHAT_TEMPLATE)
    tokenizer._hf.chat_template = {"default": CHAT_TEMPLATE, "tool_use": TOOL_TEMPLATE}
    assert tokenizer.chat_template == TOOL_TEMPLATE


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (STRICT_TEMPLATE, [{"role": "system", "content": "x"}], "^the user goes first$"),
        (CHAT_TEMPLATE, [{"role": "user", "content": ["x"]}], "can't render these messages"),
        (None, USER, "no chat template"),
    ],
)
def test_messages_that_cannot_be_rendered_are_rejected(
    template: str | None, messages: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(RequestRejectedError, match=message) as caught:
        byte_level(template).render_chat(messages)
    assert caught.value.param == "messages"


def test_template_arguments_reach_the_template() -> None:
    template = CHAT_TEMPLATE + "{% if add_generation_prompt %}>{{ mode }}{% endif %}"
    tokenizer = byte_level(template)
    assert tokenizer.render_chat(USER, mode="deep") == "user: hi>deep"
    assert tokenizer.render_chat(USER, add_generation_prompt=False) == "user: hi"


def test_byte_tokenizer_renders_roles_and_tools() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.render_chat(USER) == "user: hi\nassistant: "
    assert "probe" in tokenizer.render_chat(USER, tools=[{"name": "probe"}])
    assert tokenizer.decode([104, 256, 300, 105]) == "hi"


@pytest.mark.parametrize("content", [None, "{}", "no json"])
def test_directory_without_a_usable_tokenizer_is_refused(
    content: str | None, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match="tokenizer"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.model
def test_default_model_tokenizer(default_model_dir: Path) -> None:
    tokenizer = Tokenizer.from_directory(default_model_dir)
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.vocab_size == 49152
    text = tokenizer.render_chat([{"role": "system", "content": "Be brief."}, *USER])
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(text)
    assert ids[0] == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
