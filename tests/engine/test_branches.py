"""Several answers to one prompt: forks that share what is computed and draw apart."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import CharTokenizer, Harness, cold, cold_all, prompt_of

from radixkv.engine.branch import branch_seed
from radixkv.errors import RequestRejectedError
from radixkv.request import SamplingParams

SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 11, "max_tokens": 20}
PENALTIES = {"frequency_penalty": 1.0, "repetition_penalty": 1.3, "logit_bias": ((70, 4.0),)}

# Answers of a, b and c, of which every branch holds a part back.
HELD_TEXT = {"stop": ("abc",), "logit_bias": tuple((ord(c), 9.0) for c in "abc")}


def tokens(harness: Harness, request_id: str) -> list[list[int]]:
    return [answer.token_ids for answer in harness.choices[request_id]]


@pytest.mark.parametrize("length", [16, 17, 21])
@pytest.mark.parametrize("extra", [{}, PENALTIES, HELD_TEXT, {"min_tokens": 9}])
def test_each_branch_draws_as_a_request_with_its_seed(length: int, extra: dict[str, Any]) -> None:
    """Counts of penalties, held back text and masks are each branch's own after the fork."""
    prompt = prompt_of(length)
    params = {**SEEDED, **extra}
    harness = Harness(128, 4, eos_token_ids=tuple(range(100, 110)))
    answers = harness.ask_all(prompt, n=4, **params)
    assert len({tuple(a.token_ids) for a in answers}) == 4
    for i, answer in enumerate(answers):
        alone = Harness(128, 4, eos_token_ids=tuple(range(100, 110)))
        wanted = alone.ask(prompt, **{**params, "seed": branch_seed(11, i)})
        assert answer.token_ids == wanted.token_ids
        assert answer.text == wanted.text
        assert answer.last.finish_reason == wanted.last.finish_reason
        assert answer.last.num_completion_tokens == len(answer.token_ids)


class Halves(CharTokenizer):
    """Odd ids are the first byte of é, even ones its second."""

    def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str:
        return bytes(0xC3 if i % 2 else 0xA9 for i in ids).decode(errors="replace")


def test_characters_are_put_together_from_tokens_of_one_branch() -> None:
    """Branches that shared the unfinished character would finish each other's."""
    harness = Harness(128, 4)
    harness.engine.tokenizer = Halves()
    for kind in ({"n": 4}, {"n": 4, "use_beam_search": True}):
        answers = harness.ask_all(prompt_of(9), **kind, **SEEDED)
        assert any("é" in a.text for a in answers)
        assert [a.text for a in answers] == [Halves().decode(a.token_ids) for a in answers]


def test_greedy_branches_are_equal_and_end_in_one_set_of_blocks() -> None:
    harness = Harness(128, 4)
    answers = harness.ask_all(prompt_of(10), n=3, temperature=0.0, max_tokens=14)
    expected = cold(prompt_of(10), temperature=0.0, max_tokens=14).token_ids
    assert [a.token_ids for a in answers] == [expected] * 3
    assert harness.cache.num_tree_blocks == -(-23 // 4)


@pytest.mark.parametrize(("length", "copies"), [(160, 0), (165, 4)])
def test_prompt_is_computed_once_and_only_its_last_block_is_copied(
    length: int, copies: int
) -> None:
    harness = Harness(128, 16, max_num_batched_tokens=64)
    harness.add("a", prompt_of(length), n=4, **{**SEEDED, "max_tokens": 3})
    harness.run()
    assert harness.engine.tokens_computed == length
    assert harness.engine.tokens_generated == 12
    assert harness.cache.stats.blocks_copied <= copies
    assert harness.answers["a"].last.num_cached_tokens == 0
    assert harness.cache.stats.tokens_looked_up == length


def test_shared_tokens_are_stored_once() -> None:
    harness = Harness(128, 16, max_num_batched_tokens=64)
    harness.add("a", prompt_of(37), n=4, **SEEDED)
    harness.step()
    stats = harness.engine.stats()
    assert (stats.kv_tokens_referenced, stats.kv_tokens_stored) == (4 * 37, 37)
    assert stats.kv_slots_allocated == 48
    harness.step()
    stats = harness.engine.stats()
    # Two blocks are shared; the third, partly filled, was copied for each.
    assert (stats.kv_tokens_referenced, stats.kv_tokens_stored) == (4 * 38, 32 + 4 * 6)
    assert stats.kv_slots_allocated == 32 + 4 * 16
    harness.run()
    assert harness.engine.stats().kv_slots_allocated == 0


def test_branch_that_ends_gives_its_blocks_back_at_once() -> None:
    prompt = prompt_of(16)
    plain = [a.token_ids for a in cold_all(prompt, n=3, **SEEDED)]
    stop = next(t for t in plain[1][3:8] if all(t not in plain[i] for i in (0, 2)))
    harness = Harness(128, 4)
    request = harness.add("a", prompt, n=3, stop_token_ids=(stop,), **SEEDED)
    while len(request.live) != 2:
        harness.step()
    assert len(harness.cache.sequences) == 2
    assert harness.choices["a"][1].last.finish_reason == "stop"
    assert harness.choices["a"][1].last.timings is None
    harness.run()
    at = plain[1].index(stop)
    assert tokens(harness, "a") == [plain[0], plain[1][: at + 1], plain[2]]


def test_best_of_ranks_by_logprob_per_token() -> None:
    """Summed up, short answers would win."""
    options: dict[str, Any] = {"eos_token_ids": tuple(range(32, 70))}
    prompt = prompt_of(9)
    found = 0
    for seed in range(6):
        params = {**SEEDED, "seed": seed}
        harness = Harness(128, 4, **options)
        pool = harness.ask_all(prompt, n=5, logprobs=1, **params)
        sums = [sum(o.logprobs[0].logprob for o in a.outputs if o.logprobs) for a in pool]
        means = [total / len(a.token_ids) for total, a in zip(sums, pool, strict=True)]
        order = sorted(range(5), key=lambda i: -means[i])[:2]
        found += order != sorted(range(5), key=lambda i: -sums[i])[:2]
        best = harness.ask_all(prompt, n=2, best_of=5, logprobs=1, **params)
        assert [a.token_ids for a in best] == [pool[i].token_ids for i in order]
        assert [a.text for a in best] == [pool[i].text for i in order]
        assert [a.last.score for a in best] == pytest.approx([means[i] for i in order])
        assert [a.last.finish_reason for a in best] == [pool[i].last.finish_reason for i in order]
        assert [a.last.logprobs for a in best] == [
            tuple(entry for o in pool[i].outputs for entry in o.logprobs or ()) for i in order
        ]
        assert all(len(a.outputs) == 1 for a in best)
    assert found, "no case tells the mean from the sum"


HELD_BACK: list[dict[str, Any]] = [
    {"n": 3},
    {"n": 2, "best_of": 4},
    {"n": 2, "best_of": 3, "use_beam_search": True},
]


@pytest.mark.parametrize("steps", [0, 1, 3, 9])
@pytest.mark.parametrize("kind", HELD_BACK)
def test_abort_ends_every_choice_once(kind: dict[str, Any], steps: int) -> None:
    harness = Harness(128, 4, max_num_batched_tokens=16)
    harness.add("a", prompt_of(30), **kind, **SEEDED)
    for _ in range(steps):
        harness.step()
    assert harness.abort("a") == kind["n"]
    harness.run()
    reasons = [a.last.finish_reason for a in harness.choices["a"]]
    assert reasons == ["abort"] * kind["n"]
    assert harness.engine.finished == {"abort": 1}


@pytest.mark.parametrize("kind", HELD_BACK)
def test_failed_step_ends_every_choice_and_the_engine_goes_on(kind: dict[str, Any]) -> None:
    harness = Harness(128, 4, max_num_batched_tokens=64)
    harness.runner.fail_at = 4
    harness.add("a", prompt_of(30), **kind, **SEEDED)
    harness.run()
    assert [a.last.finish_reason for a in harness.choices["a"]] == ["error"] * kind["n"]
    wanted = [a.token_ids for a in cold_all(prompt_of(30), **kind, **SEEDED)]
    assert [a.token_ids for a in harness.ask_all(prompt_of(30), **kind, **SEEDED)] == wanted


class Failing(CharTokenizer):
    """Fails at the ids of one branch."""

    def __init__(self, start: list[int]) -> None:
        self.start = start

    def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str:
        if list(ids)[-1:] == self.start:
            raise RuntimeError("injected")
        return super().decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("kind", [*HELD_BACK, {"n": 1}])
def test_error_in_one_branch_ends_its_request_alone(kind: dict[str, Any]) -> None:
    answers = [a.token_ids for a in cold_all(prompt_of(9), **kind, **SEEDED)]
    harness = Harness(128, 4)
    harness.engine.tokenizer = Failing(answers[-1][5:6])
    harness.add("a", prompt_of(9), **kind, **SEEDED)
    harness.engine.tokenizer = CharTokenizer()
    harness.add("b", prompt_of(9), **kind, **SEEDED)
    harness.run()
    assert [a.last.finish_reason for a in harness.choices["a"]] == ["error"] * kind["n"]
    assert tokens(harness, "b") == answers


def test_branches_count_as_sequences() -> None:
    harness = Harness(200, 4, max_num_batched_tokens=12, max_num_seqs=6)
    for i in range(8):
        harness.add(str(i), prompt_of(9, seed=i), n=1 + i % 4, **SEEDED)
    while harness.engine.has_work:
        harness.step()
        meta = harness.runner.steps[-1].attention
        assert meta.num_tokens <= 12
        assert len(harness.cache.sequences) <= 6
    assert max(len(s.logits_rows) for s in harness.runner.steps) > 4


@pytest.mark.parametrize("kind", HELD_BACK)
def test_preempted_branches_recompute_what_they_share_once(kind: dict[str, Any]) -> None:
    harness = Harness(128, 4, max_num_batched_tokens=16)
    prompt = prompt_of(40)
    request = harness.add("a", prompt, **kind, **SEEDED)
    while request.timings.first_token is None or request.live[0].num_output_tokens < 6:
        harness.step()
    lengths = [b.sequence.num_computed for b in request.live]
    harness.scheduler.preempt(request)
    assert not harness.cache.sequences
    harness.cache.reset()
    before = sum(len(s.token_ids) for s in harness.runner.steps)
    while any(not b.is_ready for b in request.live):
        harness.step()
    computed = sum(len(s.token_ids) for s in harness.runner.steps) - before
    assert computed <= 40 + sum(n - 40 for n in lengths)
    harness.run()
    assert tokens(harness, "a") == [a.token_ids for a in cold_all(prompt, **kind, **SEEDED)]
    assert harness.answers["a"].last.num_cached_tokens == 0
    assert harness.engine.tokens_computed == 40


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("kind", HELD_BACK)
@pytest.mark.parametrize("length", [5, 8, 11])
def test_request_alone_in_the_pool_grows_to_its_bound_without_preemption(
    length: int, kind: dict[str, Any], enabled: bool
) -> None:
    """A bound that forgets a copy or a shared block makes such a request preempt itself."""
    harness = Harness(17, 4, enabled=enabled, max_num_batched_tokens=16)
    answers = harness.ask_all(prompt_of(length), temperature=0.9, seed=1, **kind)
    width = kind.get("best_of", kind["n"])
    bound = harness.engine.capacity.max_total_tokens(length, width)
    assert [len(a.token_ids) for a in answers] == [bound - length] * kind["n"]
    assert harness.scheduler.num_preemptions == 0


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("kind", HELD_BACK)
def test_request_alone_can_be_resumed_near_its_bound(kind: dict[str, Any], enabled: bool) -> None:
    """Without a cache, resumed branches share nothing; a bound that says so keeps them finite."""
    harness = Harness(20, 4, enabled=enabled, max_num_batched_tokens=16)
    request = harness.add("a", prompt_of(13), temperature=0.9, seed=1, **kind)
    bound = harness.engine.capacity.max_total_tokens(13, request.width)
    while request.timings.first_token is None or len(request.live[0].sequence) < bound - 2:
        harness.step()
    harness.scheduler.preempt(request)
    harness.run(max_steps=60)
    assert [len(a.token_ids) for a in harness.choices["a"]] == [bound - 13] * kind["n"]


def test_more_answers_than_fit_are_refused() -> None:
    harness = Harness(12, 4, max_num_seqs=6)
    for params, param in (
        ({"n": 7}, "n"),
        ({"n": 2, "best_of": 7}, "best_of"),
        ({"n": 5}, "n"),
    ):
        with pytest.raises(RequestRejectedError) as caught:
            harness.engine.validate(prompt_of(31), SamplingParams(**params))
        assert caught.value.param == param
    assert harness.engine.validate(prompt_of(31), SamplingParams(n=2)) is not None


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 17}, "best_of"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": 10.5}, "length_penalty"),
        ({"early_stopping": "always"}, "early_stopping"),
    ],
)
def test_params_out_of_range_are_refused(params: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRejectedError) as caught:
        SamplingParams(**params)
    assert caught.value.param == param
