"""`tool_choice` of type "allowed_tools": all tools stay in the prompt, some may be called."""

from __future__ import annotations

from typing import Any

import pytest
from server_fakes import STOP, FakeEngine, FakeTokenizer, hermes

URL = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("now", "weather", "add")]
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(FakeTokenizer(hermes, supports_tools=True, chat_template="<tool_call>"))


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def answer(client: Any, choice: Any) -> Any:
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": choice, "max_tokens": 200}
    response = await client.post(URL, json=body)
    assert response.status == 200, await response.text()
    return (await response.json())["choices"][0]["message"]


@pytest.mark.parametrize(
    ("names", "is_call"), [(("now",), True), (("add", "now"), True), (("add",), False)]
)
async def test_call_of_a_tool_that_is_not_allowed_is_content(
    client: Any, engine: FakeEngine, names: tuple[str, ...], is_call: bool
) -> None:
    engine.script = [*NOW.encode(), STOP]
    message = await answer(client, allowed("auto", *names))
    assert bool(message.get("tool_calls")) == is_call
    assert ('"now"' in (message["content"] or "")) == (not is_call)


async def test_required_ones_alone_are_in_the_grammar(client: Any, engine: FakeEngine) -> None:
    await answer(client, allowed("required", "weather", "add"))
    grammar = engine.submitted[-1].params.grammar
    assert grammar is not None
    assert [name in grammar.text for name in ("now", "weather", "add")] == [False, True, True]
    assert "~0.." in grammar.text  # several may be called


async def test_the_prompt_is_that_of_all_tools(client: Any, engine: FakeEngine) -> None:
    await answer(client, "auto")
    await answer(client, allowed("auto", "add"))
    first, second = (request.prompt for request in engine.submitted)
    assert first == second


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (allowed("any", "now"), "tool_choice.allowed_tools.mode"),
        (allowed("auto"), "tool_choice.allowed_tools.tools"),
        (allowed("auto", "other"), "tool_choice"),
        ({"type": "allowed_tools", "allowed_tools": 3}, "tool_choice.allowed_tools.mode"),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"name": "now"}]},
            },
            "tool_choice.allowed_tools.tools",
        ),
    ],
)
async def test_malformed_choice_is_refused(client: Any, choice: Any, param: str) -> None:
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": choice}
    response = await client.post(URL, json=body)
    assert response.status == 400
    assert (await response.json())["error"]["param"] == param
