"""What the clients of a soak do: each scenario is a few requests that belong together."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from loadtests.soak_client import Step
from loadtests.soak_requests import (
    BAD,
    COMPLETION,
    CONSTRAINTS,
    SALTS,
    TOOLS,
    Run,
    chat_step,
    compared,
    control,
    drawn,
    extras,
    hang_up,
    question,
    sampling,
    streaming,
    turn_step,
)

__all__ = ["SCENARIOS", "Scenario"]

Scenario = Callable[[Run], Awaitable[None]]


async def chat(run: Run) -> None:
    """Ask about a document."""
    await run.send(chat_step(run, {"messages": question(run), **sampling(run), **extras(run)}))


async def long_answer(run: Run) -> None:
    """Ask for an answer that needs several blocks, which others may hold by then."""
    body = {"messages": question(run), **sampling(run), **streaming(run)}
    await run.send(chat_step(run, {**body, "max_tokens": 96, "ignore_eos": True}))


async def completion(run: Run) -> None:
    """Let one or two documents be continued."""
    prompts: Any = [run.document() for _ in range(run.rng.choice((1, 1, 1, 2)))]
    body = {"prompt": prompts if len(prompts) > 1 else prompts[0], **sampling(run), **extras(run)}
    body |= run.rng.choice(({}, {}, {"logprobs": 2}))
    await run.send(compared(run, Step("completion", COMPLETION, body)))


async def choices(run: Run) -> None:
    """Ask for several answers of one prompt."""
    n = run.rng.randint(2, 3)
    body = {"messages": question(run), **drawn(run), "n": n, **streaming(run)}
    if "stream" not in body and run.rng.random() < 0.3:
        body["best_of"] = n + 1
    await run.send(chat_step(run, body))


async def beams(run: Run) -> None:
    """Search with beams."""
    width = run.rng.randint(2, 3)
    body = {
        "prompt": run.document(),
        "use_beam_search": True,
        "best_of": width,
        "n": run.rng.randint(1, width),
        "max_tokens": run.rng.randint(4, 12),
    }
    await run.send(compared(run, Step("completion", COMPLETION, body), exact_only=True))


async def structured(run: Run) -> None:
    """Ask for an answer that follows a grammar."""
    constraint = run.rng.choice(CONSTRAINTS)
    body = {"messages": question(run), **sampling(run), **streaming(run), **constraint}
    body |= {"max_tokens": 48, "ignore_eos": False}
    reply = await run.send(chat_step(run, body))
    if "response_format" in constraint and reply.choice(0).finish == "stop":
        try:
            json.loads(reply.choice(0).text)
        except ValueError:
            run.fail(f"no JSON: {reply.choice(0).text[:80]!r}")


async def tools(run: Run) -> None:
    """Ask with tools, and often for a call."""
    body = {
        "messages": question(run),
        "tools": TOOLS,
        "tool_choice": run.rng.choice(("required", "required", "auto", "none")),
        "parallel_tool_calls": False,
        **sampling(run),
        **streaming(run),
        "max_tokens": 48,
    }
    reply = await run.send(chat_step(run, body))
    cut = reply.choice(0).finish == "length"
    if body["tool_choice"] == "required" and not cut and not reply.choice(0).calls:
        run.fail("no call, though one was required")


async def conversation(run: Run) -> None:
    """Go on with a chat that the client keeps, and sends anew with each turn."""
    messages = question(run, run.name)
    for turn in range(3):
        reply = await run.send(
            chat_step(run, {"messages": list(messages), **sampling(run), **extras(run, salts=())})
        )
        messages.append({"role": "assistant", "content": reply.choice(0).text})
        messages.append({"role": "user", "content": f"Go on, {turn}."})


async def session(run: Run) -> None:
    """Create a session, fork it, go on with both, pin one, roll one back, and delete them."""
    salt = run.rng.choice(({}, {"cache_salt": run.rng.choice(SALTS)}))
    await run.send(control("/v1/sessions", {"system": run.document(), **salt}, saves="a"))
    for turn in range(2):
        await run.send(turn_step(run, "a", f"{run.name}: question {turn}"))
    at = run.rng.choice(({}, {"at_turn": 1}))
    await run.send(control("/v1/sessions/{a}/fork", dict(at), saves="b"))
    await run.send(
        Step("json", "/v1/sessions/{b}/pin", {"ttl_seconds": 60}, accepts=(200, 400, 404))
    )
    await at_once(run, turn_step(run, "a", "And then?"), turn_step(run, "b", "Or else?"))
    if run.rng.random() < 0.5:
        back = Step("json", "/v1/sessions/{a}/rollback", {"to_turn": 1}, is_replayed=True)
        await run.send(back)
        await run.send(turn_step(run, "a", "Let us try that again."))
    await run.send(Step("json", "/v1/sessions/{b}/unpin"))
    for name in "ab":
        await run.send(Step("json", f"/v1/sessions/{{{name}}}", method="DELETE"))


async def session_hang_up(run: Run) -> None:
    """Hang up during a turn of a session, and go on with it."""
    await run.send(control("/v1/sessions", {"system": run.document()}, saves="a"))
    await run.send(turn_step(run, "a", f"{run.name}: first"))
    lost = turn_step(run, "a", "This one is lost.")
    hang_up(run, lost)
    await run.send(lost)
    state: dict[str, Any] = {"busy": True}
    while state["busy"]:
        await asyncio.sleep(0.05)
        state = (await run.send(Step("json", "/v1/sessions/{a}", method="GET"))).body
    # The end may have been written just before the client hung up: then the turn counts.
    lost.is_replayed = state["num_turns"] == 2
    lost.is_compared = lost.is_compared and lost.is_replayed
    await run.send(turn_step(run, "a", "Are you there?"))
    await run.send(Step("json", "/v1/sessions/{a}", method="DELETE"))


async def messages_api(run: Run) -> None:
    """Ask over Anthropic's API, and have the prompt pinned sometimes."""
    system, user = (m["content"] for m in question(run))
    options = sampling(run)
    block: dict[str, Any] = {"type": "text", "text": system}
    if run.rng.random() < 0.3:
        block |= {"cache_control": {"type": "ephemeral"}}
    body = {"system": [block], "messages": [{"role": "user", "content": user}], **options}
    body |= run.rng.choice(({}, {"stream": True}))
    twin = {"messages": [{"role": "system", "content": system}, *body["messages"]], **options}
    await run.send(compared(run, Step("messages", "/v1/messages", body, twin=twin)))


async def responses_api(run: Run) -> None:
    """Ask over the Responses API, go on from the response, and delete it."""
    for turn in range(2):
        options = sampling(run)
        options["max_output_tokens"] = options.pop("max_tokens")
        if turn == 0:
            body = {"instructions": run.document(), "input": f"{run.name}: what is it about?"}
        else:
            body = {"previous_response_id": "r0", "input": "Are you sure?"}
        body |= options | run.rng.choice(({}, {"stream": True}))
        step = Step("responses", "/v1/responses", body, saves=f"r{turn}", is_replayed=True)
        await run.send(compared(run, step))
    for turn in range(2):
        await run.send(Step("json", f"/v1/responses/{{r{turn}}}", method="DELETE"))


async def hang_up_early(run: Run) -> None:
    """Hang up while an answer is made, or before it has begun."""
    body = {"messages": question(run), **sampling(run), "max_tokens": 64, **streaming(run)}
    step = chat_step(run, body)
    hang_up(run, step)
    await run.send(step)


async def time_out(run: Run) -> None:
    """Give a request less time than it needs."""
    body = {
        "messages": question(run),
        **sampling(run),
        **streaming(run),
        "max_tokens": 200,
        "ignore_eos": True,
        "timeout": run.rng.choice((0.05, 0.3, 1.0)),
    }
    step = chat_step(run, body)
    step.accepts = (200, 504)
    await run.send(step)


async def together(run: Run) -> None:
    """Ask the same from several clients at once."""
    body = {"messages": question(run, run.name), **sampling(run)}
    count = run.rng.randint(2, 4)
    await at_once(run, *(chat_step(run, {**body, **streaming(run)}) for _ in range(count)))


async def pin(run: Run) -> None:
    """Warm a prompt, pin it, and give the pin up."""
    prompt = run.document()
    ttl = run.rng.choice(({}, {"ttl_seconds": 30}))
    await run.send(Step("json", "/admin/cache/warm", {"prompt": prompt, **ttl}))
    # Another client may have flushed it, or so many pins may be in use that it can't be had.
    step = Step("json", "/admin/cache/pin", {"prompt": prompt, "ttl_seconds": 30}, saves="pin")
    step.accepts = (200, 400, 404)
    reply = await run.send(step)
    await run.send(Step("json", "/admin/cache/pins", method="GET"))
    if reply.is_whole:
        gone = Step("json", "/admin/cache/pin/{pin}", method="DELETE", accepts=(200, 404))
        await run.send(gone)


async def look(run: Run) -> None:
    """Read everything that the server tells about itself."""
    paths = (
        "/health", "/metrics", "/admin/cache", "/admin/engine", "/admin/check",
        "/admin/cache/misses?limit=20", "/admin/cache/tree?depth=6", "/admin/requests",
        "/admin/sessions", "/openapi.json", "/v1/models", "/v1/sessions",
    )  # fmt: skip
    for path in paths:
        await run.send(Step("json", path, method="GET"))
    await run.send(Step("json", "/admin/cache/explain", {"prompt": run.document()}))
    await run.send(Step("json", "/tokenize", {"prompt": run.document()}))


async def bad(run: Run) -> None:
    """Send what has to be refused."""
    for path, body, status in run.rng.sample(BAD, 4):
        await run.send(Step("json", path, body, accepts=(status,)))


async def flush(run: Run) -> None:
    """Drop what is cached, or what is cached of one salt."""
    body = run.rng.choice(({}, {"cache_salt": run.rng.choice(SALTS)}))
    await run.send(Step("json", "/admin/cache/flush", dict(body), accepts=(200, 409)))


# Each with its weight.
SCENARIOS: dict[Scenario, float] = {
    chat: 6, long_answer: 2, completion: 3, choices: 2, beams: 1.5, structured: 2, tools: 2,
    conversation: 2, session: 2, session_hang_up: 1, messages_api: 2, responses_api: 1.5,
    hang_up_early: 2, time_out: 1, together: 1, pin: 1, look: 1, bad: 1, flush: 0.4,
}  # fmt: skip


async def at_once(run: Run, *steps: Step) -> None:
    """Send several requests at once, and wait for all of them."""
    results = await asyncio.gather(*map(run.send, steps), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
