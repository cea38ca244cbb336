"""Routes that keep prompts in the cache: pins, and prompts computed ahead of time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from radixkv.engine import namespace_label
from radixkv.errors import RequestRejectedError
from radixkv.request import SamplingParams, check_pin_ttl
from radixkv.server.admin_cache import prompt_ids
from radixkv.server.auth import tenant_of
from radixkv.server.body import json_response, read_json
from radixkv.server.errors import ApiError, api_error_from
from radixkv.server.generation import Generation
from radixkv.server.protocol_cache import PinRequest, SessionPinRequest, WarmRequest
from radixkv.server.session_routes import session_of
from radixkv.server.sessions import Session, session_deleted
from radixkv.server.state import REQUEST_ID, STATE, ServerState
from radixkv.server.streaming import run_to_end

if TYPE_CHECKING:
    from radixkv.engine import PinReport

__all__ = ["list_pins", "pin_prompt", "pin_session", "unpin", "unpin_session", "warm"]

DEFAULT_TTL_S = 3600.0
PREFIX = "pin_"
MAX_DIGITS = 18


async def list_pins(request: web.Request) -> web.Response:
    """`GET /admin/cache/pins`: every pin, most recently used first, and what pins may hold."""
    state = request.app[STATE]
    pins = await state.engine.control.pins()
    usage = state.engine.stats().pins
    return json_response(
        {"object": "list", "data": [_pin_object(pin) for pin in pins], "usage": usage}
    )


async def pin_prompt(request: web.Request) -> web.Response:
    """`POST /admin/cache/pin`: keep what is cached of a prompt, or of a session, for a while."""
    state = request.app[STATE]
    config = state.config
    body = await read_json(
        request, PinRequest, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s
    )
    ttl_s = _ttl(body.ttl_seconds)
    if body.session is not None:
        if any(
            v is not None for v in (body.prompt, body.messages, body.cache_salt, body.namespace)
        ):
            raise _refuse("session", "a session is pinned as it is: session stands alone")
        session = state.sessions.get(body.session, tenant_of(request))
        return json_response(await _pin_session(state, session, ttl_s))
    namespace = body.place(tenant_of(request))
    ids = await prompt_ids(state, body, namespace)
    _check_ids(state, ids)
    pin = await state.engine.control.pin(ids, namespace, ttl_s, source="prompt")
    if pin is None:
        raise _not_cached("prompt" if body.messages is None else "messages")
    return json_response({**_pin_object(pin), "prompt_tokens": len(ids)})


async def unpin(request: web.Request) -> web.Response:
    """`DELETE /admin/cache/pin/{id}`: give up a pin."""
    name = request.match_info["pin"]
    digits = name.removeprefix(PREFIX)
    known = name.startswith(PREFIX) and digits.isascii() and digits.isdecimal()
    if not (
        known
        and len(digits) <= MAX_DIGITS
        and await request.app[STATE].engine.control.unpin(int(digits))
    ):
        raise ApiError(
            404,
            f"There is no pin {name[:64]!r}; it may have expired, or given way to another",
            param="pin",
            code="not_found",
        )
    return json_response({"id": name, "object": "cache.pin.deleted", "deleted": True})


async def pin_session(request: web.Request) -> web.Response:
    """`POST /v1/sessions/{id}/pin`: keep what is cached of a session; the body may be empty."""
    state = request.app[STATE]
    body = await read_json(
        request,
        SessionPinRequest,
        max_bytes=state.config.max_body_bytes,
        timeout_s=state.config.body_timeout_s,
        allow_empty=True,
    )
    ttl_s = _ttl(body.ttl_seconds)
    return json_response(await _pin_session(state, session_of(request), ttl_s))


async def unpin_session(request: web.Request) -> web.Response:
    """`POST /v1/sessions/{id}/unpin`: give up the session's pin, if there still is one."""
    session = session_of(request)
    state, pin_id = request.app[STATE], session.pin_id
    state.sessions.pinned(session, None, None)
    held = pin_id is not None and await state.engine.control.unpin(pin_id)
    return json_response({"id": session.id, "object": "session.unpinned", "unpinned": held})


async def warm(request: web.Request) -> web.Response:
    """`POST /admin/cache/warm`: compute a prompt ahead of time, and pin it if wanted."""
    state = request.app[STATE]
    config = state.config
    body = await read_json(
        request, WarmRequest, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s
    )
    ttl_s = None if body.ttl_seconds is None else _ttl(body.ttl_seconds)
    try:
        params = SamplingParams(
            temperature=0,
            max_tokens=1,
            cache_pin_ttl=ttl_s,
            cache_priority=body.cache_priority or 0,
        )
    except RequestRejectedError as error:
        raise api_error_from(error) from error
    namespace = body.place(tenant_of(request))
    ids = await prompt_ids(state, body, namespace)
    state.lifecycle.check_accepting()
    generation = Generation.submit(
        state.engine,
        [ids],
        params,
        namespace=namespace,
        metrics=state.metrics,
        param="prompt" if body.messages is None else "messages",
    )
    state.request_ids.remember(generation.id, 1, request[REQUEST_ID])
    try:
        await run_to_end(request, config, generation)
    finally:
        generation.close()
    source = f"request {generation.id}"
    pins = [] if ttl_s is None else await state.engine.control.pins()
    answer = generation.answers[0]
    return json_response(
        {
            "object": "cache.warmed",
            "id": generation.id,
            "namespace": namespace_label(namespace),
            "prompt_tokens": answer.num_prompt_tokens,
            "cached_tokens": answer.num_cached_tokens,
            "computed_tokens": answer.num_prompt_tokens - answer.num_cached_tokens,
            "pin": next((_pin_object(pin) for pin in pins if pin.source == source), None),
        }
    )


async def _pin_session(state: ServerState, session: Session, ttl_s: float) -> dict[str, Any]:
    """Pin a session in the place of its last pin; return the pin's object."""
    ids, control = session.token_ids.tolist(), state.engine.control
    pin = await control.pin(ids, session.namespace, ttl_s, source=f"session {session.id}")
    if pin is None:
        raise _not_cached("session")
    if session.deleted:
        await control.unpin(pin.pin_id)
        raise session_deleted()
    before = session.pin_id
    state.sessions.pinned(session, pin.pin_id, ttl_s)
    if before is not None:
        await control.unpin(before)
    return {**_pin_object(pin), "session": session.id, "prompt_tokens": len(ids)}


def _pin_object(pin: PinReport) -> dict[str, Any]:
    return {
        "id": f"{PREFIX}{pin.pin_id}",
        "object": "cache.pin",
        "namespace": namespace_label(pin.namespace),
        "source": pin.source,
        "pinned_tokens": pin.num_tokens,
        "pinned_blocks": pin.num_blocks,
        "ttl_seconds": pin.ttl_s,
        "expires": round(time.time() + pin.expires_in_s, 3),
    }


def _ttl(seconds: float | None) -> float:
    """Return the seconds a pin shall last.

    Raises:
        ApiError: 400, out of range.
    """
    if seconds is None:
        return DEFAULT_TTL_S
    try:
        check_pin_ttl("ttl_seconds", seconds)
    except RequestRejectedError as error:
        raise api_error_from(error) from error
    return float(seconds)


def _check_ids(state: ServerState, ids: list[int]) -> None:
    vocab_size = state.engine.vocab_size
    if not ids:
        raise _refuse("prompt", "the prompt must not be empty")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise _refuse("prompt", f"token ids must be between 0 and {vocab_size - 1}")


def _not_cached(param: str) -> ApiError:
    return ApiError(
        404,
        f"No whole block of this {param.removesuffix('s')} is cached: run it first, or warm it "
        "with POST /admin/cache/warm",
        param=param,
        code="not_cached",
    )


def _refuse(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
