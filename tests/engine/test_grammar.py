"""Answers that must follow a grammar: each token is drawn among those that the grammar allows."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from fakes import VOCAB, CharTokenizer, Harness, prompt_of

from radixkv.engine import grammar as grammar_module
from radixkv.engine.grammar import MAX_RULES, GrammarState
from radixkv.engine.grammar_compiler import GrammarCompiler, MaskWorker
from radixkv.engine.grammar_vocabulary import build_vocabulary
from radixkv.engine.scheduler import SchedulingOptions
from radixkv.errors import RequestRejectedError
from radixkv.request import MAX_GRAMMAR_BYTES, GrammarSpec

ENDS = (400, 401)
CHOICES = ["yes", "yesterday", "no", 'a "b"\n', "été"]
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["ok", "späť"]},
        "count": {"type": "integer", "minimum": -20, "maximum": 300},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["kind", "count"],
    "additionalProperties": False,
}
# The library goes beyond one of its limits once the first token is written.
WIDE = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                f"k{i}": {"type": "string", "pattern": f"[a-z]{{1,{n}}}"} for i in range(5)
            },
        }
        for n in range(1, 101)
    ]
}


class Characters(CharTokenizer):
    """Has what grammars ask of a tokenizer; ids of `vocab_size` and above stand for nothing."""

    special_token_ids = frozenset(ENDS)

    def __init__(self, vocab_size: int = VOCAB) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        skipped = ENDS if skip_special_tokens else ()
        return "".join(chr(i) for i in ids if i not in skipped)

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()


def compiler(tokenizer: Any = None, **options: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer or Characters(), VOCAB, ENDS, **options)


@pytest.fixture(scope="module")
def grammars() -> Iterator[GrammarCompiler]:
    made = compiler()
    yield made
    made.close()


@pytest.fixture
def harness(grammars: GrammarCompiler) -> Harness:
    return constrained(Harness(256, 4, eos_token_ids=ENDS), grammars)


def constrained(harness: Harness, grammars: GrammarCompiler) -> Harness:
    harness.engine.tokenizer = Characters()
    harness.engine.grammars = grammars
    return harness


def spec(kind: Any, content: Any) -> GrammarSpec:
    return GrammarSpec(kind, content if isinstance(content, str) else json.dumps(content), "field")


def start(grammars: GrammarCompiler, kind: str, content: Any, **options: Any) -> GrammarState:
    return grammars.compile(spec(kind, content)).start(**options)


def write(state: GrammarState, text: str) -> GrammarState:
    for char in text:
        assert state.compute_mask()[ord(char)], char
        state.accept(ord(char))
    return state


def letters(mask: Any) -> str:
    return "".join(chr(i) for i in mask.nonzero()[0] if i not in ENDS)


def test_mask_is_what_continues_a_choice_and_ends_where_one_is_complete(
    grammars: GrammarCompiler,
) -> None:
    for choice in CHOICES:
        for length in range(len(choice)):
            head = choice[:length]
            mask = write(start(grammars, "choice", CHOICES), head).compute_mask()
            wanted = {c[length] for c in CHOICES if c.startswith(head) and len(c) > length}
            assert set(letters(mask)) == wanted
            assert mask[list(ENDS)].tolist() == [head in CHOICES] * 2


def is_valid_object(text: str) -> bool:
    value = json.loads(text)
    return value["kind"] in ("ok", "späť") and -20 <= value["count"] <= 300


LARK = 'start: "<" word ("," word)* ">"\nword: /[a-c]{1,3}/\n'
GBNF = 'root ::= "<" word ("," word)* ">"\nword ::= [a-c] [a-c]? [a-c]?\n'
WORDS = r"<[a-c]{1,3}(,[a-c]{1,3})*>"
KINDS: list[tuple[str, Any, Any]] = [
    ("json_schema", SCHEMA, is_valid_object),
    ("regex", r"[A-F0-9]{2}(-\d{1,4}){2,5}", r"[A-F0-9]{2}(-\d{1,4}){2,5}"),
    ("choice", CHOICES, lambda text: text in CHOICES),
    ("grammar", LARK, WORDS),
    ("grammar", GBNF, WORDS),
]


@pytest.mark.parametrize(("kind", "content", "check"), KINDS)
@pytest.mark.parametrize(
    "how",
    [{"temperature": 0.0}, {"n": 4, "top_k": 40}, {"best_of": 4, "n": 2}, {"top_p": 0.5}],
    ids=str,
)
def test_answers_satisfy_the_grammar(
    harness: Harness, kind: str, content: Any, check: Any, how: dict[str, Any]
) -> None:
    params = {"seed": 5, "max_tokens": 400, "grammar": spec(kind, content), **how}
    for prompt in (prompt_of(11), prompt_of(16, 1)):
        for answer in harness.ask_all(prompt, **params):
            if answer.last.finish_reason == "length":
                continue  # noise may go on with a list for ever
            assert answer.last.finish_reason == "stop"
            matches = check if callable(check) else re.compile(check).fullmatch
            assert matches(answer.text), answer.text


def test_beams_satisfy_the_grammar_and_are_the_best_of_all_its_answers(harness: Harness) -> None:
    """Four beams cover five choices, so the best is known from scoring them one by one."""
    prompt = prompt_of(9)
    beams = harness.ask_all(
        prompt, grammar=spec("choice", CHOICES), n=2, best_of=4, use_beam_search=True
    )
    assert len({a.text for a in beams}) == 2
    scores = []
    for choice in CHOICES:
        alone = harness.ask_all(
            prompt, grammar=spec("choice", [choice]), best_of=2, use_beam_search=True
        )
        assert alone[0].text == choice
        scores.append((alone[0].last.score, choice))
    assert beams[0].text in [choice for _, choice in sorted(scores)[-2:]]


def test_beams_repeat_answers_where_the_grammar_has_too_few(harness: Harness) -> None:
    answers = harness.ask_all(
        prompt_of(9), grammar=spec("choice", ["no"]), n=3, use_beam_search=True
    )
    assert [a.text for a in answers] == ["no"] * 3


def test_answer_is_the_same_whatever_runs_beside_it(
    harness: Harness, grammars: GrammarCompiler
) -> None:
    """Unconstrained neighbours too, and those that are preempted for it."""
    free = {"temperature": 0.8, "seed": 3, "max_tokens": 30}
    kinds = [spec(kind, content) for kind, content, _ in KINDS]
    wanted = [harness.ask(prompt_of(12, i), grammar=g, **free) for i, g in enumerate(kinds)]
    tight = constrained(Harness(40, 4, eos_token_ids=ENDS), grammars)
    for i, g in enumerate(kinds):
        tight.add(f"bound-{i}", prompt_of(12, i), grammar=g, **free)
        tight.add(f"free-{i}", prompt_of(12, 20 + i), **free)
    tight.run()
    assert tight.scheduler.num_preemptions > 0
    for i, answer in enumerate(wanted):
        assert tight.answers[f"bound-{i}"].token_ids == answer.token_ids
        alone = harness.ask(prompt_of(12, 20 + i), **free)
        assert tight.answers[f"free-{i}"].token_ids == alone.token_ids


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.9, "n": 3}], ids=str)
@pytest.mark.parametrize("pattern", ["(xyz){1,9}", "(xy[az]){12}"])
def test_drafts_change_no_constrained_answer(
    grammars: GrammarCompiler, pattern: str, params: dict[str, Any]
) -> None:
    """Each drafted token is drawn under the mask that the tokens before it lead to."""
    prompt = [ord(char) for char in "xyzxyaxyz" * 3]
    found = []
    for num_tokens in (0, 6):
        scheduling = SchedulingOptions(speculative_tokens=num_tokens)
        harness = constrained(Harness(256, 4, eos_token_ids=ENDS, scheduling=scheduling), grammars)
        speculator = harness.scheduler.speculator
        if speculator is not None:
            # The clock of a test says nothing of what pays.
            speculator.record_step = lambda *args: None  # type: ignore[method-assign]
            speculator._least_chances = lambda bs: [0.05] * len(bs)  # type: ignore[method-assign]
        answers = harness.ask_all(prompt, seed=5, grammar=spec("regex", pattern), **params)
        found.append([(a.token_ids, a.last.finish_reason) for a in answers])
        assert all(re.fullmatch(pattern, a.text) for a in answers)
    assert speculator is not None
    assert speculator.num_accepted > 0
    assert found[0] == found[1]


def test_cut_off_answer_is_the_beginning_of_one(harness: Harness) -> None:
    params = {"temperature": 1.0, "seed": 8, "grammar": spec("regex", "(ab|cd){40}")}
    whole = harness.ask(prompt_of(7), max_tokens=200, **params)
    cut = harness.ask(prompt_of(7), max_tokens=33, **params)
    assert whole.last.finish_reason == "stop"
    assert len(whole.text) == 80
    assert cut.last.finish_reason == "length"
    assert cut.text == whole.text[:33]


def test_answer_ends_with_its_last_token_where_nothing_can_follow(harness: Harness) -> None:
    answer = harness.ask(prompt_of(7), grammar=spec("choice", ["no"]), logprobs=1, stop=["zz"])
    assert answer.token_ids == [ord("n"), ord("o")]
    assert answer.text == "no"
    assert answer.last.finish_reason == "stop"
    assert answer.last.stop_reason is None


@pytest.mark.parametrize("options", [{"min_tokens": 6}, {"ignore_eos": True}])
def test_end_is_withheld_only_while_the_grammar_has_something_else(
    grammars: GrammarCompiler, options: dict[str, Any]
) -> None:
    state = write(start(grammars, "regex", "a{2,4}", **options), "aa")
    assert not state.allowed(2)[list(ENDS)].any()
    assert letters(state.allowed(2)) == "a"
    write(state, "aa")
    assert state.is_complete


def test_min_tokens_and_ignore_eos_end_with_the_grammar(harness: Harness) -> None:
    for extra in ({"min_tokens": 30}, {"ignore_eos": True}):
        answer = harness.ask(
            prompt_of(5), grammar=spec("regex", "[ab]{1,12}"), max_tokens=50, **extra
        )
        assert len(answer.text) == 12
        assert answer.last.finish_reason == "stop"


def test_min_tokens_that_the_grammar_allows_are_reached(harness: Harness) -> None:
    grammar = spec("regex", "[ab]*")
    bias = tuple((end, 90.0) for end in ENDS)
    answer = harness.ask(
        prompt_of(5), grammar=grammar, min_tokens=9, max_tokens=50, logit_bias=bias
    )
    assert len(answer.text) == 9
    assert answer.last.finish_reason == "stop"


def test_stop_token_ends_only_where_the_grammar_does(grammars: GrammarCompiler) -> None:
    stop = ord("Z")
    state = start(grammars, "regex", "ab?", stop_token_ids=(stop,))
    assert not state.allowed(0)[stop]
    write(state, "a")
    assert state.allowed(1)[stop]
    state.accept(stop)
    assert not state.is_complete


def test_stop_token_that_the_grammar_demands_is_text_before_min_tokens(harness: Harness) -> None:
    answer = harness.ask(
        prompt_of(5), grammar=spec("choice", ["abc"]), min_tokens=9, stop_token_ids=(ord("b"),)
    )
    assert answer.text == "abc"
    assert answer.last.finish_reason == "stop"
    assert answer.last.stop_reason is None


def test_stop_string_cuts_a_constrained_answer(harness: Harness) -> None:
    answer = harness.ask(prompt_of(5), grammar=spec("choice", ["abcdef"]), stop=("de",))
    assert answer.text == "abc"
    assert answer.last.stop_reason == "de"


def test_logprobs_are_those_of_the_model_without_the_grammar(harness: Harness) -> None:
    free = harness.ask(prompt_of(6), max_tokens=1, temperature=0.0, logprobs=3)
    bound = harness.ask(
        prompt_of(6), max_tokens=1, temperature=0.0, logprobs=3, grammar=spec("choice", ["no"])
    )
    assert free.outputs[0].logprobs is not None
    assert bound.outputs[0].logprobs is not None
    assert bound.outputs[0].logprobs[0].top == free.outputs[0].logprobs[0].top
    assert bound.outputs[0].logprobs[0].logprob < -1.0


def test_columns_without_a_token_are_masked() -> None:
    few = compiler(Characters(vocab_size=300))
    mask = start(few, "regex", r"[^x]+").compute_mask()
    few.close()
    assert mask.shape == (VOCAB,)
    assert mask[33:120].all()
    assert not mask[300:].any()


def test_fork_goes_its_own_way(grammars: GrammarCompiler) -> None:
    parent = write(start(grammars, "choice", ["abc", "axy"]), "a")
    child, other = parent.fork(), parent.fork()
    write(child, "b")
    assert letters(parent.compute_mask()) == "bx"
    write(parent, "xy")
    assert letters(child.compute_mask()) == "c"
    assert letters(other.compute_mask()) == "bx"
    assert parent.is_complete
    assert not child.is_complete
    assert letters(start(grammars, "choice", ["abc", "axy"]).compute_mask()) == "a"


def test_masks_are_computed_beside_the_model(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    compute = grammar_module._compute_mask

    def spy(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return compute(*args)

    grammar = spec("regex", "[a-z]{9,20}")
    harness.engine.grammar_compiler().compile(grammar)
    monkeypatch.setattr(grammar_module, "_compute_mask", spy)
    answers = harness.ask_all(prompt_of(5), n=3, seed=1, grammar=grammar)
    assert all(re.fullmatch("[a-z]{9,20}", a.text) for a in answers)
    assert threads
    assert {name[: len("radixkv-masks")] for name in threads} == {"radixkv-masks"}


def test_step_that_fails_waits_for_the_masks(grammars: GrammarCompiler) -> None:
    state = write(start(grammars, "regex", "ab+"), "a")
    worker = MaskWorker()

    def fail() -> None:
        with worker.computing([state]):
            raise RuntimeError("injected")

    with pytest.raises(RuntimeError, match="injected"):
        fail()
    assert state.has_mask
    worker.close()


@pytest.mark.parametrize("how", [{}, {"n": 3}, {"n": 2, "use_beam_search": True}])
def test_answer_that_grows_too_complex_fails_alone(harness: Harness, how: dict[str, Any]) -> None:
    """The library gives up in the middle; the harness sees to it that no block is left behind."""
    harness.add("bad", prompt_of(6), grammar=spec("json_schema", WIDE), max_tokens=40, **how)
    harness.add("good", prompt_of(6, 1), grammar=spec("choice", CHOICES), max_tokens=40)
    harness.run()
    for answer in harness.choices["bad"]:
        assert answer.last.finish_reason == "error"
        assert answer.last.error is not None
        assert "grammar" in answer.last.error
    assert harness.answers["good"].text in CHOICES


REFUSED: list[tuple[str, Any]] = [
    ("json_schema", "[1]"),
    ("json_schema", '{"type": '),
    ("json_schema", {"type": "nonsense"}),
    ("json_schema", {"not": {"type": "object"}}),
    ("json_schema", {"$ref": "http://localhost/x"}),
    ("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    ("json_schema", '{"items":' * 2000 + "true" + "}" * 2000),
    ("json_schema", {"enum": ["\ud800"]}),
    ("regex", "(a"),
    ("regex", r"(a)\1"),
    ("regex", "(?=a)b"),
    ("regex", r"a[^\s\S]"),
    ("regex", "(" * 30000 + "a" + ")" * 30000),
    ("grammar", "start: ("),
    ("grammar", "start: start"),
    ("grammar", 'rule: "a"'),
    ("grammar", "start: " + "(" * 30000 + '"a"' + ")" * 30000),
    ("grammar", "root ::= nothing"),
    ("grammar", "root ::= " + "(" * 30000 + '"a"' + ")" * 30000),
]


@pytest.mark.parametrize(("kind", "content"), REFUSED, ids=lambda value: repr(value)[:30])
def test_bad_grammar_is_refused(grammars: GrammarCompiler, kind: str, content: Any) -> None:
    before = grammars.num_cached
    with pytest.raises(RequestRejectedError) as refusal:
        grammars.compile(spec(kind, content))
    assert refusal.value.param == "field"
    assert len(str(refusal.value)) < 400
    assert grammars.num_cached == before


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", ""),
        ("regex", "a" * (MAX_GRAMMAR_BYTES + 1)),
        ("regex", "\ud800"),
        ("choice", "[]"),
        ("choice", '["a", ""]'),
        ("choice", '["a", 1]'),
        ("choice", '{"a": 1}'),
        ("choice", "no JSON"),
    ],
)
def test_spec_out_of_bounds_is_refused(kind: str, text: str) -> None:
    with pytest.raises(RequestRejectedError) as refusal:
        spec(kind, text)
    assert refusal.value.param == "field"


def test_deep_references_do_not_overflow_the_stack(grammars: GrammarCompiler) -> None:
    """The library recurses at each level: with a usual stack this ends the process."""
    depth, count = 55, 90
    levels = (
        f'"a{i}":' + '{"anyOf":[' * depth + f'{{"$ref":"#/$defs/a{i + 1}"}}' + "]}" * depth
        for i in range(count)
    )
    schema = f'{{"$ref":"#/$defs/a0","$defs":{{{",".join(levels)},"a{count}":{{"const":5}}}}}}'
    assert write(start(grammars, "json_schema", schema), "5").is_complete


def test_grammar_of_too_many_rules_is_refused(grammars: GrammarCompiler) -> None:
    def chain(count: int) -> str:
        return "start: a1\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(1, count - 1))

    assert write(start(grammars, "grammar", chain(MAX_RULES) + f'a{MAX_RULES - 1}: "x"'), "x")
    with pytest.raises(RequestRejectedError, match="at most"):
        grammars.compile(spec("grammar", chain(MAX_RULES + 1) + f'a{MAX_RULES}: "x"'))


def test_grammar_that_takes_too_long_is_refused() -> None:
    hasty = compiler(max_compile_s=0.0)
    with pytest.raises(RequestRejectedError, match="to compile"):
        hasty.compile(spec("regex", "a+"))
    hasty.close()


async def test_latest_grammars_are_kept_and_shared() -> None:
    some = compiler(max_cached=2)
    first, again = await asyncio.gather(
        some.prepare(GrammarSpec("regex", "a+", "one")), some.prepare(GrammarSpec("regex", "a+"))
    )
    assert first is again
    await some.prepare(spec("regex", "b+"))
    assert await some.prepare(spec("regex", "a+")) is first
    await some.prepare(spec("regex", "c+"))
    assert some.num_cached == 2
    assert await some.prepare(spec("regex", "a+")) is first
    some.close()


async def test_waiting_for_a_grammar_can_be_given_up(grammars: GrammarCompiler) -> None:
    """Others that wait for the same one get it all the same."""
    one = asyncio.ensure_future(grammars.prepare(spec("regex", "given-up")))
    other = asyncio.ensure_future(grammars.prepare(spec("regex", "given-up")))
    await asyncio.sleep(0)
    one.cancel()
    assert (await other).start_mask.any()
    assert one.cancelled()


def test_engine_without_grammars_refuses_them() -> None:
    with pytest.raises(RequestRejectedError, match="not supported"):
        Harness(16, 4).ask(prompt_of(5), grammar=spec("regex", "a"))


class WordMarks:
    """Puts a space before every text that it encodes, as sentencepiece does; works backwards."""

    special_token_ids = frozenset({0})
    pieces = ("<end>", " ", "a", "b", "ab", " ab", "\x02", " \x02", *"<end>x", "bb", "xb")
    vocab_size = len(pieces)

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id].encode()

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        ids, text = [], " " + text
        while text:
            piece = max((p for p in self.pieces if text.endswith(p)), key=len)
            ids.append(self.pieces.index(piece))
            text = text[: -len(piece)]
        return ids[::-1]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("ab", [4]),
        ("abb", [2, 14]),
        ("abxbb", [4, 13, 14]),
        (" ab", [5]),
        ("<end>", [8, 9, 10, 11, 12]),
        ("", []),
    ],
)
def test_prescribed_text_is_spelled_as_the_model_would(text: str, ids: list[int]) -> None:
    """Without the word mark of a beginning, and never with a special token."""
    table = build_vocabulary(WordMarks(), WordMarks.vocab_size, frozenset({0}))
    assert table.tokenize_str(text) == ids


def test_prescribed_text_is_one_mask_per_token() -> None:
    marks = GrammarCompiler(WordMarks(), WordMarks.vocab_size, {0})
    state = start(marks, "choice", ["ababx"])
    for token_id in (4, 4, 13):
        assert state.compute_mask().nonzero()[0].tolist() == [token_id]
        state.accept(token_id)
    assert state.is_complete
    marks.close()
