"""Responses that were given, for `previous_response_id` and to be read again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.request import Namespace
from radixkv.server.errors import ApiError
from radixkv.server.protocol import Message

__all__ = ["ResponseStore", "StoredResponse"]

MAX_RESPONSES = 10_000
MAX_CHARS = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response.

    Attributes:
        namespace: of the cache, whose tenant owns the response.
        body: the response object.
        input_items: of this request, each with an id.
        messages: the conversation up to and with the answer, without instructions.
        num_chars: about the characters of text in it.
    """

    namespace: Namespace
    body: dict[str, Any]
    input_items: list[dict[str, Any]]
    messages: Sequence[Message]
    num_chars: int

    @property
    def id(self) -> str:
        """Its id."""
        return str(self.body["id"])


class ResponseStore:
    """The responses used latest, in memory: bounded by number and by the characters they hold.

    Unlike sessions they are dropped rather than refused: a client stores one by saying nothing.
    Event loop only.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, max_chars: int = MAX_CHARS) -> None:
        self._max_responses = max_responses
        self._max_chars = max_chars
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_chars = 0

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, response: StoredResponse) -> None:
        """Keep a response; those used longest ago go if there are too many."""
        self._responses[response.id] = response
        self.num_chars += response.num_chars
        while len(self._responses) > self._max_responses or self.num_chars > self._max_chars:
            _, dropped = self._responses.popitem(last=False)
            self.num_chars -= dropped.num_chars

    def get(self, response_id: str, tenant: str, param: str) -> StoredResponse:
        """Return a tenant's response, and mark it used.

        Raises:
            ApiError: 404, there is none such: never stored, deleted, dropped, another tenant's.
        """
        response = self._responses.get(response_id)
        if response is None or (response.namespace[0] if response.namespace else "") != tenant:
            raise ApiError(
                404,
                f"There is no response {response_id[:64]!r}; it was not stored, or not used for "
                "so long that it was dropped",
                param=param,
                code="response_not_found",
            )
        self._responses.move_to_end(response_id)
        return response

    def delete(self, response: StoredResponse) -> None:
        """Forget a response."""
        if self._responses.pop(response.id, None) is not None:
            self.num_chars -= response.num_chars
