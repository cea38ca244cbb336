"""Responses that were given, for `previous_response_id` and to be read again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
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

    @property
    def tenant(self) -> str:
        """Who may see it."""
        return self.namespace[0] if self.namespace else ""

    def items(self) -> Iterator[dict[str, Any]]:
        """Yield what it was given and what it answered, each with an id."""
        yield from self.input_items
        yield from self.body["output"]


class ResponseStore:
    """The responses used latest, in memory: bounded by number and by the characters they hold.

    Unlike sessions they are dropped rather than refused: a client stores one by saying nothing.
    Event loop only.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, max_chars: int = MAX_CHARS) -> None:
        self._max_responses = max_responses
        self._max_chars = max_chars
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        # By tenant and id: ids of input items are the clients' own.
        self._items: dict[tuple[str, str], dict[str, Any]] = {}
        self.num_chars = 0

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, response: StoredResponse) -> None:
        """Keep a response; those used longest ago go if there are too many."""
        self._responses[response.id] = response
        self.num_chars += response.num_chars
        for item in response.items():
            self._items[response.tenant, item["id"]] = item
        while len(self._responses) > self._max_responses or self.num_chars > self._max_chars:
            _, dropped = self._responses.popitem(last=False)
            self._forget(dropped)

    def get(self, response_id: str, tenant: str, param: str) -> StoredResponse:
        """Return a tenant's response, and mark it used.

        Raises:
            ApiError: 404, there is none such: never stored, deleted, dropped, another tenant's.
        """
        response = self._responses.get(response_id)
        if response is None or response.tenant != tenant:
            raise ApiError(
                404,
                f"There is no response {response_id[:64]!r}; it was not stored, or not used for "
                "so long that it was dropped",
                param=param,
                code="response_not_found",
            )
        self._responses.move_to_end(response_id)
        return response

    def item(self, item_id: str, tenant: str, param: str) -> dict[str, Any]:
        """Return an item of a tenant's responses, the latest with that id.

        Raises:
            ApiError: 404, no stored response has it.
        """
        item = self._items.get((tenant, item_id))
        if item is None:
            raise ApiError(
                404,
                f"There is no item {item_id[:64]!r} in the stored responses",
                param=param,
                code="item_not_found",
            )
        return item

    def delete(self, response: StoredResponse) -> None:
        """Forget a response."""
        if self._responses.pop(response.id, None) is not None:
            self._forget(response)

    def _forget(self, response: StoredResponse) -> None:
        self.num_chars -= response.num_chars
        for item in response.items():
            key = response.tenant, item["id"]
            if self._items.get(key) is item:
                del self._items[key]
