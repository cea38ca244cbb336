"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web

from radixkv.server.auth import make_namespace, tenant_of
from radixkv.server.body import json_response, read_json
from radixkv.server.generation import Generation
from radixkv.server.messages import template_messages, template_tools
from radixkv.server.protocol import ChatRequest
from radixkv.server.responses import ChatShape, TokenTexts, UsageMode
from radixkv.server.sampling import chat_sampling
from radixkv.server.state import REQUEST_ID, STATE
from radixkv.server.streaming import run_to_end, stream_chunks
from radixkv.server.structured import compile_grammar

__all__ = ["chat_completions", "chat_deltas"]


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, whole or as a stream."""
    state = request.app[STATE]
    config = state.config
    body = await read_json(
        request, ChatRequest, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s
    )
    state.check_model(body.model)
    params = chat_sampling(body, vocab_size=state.engine.vocab_size)
    namespace = make_namespace(tenant_of(request), body.cache_salt)
    messages = template_messages(body.messages, supports_tools=state.prompts.supports_tools)
    ids = await state.prompts.encode_chat(
        messages,
        template_tools(body.tools),
        add_generation_prompt=body.add_generation_prompt is not False,
    )
    grammar = await compile_grammar(state.engine, params)
    state.lifecycle.check_accepting()
    generation = Generation.submit(
        state.engine,
        [ids],
        params,
        namespace=namespace,
        metrics=state.metrics,
        grammar=grammar,
        param="messages",
    )
    state.request_ids.remember(generation.id, 1, request[REQUEST_ID])
    shape = ChatShape(
        id=f"chatcmpl-{generation.id}",
        model=state.model_name,
        usage=UsageMode.from_options(body.stream_options),
    )
    tokens = state.engine.tokenizer
    try:
        if body.stream:
            return await stream_chunks(request, config, _chunks(generation, shape, tokens))
        await run_to_end(request, config, generation)
        logprobs = params.logprobs is not None
        return json_response(shape.whole(generation.answers, tokens, logprobs=logprobs))
    finally:
        generation.close()


async def chat_deltas(
    generation: Generation, shape: ChatShape, tokens: TokenTexts, *, finish: bool = False
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the role chunks and the content chunks; the finish chunks too if `finish`."""
    answers = generation.answers
    for index in range(len(answers)):
        yield shape.role_chunk(index, answers)
    async for index, output in generation:
        if output.text or output.logprobs:
            yield shape.delta_chunk(index, output, answers, tokens)
        if finish and output.finish_reason is not None:
            yield shape.finish_chunk(index, answers)


async def _chunks(
    generation: Generation, shape: ChatShape, tokens: TokenTexts
) -> AsyncGenerator[dict[str, Any], None]:
    async for chunk in chat_deltas(generation, shape, tokens, finish=True):
        yield chunk
    if shape.usage.at_end:
        yield shape.usage_chunk(generation.answers)
