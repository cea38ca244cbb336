"""The routes under `/v1/sessions` that manage sessions; turns are in `turns`."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from radixkv.server.auth import make_namespace, tenant_of
from radixkv.server.body import json_response, read_json
from radixkv.server.errors import ApiError
from radixkv.server.messages import join_content, template_tools, tools_chars
from radixkv.server.protocol import SessionCreate, SessionFork
from radixkv.server.sessions import Session
from radixkv.server.state import STATE, ServerState

__all__ = [
    "create_session",
    "delete_session",
    "fork_session",
    "get_session",
    "list_messages",
    "list_sessions",
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
    return json_response(_session_object(session, state))


async def list_sessions(request: web.Request) -> web.Response:
    """`GET /v1/sessions?limit=100&after=<id>`: the caller's sessions, latest used first."""
    state = request.app[STATE]
    limit = _limit(request.query.get("limit", "100"))
    sessions = state.sessions.list(tenant_of(request))
    after = request.query.get("after")
    if after is not None:
        ids = [session.id for session in sessions]
        sessions = sessions[ids.index(after) + 1 :] if after in ids else []
    page = sessions[:limit]
    return json_response(
        {
            "object": "list",
            "data": [_session_object(session, state) for session in page],
            "has_more": len(sessions) > len(page),
        }
    )


async def get_session(request: web.Request) -> web.Response:
    """`GET /v1/sessions/{id}`: the session with its system prompt, tools and history."""
    session = session_of(request)
    return json_response(
        {
            **_session_object(session, request.app[STATE]),
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
    return json_response(_session_object(child, state))


async def delete_session(request: web.Request) -> web.Response:
    """`DELETE /v1/sessions/{id}`: forget the session; a turn being answered is aborted."""
    session, state = session_of(request), request.app[STATE]
    state.sessions.delete(session)
    if session.pin_id is not None:
        await state.engine.control.unpin(session.pin_id)
    return json_response({"id": session.id, "object": "session.deleted", "deleted": True})


def session_of(request: web.Request) -> Session:
    """Return the session named in the path, if it is the caller's.

    Raises:
        ApiError: 404.
    """
    state = request.app[STATE]
    return state.sessions.get(request.match_info["session_id"], tenant_of(request))


def _session_object(session: Session, state: ServerState) -> dict[str, Any]:
    return {
        "id": session.id,
        "object": "session",
        "created": session.created,
        "model": state.model_name,
        "num_turns": len(session.turns),
        "num_messages": len(session.messages),
        "num_tokens": len(session.token_ids),
        "busy": session.busy,
        "parent": session.parent,
        "metadata": session.metadata,
    }


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


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= MAX_LIST):
        raise ApiError(
            400,
            f"limit must be between 1 and {MAX_LIST}",
            param="limit",
            code="invalid_value",
        )
    return int(text[:9])
