"""The shapes of answers about sessions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

__all__ = [
    "AdminSessions",
    "RolledBack",
    "Session",
    "SessionDeleted",
    "SessionList",
    "SessionMessages",
    "SessionUnpinned",
    "SessionWithHistory",
]

Count = Annotated[int, Meta(ge=0)]


class SessionCache(msgspec.Struct, kw_only=True):
    """What of a session's history is cached, and the blocks that nothing but it has a use for."""

    cached_tokens: Count
    cached_blocks: Count
    private_blocks: Count


class Session(msgspec.Struct, kw_only=True):
    """A session: the size of its history, what it was forked of, and when it is dropped.

    Times are in seconds since 1970. `saved` is there if sessions are kept on disk.
    """

    id: str
    object: Literal["session"]
    created: int
    model: str
    num_turns: Count
    num_messages: Count
    num_tokens: Count
    busy: bool
    parent: str | None
    metadata: dict[str, str]
    last_used: float
    expires: float
    cache: SessionCache | None
    saved: bool | UnsetType = UNSET


class RolledBack(Session, kw_only=True):
    """A session whose last turns are gone, and the blocks that only they had a use for."""

    freed_blocks: Count


class SessionWithHistory(Session, kw_only=True):
    """A session with its system prompt, its tools, and the messages of its history."""

    system: str | None
    tools: list[dict[str, Any]] | None
    messages: list[dict[str, Any]]


class SessionList(msgspec.Struct, kw_only=True):
    """The caller's sessions, latest used first."""

    object: Literal["list"]
    data: list[Session]
    has_more: bool


class SessionMessages(msgspec.Struct, kw_only=True):
    """The history of a session, oldest first, in the form of the chat template."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    has_more: Literal[False]


class SessionDeleted(msgspec.Struct, kw_only=True):
    """A session that is forgotten."""

    id: str
    object: Literal["session.deleted"]
    deleted: Literal[True]
    freed_blocks: Count
    saved: bool | UnsetType = UNSET


class SessionUnpinned(msgspec.Struct, kw_only=True):
    """Whether a session had a pin."""

    id: str
    object: Literal["session.unpinned"]
    unpinned: bool


class SessionRow(msgspec.Struct, kw_only=True):
    """Whose a session is, how large it is, and what it holds in the cache."""

    id: str
    tenant: str
    namespace: str
    created_at: float
    last_used_at: float
    expires_at: float
    pinned_until: float | None
    turns: Count
    tokens: Count
    cached_tokens: Count
    cached_blocks: Count
    private_blocks: Count
    bytes: Count
    busy: bool


class AdminSessions(msgspec.Struct, kw_only=True):
    """Sessions of all tenants, and how many there are."""

    object: Literal["list"]
    data: list[SessionRow]
    total: Count
