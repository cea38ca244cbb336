"""Agent frameworks on the default model: the programs of docs/frameworks.md, and more of each.

The frameworks are imported in the tests, since some warn as they are imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import io
import itertools
import re
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from client_tools import MODEL
from pydantic import BaseModel

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(240),
    # What other people's packages leave open or call old is theirs to mend.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Item .* on TypedDict:UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

DOC = Path(__file__).parents[2] / "docs" / "frameworks.md"
PROGRAM = re.compile(r"^## (.+?)\n.*?^```python\n(.*?)^```$", re.M | re.S)
PROGRAMS = dict(PROGRAM.findall(DOC.read_text()))
CACHED = re.compile(r"(\d+) of (\d+) cached")
CLAUDE_USAGE = re.compile(r"(\d+) read, (\d+) written, (\d+) more")
CALLS = re.compile(r"^.*get_weather\b.*\b(?:Lima|Paris)\b.*\n(?:.*\n)*?.*\badd\b.*\d", re.M)
ADDED = "How warm is it in Lima, and what is 2 + 3?"


class Report(BaseModel):
    """What a report says."""

    city: Literal["Lima", "Paris"]
    sunny: bool


@pytest.fixture(autouse=True)
def strangers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """No framework, set as the document says, may talk to anyone but the server."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    real, hosts = socket.getaddrinfo, []

    def look_up(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in ("127.0.0.1", b"127.0.0.1", None):
            hosts.append(host)
            raise OSError(f"{host} is not to be looked up")
        return real(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    yield hosts
    assert hosts == []


@pytest.fixture(scope="module", autouse=True)
def run(live_url: str) -> Iterator[Any]:
    """Run a program of the document, once; its names, and what it printed."""

    @functools.cache
    def run(heading: str) -> tuple[dict[str, Any], str]:
        source = PROGRAMS[heading].replace("http://localhost:8000", live_url)
        names: dict[str, Any] = {"__name__": "program"}
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(source, f"{DOC}: {heading}", "exec"), names)
        return names, output.getvalue()

    yield run
    # What they leave open is dropped here, and not in a test of something else.
    run.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        asyncio.set_event_loop(None)
        gc.collect()


def assert_two_tools_ran_and_each_turn_found_the_last(
    output: str, turns: list[tuple[int, int]]
) -> None:
    """Assert that both tools ran, an answer came, and the cache had all of each turn before."""
    assert CALLS.search(output)
    assert len(turns) == 3
    for (_, prompt), (cached, _) in itertools.pairwise(turns):
        assert cached >= prompt
    assert output.rstrip("\n").splitlines()[-1].strip()


@pytest.mark.parametrize("heading", ["OpenAI SDK", "LangChain", "Pydantic AI", "LiteLLM"])
def test_the_documents_program_runs_both_tools_and_hits_the_cache(run: Any, heading: str) -> None:
    _, output = run(heading)
    turns = [(int(cached), int(prompt)) for cached, prompt in CACHED.findall(output)]
    assert_two_tools_ran_and_each_turn_found_the_last(output, turns)


def test_the_openai_agents_program_runs_on_both_apis(run: Any) -> None:
    _, output = run("OpenAI Agents SDK")
    turns = [(int(cached), int(prompt)) for cached, prompt in CACHED.findall(output)]
    chat, responses = re.split(r"^OpenAIChatCompletionsModel says: ", output, flags=re.M)
    assert_two_tools_ran_and_each_turn_found_the_last(chat, turns[:3])
    assert_two_tools_ran_and_each_turn_found_the_last(responses, turns[3:])


def test_the_anthropic_program_reads_what_it_wrote(run: Any) -> None:
    _, output = run("Anthropic SDK")
    usages = [tuple(map(int, found)) for found in CLAUDE_USAGE.findall(output)]
    turns = [(read, sum((read, written, more))) for read, written, more in usages]
    assert_two_tools_ran_and_each_turn_found_the_last(output, turns)


def test_langchain_streams_tokens_and_usage(run: Any) -> None:
    names, _ = run("LangChain")
    chunks = [chunk for chunk, _ in names["agent"].stream(names["ask"], stream_mode="messages")]
    tools = [chunk.name for chunk in chunks if chunk.type == "tool"]
    assert tools == ["get_weather", "add"]
    answer = [chunk.content for chunk in chunks if chunk.type == "AIMessageChunk"]
    assert len([text for text in answer if text]) > 2
    usages = [u for chunk in chunks if (u := getattr(chunk, "usage_metadata", None))]
    assert len(usages) == 3
    assert all(usage["input_token_details"]["cache_read"] > 0 for usage in usages)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structures_an_answer(live_url: str, method: Any) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        base_url=f"{live_url}/v1", api_key="none", model=MODEL, temperature=0, max_tokens=60
    )
    assert isinstance(
        model.with_structured_output(Report, method=method).invoke("Report on Lima."), Report
    )


def test_langchain_speaks_the_responses_api(live_url: str) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        base_url=f"{live_url}/v1", api_key="none", model=MODEL, temperature=0, max_tokens=6,
        use_responses_api=True,
    )  # fmt: skip
    first = model.invoke("Say hello.")
    assert first.text
    assert "".join(chunk.text for chunk in model.stream("Say hello.")) == first.text


@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
async def test_openai_agents_stream_and_structure_an_answer(live_url: str, kind: str) -> None:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=f"{live_url}/v1", api_key="none") as client:
        agent = agents.Agent(
            name="reporter",
            model=getattr(agents, kind)(MODEL, openai_client=client),
            model_settings=agents.ModelSettings(temperature=0, max_tokens=60, include_usage=True),
            output_type=Report,
        )
        run = agents.Runner.run_streamed(agent, "Report on Lima.")
        deltas = [
            event.data.delta
            async for event in run.stream_events()
            if event.type == "raw_response_event" and event.data.type.endswith("text.delta")
        ]
    assert isinstance(run.final_output, Report)
    assert Report.model_validate_json("".join(deltas)) == run.final_output
    assert run.context_wrapper.usage.input_tokens > 0


async def test_pydantic_ai_streams_events_of_both_tools(run: Any, live_url: str) -> None:
    from pydantic_ai import Agent, FunctionToolResultEvent
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{live_url}/v1", api_key="none")
    agent: Agent[None, str] = Agent(OpenAIResponsesModel(MODEL, provider=provider))
    choices: Any = [["get_weather"], ["add"], "none"]

    @agent.tool_plain
    def get_weather(city: Literal["Lima", "Paris"]) -> str:
        return f"It is 21 degrees in {city}."

    @agent.tool_plain
    def add(a: Literal[2, 3], b: Literal[2, 3]) -> int:
        return a + b

    def choose(context: Any) -> Any:
        return {"temperature": 0, "max_tokens": 40, "tool_choice": choices[context.run_step - 1]}

    async with agent.run_stream_events(ADDED, model_settings=choose) as events:
        results = [e.part.tool_name async for e in events if isinstance(e, FunctionToolResultEvent)]
    assert results == ["get_weather", "add"]


@pytest.mark.parametrize("output", ["ToolOutput", "NativeOutput"])
def test_pydantic_ai_structures_an_answer(live_url: str, output: str) -> None:
    import pydantic_ai
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{live_url}/v1", api_key="none")
    model = OpenAIChatModel(MODEL, provider=provider, profile={"supports_json_schema_output": True})
    agent: Any = pydantic_ai.Agent(
        model,
        output_type=getattr(pydantic_ai, output)(Report),
        model_settings={"temperature": 0, "max_tokens": 60},
    )
    result = agent.run_sync("Report on Lima.")
    assert isinstance(result.output, Report)


def test_litellm_streams_and_maps_errors(live_url: str) -> None:
    import litellm

    fields: Any = {
        "model": f"openai/{MODEL}", "api_base": f"{live_url}/v1", "api_key": "none",
        "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 6,
    }  # fmt: skip
    whole = litellm.completion(**fields, temperature=0)
    options = {"include_usage": True}
    chunks = list(litellm.completion(**fields, temperature=0, stream=True, stream_options=options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**fields, temperature=9)
    long = {**fields, "messages": [{"role": "user", "content": "a b " * 10_000}]}
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**long)


def test_litellm_speaks_the_other_two_apis(live_url: str) -> None:
    import litellm

    response = litellm.responses(
        model=f"openai/{MODEL}", api_base=f"{live_url}/v1", api_key="none", input="Say hello.",
        max_output_tokens=6, temperature=0,
    )  # fmt: skip
    assert response.output_text
    answer = litellm.completion(
        model=f"anthropic/{MODEL}", api_base=live_url, api_key="none", max_tokens=6,
        messages=[{"role": "user", "content": "Say hello."}], temperature=0,
    )  # fmt: skip
    # LiteLLM asks `/v1/responses` for 16 tokens at least.
    assert response.output_text.startswith(answer.choices[0].message.content)
