"""A light client for load tests on gevent: reads event streams line by line as they come."""

from __future__ import annotations

import json
import time
from typing import Any

from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPParseError
from geventhttpclient.url import URL

from loadtests.openai_client import Sample, finish_sample, read_event

__all__ = ["StreamClient"]

# The socket's and the parser's; a time limit is an OSError.
FAILURES = (OSError, HTTPParseError, ValueError)
MAX_CONNECTIONS = 64  # of one user, for what it asks at once


class StreamClient:
    """Owns one user's connections to a server."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        """Make a client; nothing is opened yet.

        Args:
            url: of the server, with or without `/v1`.
            api_key: sent as a bearer token.
            timeout_s: the longest silence of a server.
        """
        base = url.rstrip("/").removesuffix("/v1")
        self._path = URL(base).path.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._http = HTTPClient.from_url(
            base,
            concurrency=MAX_CONNECTIONS,
            connection_timeout=30.0,
            network_timeout=timeout_s,
        )

    def stream(self, route: str, body: dict[str, Any]) -> Sample:
        """Send a request for a streamed answer and read it to its end; failures are in `error`."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        sample = Sample()
        begin = time.perf_counter()
        try:
            response = self._send("POST", route, body)
            if response.status_code != 200:
                sample.error = f"{response.status_code}: {_reason(response.read())}"
            else:
                while line := response.readline(b"\n"):
                    if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                        event = json.loads(line[6:])
                        read_event(sample, event, time.perf_counter() - begin)
            response.release()
        except FAILURES as error:
            sample.error = f"{type(error).__name__}: {error}"
        sample.latency = time.perf_counter() - begin
        finish_sample(sample)
        return sample

    def request(self, method: str, route: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request and return the JSON of its answer, {} if it has none.

        Raises:
            ConnectionError: the server is gone, or its answer is not a success.
        """
        try:
            response = self._send(method, route, body)
            content = bytes(response.read())
            response.release()
            if response.status_code >= 400:
                raise ConnectionError(f"{response.status_code}: {_reason(content)}")
            return json.loads(content) if content else {}
        except FAILURES as error:
            raise ConnectionError(f"{method} {route}: {error}") from error

    def close(self) -> None:
        """Close all connections; the server ends what still runs."""
        self._http.close()

    def _send(self, method: str, route: str, body: dict[str, Any] | None) -> Any:
        data = b"" if body is None else json.dumps(body).encode()
        return self._http.request(method, f"{self._path}{route}", body=data, headers=self._headers)


def _reason(content: bytes) -> str:
    """Return the message of an error's body, or its beginning."""
    text = bytes(content).decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return text[:300]
