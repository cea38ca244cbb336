"""What each route takes and gives; a new route is declared by one entry of `ROUTES`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from radixkv.server import answer_types as answers
from radixkv.server import answer_types_agents as agents
from radixkv.server import answer_types_cache as cache
from radixkv.server import answer_types_engine as engine
from radixkv.server import answer_types_sessions as sessions
from radixkv.server import openapi_queries as queries
from radixkv.server import protocol, protocol_anthropic, protocol_cache, protocol_responses
from radixkv.server.tokenize_routes import DetokenizeRequest, TokenizeRequest

__all__ = ["ROUTES", "TAGS", "Route"]

TAGS = {
    "openai": "OpenAI's API, with a few fields more.",
    "responses": "OpenAI's Responses API.",
    "anthropic": "Anthropic's Messages API.",
    "tokens": "Texts to tokens, and back.",
    "sessions": "Conversations whose exact tokens the server keeps.",
    "cache": "What is in the cache, what is kept there, and why requests missed.",
    "operating": "For the one who runs the server.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What a route takes and gives, beside what its path and method say already.

    Every route may answer 403 and 500; one that needs a key 401, and a POST of such a kind 503 and,
    but for those of admins, 429; one with a body 400, 408, 413 and 415, one with a query 400, and
    one with a name in its path 404.

    Attributes:
        tag: one of `TAGS`.
        answer: type of the body, or a media type other than JSON; None: there is no body.
        body: type the request's body is decoded as; None if it isn't read.
        body_required: False if no body counts as `{}`.
        query: type whose fields are the parameters of the query.
        events: type of an event's data, if the answer may be streamed.
        generates: it runs the model, so that it may also answer 429, 503 and 504.
        errors: further statuses it may answer.
        error: type of the body of these.
        answers: the same by status, for statuses that have a body of their own; several types in a
            tuple.
        success: the status of success; None if there is none.
        makes: the name in other paths that the `id` of the answer can stand for.
    """

    tag: str
    answer: Any
    body: type[msgspec.Struct] | None = None
    body_required: bool = True
    query: type[msgspec.Struct] | None = None
    events: Any = None
    generates: bool = False
    errors: tuple[int, ...] = ()
    error: type[msgspec.Struct] = answers.ErrorAnswer
    answers: Mapping[int, Any] = field(default_factory=dict)
    success: int | None = 200
    makes: str | None = None

    def types(self) -> Iterator[Any]:
        """Yield the types whose schemas the route needs."""
        own = [kind for kind in self.answers.values() if not isinstance(kind, tuple)]
        own += [one for kind in self.answers.values() if isinstance(kind, tuple) for one in kind]
        for kind in (self.answer, self.body, self.events, self.error, *own):
            if kind is not None and not isinstance(kind, str):
                yield kind


ROUTES: dict[str, Route] = {
    "POST /v1/chat/completions": Route(
        tag="openai",
        body=protocol.ChatRequest,
        answer=answers.ChatCompletion,
        events=answers.ChatChunk,
        generates=True,
        errors=(404, 409),
        makes="request",
    ),
    "POST /v1/completions": Route(
        tag="openai",
        body=protocol.CompletionRequest,
        answer=answers.Completion,
        events=answers.CompletionChunk,
        generates=True,
        errors=(404,),
        makes="request",
    ),
    "GET /v1/models": Route(tag="openai", answer=answers.ModelList),
    "GET /v1/models/{model}": Route(tag="openai", answer=answers.Model),
    "POST /v1/responses": Route(
        tag="responses",
        body=protocol_responses.ResponsesRequest,
        answer=agents.Response,
        events=agents.ResponseEvent,
        generates=True,
        errors=(404,),
        makes="response_id",
    ),
    "POST /v1/responses/input_tokens": Route(
        tag="responses",
        body=protocol_responses.ResponsesRequest,
        answer=agents.ResponseInputTokens,
        errors=(404,),
    ),
    "GET /v1/responses/{response_id}": Route(tag="responses", answer=agents.Response),
    "DELETE /v1/responses/{response_id}": Route(tag="responses", answer=agents.ResponseDeleted),
    "POST /v1/responses/{response_id}/cancel": Route(
        tag="responses", answer=None, success=None, errors=(400,)
    ),
    "GET /v1/responses/{response_id}/input_items": Route(
        tag="responses", query=queries.ItemsQuery, answer=agents.InputItems
    ),
    "POST /v1/messages": Route(
        tag="anthropic",
        body=protocol_anthropic.MessagesRequest,
        answer=agents.MessageAnswer,
        events=agents.MessageEvent,
        generates=True,
        errors=(404,),
        error=agents.AnthropicErrorAnswer,
        makes="request",
    ),
    "POST /v1/messages/count_tokens": Route(
        tag="anthropic",
        body=protocol_anthropic.CountTokensRequest,
        answer=agents.InputTokens,
        errors=(404,),
        error=agents.AnthropicErrorAnswer,
    ),
    "POST /tokenize": Route(
        tag="tokens", body=TokenizeRequest, answer=answers.Tokenized, errors=(404,)
    ),
    "POST /detokenize": Route(
        tag="tokens", body=DetokenizeRequest, answer=answers.Detokenized, errors=(404,)
    ),
    "POST /v1/sessions": Route(
        tag="sessions",
        body=protocol.SessionCreate,
        body_required=False,
        answer=sessions.Session,
        errors=(404, 429),
        makes="session_id",
    ),
    "GET /v1/sessions": Route(
        tag="sessions", query=queries.SessionsQuery, answer=sessions.SessionList
    ),
    "GET /v1/sessions/{session_id}": Route(tag="sessions", answer=sessions.SessionWithHistory),
    "DELETE /v1/sessions/{session_id}": Route(
        tag="sessions", answer=sessions.SessionDeleted, errors=(503,)
    ),
    "GET /v1/sessions/{session_id}/messages": Route(
        tag="sessions", answer=sessions.SessionMessages
    ),
    "POST /v1/sessions/{session_id}/messages": Route(
        tag="sessions",
        body=protocol.SessionTurn,
        answer=answers.SessionCompletion,
        events=answers.ChatChunk,
        generates=True,
        errors=(409,),
    ),
    "POST /v1/sessions/{session_id}/fork": Route(
        tag="sessions",
        body=protocol.SessionFork,
        body_required=False,
        answer=sessions.Session,
        errors=(429,),
        makes="session_id",
    ),
    "POST /v1/sessions/{session_id}/rollback": Route(
        tag="sessions",
        body=protocol.SessionRollback,
        answer=sessions.RolledBack,
        errors=(409,),
    ),
    "POST /v1/sessions/{session_id}/pin": Route(
        tag="sessions",
        body=protocol_cache.SessionPinRequest,
        body_required=False,
        answer=cache.SessionPin,
        errors=(409,),
        makes="pin",
    ),
    "POST /v1/sessions/{session_id}/unpin": Route(tag="sessions", answer=sessions.SessionUnpinned),
    "GET /health": Route(tag="operating", answer=answers.Health, answers={503: answers.Health}),
    "GET /metrics": Route(tag="operating", answer="text/plain"),
    "GET /openapi.json": Route(tag="operating", answer=dict[str, Any]),
    "GET /admin": Route(tag="operating", answer=None, success=308),
    "GET /admin/": Route(tag="operating", answer="text/html", answers={304: None}),
    "GET /admin/assets/{name}": Route(tag="operating", answer="*/*", answers={304: None}),
    "GET /admin/timeline": Route(
        tag="operating", query=queries.TimelineQuery, answer=engine.TimelineReport
    ),
    "GET /admin/cache": Route(tag="operating", answer=cache.CacheReport),
    "GET /admin/engine": Route(tag="operating", answer=engine.EngineReport),
    "GET /admin/check": Route(
        tag="operating",
        answer=cache.Checked,
        answers={500: (cache.NotIntact, answers.ErrorAnswer)},
        errors=(503,),
    ),
    "GET /admin/sessions": Route(
        tag="operating",
        query=queries.AdminSessionsQuery,
        answer=sessions.AdminSessions,
        errors=(503,),
    ),
    "GET /admin/requests": Route(
        tag="operating", query=queries.RequestsQuery, answer=engine.RequestReport
    ),
    "GET /admin/requests/{request}": Route(
        tag="operating", query=queries.RequestQuery, answer=engine.RequestDetail
    ),
    "GET /admin/cache/explain/{request}": Route(
        tag="cache", query=queries.ExplainQuery, answer=cache.RequestExplanation
    ),
    "POST /admin/cache/explain": Route(
        tag="cache", body=protocol.ExplainRequest, answer=cache.Explanation
    ),
    "GET /admin/cache/misses": Route(tag="cache", query=queries.MissesQuery, answer=cache.Misses),
    "GET /admin/cache/tree": Route(
        tag="cache", query=queries.TreeQuery, answer=cache.CacheTree, errors=(503,)
    ),
    "GET /admin/cache/pins": Route(tag="cache", answer=cache.PinList, errors=(503,)),
    "POST /admin/cache/pin": Route(
        tag="cache",
        body=protocol_cache.PinRequest,
        answer=cache.Pin,
        errors=(404, 409),
        makes="pin",
    ),
    "DELETE /admin/cache/pin/{pin}": Route(tag="cache", answer=cache.PinDeleted, errors=(503,)),
    "POST /admin/cache/warm": Route(
        tag="cache",
        body=protocol_cache.WarmRequest,
        answer=cache.Warmed,
        generates=True,
        makes="request",
    ),
    "POST /admin/cache/flush": Route(
        tag="cache",
        body=protocol_cache.FlushRequest,
        body_required=False,
        answer=cache.Flushed,
        errors=(409,),
    ),
    "POST /flush_cache": Route(tag="cache", answer=cache.Flushed, errors=(409,)),
    "GET /flush_cache": Route(tag="cache", answer=cache.Flushed, errors=(409, 503)),
}
