from __future__ import annotations

from typing import Any

import pytest
from server_fakes import FakeEngine, FakeTokenizer, chatml_tools

URL = "/v1/chat/completions"
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


async def ids_of(client: Any, engine: FakeEngine, messages: list[Any]) -> list[int]:
    response = await client.post(URL, json={"messages": messages, "max_tokens": 1})
    assert response.status == 200, await response.text()
    return engine.submitted[-1].prompt


@pytest.fixture(params=[False, True], ids=["flattened", "structured"])
async def served(request: Any, make_client: Any) -> Any:
    tools = request.param
    tokenizer = FakeTokenizer(chatml_tools, supports_tools=True) if tools else FakeTokenizer()
    engine = FakeEngine(tokenizer)
    return await make_client(engine), engine


async def test_content_of_a_tool_call_null_absent_or_empty_gives_the_same_ids(served: Any) -> None:
    client, engine = served
    seen = []
    for content in ({"content": None}, {}, {"content": ""}):
        messages = [
            {"role": "user", "content": "q"},
            {"role": "assistant", **content, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
        ]
        seen.append(await ids_of(client, engine, messages))
    assert seen[0] == seen[1] == seen[2]
    text = engine.tokenizer.decode(seen[0])
    assert '"name"' in text
    assert "42" in text


async def test_tool_calls_are_flattened_to_text_for_templates_without_tools(
    client: Any, engine: FakeEngine
) -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    text = engine.tokenizer.decode(
        await ids_of(client, engine, messages), skip_special_tokens=False
    )
    assert 'Let me see.\n{"name": "f", "arguments": {"x": 1}}<|im_end|>' in text
    assert "<|im_start|>user\n42<|im_end|>" in text


async def test_one_part_equals_the_string_and_parts_are_joined_by_a_line_break(
    served: Any,
) -> None:
    client, engine = served

    def user(content: Any) -> list[Any]:
        return [{"role": "user", "content": content}]

    one = await ids_of(client, engine, user([{"type": "text", "text": "a b"}]))
    assert one == await ids_of(client, engine, user("a b"))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert await ids_of(client, engine, user(parts)) == await ids_of(client, engine, user("a\nb"))
    assert await ids_of(client, engine, user([])) == await ids_of(client, engine, user(""))


async def test_parts_are_joined_alike_in_tool_answers_and_system_prompts(served: Any) -> None:
    client, engine = served
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    def conversation(content: Any) -> list[Any]:
        return [
            {"role": "system", "content": content},
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": content},
        ]

    split = await ids_of(client, engine, conversation(parts))
    assert split == await ids_of(client, engine, conversation("a\nb"))


async def test_developer_is_rendered_as_system(served: Any) -> None:
    client, engine = served
    user = {"role": "user", "content": "q"}
    developer = await ids_of(client, engine, [{"role": "developer", "content": "rule"}, user])
    system = await ids_of(client, engine, [{"role": "system", "content": "rule"}, user])
    assert developer == system
    assert "rule" in engine.tokenizer.decode(system)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([], "messages", "at least one"),
        ([{"role": "banana", "content": "x"}], "messages[0].role", "'banana'"),
        ([{"role": "user"}], "messages[0].content", "content"),
        ([{"content": "x"}], "messages[0].role", "role"),
        ([{"role": "user", "content": 3}], "messages[0].content", "int"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
            "'image_url'",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "text"),
        (
            [{"role": "user", "content": "x", "tool_calls": [CALL]}],
            "messages[0].tool_calls",
            "assi",
        ),
        ([{"role": "assistant", "content": "x"}], "messages", "must not be answered"),
        (
            [{"role": "assistant", "function_call": {"name": "f"}}],
            "messages[0].function_call",
            "tool_calls",
        ),
    ],
)
async def test_bad_message_is_refused_as_json(
    client: Any, stream: bool, messages: Any, param: str, words: str
) -> None:
    response = await client.post(URL, json={"messages": messages, "stream": stream})
    assert response.status == 400
    assert response.content_type == "application/json"
    error = (await response.json())["error"]
    assert error["param"] == param
    assert words in error["message"]
