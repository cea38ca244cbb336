"""Several answers to one prompt over HTTP: `n`, `best_of` and beam search, with the real engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from server_fakes import read_events, until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
IDS = [5 + i % 200 for i in range(33)]
SAMPLED = {"temperature": 0.9, "seed": 7, "max_tokens": 6, "ignore_eos": True}
BEAMS = {"use_beam_search": True, "best_of": 3, "n": 2, "max_tokens": 6, "ignore_eos": True}


def body_of(url: str, **fields: Any) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt": IDS}
    if url == CHAT:
        prompt = {"messages": [{"role": "user", "content": "x" * 40}]}
    return {**prompt, **fields}


async def whole(client: Any, url: str, **fields: Any) -> Any:
    response = await client.post(url, json=body_of(url, **fields))
    assert response.status == 200, await response.text()
    return await response.json()


async def stream(client: Any, url: str, **fields: Any) -> list[Any]:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = await read_events(await client.post(url, json=body_of(url, **fields, **options)))
    assert events[-1] == "[DONE]"
    return events[:-1]


def text_of(choice: dict[str, Any]) -> str:
    part = choice.get("message") or choice.get("delta") or choice
    text = part.get("text", part.get("content", ""))
    assert isinstance(text, str)
    return text


def texts(answer: Any) -> list[str]:
    assert [c["index"] for c in answer["choices"]] == list(range(len(answer["choices"])))
    return [text_of(choice) for choice in answer["choices"]]


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
async def test_n_answers_count_the_prompt_once(serve: Any, url: str) -> None:
    client, served = await serve()
    alone = await whole(client, url, **SAMPLED)
    await served.flush_cache()
    answer = await whole(client, url, n=3, **SAMPLED)
    assert len(set(texts(answer))) == 3
    assert texts(answer)[0] == texts(alone)[0]
    assert [c["finish_reason"] for c in answer["choices"]] == ["length"] * 3
    assert answer["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 18
    again = await whole(client, url, n=3, **SAMPLED)
    assert texts(again) == texts(answer)
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == alone["usage"]["prompt_tokens"] - 1


@pytest.mark.parametrize("fields", [{"n": 3, **SAMPLED}, BEAMS])
@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
async def test_streamed_choices_join_to_the_whole_ones(
    serve: Any, url: str, fields: dict[str, Any]
) -> None:
    client, _ = await serve()
    answer = await whole(client, url, **fields)
    events = await stream(client, url, **fields)
    *chunks, usage = events
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
    assert usage["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert all(chunk["usage"] is None for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    for index, text in enumerate(texts(answer)):
        mine = [c for c in choices if c["index"] == index]
        assert "".join(text_of(c) for c in mine) == text
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["length"]


async def test_streamed_choices_come_side_by_side(serve: Any) -> None:
    client, _ = await serve()
    events = await stream(client, COMPLETIONS, n=3, logprobs=0, **SAMPLED)
    order = [e["choices"][0]["index"] for e in events if e["choices"]]
    assert order[:6] == [0, 1, 2, 0, 1, 2]


async def test_two_prompts_have_n_choices_each(serve: Any) -> None:
    client, _ = await serve()
    prompts = [IDS, IDS[::-1]]
    singles = [await whole(client, COMPLETIONS, **{**SAMPLED, "prompt": p}) for p in prompts]
    answer = await whole(client, COMPLETIONS, **{**SAMPLED, "prompt": prompts, "n": 2})
    assert [texts(answer)[i] for i in (0, 2)] == [texts(single)[0] for single in singles]
    assert answer["usage"]["prompt_tokens"] == 2 * len(IDS)
    assert answer["usage"]["completion_tokens"] == 24


async def test_logprobs_are_those_of_each_choice(serve: Any) -> None:
    client, _ = await serve()
    for url, fields in ((CHAT, {"logprobs": True}), (COMPLETIONS, {"logprobs": 0})):
        answer = await whole(client, url, n=2, **SAMPLED, **fields)
        shown = [c["logprobs"] for c in answer["choices"]]
        tokens = [
            s["tokens"] if "tokens" in s else [t["token"] for t in s["content"]] for s in shown
        ]
        assert [len(t) for t in tokens] == [6, 6]
        assert tokens[0] != tokens[1]


async def test_stop_string_ends_its_choice_alone(serve: Any) -> None:
    client, served = await serve()
    fields = {**SAMPLED, "max_tokens": 12, "n": 3, "logprobs": 0}
    plain = await whole(client, COMPLETIONS, **fields)
    tokens = [choice["logprobs"]["tokens"] for choice in plain["choices"]]
    visible = [t for t in tokens[1][2:] if len(t) == 1 and t.isprintable()]
    others = {t for index in (0, 2) for t in tokens[index]}
    stop = next(t for t in visible if t not in others)
    answer = await whole(client, COMPLETIONS, **fields, stop=stop)
    assert [c["finish_reason"] for c in answer["choices"]] == ["length", "stop", "length"]
    assert answer["choices"][1]["stop_reason"] == stop
    assert texts(answer) == [texts(plain)[0], texts(plain)[1].split(stop)[0], texts(plain)[2]]
    assert served.engine.cache.num_referenced_blocks == 0


async def test_best_of_gives_the_best_by_mean_logprob(serve: Any) -> None:
    client, _ = await serve()
    pool = await whole(client, COMPLETIONS, n=5, logprobs=0, **SAMPLED)
    means = [sum(c["logprobs"]["token_logprobs"]) for c in pool["choices"]]
    order = sorted(range(5), key=lambda i: -means[i])[:2]
    assert order != [0, 1]
    answer = await whole(client, COMPLETIONS, n=2, best_of=5, **SAMPLED)
    assert texts(answer) == [texts(pool)[i] for i in order]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 12
    shown = await whole(client, COMPLETIONS, n=2, best_of=5, logprobs=0, **SAMPLED)
    assert [c["logprobs"] for c in shown["choices"]] == [
        pool["choices"][i]["logprobs"] for i in order
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 17}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": 9}, "n"),  # more than run at once
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 17}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"beam_width": 2}, "beam_width"),
        ({"length_penalty": 1.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"use_beam_search": True, "beam_width": 2, "best_of": 3}, "beam_width"),
        ({"use_beam_search": True, "n": 3, "beam_width": 2}, "beam_width"),
        ({"use_beam_search": True, "temperature": 0.7}, "temperature"),
        ({"use_beam_search": True, "top_p": 0.9}, "top_p"),
        ({"use_beam_search": True, "top_k": 5}, "top_k"),
        ({"use_beam_search": True, "length_penalty": 11}, "length_penalty"),
        ({"use_beam_search": True, "early_stopping": "soon"}, "early_stopping"),
    ],
)
@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
async def test_impossible_choice_is_refused_by_name(
    serve: Any, url: str, fields: dict[str, Any], param: str
) -> None:
    client, served = await serve(max_num_seqs=8)
    response = await client.post(url, json=body_of(url, **fields))
    error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, param), error
    assert param in error["message"]
    assert not served.engine.has_work


async def test_client_that_hangs_up_frees_all_choices(serve: Any) -> None:
    client, served = await serve(num_blocks=512)
    body = body_of(COMPLETIONS, n=4, **{**SAMPLED, "max_tokens": 1900}, stream=True)
    response = await client.post(COMPLETIONS, json=body)
    await response.content.readuntil(b"\n\n")
    assert len(served.engine.cache.sequences) == 4
    response.close()
    await until(lambda: not served.engine.has_work)
    await served.check_integrity()
    assert not served.engine.cache.sequences
    assert served.engine.cache.num_referenced_blocks == 0
    assert served.engine.finished["abort"] == 1


async def test_requests_of_several_widths_at_once_get_what_they_get_alone(serve: Any) -> None:
    client, _ = await serve(num_blocks=16, max_num_seqs=8)
    kinds: list[dict[str, Any]] = [{"n": 1}, {"n": 3}, {"n": 2, "best_of": 4}]
    requests = [{**SAMPLED, "max_tokens": 20, "seed": i, **kinds[i % 3]} for i in range(6)]
    alone = [texts(await whole(client, COMPLETIONS, **fields)) for fields in requests]
    together = await asyncio.gather(*(whole(client, COMPLETIONS, **f) for f in requests))
    assert [texts(answer) for answer in together] == alone
