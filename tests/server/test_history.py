from __future__ import annotations

from typing import Any

import pytest
from server_fakes import PAIR, START, STOP, FakeEngine, FakeTokenizer, hermes

from radixkv.server.generation import Answer
from radixkv.server.history import AnswerHistory, ChatPrompt, encode_chat
from radixkv.server.prompts import PromptBuilder
from radixkv.server.state import STATE

A = {"97": 100}
URL = "/v1/chat/completions"
BREAKS = list(b"a\n\nb\n\n")  # two tokens where the tokenizer has one for the pair


async def ask(client: Any, messages: list[Any], **fields: Any) -> Any:
    response = await client.post(URL, json={"messages": messages, "max_tokens": 9, **fields})
    assert response.status == 200, await response.text()
    return await response.json()


async def converse(client: Any, turns: int, **fields: Any) -> list[tuple[int, int]]:
    """Return (cached tokens, what the turn before computed) of each turn but the first."""
    messages: list[Any] = []
    seen, computed = [], 0
    for turn in range(turns):
        messages.append({"role": "user", "content": f"question {turn}"})
        answer = await ask(client, messages, **fields)
        messages.append(answer["choices"][0]["message"])
        usage = answer["usage"]
        if turn:
            seen.append((usage["prompt_tokens_details"]["cached_tokens"], computed))
        computed = usage["prompt_tokens"] + usage["completion_tokens"] - 1
    return seen


@pytest.mark.parametrize(
    ("script", "fields"),
    [
        ([*BREAKS, STOP], {}),
        ([*BREAKS, STOP], {"stream": False, "n": 2}),
        (BREAKS * 3, {}),  # cut by max_tokens
        ([*BREAKS, 0xC3], {"max_tokens": 7}),  # in the middle of a character
    ],
)
async def test_each_turn_hits_all_that_the_last_one_computed(
    client: Any, engine: FakeEngine, script: list[int], fields: Any
) -> None:
    engine.script = script
    if fields.pop("n", 1) == 2:  # the fake engine gives one answer; the same body twice is the same
        await converse(client, 1)
    seen = await converse(client, 5, **fields)
    assert [cached for cached, _ in seen] == [computed for _, computed in seen]
    assert PAIR not in engine.submitted[-1].prompt


async def test_call_that_is_text_for_the_template_is_kept_as_it_was_written(
    client: Any, engine: FakeEngine
) -> None:
    engine.script = [*b'Well.\n{"name":"f","arguments":{ } }', STOP]
    fields = {"tools": [{"type": "function", "function": {"name": "f"}}], "max_tokens": 99}
    seen = await converse(client, 3, **fields)
    assert [cached for cached, _ in seen] == [computed for _, computed in seen]


async def test_answer_ended_by_a_stop_string_is_kept_up_to_it(
    client: Any, engine: FakeEngine
) -> None:
    engine.script = [*BREAKS, *b"END"]
    seen = await converse(client, 3, stop=["END"])
    # The stop string's tokens were computed too, but are no part of the history.
    assert [computed - cached for cached, computed in seen] == [2, 2]
    assert PAIR not in engine.submitted[-1].prompt


async def test_edited_answer_is_encoded_as_it_is(client: Any, engine: FakeEngine) -> None:
    engine.script = [*BREAKS, STOP]
    question = {"role": "user", "content": "q"}
    text = (await ask(client, [question]))["choices"][0]["message"]["content"]
    for edited in (f"{text}more", text[:-1], f" {text}"):
        await ask(client, [question, {"role": "assistant", "content": edited}, question])
        sent = engine.submitted[-1].prompt
        shown = engine.tokenizer.decode(sent, skip_special_tokens=False)
        assert sent == engine.tokenizer.encode(shown)
        assert f"assistant\n{edited}<|im_end|>" in shown


async def test_answers_of_another_namespace_are_not_used(client: Any, engine: FakeEngine) -> None:
    engine.script = [*BREAKS, STOP]
    question = {"role": "user", "content": "q"}
    answer = (await ask(client, [question], cache_salt="a"))["choices"][0]["message"]
    await ask(client, [question, answer, question], cache_salt="b")
    assert PAIR in engine.submitted[-1].prompt
    await ask(client, [question, answer, question], cache_salt="a")
    assert PAIR not in engine.submitted[-1].prompt


async def test_other_question_before_the_same_answer_is_another_conversation(
    client: Any, engine: FakeEngine
) -> None:
    engine.script = [*BREAKS, STOP]
    answer = (await ask(client, [{"role": "user", "content": "q"}]))["choices"][0]["message"]
    other = {"role": "user", "content": "r"}
    await ask(client, [other, answer, other])
    assert PAIR in engine.submitted[-1].prompt


async def test_template_that_rewrites_an_answer_is_reported(make_client: Any) -> None:
    engine = FakeEngine(FakeTokenizer(hermes, supports_tools=True))
    client = await make_client(engine)
    engine.script = [*b"<think>x</think>hi", STOP]
    messages: list[Any] = [{"role": "user", "content": "q"}]
    answer = await ask(client, messages, max_tokens=30)
    messages += [answer["choices"][0]["message"], {"role": "user", "content": "r"}]
    assert answer["choices"][0]["message"]["content"] == "<think>x</think>hi"
    await ask(client, messages, max_tokens=1)
    prompt = engine.submitted[-1].prompt
    shown = engine.tokenizer.decode(prompt, skip_special_tokens=False)
    assert "think" not in shown
    assert prompt == engine.tokenizer.encode(shown)
    report = next(iter(client.app[STATE].history._reports.values()))
    assert (report.exact, report.rewritten) == (0, (1,))


async def test_explain_tells_what_became_of_answers(serve: Any) -> None:
    client, _ = await serve()
    question = {"role": "user", "content": "q"}
    first = await ask(client, [question], logit_bias=A)
    assert "history" not in await explain(client, first["id"])
    # A template may show anything it likes; this one begins to shout.
    second = await ask(client, [question, first["choices"][0]["message"], question])
    assert (await explain(client, second["id"]))["history"] == {
        "exact_answers": 1,
        "rewritten_messages": [],
    }
    tokenizer = client.app[STATE].engine.tokenizer
    quiet = tokenizer.template
    tokenizer.template = lambda *given: quiet(*given).upper()
    third = await ask(client, [question, first["choices"][0]["message"], question])
    history = (await explain(client, third["id"]))["history"]
    assert history["rewritten_messages"] == [1]
    assert "messages[1]" in history["message"]
    misses = (await (await client.get("/admin/cache/misses")).json())["data"]
    assert misses[0]["history"] == history


async def explain(client: Any, name: str) -> Any:
    return await (await client.get(f"/admin/cache/explain/{name}")).json()


async def test_explain_of_messages_means_the_ids_a_chat_would_have(serve: Any) -> None:
    client, _ = await serve()
    question = {"role": "user", "content": "q"}
    answer = await ask(client, [question], logit_bias=A)
    messages = [question, answer["choices"][0]["message"], question]
    would = await (await client.post("/admin/cache/explain", json={"messages": messages})).json()
    computed = answer["usage"]["total_tokens"] - 1
    assert would["hit"]["tokens"] == computed
    tokens = await (await client.post("/tokenize", json={"messages": messages})).json()
    assert tokens["count"] == would["prompt_tokens"]


class Prefixing(FakeTokenizer):
    """Writes a space before every text it encodes, as sentencepiece does."""

    def encode(self, text: str, **options: Any) -> list[int]:
        return super().encode(f" {text}", **options)

    def decode(self, ids: Any, **options: Any) -> str:
        return super().decode(ids, **options).removeprefix(" ")


async def test_tokenizer_that_can_not_encode_pieces_gets_the_whole(make_client: Any) -> None:
    engine = FakeEngine(Prefixing())
    client = await make_client(engine)
    engine.script = [*b"hi", STOP]
    question = {"role": "user", "content": "q"}
    answer = (await ask(client, [question]))["choices"][0]["message"]
    await ask(client, [question, answer, question])
    shown = engine.tokenizer.decode(engine.submitted[-1].prompt, skip_special_tokens=False)
    assert "assistant\nhi<|im_end|>\n<|im_start|>user" in shown


async def test_answer_with_hidden_tokens_is_not_remembered(client: Any, engine: FakeEngine) -> None:
    engine.script = [*b"a", START, *b"b", STOP]
    question = {"role": "user", "content": "q"}
    answer = (await ask(client, [question]))["choices"][0]["message"]
    assert answer["content"] == "ab"
    assert len(client.app[STATE].history) == 0
    await ask(client, [question, answer, question])
    shown = engine.tokenizer.decode(engine.submitted[-1].prompt, skip_special_tokens=False)
    assert "assistant\nab<|im_end|>" in shown


async def remembered(history: AnswerHistory, engine: FakeEngine, question: str) -> ChatPrompt:
    prompts = PromptBuilder(engine)  # type: ignore[arg-type]
    messages: list[Any] = [{"role": "user", "content": question}]
    prompt = await encode_chat(prompts, history, (), messages, None)
    answer = Answer(text=["ab"], token_ids=[97, 98, STOP], finish_reason="stop")
    message: Any = {"role": "assistant", "content": "ab"}
    history.remember(engine, prompts, prompt, message, answer, skip_special_tokens=True)  # type: ignore[arg-type]
    return await encode_chat(prompts, history, (), [*messages, message], None)


async def test_history_is_bounded_and_drops_what_was_used_longest_ago() -> None:
    engine, history = FakeEngine(), AnswerHistory(max_tokens=4)
    assert (await remembered(history, engine, "1")).report.exact == 1
    assert (await remembered(history, engine, "2")).report.exact == 1
    prompts = PromptBuilder(engine)  # type: ignore[arg-type]

    async def exact(question: str) -> int:
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "ab"},
        ]
        return (await encode_chat(prompts, history, (), messages, None)).report.exact

    assert await exact("1") == 1
    await remembered(history, engine, "3")
    assert (len(history), history.num_tokens) == (2, 4)
    assert [await exact(question) for question in "123"] == [1, 0, 1]
