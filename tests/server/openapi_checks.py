"""A client that holds every answer to the OpenAPI document of its server."""

from __future__ import annotations

import json
import re
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match


class CheckedClient:
    """Sends requests, and fails if an answer is not what the document says, to the field.

    Attributes:
        seen: (method, path of the document, status, media type) of every answer.
    """

    def __init__(self, client: Any, document: dict[str, Any]) -> None:
        self.client = client
        self.document = document
        self.seen: set[tuple[str, str, int, str]] = set()
        self._strict = {"components": {"schemas": {}}}
        for name, schema in document["components"]["schemas"].items():
            # Clients must not mind a field more; here it is one that nobody declared.
            closed = {"additionalProperties": False} if "properties" in schema else {}
            self._strict["components"]["schemas"][name] = {**closed, **schema}

    async def get(self, url: str, **options: Any) -> Any:
        return await self.send("GET", url, **options)

    async def post(self, url: str, **options: Any) -> Any:
        return await self.send("POST", url, **options)

    async def delete(self, url: str, **options: Any) -> Any:
        return await self.send("DELETE", url, **options)

    async def send(self, method: str, url: str, *, status: int = 200, **options: Any) -> Any:
        """Return the body: parsed JSON, text, or the list of a stream's events."""
        response = await self.client.request(method, url, allow_redirects=False, **options)
        text = await response.text()
        assert response.status == status, text
        path, operation = self._operation(method, response.url.path)
        declared = operation["responses"][str(status)]
        assert "X-Request-ID" in response.headers
        self.seen.add((method, path, status, response.content_type if text else ""))
        if not text:
            assert "content" not in declared
            return None
        content = declared["content"].get("*/*") or declared["content"][response.content_type]
        if response.content_type == "text/event-stream":
            data = content["schema"]["properties"]["data"]
            return self._events(text, data["contentSchema"])
        if response.content_type != "application/json":
            return text
        return self._checked(json.loads(text), content["schema"])

    def _operation(self, method: str, path: str) -> tuple[str, Any]:
        for name in ("[^/]+", ".+"):  # some names may contain slashes
            for pattern, operations in self.document["paths"].items():
                matches = re.fullmatch(re.sub(r"{\w+}", name, pattern), path)
                if matches and method.lower() in operations:
                    return pattern, operations[method.lower()]
        raise AssertionError(f"{method} {path} is not in the document")

    def _events(self, text: str, schema: dict[str, Any]) -> list[Any]:
        lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
        return [self._checked(json.loads(line), schema) for line in lines if line != "[DONE]"]

    def _checked(self, value: Any, schema: dict[str, Any]) -> Any:
        error = best_match(Draft202012Validator({**schema, **self._strict}).iter_errors(value))
        assert error is None, f"{error.json_path}: {error.message}"
        return value
