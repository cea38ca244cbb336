"""The routes under `/v1/sessions` that manage sessions; turns are in `turns`, pins in `pins`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiohttp import web

from radixkv.engine import SessionUsage
from radixkv.server.auth import make_namespace, tenant_of
from radixkv.server.body import json_response, read_json
from radixkv.server.errors import ApiError
from radixkv.server.messages import join_content, template_tools, tools_chars
from radixkv.server.protocol import SessionCreate, SessionFork, SessionRollback
from radixkv.server.queries import query_number
from radixkv.server.session_cache import SessionPast, release_past, usage_of
from radixkv.server.session_pins import renew_pin
from radixkv.server.sessions import Session
from radixkv.server.state import STATE, ServerState

__all__ = [
    "create_session",
    "delete_session",
    "fork_session",
    "get_session",
    "list_messages",
    "list_sessions",
    "roll_back_session",
    "session_of",
]

MAX_LIST = 1000
MAX_METADATA_KEYS = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512


async def create_session(request: web.Request) -> web.Response:
    """`POST /v1/sessions`: open a session; the body may be empty."""
    state = request.app[STATE]
    body = await read_json(
        request,
        SessionCreate,
        max_bytes=state.config.max_body_bytes,
        timeout_s=state.config.body_timeout_s,
        allow_empty=True,
    )
    state.check_model(body.model)
    system = join_content(body.system, "system")
    state.prompts.check_chars(len(system), "system")
    tools = template_tools(body.tools)
    # Kept for the life of the session, so what could never fit a prompt is refused here.
    state.prompts.check_chars(tools_chars(tools), "tools")
    session = state.sessions.create(
        make_namespace(tenant_of(request), body.cache_salt),
        system=system or None,
        tools=tools,
        metadata=_checked_metadata(body.metadata),
    )
    return await _answer(state, session)


async def list_sessions(request: web.Request) -> web.Response:
    """`GET /v1/sessions?limit=100&after=<id>`: the caller's sessions, latest used first."""
    state = request.app[STATE]
    limit = query_number(request, "limit", 100, 1, MAX_LIST)
    sessions = state.sessions.list(tenant_of(request))
    after = request.query.get("after")
    if after is not None:
        ids = [session.id for session in sessions]
        sessions = sessions[ids.index(after) + 1 :] if after in ids else []
    page = sessions[:limit]
    return json_response(
        {
            "object": "list",
            "data": await _objects(state, page),
            "has_more": len(sessions) > len(page),
        }
    )


async def get_session(request: web.Request) -> web.Response:
    """`GET /v1/sessions/{id}`: the session with its system prompt, tools and history."""
    session = session_of(request)
    (shown,) = await _objects(request.app[STATE], [session])
    return json_response(
        {
            **shown,
            "system": session.system,
            "tools": session.tools,
            "messages": session.messages,
        }
    )


async def list_messages(request: web.Request) -> web.Response:
    """`GET /v1/sessions/{id}/messages`: the history, oldest first."""
    session = session_of(request)
    return json_response({"object": "list", "data": session.messages, "has_more": False})


async def fork_session(request: web.Request) -> web.Response:
    """`POST /v1/sessions/{id}/fork`: a second session with the same past."""
    state = request.app[STATE]
    body = await read_json(
        request,
        SessionFork,
        max_bytes=state.config.max_body_bytes,
        timeout_s=state.config.body_timeout_s,
        allow_empty=True,
    )
    metadata = None if body.metadata is None else _checked_metadata(body.metadata)
    child = state.sessions.fork(session_of(request), at_turn=body.at_turn, metadata=metadata)
    return await _answer(state, child)


async def roll_back_session(request: web.Request) -> web.Response:
    """`POST /v1/sessions/{id}/rollback`: drop the turns after one, and what only they cached."""
    state = request.app[STATE]
    body = await read_json(
        request,
        SessionRollback,
        max_bytes=state.config.max_body_bytes,
        timeout_s=state.config.body_timeout_s,
    )
    session = session_of(request)
    past = SessionPast.of(session)
    state.sessions.roll_back(session, to_turn=body.to_turn)
    freed = await release_past(state, past)
    if past.pin_id is not None and past.pin_id == session.pin_id:
        # It held dropped turns, too; what is left gets one for as long.
        session.pin_id = None
        await renew_pin(state, session)
    return await _answer(state, session, freed_blocks=freed)


async def delete_session(request: web.Request) -> web.Response:
    """`DELETE /v1/sessions/{id}`: forget the session, abort its turn, free what only it cached."""
    session, state = session_of(request), request.app[STATE]
    past = SessionPast.of(session)
    state.sessions.delete(session)
    freed = await release_past(state, past)
    return json_response(
        {
            "id": session.id,
            "object": "session.deleted",
            "deleted": True,
            "freed_blocks": freed,
            **_saved_field(await state.sessions.saved(session)),
        }
    )


def session_of(request: web.Request) -> Session:
    """Return the session named in the path, if it is the caller's.

    Raises:
        ApiError: 404.
    """
    state = request.app[STATE]
    return state.sessions.get(request.match_info["session_id"], tenant_of(request))


async def _answer(state: ServerState, session: Session, **fields: Any) -> web.Response:
    """Return the session's object once it is on the disk, or the disk has had its time."""
    saved = await state.sessions.saved(session)
    (shown,) = await _objects(state, [session])
    return json_response({**shown, **fields, **_saved_field(saved)})


async def _objects(state: ServerState, sessions: Sequence[Session]) -> list[dict[str, Any]]:
    usage = await usage_of(state, sessions)
    return [_session_object(state, s, u) for s, u in zip(sessions, usage, strict=True)]


def _session_object(
    state: ServerState, session: Session, usage: SessionUsage | None
) -> dict[str, Any]:
    return {
        "id": session.id,
        "object": "session",
        "created": int(session.created),
        "model": session.model or state.model_name,
        "num_turns": len(session.turns),
        "num_messages": session.num_messages,
        "num_tokens": session.num_tokens,
        "busy": session.busy,
        "parent": session.parent,
        "metadata": session.metadata,
        "last_used": session.last_used,
        "expires": state.sessions.expires_at(session),
        "cache": None
        if usage is None
        else {
            "cached_tokens": usage.cached_tokens,
            "cached_blocks": usage.cached_blocks,
            "private_blocks": usage.private_blocks,
        },
    }


def _saved_field(saved: bool | None) -> dict[str, bool]:
    return {} if saved is None else {"saved": saved}


def _checked_metadata(metadata: dict[str, str] | None) -> dict[str, str]:
    metadata = metadata or {}
    small = len(metadata) <= MAX_METADATA_KEYS and all(
        len(key) <= MAX_METADATA_KEY_CHARS and len(value) <= MAX_METADATA_VALUE_CHARS
        for key, value in metadata.items()
    )
    if not small:
        raise ApiError(
            400,
            f"metadata must have at most {MAX_METADATA_KEYS} keys of {MAX_METADATA_KEY_CHARS} "
            f"characters with values of {MAX_METADATA_VALUE_CHARS} characters",
            param="metadata",
            code="invalid_value",
        )
    return metadata
