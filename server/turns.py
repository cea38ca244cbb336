"""`POST /v1/sessions/{id}/messages`: one turn of a session.

A turn is committed when the engine has finished the answer and the client is still connected, just
before the client is told that it is complete. A turn that fails, is aborted or loses its client
before that leaves the session as it was.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from radixkv.request import SamplingParams
from radixkv.server.body import json_response, read_json
from radixkv.server.chat import chat_deltas
from radixkv.server.continuation import next_prompt, served_ids
from radixkv.server.dialogue import AnswerReader, Dialogue
from radixkv.server.errors import ApiError
from radixkv.server.generation import Generation
from radixkv.server.history import ChatPrompt
from radixkv.server.messages import TemplateMessage, template_messages
from radixkv.server.protocol import Message, SessionTurn
from radixkv.server.responses import ChatShape, TokenTexts, UsageMode
from radixkv.server.sampling import chat_sampling
from radixkv.server.session_routes import session_of
from radixkv.server.sessions import Session, session_deleted
from radixkv.server.state import REQUEST_ID, STATE, ServerState
from radixkv.server.streaming import ClientGoneError, stream_chunks
from radixkv.server.structured import compile_grammar
from radixkv.server.tools import plan_tools

__all__ = ["post_message"]

TURN_ROLES = frozenset({"user", "tool"})


@dataclass(frozen=True, slots=True)
class PendingTurn:
    """A turn that is being answered."""

    state: ServerState
    session: Session
    new_messages: list[TemplateMessage]
    prompt_ids: list[int]
    params: SamplingParams

    def commit(self, reader: AnswerReader) -> dict[str, Any]:
        """Store the finished turn, free the session, and return its `session` object."""
        answer = reader.answer
        text = answer.full_text()
        ids = answer.token_ids
        if isinstance(answer.stop_reason, str):
            ids = served_ids(
                self.state.prompts,
                self.state.engine,
                ids,
                text,
                skip=self.params.skip_special_tokens,
            )
            ended_by_token = False
        else:
            last = ids[-1] if ids else None
            eos = self.state.engine.tokenizer.eos_token_ids
            ended_by_token = last is not None and (last in eos or last == answer.stop_reason)
        supports_tools = self.state.prompts.supports_tools
        given = template_messages([reader.message()], supports_tools=supports_tools)
        messages = [*self.new_messages, *given]
        turn = self.session.commit_turn(
            messages, self.prompt_ids, ids, ended_by_token=ended_by_token
        )
        self.session.end_turn()
        self.state.sessions.touch(self.session)
        return {
            "id": self.session.id,
            "turn": len(self.session.turns),
            "num_tokens": turn.num_tokens,
        }


async def post_message(request: web.Request) -> web.StreamResponse:
    """Answer the next turn of a session, whole or as a stream."""
    state = request.app[STATE]
    config = state.config
    body = await read_json(
        request, SessionTurn, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s
    )
    state.check_model(body.model)
    params = chat_sampling(body, vocab_size=state.engine.vocab_size)
    new_messages = _new_messages(body, supports_tools=state.prompts.supports_tools)
    session = session_of(request)
    plan = plan_tools(state.tools, session.tools, body.tool_choice, body.parallel_tool_calls)
    params = plan.apply(params, state.engine)
    grammar = await compile_grammar(state.engine, params)
    state.lifecycle.check_accepting()
    session.begin_turn()
    generation: Generation | None = None
    try:
        ids = await next_prompt(state.engine, state.prompts, session, new_messages)
        # Both may have changed while the prompt was made on a thread.
        state.lifecycle.check_accepting()
        if session.deleted:
            raise session_deleted()
        generation = Generation.submit(
            state.engine,
            [ids],
            params,
            namespace=session.namespace,
            metrics=state.metrics,
            grammar=grammar,
            param="content",
        )
        session.active = generation
        state.request_ids.remember(generation.id, 1, request[REQUEST_ID], session.id)
        turn = PendingTurn(state, session, new_messages, ids, params)
        shape = ChatShape(
            id=f"chatcmpl-{generation.id}",
            model=state.model_name,
            usage=UsageMode.from_options(body.stream_options),
        )
        tokens = state.engine.tokenizer
        dialogue = Dialogue(state, generation, ChatPrompt(ids), plan, params)
        if body.stream:
            chunks = _chunks(request, dialogue, shape, tokens, turn)
            return await stream_chunks(request, config, chunks)
        await dialogue.run(request)
        whole = shape.whole(dialogue.readers, tokens, logprobs=params.logprobs is not None)
        return json_response({**whole, "session": turn.commit(dialogue.readers[0])})
    finally:
        if generation is not None:
            generation.close()
        if generation is None or session.active is generation:
            session.end_turn()


async def _chunks(
    request: web.Request,
    dialogue: Dialogue,
    shape: ChatShape,
    tokens: TokenTexts,
    turn: PendingTurn,
) -> AsyncGenerator[dict[str, Any], None]:
    (reader,) = readers = dialogue.readers
    async for chunk in chat_deltas(dialogue, shape, tokens):
        yield chunk
    if request.transport is None or request.transport.is_closing():
        raise ClientGoneError("the client hung up before the turn was committed")
    yield shape.finish_chunk(0, readers, session=turn.commit(reader))
    if shape.usage.at_end:
        yield shape.usage_chunk(dialogue.answers)


def _new_messages(body: SessionTurn, *, supports_tools: bool) -> list[TemplateMessage]:
    """Return the messages of a turn, given as `content`, `message` or `messages`."""
    for name in ("tools", "cache_salt"):
        if getattr(body, name) is not None:
            raise _refuse(name, f"{name} is fixed when a session is created")
    given = [n for n in ("content", "message", "messages") if getattr(body, n) is not None]
    if len(given) != 1:
        raise _refuse(
            given[1] if given else "content",
            "exactly one of content, message and messages must be set",
        )
    if body.content is not None:
        messages = [
            Message(role=body.role or "user", content=body.content, tool_call_id=body.tool_call_id)
        ]
    elif body.message is not None:
        messages = [body.message]
    else:
        messages = body.messages or []
    for message in messages:
        if message.role not in TURN_ROLES:
            raise _refuse(
                given[0],
                f"{given[0]}: a turn takes messages of role user or tool, "
                f"got {message.role[:64]!r}",
            )
    return template_messages(messages, supports_tools=supports_tools, field=given[0])


def _refuse(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
