"""What belongs to the HTTP request being answered, wherever in the server that happens.

A context variable, since log lines can't be given it as an argument.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from radixkv.request import SamplingParams
from radixkv.server.request_log import RequestLog, RequestRecord, Timed

if TYPE_CHECKING:
    from radixkv.server.generation import Answer

__all__ = ["APIS", "RequestScope", "current_scope", "enter_scope", "leave_scope"]

# What an answer's id begins with, by the API that gives it.
APIS = {
    "chat": "chatcmpl-",
    "completions": "cmpl-",
    "responses": "resp_",
    "messages": "msg_",
    "session": "chatcmpl-",
    "warm": "",
}
ROUTES = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/sessions/{session_id}/messages": "session",
    "/admin/cache/warm": "warm",
}


@dataclass(slots=True, kw_only=True)
class RequestScope:
    """One HTTP request from its arrival to its end.

    Attributes:
        request_id: its `X-Request-ID`.
        method, route: how it was asked for; the route is a pattern, never the client's path.
        model: the one that is served.
        headers: the client's.
        log: where requests to the engine are noted.
        log_prompts: prompts are logged.
        tenant: who asks, once that is known.
        session_id: of the session whose turn it is.
        params: of its requests to the engine, if there are any.
        records: these requests.
        body_bytes: bytes of the body sent so far, of a stream.
    """

    request_id: str
    method: str
    route: str
    model: str
    headers: Mapping[str, str]
    log: RequestLog
    log_prompts: bool = False
    tenant: str = ""
    session_id: str | None = None
    params: SamplingParams | None = None
    records: list[RequestRecord] = field(default_factory=list)
    body_bytes: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def api(self) -> str | None:
        """Which API it is; None for a route that doesn't generate."""
        return ROUTES.get(self.route) if self.method == "POST" else None

    @property
    def response_id(self) -> str | None:
        """The id of the answer, if the engine has taken a request for it."""
        if not self.records:
            return None
        first = self.records[0].id
        return first if len(self.records) == 1 else first.removesuffix("-0")

    def begin(
        self,
        names: Sequence[str],
        streams: Sequence[Timed],
        answers: Sequence[Sequence[Answer]],
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        namespace: str,
    ) -> None:
        """Note requests that the engine has accepted.

        Args:
            names: the engine's, one for each prompt.
            streams: of the same.
            answers: the choices of each.
            prompts: token ids; only their number is kept.
            params: of all.
            namespace: its label.
        """
        self.params = params
        api = self.api or "other"
        for name, stream, choices, prompt in zip(names, streams, answers, prompts, strict=True):
            record = RequestRecord(
                id=APIS.get(api, "") + name,
                engine_id=name,
                request_id=self.request_id,
                api=api,
                model=self.model,
                namespace=namespace,
                tenant=self.tenant,
                session_id=self.session_id,
                prompt_tokens=len(prompt),
                n=params.n,
            )
            self.log.begin(record, stream, choices)
            self.records.append(record)

    def end(self) -> None:
        """Note the end of all of them. Idempotent."""
        for record in self.records:
            self.log.end(record)


_CURRENT: ContextVar[RequestScope | None] = ContextVar("radixkv_request", default=None)


def current_scope() -> RequestScope | None:
    """Return the scope of the request that this task answers; None elsewhere."""
    return _CURRENT.get()


def enter_scope(scope: RequestScope) -> Token[RequestScope | None]:
    """Make `scope` the current one; give the result to `leave_scope`."""
    return _CURRENT.set(scope)


def leave_scope(token: Token[RequestScope | None]) -> None:
    """Undo `enter_scope`."""
    _CURRENT.reset(token)
