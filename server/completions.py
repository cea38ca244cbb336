"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from aiohttp import web

from radixkv.server.auth import make_namespace, tenant_of
from radixkv.server.body import json_response, read_json
from radixkv.server.errors import ApiError
from radixkv.server.generation import Generation
from radixkv.server.guards import use_of
from radixkv.server.protocol import CompletionRequest
from radixkv.server.responses import CompletionShape, TokenTexts, UsageMode
from radixkv.server.sampling import completion_sampling
from radixkv.server.state import REQUEST_ID, STATE, ServerState
from radixkv.server.streaming import run_to_end, stream_chunks
from radixkv.server.structured import compile_grammar

__all__ = ["completions"]

Prompt = str | list[int]


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue one or several texts, whole or as a stream."""
    state = request.app[STATE]
    config = state.config
    body = await read_json(
        request, CompletionRequest, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s
    )
    state.check_model(body.model)
    params = completion_sampling(body, vocab_size=state.engine.vocab_size)
    namespace = make_namespace(tenant_of(request), body.cache_salt)
    prompts = _split_prompts(body.prompt, config.max_prompts)
    ids = await _encode(state, prompts, body.add_special_tokens is not False)
    grammar = await compile_grammar(state.engine, params)
    state.lifecycle.check_accepting()
    generation = Generation.submit(
        state.engine,
        ids,
        params,
        namespace=namespace,
        metrics=state.metrics,
        grammar=grammar,
        param="prompt",
        use=use_of(request),
    )
    state.request_ids.remember(generation.id, len(ids), request[REQUEST_ID])
    shape = CompletionShape(
        id=f"cmpl-{generation.id}",
        model=state.model_name,
        usage=UsageMode.from_options(body.stream_options),
    )
    tokens = state.engine.tokenizer
    try:
        echoes = [_echo(state, p) if body.echo else "" for p in prompts for _ in range(params.n)]
        if body.stream:
            chunks = _chunks(generation, shape, tokens, echoes)
            return await stream_chunks(request, config, chunks)
        await run_to_end(request, config, generation)
        return json_response(
            shape.whole(generation.answers, echoes, tokens, logprobs=params.logprobs is not None)
        )
    finally:
        generation.close()


async def _chunks(
    generation: Generation, shape: CompletionShape, tokens: TokenTexts, echoes: Sequence[str]
) -> AsyncGenerator[dict[str, Any], None]:
    answers = generation.answers
    offsets = [0] * len(answers)
    for index, echo in enumerate(echoes):
        if echo:
            yield shape.text_chunk(index, echo, answers)
    async for index, output in generation:
        logprobs = None
        if output.logprobs:
            logprobs = shape.logprobs(output.logprobs, tokens, offsets[index])
            offsets[index] += sum(len(text) for text in logprobs["tokens"])
        if output.text or logprobs:
            yield shape.text_chunk(index, output.text, answers, logprobs)
        if output.finish_reason is not None:
            yield shape.finish_chunk(index, answers)
    if shape.usage.at_end:
        yield shape.usage_chunk(answers)


def _split_prompts(prompt: str | list[int | str | list[int]], limit: int) -> list[Prompt]:
    """Return the prompts of a request: a text, ids, a list of texts, or a list of id lists."""
    prompts: list[Prompt]
    if isinstance(prompt, str):
        prompts = [prompt]
    elif prompt and isinstance(prompt[0], int):
        prompts = [[i for i in prompt if isinstance(i, int)]]
        if len(prompts[0]) != len(prompt):
            raise _refuse("prompt must not mix token ids with texts or lists")
    else:
        prompts = [p for p in prompt if not isinstance(p, int)]
        if len(prompts) != len(prompt) or len({type(p) for p in prompts}) > 1:
            raise _refuse("prompt must not mix texts, token ids and lists of token ids")
    if not prompts or not all(prompts):
        raise _refuse("prompt must not be empty")
    if len(prompts) > limit:
        raise _refuse(f"prompt must have at most {limit} prompts, got {len(prompts)}")
    return prompts


async def _encode(
    state: ServerState, prompts: Sequence[Prompt], add_special_tokens: bool
) -> list[list[int]]:
    vocab_size = state.engine.vocab_size
    result = []
    for prompt in prompts:
        if isinstance(prompt, str):
            prompt = await state.prompts.encode_text(
                prompt, add_special_tokens=add_special_tokens, param="prompt"
            )
        elif min(prompt) < 0 or max(prompt) >= vocab_size:
            raise _refuse(f"prompt token ids must be between 0 and {vocab_size - 1}")
        if not prompt:
            raise _refuse("prompt must have at least one token")
        result.append(prompt)
    return result


def _echo(state: ServerState, prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return state.prompts.decode(prompt, skip_special_tokens=False)


def _refuse(message: str) -> ApiError:
    return ApiError(400, message, param="prompt", code="invalid_value")
