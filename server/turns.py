"""One turn of a session, posted to it or sent as a chat completion with a `session_id`.

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
from radixkv.server.auth import make_namespace, tenant_of
from radixkv.server.body import json_response, read_json
from radixkv.server.chat_chunks import chat_deltas
from radixkv.server.continuation import next_prompt, served_ids
from radixkv.server.dialogue import AnswerReader, Dialogue
from radixkv.server.errors import ApiError
from radixkv.server.generation import Generation
from radixkv.server.guards import use_of
from radixkv.server.history import ChatPrompt, encode_chat
from radixkv.server.messages import TemplateMessage, template_messages, template_tools
from radixkv.server.protocol import ChatFields, ChatRequest, Message, SessionTurn
from radixkv.server.responses import ChatShape, TokenTexts, UsageMode
from radixkv.server.sampling import chat_sampling
from radixkv.server.scope import current_scope
from radixkv.server.session_match import TURN_ROLES, check_tools, new_messages, refuse_role
from radixkv.server.session_pins import renew_pin
from radixkv.server.session_routes import session_of
from radixkv.server.session_state import Draft
from radixkv.server.sessions import (
    OWN_PREFIX,
    Session,
    check_name,
    session_deleted,
    session_not_found,
)
from radixkv.server.state import REQUEST_ID, STATE, ServerState
from radixkv.server.streaming import ClientGoneError, stream_chunks
from radixkv.server.structured import compile_grammar
from radixkv.server.tools import plan_tools

__all__ = ["chat_turn", "post_message"]


@dataclass(frozen=True, slots=True)
class NewTurn:
    """What a turn adds to its session.

    Attributes:
        session: taken for this turn.
        messages: the new ones.
        system, tools: the session's; the first turn may set them.
    """

    session: Session
    messages: list[TemplateMessage]
    system: str | None
    tools: list[dict[str, Any]] | None


@dataclass(frozen=True, slots=True)
class PendingTurn:
    """A turn that is being answered."""

    state: ServerState
    new: NewTurn
    ticket: int
    prompt_ids: list[int]
    draft: Draft
    params: SamplingParams

    async def commit(self, reader: AnswerReader) -> dict[str, Any]:
        """Store the finished turn, free the session, and return its `session` object.

        Raises:
            ApiError: 409, the session was deleted meanwhile.
        """
        session, sessions = self.new.session, self.state.sessions
        ids, ended_by_token = self._answer_ids(reader)
        supports_tools = self.state.prompts.supports_tools
        given = template_messages([reader.message()], supports_tools=supports_tools)
        messages = [*self.new.messages, *given]
        turn = session.commit_turn(messages, self.prompt_ids, ids, ended_by_token=ended_by_token)
        session.system, session.tools = self.new.system, self.new.tools
        session.drop_draft(self.draft)
        session.end_turn(self.ticket)
        sessions.answered(session)
        committed = {
            "id": session.id,
            "turn": len(session.turns),
            "num_tokens": turn.num_tokens,
        }
        # The answer is safe in memory: whatever becomes of the rest, the client gets it.
        if sessions.wants_pin(session):
            await renew_pin(self.state, session)
        saved = await sessions.saved(session)
        return committed if saved is None else {**committed, "saved": saved}

    def _answer_ids(self, reader: AnswerReader) -> tuple[list[int], bool]:
        """Return the ids of the answer, and whether the last is an end token."""
        answer = reader.answer
        ids = answer.token_ids
        if isinstance(answer.stop_reason, str):
            text, skip = answer.full_text(), self.params.skip_special_tokens
            prompts, engine = self.state.prompts, self.state.engine
            return served_ids(prompts, engine, ids, text, skip=skip), False
        last = ids[-1] if ids else None
        eos = self.state.engine.tokenizer.eos_token_ids
        return ids, last is not None and (last in eos or last == answer.stop_reason)


async def post_message(request: web.Request) -> web.StreamResponse:
    """`POST /v1/sessions/{id}/messages`: answer the next turn, whole or as a stream."""
    state = request.app[STATE]
    config = state.config
    body = await read_json(
        request, SessionTurn, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s
    )
    state.check_model(body.model)
    params = chat_sampling(body, vocab_size=state.engine.vocab_size)
    messages = _posted_messages(body, supports_tools=state.prompts.supports_tools)
    session = session_of(request)
    ticket = session.begin_turn()
    try:
        new = NewTurn(session, messages, session.system, session.tools)
        return await _answer(request, body, params, new, ticket, "content")
    finally:
        session.end_turn(ticket)


async def chat_turn(request: web.Request, body: ChatRequest) -> web.StreamResponse:
    """Answer a chat completion that has a `session_id`; see `session_match` for its messages.

    An id that clients chose makes a session when it is first used. One that the server made is
    unknown only if the session is gone, and to start again without its past would be wrong.
    """
    state = request.app[STATE]
    session_id = body.session_id or ""
    check_name(session_id)
    params = chat_sampling(body, vocab_size=state.engine.vocab_size)
    if params.n != 1:
        raise _refuse("n", "n must be 1: a session goes on from one answer")
    if body.add_generation_prompt is False or body.continue_final_message:
        name = "continue_final_message" if body.continue_final_message else "add_generation_prompt"
        raise _refuse(name, f"{name}: a turn of a session begins a new answer")
    given = template_messages(body.messages, supports_tools=state.prompts.supports_tools)
    tools = template_tools(body.tools)
    namespace = make_namespace(tenant_of(request), body.cache_salt)
    session = state.sessions.find(session_id, tenant_of(request))
    made = session is None
    if session is None:
        if session_id.startswith(OWN_PREFIX):
            raise session_not_found(session_id)
        session = state.sessions.create(namespace, session_id=session_id, save=False)
    if (scope := current_scope()) is not None:
        scope.session_id = session.id
    ticket = session.begin_turn()
    try:
        if body.cache_salt is not None and namespace != session.namespace:
            raise ApiError(
                409,
                "cache_salt is not that of the session, which stays the same",
                param="cache_salt",
                code="session_conflict",
            )
        system, messages = new_messages(session, given)
        new = NewTurn(session, messages, system, check_tools(session, tools))
        return await _answer(request, body, params, new, ticket, "messages")
    finally:
        session.end_turn(ticket)
        if made and not session.turns and not session.busy:
            state.sessions.delete(session)


async def _answer(
    request: web.Request,
    body: ChatFields,
    params: SamplingParams,
    new: NewTurn,
    ticket: int,
    param: str,
) -> web.StreamResponse:
    """Answer a turn of a session that is taken for it."""
    state, session = request.app[STATE], new.session
    if state.sessions.is_foreign(session):
        raise ApiError(
            409,
            f"The session was made with {session.model!r}, whose tokenizer or chat template is "
            f"not that of {state.model_name!r}. Its history can be read; to go on, send it to a "
            "new session",
            param="session_id",
            code="session_of_other_model",
        )
    plan = plan_tools(state.tools, new.tools, body.tool_choice, body.parallel_tool_calls)
    params = plan.apply(params, state.engine)
    grammar = await compile_grammar(state.engine, params)
    state.lifecycle.check_accepting()
    prompt = await _prompt(state, new)
    # Both may have changed while the prompt was made on a thread.
    state.lifecycle.check_accepting()
    if session.deleted:
        raise session_deleted()
    generation = Generation.submit(
        state.engine,
        [prompt.ids],
        params,
        namespace=session.namespace,
        metrics=state.metrics,
        grammar=grammar,
        param=param,
        use=use_of(request),
    )
    try:
        session.active = generation
        draft = session.add_draft(prompt.ids)
        state.request_ids.remember(generation.id, 1, request[REQUEST_ID], session.id)
        state.history.report(generation.id, prompt.report)
        turn = PendingTurn(state, new, ticket, prompt.ids, draft, params)
        shape = ChatShape(
            id=f"chatcmpl-{generation.id}",
            model=state.model_name,
            usage=UsageMode.from_options(body.stream_options),
        )
        tokens = state.engine.tokenizer
        dialogue = Dialogue(state, generation, prompt, plan, params)
        if body.stream:
            chunks = _chunks(request, dialogue, shape, tokens, turn)
            return await stream_chunks(request, state.config, chunks)
        await dialogue.run(request)
        whole = shape.whole(dialogue.readers, tokens, logprobs=params.logprobs is not None)
        return json_response({**whole, "session": await turn.commit(dialogue.readers[0])})
    finally:
        generation.close()


async def _prompt(state: ServerState, new: NewTurn) -> ChatPrompt:
    session = new.session
    if session.turns:
        return ChatPrompt(await next_prompt(state.engine, state.prompts, session, new.messages))
    system = [{"role": "system", "content": new.system}] if new.system else []
    return await encode_chat(
        state.prompts, state.history, session.namespace, [*system, *new.messages], new.tools
    )


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
    yield shape.finish_chunk(0, readers, session=await turn.commit(reader))
    if shape.usage.at_end:
        yield shape.usage_chunk(dialogue.answers)


def _posted_messages(body: SessionTurn, *, supports_tools: bool) -> list[TemplateMessage]:
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
            raise refuse_role(given[0], message.role)
    return template_messages(messages, supports_tools=supports_tools, field=given[0])


def _refuse(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
