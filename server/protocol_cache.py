"""The bodies of the routes that pin, warm and flush; types are strict, as in `protocol`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from radixkv.engine import namespace_of
from radixkv.request import Namespace
from radixkv.server.auth import make_namespace
from radixkv.server.errors import ApiError
from radixkv.server.field_limits import PinTtl, Tools
from radixkv.server.protocol import Messages

__all__ = ["FlushRequest", "PinRequest", "PromptFields", "SessionPinRequest", "WarmRequest"]

MAX_LABEL_CHARS = 2048


class PlaceFields(msgspec.Struct, kw_only=True):
    """Which namespace is meant: that of a caller's `cache_salt`, or one by its label."""

    cache_salt: str | None = None
    namespace: str | None = None

    def place(self, tenant: str) -> Namespace:
        """Return the namespace; that of `tenant`'s own requests without a salt if none is named.

        Raises:
            ApiError: 400, both are given, or one that can't be.
        """
        if self.namespace is None:
            return make_namespace(tenant, self.cache_salt)
        if self.cache_salt is not None:
            raise ApiError(
                400,
                "at most one of namespace and cache_salt may be set",
                param="namespace",
                code="invalid_value",
            )
        if not 0 < len(self.namespace) <= MAX_LABEL_CHARS:
            raise ApiError(
                400,
                "namespace must be a label as /admin/cache shows it",
                param="namespace",
                code="invalid_value",
            )
        return namespace_of(self.namespace)


class PromptFields(PlaceFields, kw_only=True):
    """A prompt, as text or token ids, or as messages; exactly one of the two."""

    prompt: str | list[int] | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None


class PinRequest(PromptFields, kw_only=True):
    """The body of `POST /admin/cache/pin`: a prompt, or the id of a session."""

    session: str | None = None
    ttl_seconds: PinTtl | None = None


class WarmRequest(PromptFields, kw_only=True):
    """The body of `POST /admin/cache/warm`; `ttl_seconds` pins what was computed."""

    ttl_seconds: PinTtl | None = None
    cache_priority: Annotated[int, Meta(ge=0, le=1_000)] | None = None


class SessionPinRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/sessions/{id}/pin`."""

    ttl_seconds: PinTtl | None = None


class FlushRequest(PlaceFields, kw_only=True):
    """The body of `POST /admin/cache/flush`; without either field all is flushed."""
