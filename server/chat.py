"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web

from radixkv.server.auth import make_namespace, tenant_of
from radixkv.server.body import json_response, read_json
from radixkv.server.chat_chunks import chat_deltas
from radixkv.server.dialogue import Dialogue
from radixkv.server.errors import ApiError
from radixkv.server.messages import template_tools
from radixkv.server.protocol import ChatRequest
from radixkv.server.responses import ChatShape, TokenTexts, UsageMode
from radixkv.server.sampling import chat_sampling
from radixkv.server.state import STATE
from radixkv.server.streaming import stream_chunks
from radixkv.server.tools import plan_tools
from radixkv.server.turns import chat_turn

__all__ = ["chat_completions"]


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, whole or as a stream."""
    state = request.app[STATE]
    config = state.config
    body = await read_json(
        request, ChatRequest, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s
    )
    state.check_model(body.model)
    if body.continue_final_message and body.add_generation_prompt:
        raise ApiError(
            400,
            "continue_final_message and add_generation_prompt can't both be true",
            param="continue_final_message",
            code="invalid_value",
        )
    if body.session_id is not None:
        return await chat_turn(request, body)
    params = chat_sampling(body, vocab_size=state.engine.vocab_size)
    namespace = make_namespace(tenant_of(request), body.cache_salt)
    plan = plan_tools(
        state.tools, template_tools(body.tools), body.tool_choice, body.parallel_tool_calls
    )
    dialogue = await Dialogue.begin(
        request,
        body.messages,
        plan,
        params,
        namespace,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final=bool(body.continue_final_message),
    )
    shape = ChatShape(
        id=f"chatcmpl-{dialogue.generation.id}",
        model=state.model_name,
        usage=UsageMode.from_options(body.stream_options),
    )
    tokens = state.engine.tokenizer
    try:
        if body.stream:
            return await stream_chunks(request, config, _chunks(dialogue, shape, tokens))
        await dialogue.run(request)
        logprobs = params.logprobs is not None
        return json_response(shape.whole(dialogue.readers, tokens, logprobs=logprobs))
    finally:
        dialogue.close()


async def _chunks(
    dialogue: Dialogue, shape: ChatShape, tokens: TokenTexts
) -> AsyncGenerator[dict[str, Any], None]:
    async for chunk in chat_deltas(dialogue, shape, tokens, finish=True):
        yield chunk
    if shape.usage.at_end:
        yield shape.usage_chunk(dialogue.answers)
