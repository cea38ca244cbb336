"""Routes that show what is in the cache, and why requests missed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import web

from radixkv.engine import namespace_label
from radixkv.errors import RequestRejectedError
from radixkv.request import Namespace
from radixkv.server.auth import make_namespace, tenant_of
from radixkv.server.body import json_response, read_json
from radixkv.server.errors import ApiError, api_error_from
from radixkv.server.history import encode_chat
from radixkv.server.messages import template_messages, template_tools
from radixkv.server.prompts import INLINE_CHARS
from radixkv.server.protocol import ExplainRequest
from radixkv.server.protocol_cache import PromptFields
from radixkv.server.queries import query_flag, query_number
from radixkv.server.state import STATE, ServerState

if TYPE_CHECKING:
    from radixkv.engine import Explanation, RequestExplanation

__all__ = [
    "cache_tree",
    "explain_prompt",
    "explain_request",
    "latest_misses",
    "prompt_ids",
]

MAX_MISSES = 1000
MAX_DEPTH = 64
MAX_BREADTH = 1000
# The sessions used latest are looked for in the tree.
MAX_SESSIONS = 100
# Texts are decoded on a thread from this many nodes on.
INLINE_NODES = 64


async def explain_request(request: web.Request) -> web.Response:
    """`GET /admin/cache/explain/{request}`: what a request found, and why no more."""
    state = request.app[STATE]
    index = query_number(request, "index", 0, 0, state.config.max_prompts - 1)
    name = request.match_info["request"]
    entry = state.engine.explain(state.request_ids.resolve(name, index))
    if entry is None:
        raise ApiError(
            404,
            f"There is no explanation for {name[:128]!r}: it was not admitted yet, "
            "or too many requests came after it",
            param="request",
            code="not_found",
        )
    return json_response(_request_object(state, entry, reveal=query_flag(request, "reveal")))


async def latest_misses(request: web.Request) -> web.Response:
    """`GET /admin/cache/misses?limit=20`: the latest requests that had to compute, latest first."""
    state = request.app[STATE]
    limit = query_number(request, "limit", 20, 1, MAX_MISSES)
    reveal = query_flag(request, "reveal")
    entries = state.engine.recent_explanations(limit, misses_only=True)

    def work() -> list[dict[str, Any]]:
        return [_request_object(state, entry, reveal=reveal) for entry in entries]

    data = await state.prompts.offload(_work_chars(len(entries)), work)
    return json_response({"object": "list", "data": data})


async def explain_prompt(request: web.Request) -> web.Response:
    """`POST /admin/cache/explain`: what a prompt would find now, without running it."""
    state = request.app[STATE]
    config = state.config
    body = await read_json(
        request, ExplainRequest, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s
    )
    namespace = make_namespace(tenant_of(request), body.cache_salt)
    ids = await prompt_ids(state, body, namespace)
    try:
        explanation = await state.engine.explain_prompt(ids, namespace)
    except RequestRejectedError as error:
        refusal = api_error_from(error)
        if refusal.status == 400:
            refusal.param = "prompt" if body.messages is None else "messages"
        raise refusal from error
    return json_response(
        {
            "object": "cache.explanation",
            "namespace": namespace_label(namespace),
            "prompt_tokens": len(ids),
            **_explanation_fields(state, explanation, reveal=body.reveal is True),
        }
    )


async def cache_tree(request: web.Request) -> web.Response:
    """`GET /admin/cache/tree?depth=4&breadth=10&namespace=`: the cached tree."""
    state = request.app[STATE]
    report = await state.engine.tree_report(
        query_number(request, "depth", 4, 1, MAX_DEPTH),
        query_number(request, "breadth", 10, 1, MAX_BREADTH),
        request.query.get("namespace"),
        # Copies, since a turn may end while the engine reads them.
        [
            (session.id, session.namespace, session.token_ids[:])
            for session in state.sessions.list(tenant_of(request))[:MAX_SESSIONS]
        ],
    )
    await state.prompts.offload(_work_chars(report["nodes"]), lambda: _add_texts(state, report))
    return json_response({"object": "cache.tree", "model": state.model_name, **report})


async def prompt_ids(
    state: ServerState, body: ExplainRequest | PromptFields, namespace: Namespace
) -> list[int]:
    """Return the ids of `prompt` or `messages`, as a completion or a chat would have them."""
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(
            400,
            "exactly one of prompt and messages must be set",
            param="prompt",
            code="invalid_value",
        )
    if body.messages is not None:
        prompt = await encode_chat(
            state.prompts,
            state.history,
            namespace,
            template_messages(body.messages, supports_tools=state.prompts.supports_tools),
            template_tools(body.tools),
            add_generation_prompt=body.add_generation_prompt is not False,
        )
        return prompt.ids
    if isinstance(body.prompt, str):
        return await state.prompts.encode_text(
            body.prompt, add_special_tokens=body.add_special_tokens is not False, param="prompt"
        )
    return body.prompt or []


def _request_object(
    state: ServerState, entry: RequestExplanation, *, reveal: bool
) -> dict[str, Any]:
    return {
        "object": "cache.explanation",
        "request": entry.request_id,
        "created": entry.created,
        "namespace": namespace_label(entry.namespace),
        "prompt_tokens": entry.num_prompt_tokens,
        "cached_tokens": entry.num_cached_tokens,
        "cached_by_tier": entry.cached_by_tier,
        "computed_tokens": entry.num_computed_tokens,
        **_explanation_fields(state, entry.explanation, reveal=reveal),
        **_history_fields(state, entry.request_id),
    }


def _history_fields(state: ServerState, request_id: str) -> dict[str, Any]:
    """Return what became of this server's own answers in the request's history."""
    report = state.history.report_of(request_id)
    if report is None:
        return {}
    history: dict[str, Any] = {
        "exact_answers": report.exact,
        "rewritten_messages": list(report.rewritten),
    }
    if report.rewritten:
        history["message"] = (
            f"messages[{report.rewritten[0]}] is an answer of this server, but the chat template "
            "renders it, or what comes before it, otherwise than when it was generated; from there "
            "on nothing that was computed then can match."
        )
    return {"history": history}


def _explanation_fields(
    state: ServerState, explanation: Explanation, *, reveal: bool
) -> dict[str, Any]:
    """Return what both kinds of explanation have in common."""
    fields: dict[str, Any] = {
        "hit": {
            "tokens": explanation.num_hit_tokens,
            "whole_blocks": explanation.num_block_tokens // state.engine.block_size,
            "partial_tokens": explanation.num_partial_tokens,
        },
        "reason": explanation.reason,
        "message": _message(explanation, state.engine.block_size),
        "position": explanation.position,
    }
    if explanation.prompt_after:
        fields["window"] = {
            "start": explanation.window_start,
            "prompt": _side(state, explanation.prompt_window, explanation),
            "cached": _side(state, explanation.cached_window, explanation),
        }
    if explanation.evicted_s is not None:
        fields["evicted"] = {
            "seconds_ago": explanation.evicted_s,
            "by": explanation.evicted_by,
        }
    if reveal and explanation.other_namespace is not None:
        fields["other_namespace"] = namespace_label(explanation.other_namespace)
    return fields


def _side(state: ServerState, ids: list[int], explanation: Explanation) -> dict[str, Any]:
    """Return one side of a window: the text up to the first miss, and the text from there."""
    split = explanation.position - explanation.window_start
    return {
        "before": state.prompts.decode(ids[:split], skip_special_tokens=False),
        "after": state.prompts.decode(ids[split:], skip_special_tokens=False),
        "token_ids": ids,
    }


def _message(explanation: Explanation, block_size: int) -> str:
    at = explanation.position
    match explanation.reason:
        case "complete":
            return "Every token that can be reused is cached."
        case "diverged":
            return f"The prompt equals a cached path up to token {at}, where the two differ."
        case "evicted":
            cause = (
                "dropped by a flush"
                if explanation.evicted_by == "flush"
                else f"evicted by the {explanation.evicted_by} policy"
            )
            return (
                f"The block after token {explanation.num_block_tokens} was cached, and {cause} "
                f"{explanation.evicted_s or 0.0:.1f} s ago."
            )
        case "other_namespace":
            return (
                f"What follows token {at} is cached under another namespace (another API key or "
                "cache_salt), where it can't be reused."
            )
        case "below_block":
            return (
                f"What follows token {at} is new, and shorter than a block of {block_size} tokens."
            )
        case "disabled":
            return "Prefix caching is off."
        case _:
            return f"What follows token {at} was never cached."


def _add_texts(state: ServerState, report: dict[str, Any]) -> None:
    """Decode the start of each edge of a tree report."""
    stack = [child for entry in report["namespaces"] for child in entry["children"]]
    while stack:
        node = stack.pop()
        node["text"] = state.prompts.decode(node.pop("token_ids"), skip_special_tokens=False)
        stack.extend(node["children"])


def _work_chars(count: int) -> int:
    return INLINE_CHARS + 1 if count > INLINE_NODES else 0
