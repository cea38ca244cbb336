"""What the library takes, and what it costs to import."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from radixkv import (
    LLM,
    GrammarSpec,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from radixkv.batch_progress import BatchProgress
from radixkv.config import ServeConfig
from radixkv.errors import ConfigError, RequestRejectedError
from radixkv.model.tokenizer import ByteTokenizer
from radixkv.options import config_of, quotas_of
from radixkv.outputs import CompletionOutput
from radixkv.prompts import chat_prompt, prompt_of
from radixkv.request import RequestOutput as Increment


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_num_seq": 4}, "there is no option 'max_num_seq'; did you mean max_num_seqs"),
        ({"max_num_seqs": 0}, "max_num_seqs must be a whole number from 1 to 4096, got '0'"),
        ({"block_size": 16.5}, "block_size must be"),
        ({"gpu_memory_utilization": 0.9}, "there is no option 'gpu_memory_utilization'"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 8}, "^max_num_batched_tokens must be at"),
    ],
)
def test_a_wrong_option_is_named_as_it_was_given(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(None, **given)


def test_options_are_values_or_texts_and_the_environment_plays_no_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RADIXKV_MAX_NUM_SEQS", "3")
    monkeypatch.setenv("RADIXKV_CONFIG", "/no/such/file")
    config = config_of(
        Path("m"),
        {
            "kv_cache_memory": "1MiB", "swap_space": 4096, "prefix_caching": False, "threads": None,
            "tenant_quota": {"default": 0.5, "a,b": 0.25}, "itl_target": 20,
        },
    )  # fmt: skip
    assert config == ServeConfig(
        model="m", kv_cache_memory=1024**2, swap_space=4096, prefix_caching=False,
        tenant_quota=(("default", 0.5), ("a%2Cb", 0.25)), itl_target=20.0,
    )  # fmt: skip
    assert quotas_of(config) == {(): 0.5, ("", "a,b"): 0.25}


def test_sampling_params_take_the_forms_of_other_engines() -> None:
    loose = SamplingParams(stop="end", stop_token_ids=[1, 2], logit_bias={5: -1.0})  # type: ignore[arg-type]
    strict = SamplingParams(stop=("end",), stop_token_ids=(1, 2), logit_bias=((5, -1.0),))
    assert loose == strict
    assert hash(loose) == hash(strict)
    none = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None)  # type: ignore[arg-type]
    assert none == SamplingParams()
    with pytest.raises(RequestRejectedError, match="combined with grammar"):
        SamplingParams(
            grammar=GrammarSpec("regex", "a"),
            structured_outputs=StructuredOutputsParams(regex="b"),
        )
    with pytest.raises(RequestRejectedError, match="exactly one constraint, got 2"):
        StructuredOutputsParams(regex="a", choice=["b"])


def test_the_bar_shows_speed_and_the_cached_share() -> None:
    now = iter([0.0, 2.0, 4.0, 4.0, 4.0])
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with BatchProgress(2, console=console, clock=lambda: next(now)) as progress:
        progress.add(Increment(token_ids=(1, 2, 3)))
        progress.finish(RequestOutput("a", None, [1] * 8, [CompletionOutput(0)], 6))
        assert progress.figures() == "0.8 tokens/s, 75% cached"
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "0.8 tokens/s, 75% cached" in shown
    assert "1/2" in shown


def test_importing_the_package_loads_nothing() -> None:
    code = (
        "import sys, radixkv\nassert 'LLM' in dir(radixkv)\nradixkv.SamplingParams\n"
        "heavy = {'torch', 'numpy', 'rich', 'transformers'} & set(sys.modules)\n"
        "sys.exit(bool(heavy))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_prompt_gets_special_tokens_and_a_rendered_conversation_no_more() -> None:
    """A template writes the special tokens itself; a second begin token would hide the cache."""

    class Marking(ByteTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
            return [256] * add_special_tokens + super().encode(text)

    assert prompt_of("a", Marking(), None).token_ids == [256, 97]
    chat = chat_prompt([{"role": "user", "content": "a"}], Marking())
    assert chat.token_ids == list(b"user: a\nassistant: ")
