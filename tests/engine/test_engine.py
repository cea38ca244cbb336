"""What the cache may never change: the tokens of an answer."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import Harness, cold, make_engine, prompt_of

from radixkv.errors import ContextLengthError, RequestRejectedError
from radixkv.request import SamplingParams

STYLES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "seed": 11},
    "filtered": {"temperature": 1.2, "seed": 5, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": {
        "temperature": 0.8,
        "seed": 3,
        "frequency_penalty": 1.0,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.3,
    },
}
GREEDY = STYLES["greedy"]


def full_blocks(harness: Harness) -> int:
    return sum(n.num_blocks for n in harness.cache.tree.nodes() if not n.is_tail)


@pytest.mark.parametrize("style", STYLES)
def test_cold_warm_batched_and_alone_give_the_same_tokens(style: str) -> None:
    params = {**STYLES[style], "max_tokens": 20}
    prompts = [prompt_of(n, seed=n) for n in (1, 7, 16, 33)]
    expected = [cold(p, **params).token_ids for p in prompts]
    harness = Harness(128)
    for turn in ("cold", "warm"):
        for i, prompt in enumerate(prompts):
            harness.add(f"{turn}-{i}", prompt, **params)
        harness.run()
        answers = [harness.answers[f"{turn}-{i}"] for i in range(len(prompts))]
        assert [a.token_ids for a in answers] == expected
        hits = [a.last.num_cached_tokens for a in answers]
        assert hits == ([0] * 4 if turn == "cold" else [len(p) - 1 for p in prompts])


@pytest.mark.parametrize("block_size", [3, 16])
def test_ten_turns_reuse_prompt_and_answer(block_size: int) -> None:
    """Only the prompt was filed once, so that every earlier answer was computed again."""
    harness = Harness(4096 // block_size, block_size, max_num_batched_tokens=200)
    history = prompt_of(100)
    known = 0
    for turn in range(10):
        answer = harness.ask(history, max_tokens=50, **GREEDY)
        assert answer.last.num_cached_tokens == known
        assert answer.token_ids == cold(history, max_tokens=50, **GREEDY).token_ids
        known = len(history) + 50 - 1
        history = history + answer.token_ids + prompt_of(50, seed=turn + 1)


@pytest.mark.parametrize("total", range(30, 35))
def test_last_sampled_token_is_not_filed(total: int) -> None:
    """Its KV was never written, yet at a block boundary its block was published."""
    harness = Harness(16, 16)
    prompt = prompt_of(20)
    answer = harness.ask(prompt, max_tokens=total - 20, **GREEDY)
    assert full_blocks(harness) == (total - 1) // 16
    follow_up = prompt + answer.token_ids + prompt_of(8, seed=1)
    warm = harness.ask(follow_up, max_tokens=5, **GREEDY)
    assert warm.last.num_cached_tokens == total - 1
    assert warm.token_ids == cold(follow_up, max_tokens=5, **GREEDY).token_ids


def test_tokens_past_a_stop_string_do_not_spoil_the_next_turn() -> None:
    prompt = prompt_of(20)
    plain = cold(prompt, max_tokens=30, **GREEDY)
    ids = [t for t in plain.token_ids if t >= 32]
    stop = "".join(map(chr, ids[11:14]))
    harness = Harness(64, 4)
    answer = harness.ask(prompt, max_tokens=30, stop=(stop,), **GREEDY)
    assert answer.last.finish_reason == "stop"
    assert answer.last.stop_reason == stop
    assert answer.text == "".join(map(chr, ids[:11]))
    served = [t for t in answer.token_ids if t >= 32][:11]
    follow_up = prompt + answer.token_ids[: answer.token_ids.index(served[-1]) + 1] + [99] * 5
    warm = harness.ask(follow_up, max_tokens=5, **GREEDY)
    assert warm.last.num_cached_tokens == len(follow_up) - 5
    assert warm.token_ids == cold(follow_up, max_tokens=5, **GREEDY).token_ids


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
def test_same_prompt_three_times_then_longer(length: int) -> None:
    """A prompt cached in full left nothing to compute, and the request died."""
    harness = Harness(32, 16)
    prompt = prompt_of(length)
    expected = cold(prompt, max_tokens=1, **GREEDY).token_ids
    for hit in (0, length - 1, length - 1):
        answer = harness.ask(prompt, max_tokens=1, **GREEDY)
        assert answer.last.num_cached_tokens == hit
        assert answer.token_ids == expected
        assert harness.cache.num_tree_blocks == -(-length // 16)
    longer = prompt + prompt_of(17, seed=1)
    answer = harness.ask(longer, max_tokens=3, **GREEDY)
    assert answer.last.num_cached_tokens == length
    assert answer.token_ids == cold(longer, max_tokens=3, **GREEDY).token_ids


@pytest.mark.parametrize(("first", "more"), [(128, 5), (512, 1), (128, 63), (128, 64), (128, 65)])
def test_chunks_begin_after_the_cached_prefix(first: int, more: int) -> None:
    """Chunking once went by the whole prompt: empty chunks, or one chunk of reuse at most."""
    harness = Harness(64, 16, max_num_batched_tokens=64)
    prompt = prompt_of(first)
    harness.ask(prompt, max_tokens=1, **GREEDY)
    computed, steps = harness.engine.tokens_computed, len(harness.runner.steps)
    longer = prompt + prompt_of(more, seed=1)
    answer = harness.ask(longer, max_tokens=1, **GREEDY)
    assert answer.last.num_cached_tokens == first
    assert len(harness.runner.steps) - steps == -(-more // 64)
    assert harness.engine.tokens_computed - computed == more
    assert answer.token_ids == cold(longer, max_tokens=1, **GREEDY).token_ids


def test_twins_and_a_late_stranger_do_not_disturb_each_other() -> None:
    """The loser of two equal prefills read blocks that had been given away."""
    harness = Harness(40, 4, max_num_batched_tokens=16)
    twin, stranger = prompt_of(40), prompt_of(30, seed=1)
    harness.add("a", twin, max_tokens=32, **GREEDY)
    harness.add("b", twin, max_tokens=32, **GREEDY)
    for _ in range(5):
        harness.step()
    harness.add("c", stranger, max_tokens=32, **GREEDY)
    harness.run()
    expected = cold(twin, max_tokens=32, **GREEDY).token_ids
    assert harness.answers["a"].token_ids == harness.answers["b"].token_ids == expected
    assert harness.answers["c"].token_ids == cold(stranger, max_tokens=32, **GREEDY).token_ids


def test_equal_answers_decoded_side_by_side_end_in_one_set_of_blocks() -> None:
    harness = Harness(64, 4)
    prompt = prompt_of(9)
    first = harness.add("a", prompt, max_tokens=24, **GREEDY)
    harness.step()
    second = harness.add("b", prompt, max_tokens=24, **GREEDY)
    for _ in range(10):
        harness.step()
    sequences = [r.branches[0].sequence for r in (first, second)]
    shared = min(s.num_tree_blocks for s in sequences)
    assert shared >= 4
    tables = [s.block_table[:shared].tolist() for s in sequences]
    assert tables[0] == tables[1]
    harness.run()
    assert harness.answers["a"].token_ids == harness.answers["b"].token_ids


@pytest.mark.parametrize("style", STYLES)
def test_preempted_streams_equal_their_solo_runs(style: str) -> None:
    """Recomputing forgot the generated tokens, or penalties took them for prompt."""
    params = {**STYLES[style], "max_tokens": 80}
    harness = Harness(8, 16)
    prompts = [prompt_of(17, seed=i) for i in range(2)]
    for i, prompt in enumerate(prompts):
        harness.add(str(i), prompt, **params)
    harness.run(max_steps=400)
    assert harness.scheduler.num_preemptions >= 1
    for i, prompt in enumerate(prompts):
        assert harness.answers[str(i)].token_ids == cold(prompt, **params).token_ids
        assert harness.answers[str(i)].last.num_completion_tokens == 80


@pytest.mark.parametrize("evict", [False, True])
@pytest.mark.parametrize("style", ["greedy", "penalties"])
def test_preemption_in_the_middle_of_a_recompute(style: str, evict: bool) -> None:
    params = {**STYLES[style], "max_tokens": 30}
    harness = Harness(64, 4, max_num_batched_tokens=16)
    prompt = prompt_of(40)
    request = harness.add("a", prompt, **params)
    while request.branches[0].num_output_tokens < 12:
        harness.step()
    for expected in (1, 2):
        harness.scheduler.preempt(request)
        if evict:
            harness.cache.reset()
        harness.step()
        assert request.num_preemptions == expected
        assert request.is_prefilling == evict
    harness.run()
    assert harness.answers["a"].token_ids == cold(prompt, **params).token_ids
    assert harness.answers["a"].last.num_cached_tokens == 0


def test_pool_under_pressure_gives_everyone_the_cold_answer() -> None:
    params = {**GREEDY, "max_tokens": 25}
    harness = Harness(24, 4, max_num_batched_tokens=24)
    shared = prompt_of(10)
    prompts = [shared + prompt_of(3 * i, seed=i) for i in range(10)]
    for i, prompt in enumerate(prompts):
        harness.add(str(i), prompt, **params)
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    assert harness.cache.stats.blocks_evicted > 0
    assert harness.cache.stats.tokens_hit > 0
    for i, prompt in enumerate(prompts):
        assert harness.answers[str(i)].token_ids == cold(prompt, **params).token_ids


def test_sixteen_identical_prompts_are_computed_once() -> None:
    harness = Harness(64, 16, max_num_batched_tokens=64)
    prompt = prompt_of(160)
    for i in range(16):
        harness.add(str(i), prompt, max_tokens=4, **GREEDY)
    harness.run()
    expected = cold(prompt, max_tokens=4, **GREEDY).token_ids
    assert [a.token_ids for a in harness.answers.values()] == [expected] * 16
    assert harness.engine.tokens_computed == 160 + 15
    assert full_blocks(harness) == 10
    assert [a.last.num_cached_tokens for a in harness.answers.values()] == [0] + [159] * 15


@pytest.mark.parametrize("event", ["abort", "preempt"])
def test_followers_outlive_their_leader(event: str) -> None:
    harness = Harness(64, 16, max_num_batched_tokens=64)
    prompt = prompt_of(160)
    leader = harness.add("leader", prompt, max_tokens=4, **GREEDY)
    for i in range(5):
        harness.add(str(i), prompt, max_tokens=4, **GREEDY)
    harness.step()
    assert leader.is_prefilling
    assert len(harness.scheduler.waiting) == 5
    if event == "abort":
        harness.abort("leader")
    else:
        harness.scheduler.preempt(leader)
        harness.cache.reset()
    harness.run(max_steps=60)
    expected = cold(prompt, max_tokens=4, **GREEDY).token_ids
    answers = [a for name, a in harness.answers.items() if name != "leader" or event == "preempt"]
    assert [a.token_ids for a in answers] == [expected] * len(answers)
    assert full_blocks(harness) == 10


def test_other_namespaces_share_nothing_and_do_not_wait() -> None:
    harness = Harness(64, 16, max_num_batched_tokens=512)
    prompt = prompt_of(160)
    spaces = [("ab", "c"), ("a", "bc"), (), ("",)]
    for i, namespace in enumerate(spaces):
        harness.add(str(i), prompt, namespace, max_tokens=4, **GREEDY)
    harness.step()
    assert len(harness.scheduler.running) == 4
    harness.run()
    assert [a.last.num_cached_tokens for a in harness.answers.values()] == [0] * 4
    assert harness.ask(prompt, ("a", "bc"), max_tokens=1, **GREEDY).last.num_cached_tokens == 159
    assert harness.engine.tokens_computed == 4 * 160 + 1


def test_namespace_survives_preemption() -> None:
    harness = Harness(64, 4)
    prompt = prompt_of(20)
    request = harness.add("a", prompt, ("tenant",), max_tokens=10, **GREEDY)
    for _ in range(4):
        harness.step()
    harness.scheduler.preempt(request)
    harness.run()
    other = harness.ask(prompt, max_tokens=1, **GREEDY)
    assert other.last.num_cached_tokens == 0
    assert harness.cache.stats.tokens_rehit > 0


@pytest.mark.parametrize(
    ("length", "max_tokens", "expected"), [(250, 100, 6), (250, None, 6), (250, 6, 6), (255, 9, 1)]
)
def test_answer_is_cut_at_the_context_length(
    length: int, max_tokens: int | None, expected: int
) -> None:
    harness = Harness(64, 16, max_model_len=256)
    answer = harness.ask(prompt_of(length), max_tokens=max_tokens, **GREEDY)
    assert len(answer.token_ids) == expected
    assert (answer.last.finish_reason, answer.last.num_prompt_tokens) == ("length", length)


@pytest.mark.parametrize("length", [256, 257])
def test_prompt_without_room_for_an_answer_is_refused(length: int) -> None:
    harness = Harness(64, 16, max_model_len=256)
    with pytest.raises(ContextLengthError, match=rf"256 tokens.*{length} tokens") as caught:
        harness.engine.validate(prompt_of(length), SamplingParams())
    assert caught.value.code == "context_length_exceeded"


def test_context_length_is_at_most_the_pool() -> None:
    """A request that can't fit even alone would wait for ever."""
    harness = Harness(4, 4, max_model_len=4096)
    assert harness.engine.max_model_len == 16
    answer = harness.ask(prompt_of(15), max_tokens=100, **GREEDY)
    assert len(answer.token_ids) == 1
    assert len(harness.ask(prompt_of(3, seed=1), **GREEDY).token_ids) == 13


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([512], {}, "prompt"),
        ([1.5], {}, "prompt"),
        ([True], {}, "prompt"),
        ([[1, 2]], {}, "prompt"),
        ([1], {"logit_bias": ((99_999, 1.0),)}, "logit_bias"),
        ([1], {"logit_bias": ((-1, 1.0),)}, "logit_bias"),
        ([1], {"stop_token_ids": (512,)}, "stop_token_ids"),
    ],
)
def test_invalid_requests_are_refused(prompt: Any, params: dict[str, Any], param: str) -> None:
    harness = Harness()
    with pytest.raises(RequestRejectedError) as caught:
        harness.engine.add_request("a", prompt, SamplingParams(**params))
    assert caught.value.param == param
    assert not harness.engine.has_work


NAN, INF = float("nan"), float("inf")
INVALID: list[tuple[str, Any]] = [
    *[("temperature", v) for v in (NAN, INF, -1.0, 2.1)],
    *[("top_p", v) for v in (0.0, 1.1, NAN)],
    *[("min_p", v) for v in (-0.1, 1.1, NAN)],
    ("top_k", -2),
    *[("repetition_penalty", v) for v in (0.0, -1.0, 11.0, NAN)],
    *[("presence_penalty", v) for v in (10.0, NAN)],
    *[("frequency_penalty", v) for v in (-10.0, NAN)],
    *[("max_tokens", v) for v in (-1, 0)],
    ("min_tokens", -1),
    *[("seed", v) for v in (2**64, -(2**63) - 1)],
    *[("logprobs", v) for v in (-1, 21)],
    *[("logit_bias", ((5, v),)) for v in (1000.0, NAN, INF)],
    *[("stop", v) for v in (("x",) * 1000, ("",))],
]


@pytest.mark.parametrize(("name", "value"), INVALID)
def test_sampling_params_out_of_range_are_refused(name: str, value: Any) -> None:
    """Checks written as "below or above" let NaN through, and one request killed all others."""
    with pytest.raises(RequestRejectedError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("temperature", [1e-4, 1e-40])
def test_tiny_temperature_equals_greedy(temperature: float) -> None:
    harness = Harness()
    harness.add("tiny", prompt_of(9), temperature=temperature, max_tokens=12)
    harness.add("healthy", prompt_of(5, seed=1), temperature=0.9, seed=1, max_tokens=12)
    harness.run()
    expected = cold(prompt_of(9), max_tokens=12, **GREEDY).token_ids
    assert harness.answers["tiny"].token_ids == expected
    healthy = cold(prompt_of(5, seed=1), temperature=0.9, seed=1, max_tokens=12)
    assert harness.answers["healthy"].token_ids == healthy.token_ids


def test_end_token_stops_and_is_not_part_of_the_text() -> None:
    prompt = prompt_of(9)
    plain = cold(prompt, max_tokens=30, **GREEDY).token_ids
    eos = next(t for i, t in enumerate(plain) if i >= 5 and t >= 32 and t not in plain[:i])
    at = plain.index(eos)
    harness = Harness(64, 4, eos_token_ids=(eos,))
    answer = harness.ask(prompt, max_tokens=30, **GREEDY)
    assert answer.token_ids == plain[: at + 1]
    assert (answer.last.finish_reason, answer.last.stop_reason) == ("stop", None)
    assert chr(eos) not in answer.text
    ignored = harness.ask(prompt, max_tokens=30, ignore_eos=True, **GREEDY)
    assert ignored.token_ids == plain
    other = Harness(64, 4).ask(prompt, max_tokens=30, stop_token_ids=(eos,), **GREEDY)
    assert (other.last.finish_reason, other.last.stop_reason) == ("stop", eos)
    late = harness.ask(prompt, max_tokens=30, min_tokens=at + 3, **GREEDY)
    assert len(late.token_ids) >= at + 3
    assert eos not in late.token_ids[: at + 3]


@pytest.mark.parametrize("prompt", [[[1], [2, 3]], [[1, 2]], ["a"], [1.5], [2**70]])
def test_prompts_that_are_not_flat_lists_of_ids_are_rejected(prompt: list[object]) -> None:
    """A ragged list was numpy's ValueError, which the server answered with 500."""
    with pytest.raises(RequestRejectedError, match="integers"):
        make_engine().validate(prompt, SamplingParams())  # type: ignore[arg-type]


def test_namespaces_have_different_names_in_the_report() -> None:
    """("a", "b") and ("a/b",) shared one entry."""
    engine = make_engine()
    namespaces: list[tuple[str, ...]] = [(), ("",), ("a", "b"), ("a/b",), ("a%2Fb",), ("", "x")]
    for i, namespace in enumerate(namespaces):
        engine.add_request(str(i), [1, 2], SamplingParams(max_tokens=1), namespace=namespace)
    while engine.has_work:
        engine.step()
    assert len(engine.stats().namespaces) == len(namespaces)
