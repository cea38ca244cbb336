from __future__ import annotations

import asyncio
from typing import Any

import pytest
from server_fakes import END, PAIR, STOP, FakeEngine, FakeTokenizer, chatml, read_events, until

from radixkv.server.streaming import EventStream

SESSIONS = "/v1/sessions"


async def open_session(client: Any, **fields: Any) -> str:
    response = await client.post(SESSIONS, json=fields)
    assert response.status == 200, await response.text()
    return f"{SESSIONS}/{(await response.json())['id']}"


async def say(client: Any, url: str, content: Any = "hello", **fields: Any) -> Any:
    body = {"content": content, "max_tokens": 8, **fields}
    response = await client.post(f"{url}/messages", json=body)
    assert response.status == 200, await response.text()
    return await response.json()


async def state_of(client: Any, url: str) -> tuple[int, int, list[Any]]:
    body = await (await client.get(url)).json()
    return body["num_turns"], body["num_tokens"], body["messages"]


async def test_session_object_and_history(client: Any) -> None:
    created = await (
        await client.post(SESSIONS, json={"system": "Be brief.", "metadata": {"k": "v"}})
    ).json()
    assert created["object"] == "session"
    assert (created["num_turns"], created["num_tokens"], created["parent"]) == (0, 0, None)
    url = f"{SESSIONS}/{created['id']}"
    answer = await say(client, url)
    assert answer["object"] == "chat.completion"
    assert answer["session"] == {
        "id": created["id"],
        "turn": 1,
        "num_tokens": answer["usage"]["total_tokens"],
    }
    text = answer["choices"][0]["message"]["content"]
    history = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": text}]
    body = await (await client.get(url)).json()
    assert body["messages"] == history
    assert (body["system"], body["metadata"], body["num_turns"]) == ("Be brief.", {"k": "v"}, 1)
    assert (await (await client.get(f"{url}/messages")).json())["data"] == history
    listed = await (await client.get(SESSIONS)).json()
    assert [s["id"] for s in listed["data"]] == [created["id"]]


async def test_session_that_could_never_fit_is_refused(make_client: Any) -> None:
    client = await make_client(FakeEngine(max_model_len=64))
    function = {"name": "f", "description": "x" * 2000}
    for fields in ({"system": "x" * 2000}, {"tools": [{"type": "function", "function": function}]}):
        response = await client.post(SESSIONS, json=fields)
        assert response.status == 400
        assert (await response.json())["error"]["param"] == next(iter(fields))


async def test_empty_body_opens_a_session(client: Any) -> None:
    response = await client.post(SESSIONS)
    assert response.status == 200


async def test_next_turn_keeps_every_id_and_encodes_only_new_text(
    client: Any, engine: FakeEngine
) -> None:
    url = await open_session(client, system="S" * 300)
    for turn in range(5):
        engine.script = [*b"\n\nso\n\n", STOP]
        before = [*engine.submitted[-1].prompt, *engine.submitted[-1].out] if turn else []
        engine.tokenizer.encoded.clear()
        answer = await say(client, url, f"question {turn}")
        prompt = engine.submitted[-1].prompt
        assert prompt[: len(before)] == before
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        if turn:
            assert cached == len(before) - 1
            new = f"\n<|im_start|>user\nquestion {turn}<|im_end|>\n<|im_start|>assistant\n"
            assert engine.tokenizer.encoded[0] == new
            assert engine.tokenizer.decode(prompt, skip_special_tokens=False).count(
                "<|im_end|>"
            ) == (2 + 2 * turn)
    # Encoded again, each pair of line breaks would have become one id.
    assert PAIR not in engine.submitted[-1].prompt


async def test_stateless_chat_with_an_edited_answer_hits_only_the_common_prefix(
    client: Any, engine: FakeEngine
) -> None:
    """The control of the test above: text that isn't the answer is encoded as it is."""
    engine.script = [*b"a\n\nb", STOP]
    first = [{"role": "user", "content": "q"}]
    url = "/v1/chat/completions"
    answer = await (await client.post(url, json={"messages": first, "max_tokens": 8})).json()
    text = answer["choices"][0]["message"]["content"]
    more = [*first, {"role": "assistant", "content": f"{text}!"}, {"role": "user", "content": "r"}]
    answer = await (await client.post(url, json={"messages": more, "max_tokens": 1})).json()
    prompt = engine.submitted[0].prompt
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) + 1


async def test_reasoning_stays_in_a_session_though_the_template_drops_it(make_client: Any) -> None:
    def drops_thought(messages: Any, tools: Any, add: bool) -> str:
        shown = [{**m, "content": m["content"].split("</think>")[-1]} for m in messages]
        return chatml(shown, tools, add)

    engine = FakeEngine(FakeTokenizer(drops_thought))
    client = await make_client(engine)
    url = await open_session(client)
    engine.script = [*b"<think>hm</think>yes", STOP]
    await say(client, url, max_tokens=30)
    kept = [*engine.submitted[0].prompt, *engine.submitted[0].out]
    answer = await say(client, url, max_tokens=1)
    assert engine.submitted[1].prompt[: len(kept)] == kept
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(kept) - 1


async def test_template_that_rewrites_answers_is_rendered_afresh(make_client: Any) -> None:
    def shouts(messages: Any, tools: Any, add: bool) -> str:
        return chatml([{**m, "content": m["content"].upper()} for m in messages], tools, add)

    engine = FakeEngine(FakeTokenizer(shouts))
    client = await make_client(engine)
    url = await open_session(client)
    engine.script = [*b"yes", STOP]
    await say(client, url, "one")
    answer = await say(client, url, "two")
    text = engine.tokenizer.decode(engine.submitted[1].prompt)
    assert text == "user\nONE\nassistant\nYES\nuser\nTWO\nassistant\n"
    assert answer["session"]["turn"] == 2


@pytest.mark.parametrize("end", [STOP, END, None])
async def test_turn_is_closed_exactly_once_whatever_ended_the_answer(
    client: Any, engine: FakeEngine, end: int | None
) -> None:
    url = await open_session(client)
    engine.script = [*b"yes", *([end] if end else [])]
    await say(client, url, "one", max_tokens=4 if end else 3)
    await say(client, url, "two")
    text = engine.tokenizer.decode(engine.submitted[1].prompt, skip_special_tokens=False)
    assert "assistant\nyes<|im_end|>\n<|im_start|>user\ntwo<|im_end|>" in text
    assert "endoftext" not in text


async def test_stop_string_is_not_kept_in_the_ids(client: Any, engine: FakeEngine) -> None:
    url = await open_session(client)
    engine.script = [*b"Think", PAIR, *b"Obs: no"]
    answer = await say(client, url, "one", stop=["\nObs:"], max_tokens=20)
    assert answer["choices"][0]["message"]["content"] == "Think\n"
    prompt = engine.submitted[0].prompt
    assert answer["session"]["num_tokens"] == len(prompt) + 6
    await say(client, url, "two")
    follow = engine.submitted[1]
    assert follow.prompt[len(prompt) : len(prompt) + 7] == [*b"Think\n", STOP]
    assert follow.cached == len(prompt) + 5


@pytest.mark.parametrize("stream", [False, True])
async def test_streamed_turn_equals_whole_turn(client: Any, stream: bool) -> None:
    url = await open_session(client)
    fork = f"{SESSIONS}/{(await (await client.post(f'{url}/fork')).json())['id']}"
    whole = await say(client, url)
    body = {"content": "hello", "max_tokens": 8, "stream": True}
    body["stream_options"] = {"include_usage": True}
    events = await read_events(await client.post(f"{fork}/messages", json=body))
    assert events[-1] == "[DONE]"
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-2])
    assert text == whole["choices"][0]["message"]["content"]
    assert events[-3]["session"]["turn"] == 1
    assert events[-2]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert await state_of(client, fork) == await state_of(client, url)


async def test_next_turn_may_follow_the_finish_chunk_at_once(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(self: EventStream) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(EventStream, "finish", never)
    url = await open_session(client)
    body = {"content": "x", "max_tokens": 2, "stream": True}
    async with client.post(f"{url}/messages", json=body) as response:
        async for line in response.content:
            if b'"finish_reason":"length"' in line:
                assert (await say(client, url))["session"]["turn"] == 2
                break
    assert (await state_of(client, url))[0] == 2


async def test_tool_answers_and_message_objects_are_turns(client: Any, engine: FakeEngine) -> None:
    url = await open_session(client)
    await say(
        client, url, None, message={"role": "user", "content": [{"type": "text", "text": "q"}]}
    )
    tools = [{"role": "tool", "tool_call_id": c, "content": c} for c in ("c1", "c2")]
    await say(client, url, None, messages=tools)
    text = engine.tokenizer.decode(engine.submitted[1].prompt)
    assert text.endswith("user\nc1\nuser\nc2\nassistant\n")
    roles = [m["role"] for m in (await state_of(client, url))[2]]
    assert roles == ["user", "assistant", "user", "user", "assistant"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "content"),
        ({"content": "a", "message": {"role": "user", "content": "b"}}, "message"),
        ({"message": {"role": "assistant", "content": "b"}}, "message"),
        ({"messages": []}, "messages"),
        ({"content": "a", "role": "system"}, "content"),
        ({"content": "a", "cache_salt": "s"}, "cache_salt"),
        ({"content": "a", "tools": []}, "tools"),
        ({"content": "a", "temperature": 9}, "temperature"),
        ({"content": "a", "n": 2}, "n"),
    ],
)
async def test_bad_turn_is_refused_and_leaves_the_session_usable(
    client: Any, body: Any, param: str
) -> None:
    url = await open_session(client)
    response = await client.post(f"{url}/messages", json=body)
    assert response.status == 400
    assert (await response.json())["error"]["param"] == param
    assert (await say(client, url))["session"]["turn"] == 1


async def test_second_simultaneous_turn_is_a_409(client: Any, engine: FakeEngine) -> None:
    url = await open_session(client)
    engine.gate.clear()
    first = asyncio.create_task(say(client, url, "one"))
    await until(lambda: engine.waiting)
    second = await client.post(f"{url}/messages", json={"content": "two"})
    assert second.status == 409
    assert (await second.json())["error"]["code"] == "session_busy"
    engine.gate.set()
    assert (await first)["session"]["turn"] == 1
    assert [m["content"] for m in (await state_of(client, url))[2]][0::2] == ["one"]


@pytest.mark.parametrize("stream", [False, True])
async def test_delete_aborts_the_running_turn(
    client: Any, engine: FakeEngine, stream: bool
) -> None:
    url = await open_session(client)
    engine.gate.clear()
    body = {"content": "x", "stream": stream}

    async def post() -> Any:
        return await client.post(f"{url}/messages", json=body)

    turn = asyncio.create_task(post())
    await until(lambda: engine.waiting)
    assert (await (await client.delete(url)).json())["deleted"] is True
    response = await turn
    error = (await read_events(response))[-1] if stream else await response.json()
    assert error["error"]["code"] == "session_deleted"
    assert response.status == (200 if stream else 409)
    assert not engine.waiting
    for gone in (
        await client.get(url),
        await client.delete(url),
        await client.post(f"{url}/messages", json={"content": "x"}),
        await client.post(f"{url}/fork"),
    ):
        assert gone.status == 404
        assert (await gone.json())["error"]["code"] == "session_not_found"


@pytest.mark.parametrize("stream", [False, True])
async def test_failed_or_abandoned_turn_changes_nothing(make_client: Any, stream: bool) -> None:
    engine = FakeEngine(step_s=0.002)
    client = await make_client(engine)
    url = await open_session(client)
    await say(client, url)
    before = await state_of(client, url)
    engine.fail_at = 3
    await (await client.post(f"{url}/messages", json={"content": "x", "stream": stream})).read()
    assert await state_of(client, url) == before
    engine.fail_at = None
    body = {"content": "x", "stream": stream, "max_tokens": 2000}

    async def abandoned() -> None:
        async with client.post(f"{url}/messages", json=body) as response:
            await response.read()

    post = asyncio.create_task(abandoned())
    await until(lambda: engine.running and engine.running[0].out)
    post.cancel()
    await until(lambda: engine.finished["abort"] == 1)
    await until(lambda: not engine.running)
    assert await state_of(client, url) == before
    assert (await say(client, url))["session"]["turn"] == 2


async def test_overflowing_turn_is_refused_and_the_session_stays_usable(make_client: Any) -> None:
    client = await make_client(FakeEngine(max_model_len=256))
    url = await open_session(client)
    while True:
        before = await state_of(client, url)
        body = {"content": "x" * 40, "max_tokens": 8}
        response = await client.post(f"{url}/messages", json=body)
        if response.status != 200:
            break
    error = (await response.json())["error"]
    assert (response.status, error["code"]) == (400, "context_length_exceeded")
    assert await state_of(client, url) == before
    assert before[0] >= 2
    assert before[1] < 256
    assert (await say(client, url, "y", max_tokens=1))["session"]["turn"] == before[0] + 1


async def test_fork_shares_the_past_and_survives_its_parent(
    client: Any, engine: FakeEngine
) -> None:
    url = await open_session(client, system="S", metadata={"a": "b"})
    for i in range(3):
        await say(client, url, f"m{i}")
    child = await (await client.post(f"{url}/fork")).json()
    early = await (await client.post(f"{url}/fork", json={"at_turn": 1})).json()
    blank = await (await client.post(f"{url}/fork", json={"at_turn": 0})).json()
    assert (child["num_turns"], early["num_turns"], blank["num_turns"]) == (3, 1, 0)
    assert child["parent"] == url.removeprefix(f"{SESSIONS}/")
    assert child["metadata"] == {"a": "b"}
    tokens = (await state_of(client, url))[1]
    await client.delete(url)
    answer = await say(client, f"{SESSIONS}/{child['id']}", "next")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == tokens - 1
    answer = await say(client, f"{SESSIONS}/{early['id']}", "other")
    assert answer["session"]["turn"] == 2
    first = [*engine.submitted[0].prompt, *engine.submitted[0].out]
    assert early["num_tokens"] == len(first)
    text = engine.tokenizer.decode(engine.submitted[-1].prompt[len(first) :])
    assert text == "\nuser\nother\nassistant\n"
    for at_turn in (-1, 5):
        child_url = f"{SESSIONS}/{child['id']}/fork"
        bad = await client.post(child_url, json={"at_turn": at_turn})
        assert bad.status == 400
        assert (await bad.json())["error"]["param"] == "at_turn"


async def test_fork_during_a_turn_has_the_state_before_it(client: Any, engine: FakeEngine) -> None:
    url = await open_session(client)
    await say(client, url, "one")
    before = await state_of(client, url)
    engine.gate.clear()
    turn = asyncio.create_task(say(client, url, "two"))
    await until(lambda: engine.waiting)
    child = await (await client.post(f"{url}/fork")).json()
    engine.gate.set()
    await turn
    assert await state_of(client, f"{SESSIONS}/{child['id']}") == before


async def test_full_store_refuses_and_evicts_nothing(make_client: Any) -> None:
    client = await make_client(max_sessions=2)
    urls = [await open_session(client) for _ in range(2)]
    for refused in (await client.post(SESSIONS), await client.post(f"{urls[0]}/fork")):
        assert refused.status == 429
        assert (await refused.json())["error"]["code"] == "too_many_sessions"
        assert "Retry-After" in refused.headers
    assert [(await client.get(url)).status for url in urls] == [200, 200]
    await client.delete(urls[0])
    assert (await client.post(SESSIONS)).status == 200


async def test_many_sessions_opened_used_and_dropped_leave_nothing(client: Any) -> None:
    for _ in range(200):
        url = await open_session(client)
        await say(client, url, "x", max_tokens=1)
        await client.delete(url)
    assert (await (await client.get("/admin/cache")).json())["sessions"] == 0


async def test_listing_has_pages(client: Any) -> None:
    urls = [await open_session(client) for _ in range(5)]
    ids = [url.removeprefix(f"{SESSIONS}/") for url in reversed(urls)]
    page = await (await client.get(f"{SESSIONS}?limit=3")).json()
    assert [s["id"] for s in page["data"]] == ids[:3]
    assert page["has_more"] is True
    rest = await (await client.get(f"{SESSIONS}?limit=3&after={ids[2]}")).json()
    assert [s["id"] for s in rest["data"]] == ids[3:]
    assert rest["has_more"] is False
    assert (await client.get(f"{SESSIONS}?limit=0")).status == 400


async def test_salt_of_a_session_is_kept_in_its_forks(client: Any, engine: FakeEngine) -> None:
    url = await open_session(client, cache_salt="s")
    await say(client, url)
    child = await (await client.post(f"{url}/fork")).json()
    await say(client, f"{SESSIONS}/{child['id']}")
    assert set(engine.filed) == {("", "s")}
