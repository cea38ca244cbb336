"""`POST /tokenize` and `POST /detokenize`, with vLLM's routes and shapes."""

from __future__ import annotations

import msgspec
from aiohttp import web

from radixkv.server.auth import make_namespace, tenant_of
from radixkv.server.body import json_response, read_json
from radixkv.server.errors import ApiError
from radixkv.server.field_limits import Tools
from radixkv.server.history import encode_chat
from radixkv.server.messages import template_messages, template_tools
from radixkv.server.protocol import Messages
from radixkv.server.state import STATE

__all__ = ["detokenize", "tokenize"]


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /tokenize`: `prompt`, or `messages` as chat completions take them."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    cache_salt: str | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


async def tokenize(request: web.Request) -> web.Response:
    """Return the ids of a text, or of a conversation just as a chat completion would have them."""
    state = request.app[STATE]
    config = state.config
    body = await read_json(
        request, TokenizeRequest, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s
    )
    state.check_model(body.model)
    if body.messages is not None and body.prompt is None:
        prompt = await encode_chat(
            state.prompts,
            state.history,
            make_namespace(tenant_of(request), body.cache_salt),
            template_messages(body.messages, supports_tools=state.prompts.supports_tools),
            template_tools(body.tools),
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final=bool(body.continue_final_message),
        )
        ids = prompt.ids
    elif body.prompt is not None and body.messages is None:
        ids = await state.prompts.encode_text(
            body.prompt, add_special_tokens=body.add_special_tokens is not False, param="prompt"
        )
    else:
        raise ApiError(
            400,
            "exactly one of prompt and messages must be set",
            param="prompt",
            code="invalid_value",
        )
    texts = state.engine.tokenizer.token_str
    return json_response(
        {
            "count": len(ids),
            "max_model_len": state.engine.max_model_len,
            "tokens": ids,
            "token_strs": [texts(i) for i in ids] if body.return_token_strs else None,
        }
    )


async def detokenize(request: web.Request) -> web.Response:
    """Return the text of ids, special tokens included."""
    state = request.app[STATE]
    config = state.config
    body = await read_json(
        request, DetokenizeRequest, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s
    )
    state.check_model(body.model)
    vocab_size = state.engine.vocab_size
    if body.tokens and not (min(body.tokens) >= 0 and max(body.tokens) < vocab_size):
        raise ApiError(
            400,
            f"tokens must be between 0 and {vocab_size - 1}",
            param="tokens",
            code="invalid_value",
        )
    ids = body.tokens
    text = await state.prompts.offload(
        len(ids), lambda: state.prompts.decode(ids, skip_special_tokens=False)
    )
    return json_response({"prompt": text})
