"""`GET /v1/models` and `GET /v1/models/{model}`, as OpenAI's and Anthropic's clients read them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from radixkv.server.body import json_response
from radixkv.server.state import STATE, ServerState

__all__ = ["get_model", "list_models"]


async def list_models(request: web.Request) -> web.Response:
    """Return the one model that is served."""
    model = _model_object(request.app[STATE])
    return json_response(
        {
            "object": "list",
            "data": [model],
            "has_more": False,
            "first_id": model["id"],
            "last_id": model["id"],
        }
    )


async def get_model(request: web.Request) -> web.Response:
    """Return a model by its name, which may contain slashes."""
    state = request.app[STATE]
    state.check_model(request.match_info["model"])
    return json_response(_model_object(state))


def _model_object(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "radixkv",
        "root": state.engine.model_name,
        "parent": None,
        "max_model_len": state.engine.max_model_len,
        # The rest is Anthropic's.
        "type": "model",
        "display_name": state.model_name,
        "created_at": datetime.fromtimestamp(state.created, UTC).isoformat(),
        "max_input_tokens": state.engine.max_model_len,
    }
