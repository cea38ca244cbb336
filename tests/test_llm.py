"""The engine as a library, on a tiny model with random weights, and on the default one."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from radixkv import (
    LLM,
    AsyncEngine,
    BeamSearchParams,
    GrammarSpec,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from radixkv.config import ServeConfig
from radixkv.engine import factory
from radixkv.errors import (
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    RequestRejectedError,
)

ROOT = Path(__file__).parent.parent
TINY = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "eos_token_id": 256,
    "tie_word_embeddings": False,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(TINY))
    return {
        "model": path, "load_format": "dummy", "dtype": "float32", "kv_cache_memory": "1MiB",
        "max_num_seqs": 8, "swap_space": 0,
    }  # fmt: skip


@pytest.fixture(scope="module")
def llm(options: dict[str, Any]) -> Iterator[LLM]:
    with LLM(**options) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _whole(llm: LLM) -> Iterator[None]:
    """After each test nothing runs, nothing is held, and the cache is sound."""
    yield
    stats = llm.stats()
    assert stats.num_running == stats.num_waiting == stats.blocks_referenced == 0
    llm.check_integrity()


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [answer.token_ids for output in outputs for answer in output.outputs]


def test_every_form_of_a_prompt_means_the_same(llm: LLM) -> None:
    tokens = llm.get_tokenizer().encode("hello there")
    forms: list[Any] = [
        "hello there",
        tokens,
        {"prompt": "hello there"},
        {"prompt_token_ids": tokens},
        {"prompt": "hello there", "cache_salt": "s"},
    ]
    alone = [llm.generate(form, GREEDY)[0] for form in forms]
    together = llm.generate(forms, GREEDY)
    assert len({tuple(answer) for answer in ids(alone + together)}) == 1
    assert [o.prompt for o in together] == ["hello there", None, "hello there", None, "hello there"]
    assert all(o.prompt_token_ids == tokens for o in together)
    assert all(o.finished for o in together)


def test_outputs_keep_the_order_of_the_prompts_and_their_own_parameters(llm: LLM) -> None:
    lengths = [9, 1, 5, 3]
    params = [SamplingParams(max_tokens=n, seed=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate(["a", "b", "c", "d"], params)
    assert [o.prompt for o in outputs] == ["a", "b", "c", "d"]
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    assert [o.outputs[0].finish_reason for o in outputs] == ["length"] * 4


def test_nothing_asked_is_nothing_answered(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_a_repeated_prompt_is_cached_but_for_its_salt(llm: LLM) -> None:
    prompt = list(range(40, 90))
    first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    other = llm.generate(prompt, GREEDY, cache_salt="mine")[0]
    cached = [o.num_cached_tokens for o in (first, second, other)]
    assert cached == [0, 49, 0]


def test_several_answers_have_their_indices_and_metrics(llm: LLM) -> None:
    output = llm.generate("tell me", SamplingParams(n=3, max_tokens=6, seed=1, ignore_eos=True))[0]
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3
    metrics = output.metrics
    assert metrics is not None
    times = [metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time,
             metrics.last_token_time, metrics.finished_time]  # fmt: skip
    assert all(time is not None for time in times)
    assert times == sorted(times)
    assert metrics.time_in_queue == times[1] - times[0]  # type: ignore[operator]


def test_logprobs_are_those_of_the_chosen_and_the_likeliest(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=5, logprobs=2, ignore_eos=True)
    answer = llm.generate("abc", params)[0].outputs[0]
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 5
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert {1, 2} <= {logprob.rank for logprob in entry.values()}
        assert 2 <= len(entry) <= 3
        assert entry[token].decoded_token == llm.get_tokenizer().token_str(token)
    chosen = [entry[t].logprob for t, entry in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert answer.cumulative_logprob == pytest.approx(sum(chosen))
    plain = llm.generate("abc", GREEDY)[0].outputs[0]
    assert (plain.logprobs, plain.cumulative_logprob) == (None, None)


def test_beams_come_best_first(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=5, ignore_eos=True)
    answers = llm.beam_search("beams", params)[0].outputs
    scores = [answer.score for answer in answers]
    assert scores == sorted(scores, reverse=True)  # type: ignore[type-var]
    assert answers[0].score == pytest.approx((answers[0].cumulative_logprob or 0) / 5)
    greedy = llm.generate("beams", SamplingParams(temperature=0, max_tokens=5, ignore_eos=True,
                                                  logprobs=0))[0].outputs[0]  # fmt: skip
    assert answers[0].cumulative_logprob >= greedy.cumulative_logprob  # type: ignore[operator]


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        (StructuredOutputsParams(choice=["red", "blue"]), r"red|blue"),
        (StructuredOutputsParams(regex=r"[0-9]{3}-[a-f]"), r"[0-9]{3}-[a-f]"),
        (StructuredOutputsParams(grammar='root ::= "yes" | "no"'), r"yes|no"),
        (StructuredOutputsParams(json={"type": "boolean"}), r"true|false"),
        (StructuredOutputsParams(json='{"const": 7}'), r"7"),
    ],
)
def test_an_answer_keeps_to_its_constraint(
    llm: LLM, constraint: StructuredOutputsParams, pattern: str
) -> None:
    params = SamplingParams(seed=5, max_tokens=40, structured_outputs=constraint)
    answer = llm.generate("x", params)[0].outputs[0]
    assert answer.finish_reason == "stop"
    assert re.fullmatch(pattern, answer.text)


def test_chat_takes_one_conversation_or_several(llm: LLM) -> None:
    one = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    parts = [{"type": "text", "text": text} for text in "ab"]
    two = [{"role": "user", "content": parts}]
    single = llm.chat(one, GREEDY)
    several = llm.chat([one, two], GREEDY)
    assert single[0].prompt == "system: Be brief.\nuser: Hi\nassistant: "
    assert several[1].prompt == "user: a\nb\nassistant: "
    assert ids(single) == ids(several)[:1]
    tools = llm.chat(one, GREEDY, tools=[{"type": "function"}], add_generation_prompt=False)
    assert tools[0].prompt == 'tools: [{"type": "function"}]\nsystem: Be brief.\nuser: Hi\n'


@pytest.mark.parametrize(
    ("prompts", "params", "error"),
    [
        (["fine", "x" * 600], GREEDY, ContextLengthError),
        (["fine", []], GREEDY, RequestRejectedError),
        (["fine", [5, 300]], GREEDY, RequestRejectedError),
        (["fine", [1.5]], GREEDY, RequestRejectedError),
        (["fine", {"text": "x"}], GREEDY, RequestRejectedError),
        (["fine", {"prompt": "x", "prompt_token_ids": [1]}], GREEDY, RequestRejectedError),
        (["fine", {"prompt": "x", "cache_salt": ""}], GREEDY, RequestRejectedError),
        (["fine", "y"], [GREEDY, SamplingParams(n=9)], RequestRejectedError),
        (["fine", "y"], [GREEDY, SamplingParams(stop_token_ids=[300])], RequestRejectedError),
    ],
)
def test_one_bad_prompt_is_named_and_none_is_run(
    llm: LLM, prompts: Any, params: Any, error: type[Exception]
) -> None:
    before = llm.stats().requests_admitted
    with pytest.raises(error) as caught:
        llm.generate(prompts, params)
    assert caught.value.__notes__ == ["in prompt 1"]
    assert llm.stats().requests_admitted == before


def test_a_grammar_that_makes_no_sense_runs_nothing(llm: LLM) -> None:
    before = llm.stats().requests_admitted
    bad = SamplingParams(grammar=GrammarSpec("regex", "("))
    with pytest.raises(RequestRejectedError):
        llm.generate(["fine", "y"], [GREEDY, bad])
    assert llm.stats().requests_admitted == before


def test_as_many_parameters_as_prompts_are_wanted(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 prompts, but 1 sampling_params"):
        llm.generate(["a", "b"], [GREEDY])


@pytest.mark.parametrize(
    "messages", [[{"content": "x"}], [{"role": "user", "content": [{"type": "image_url"}]}]]
)
def test_messages_that_are_none_are_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestRejectedError):
        llm.chat(messages, GREEDY)


def test_more_prompts_than_the_server_would_queue_are_answered(llm: LLM) -> None:
    outputs = llm.generate([[i % 200] for i in range(1100)], SamplingParams(max_tokens=1))
    assert len(outputs) == 1100
    assert all(output.finished for output in outputs)


def test_an_interrupt_aborts_all_and_leaves_the_cache_whole(llm: LLM) -> None:
    before = llm.stats()
    endless = SamplingParams(max_tokens=400, ignore_eos=True)

    def interrupt() -> None:
        while llm.stats().tokens_generated < before.tokens_generated + 20:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[i] * 20 for i in range(1, 21)], endless)
    # All is over when the call is.
    stats = llm.stats()
    thread.join()
    aborted = stats.requests_finished["abort"] - before.requests_finished.get("abort", 0)
    assert aborted == 20
    assert stats.num_running == stats.num_waiting == stats.blocks_referenced == 0
    assert len(llm.generate("still there", GREEDY)[0].outputs[0].token_ids) == 8


def test_calls_from_several_threads_and_inside_a_loop_do_not_mix(llm: LLM) -> None:
    expected = [ids(llm.generate([[i] * 5], GREEDY)) for i in range(4)]

    async def in_a_loop() -> list[list[list[int]]]:
        work = [asyncio.to_thread(llm.generate, [[i] * 5], GREEDY) for i in range(3)]
        here = ids(llm.generate([[3] * 5], GREEDY))  # blocks the loop, as in a notebook
        return [*[ids(outputs) for outputs in await asyncio.gather(*work)], here]

    assert asyncio.run(in_a_loop()) == expected


def test_reset_drops_what_is_cached(llm: LLM) -> None:
    llm.generate([7] * 50, GREEDY)
    assert llm.reset_prefix_cache() > 0
    assert llm.generate([7] * 50, GREEDY)[0].num_cached_tokens == 0


def test_closing_ends_the_call_of_another_thread(options: dict[str, Any]) -> None:
    other = LLM(**options)
    outputs: list[RequestOutput] = []
    endless = SamplingParams(max_tokens=400, ignore_eos=True)
    thread = threading.Thread(target=lambda: outputs.extend(other.generate(["x", "y"], endless)))
    thread.start()
    while not other.stats().tokens_generated:
        time.sleep(0.001)
    other.close()
    thread.join(20)
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort", "abort"]


def test_closing_waits_for_a_call_that_outlasts_the_engine(options: dict[str, Any]) -> None:
    other = LLM(**options)
    results: list[str] = []
    thread = threading.Thread(
        target=lambda: results.append(other._wait(asyncio.sleep(0.2, "ended"))), daemon=True
    )
    thread.start()
    time.sleep(0.05)
    other.close()
    thread.join(10)
    assert results == ["ended"]


def test_a_dropped_llm_closes_itself(options: dict[str, Any]) -> None:
    other = LLM(**options)
    other.generate("x", GREEDY)
    threads = [other._thread, other._engine._thread]
    del other
    for thread in threads:
        assert thread is not None
        thread.join(20)
        assert not thread.is_alive()


def test_a_closed_llm_says_so(options: dict[str, Any]) -> None:
    with LLM(**options) as other:
        other.generate("x", GREEDY)
    other.close()
    with pytest.raises(EngineClosedError):
        other.generate("x", GREEDY)


def test_a_program_that_never_closes_ends_all_the_same(options: dict[str, Any]) -> None:
    code = (
        "import json, sys\nfrom radixkv import LLM, SamplingParams\n"
        "llm = LLM(**json.loads(sys.argv[1]))\n"
        "print(len(llm.generate('x', SamplingParams(max_tokens=2, ignore_eos=True))))"
    )
    given = json.dumps({**options, "model": str(options["model"])})
    done = subprocess.run(
        [sys.executable, "-c", code, given],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_an_option_that_the_model_refuses_is_named_as_it_was_given(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^max_model_len must be at most 512"):
        LLM(**options, max_model_len=1000)


async def test_async_engine_yields_increments_and_aborts_when_left(
    options: dict[str, Any],
) -> None:
    async with await asyncio.to_thread(AsyncEngine.from_config, **options) as engine:
        whole = [i async for i in engine.generate("hello there", GREEDY)]
        assert len(whole) > 4
        assert [i.finish_reason for i in whole] == [None] * (len(whole) - 1) + ["length"]
        assert len([t for i in whole for t in i.token_ids]) == 8
        endless = SamplingParams(max_tokens=400, ignore_eos=True)
        async with aclosing(engine.generate("again", endless)) as increments:
            async for _ in increments:
                break
        while engine.health().busy:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert engine.stats().requests_finished == {"length": 1, "abort": 1}
        await engine.check_integrity()
    with pytest.raises(EngineClosedError):
        await anext(engine.generate("x", GREEDY))


def test_async_engine_takes_a_config_or_options_and_not_both() -> None:
    with pytest.raises(ValueError, match="either"):
        AsyncEngine.from_config(ServeConfig(), max_num_seqs=1)


@pytest.mark.model
@pytest.mark.usefixtures("default_model_dir")
def test_the_examples_of_the_page_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Weights are loaded once for both engines of the page.
    monkeypatch.setattr(factory, "load_model", functools.cache(factory.load_model))
    page = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    for example in examples:
        exec(compile(example, "docs/library.md", "exec"), names)
    shown = capsys.readouterr().out
    assert len(examples) == 7
    assert "The capital of France is ->  Paris" in shown
    assert names["second"].num_cached_tokens > len(names["first"].prompt_token_ids)
    assert names["answer"].text in ("red", "green", "blue")
    assert len(names["texts"]) == 2
