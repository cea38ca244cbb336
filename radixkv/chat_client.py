"""A running server, as `radixkv chat` talks to it: plain HTTP, whole answers and streams."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator
from contextlib import closing
from typing import Any

from radixkv.errors import RadixKVError

__all__ = ["ChatClient", "ServerError", "ServerGoneError"]

# Longer than the pauses between a stream's keep-alive comments, however long the prompt.
TIMEOUT_S = 60.0
EVENT = b"data: "
DONE = b"[DONE]"


class ServerGoneError(RadixKVError):
    """The server can't be reached, or an answer broke off; the message is for the user."""


class ServerError(RadixKVError):
    """The server refused, or failed; the message is its own.

    Attributes:
        code: machine-readable reason, or None.
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class ChatClient:
    """Sends requests to one server. One at a time."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Take the server's address.

        Raises:
            RadixKVError: it is none of HTTP.
        """
        if not url.startswith(("http://", "https://")):
            raise RadixKVError(f"--url must begin with http:// or https://, got {url!r}")
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def call(self, method: str, path: str, body: Any = None, **query: Any) -> dict[str, Any]:
        """Return the JSON body of an answer.

        Raises:
            ServerError: it is not a success.
            ServerGoneError: there is none.
        """
        try:
            with self._open(method, path, body, query) as response:
                answer: dict[str, Any] = json.load(response)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._gone(error) from None
        return answer

    def stream(self, path: str, body: Any) -> Generator[dict[str, Any], None, None]:
        """Yield the events of a streamed answer; closing the iterator hangs up.

        Raises:
            ServerError: the server refused, or failed on the way.
            ServerGoneError: it can't be reached, or the stream broke off.
        """
        try:
            with closing(self._open("POST", path, body, {})) as response:
                for line in response:
                    data = line.removeprefix(EVENT).strip()
                    if not line.startswith(EVENT):
                        continue
                    if data == DONE:
                        return
                    event = json.loads(data)
                    if "error" in event:
                        raise _server_error(event)
                    yield event
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._gone(error) from None
        raise ServerGoneError(f"{self.url} hung up in the middle of an answer")

    def _open(self, method: str, path: str, body: Any, query: dict[str, Any]) -> Any:
        address = self.url + path
        if query:
            address += "?" + urllib.parse.urlencode(query)
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(address, data, self._headers, method=method)
        try:
            return urllib.request.urlopen(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(error) from None

    def _gone(self, error: Exception) -> ServerGoneError:
        reason = getattr(error, "reason", None) or error
        return ServerGoneError(f"{self.url} can't be reached: {reason}")


def _refusal(error: urllib.error.HTTPError) -> RadixKVError:
    try:
        return _server_error(json.load(error))
    except (ValueError, KeyError, TypeError, OSError):
        return ServerError(f"the server answers {error.code} {error.reason}")


def _server_error(body: dict[str, Any]) -> ServerError:
    return ServerError(str(body["error"]["message"]), body["error"].get("code"))
