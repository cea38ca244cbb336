"""What the handlers share: one object per application, and no module globals."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

from radixkv.server.api_keys import KeyRing
from radixkv.server.config import ServerConfig
from radixkv.server.cors import BrowserRules
from radixkv.server.errors import ApiError
from radixkv.server.history import AnswerHistory
from radixkv.server.limits import RateLimits
from radixkv.server.metrics import Metrics
from radixkv.server.prompts import PromptBuilder
from radixkv.server.request_ids import RequestIds
from radixkv.server.request_log import RequestLog
from radixkv.server.response_store import ResponseStore
from radixkv.server.sessions import SessionStore
from radixkv.server.timeline import Timeline
from radixkv.server.tool_parsers import FAMILIES, ToolFamily
from radixkv.server.tracing import RequestTracer

if TYPE_CHECKING:
    from radixkv.engine import AsyncEngine

__all__ = ["REQUEST_ID", "STATE", "Lifecycle", "ServerState"]


@dataclass(slots=True)
class Lifecycle:
    """Whether the server takes new work, and what it is working on.

    Attributes:
        draining: goes from False to True once.
        handlers: the tasks of requests being answered, so that a shutdown can wait for them.
        hurry: set by a second stop signal: whoever waits for an end in good order gives up.
    """

    draining: bool = False
    handlers: set[asyncio.Task[object]] = field(default_factory=set)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)

    def check_accepting(self) -> None:
        """Refuse new work while draining.

        Raises:
            ApiError: 503.
        """
        if self.draining:
            raise ApiError(
                503,
                "The server is shutting down and takes no new requests",
                code="shutting_down",
                headers={"Retry-After": "5"},
            )


@dataclass(frozen=True, slots=True)
class ServerState:
    """The engine and everything around it that outlives a request."""

    engine: AsyncEngine
    config: ServerConfig
    model_name: str
    created: int
    metrics: Metrics
    prompts: PromptBuilder
    sessions: SessionStore
    lifecycle: Lifecycle
    timeline: Timeline
    tools: ToolFamily = FAMILIES["generic"]
    request_ids: RequestIds = field(default_factory=RequestIds)
    history: AnswerHistory = field(default_factory=AnswerHistory)
    responses: ResponseStore = field(default_factory=ResponseStore)
    requests: RequestLog = field(default_factory=RequestLog)
    tracer: RequestTracer | None = None
    keys: KeyRing = field(default_factory=KeyRing)
    limits: RateLimits = field(default_factory=RateLimits)
    browsers: BrowserRules = field(default_factory=BrowserRules)

    def check_model(self, model: str | None) -> None:
        """Refuse a model that is not served; None stands for the one that is.

        Raises:
            ApiError: 404, code model_not_found.
        """
        if model is not None and model != self.model_name:
            raise ApiError(
                404,
                f"The model {model[:128]!r} does not exist; this server has {self.model_name!r}",
                param="model",
                code="model_not_found",
            )


STATE = web.AppKey("state", ServerState)
REQUEST_ID = web.RequestKey("request_id", str)
