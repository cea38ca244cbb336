"""`GET /v1/models` and `GET /v1/models/{model}`."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from radixkv.server.body import json_response
from radixkv.server.state import STATE, ServerState

__all__ = ["get_model", "list_models"]


async def list_models(request: web.Request) -> web.Response:
    """Return the one model that is served."""
    return json_response({"object": "list", "data": [_model_object(request.app[STATE])]})


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
    }
