"""From request fields to the engine's `SamplingParams`."""

from __future__ import annotations

from typing import Any

from radixkv.errors import RequestRejectedError
from radixkv.request import SamplingParams
from radixkv.server.errors import ApiError, api_error_from
from radixkv.server.protocol import (
    ChatFields,
    CompletionRequest,
    SamplingFields,
    SessionTurn,
    whole_number,
)
from radixkv.server.structured import structured_spec

__all__ = ["chat_sampling", "completion_sampling"]

MAX_LOGPROBS = 20

UNSUPPORTED = ("prompt_logprobs",)
# Beam search draws nothing; these are the values that say so.
BEAM_NEUTRAL = {"temperature": (0,), "top_p": (1,), "top_k": (0, -1), "min_p": (0,)}
CHAT_UNSUPPORTED = ("functions", "function_call", "audio", "web_search_options", "moderation")


def chat_sampling(body: ChatFields, *, vocab_size: int) -> SamplingParams:
    """Return the parameters of a chat or session turn.

    Raises:
        ApiError: 400; `param` names the field.
    """
    _check_common(body)
    if isinstance(body, SessionTurn) and (body.n or 1) != 1:
        raise _refuse("n", "n must be 1: a session goes on from one answer")
    for name in CHAT_UNSUPPORTED:
        if getattr(body, name):
            raise _refuse(name, f"{name} is not supported")
    if body.modalities not in (None, [], ["text"]):
        raise _refuse("modalities", "modalities: only 'text' is supported")
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    top = _whole("top_logprobs", body.top_logprobs)
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise _refuse(
            "top_logprobs", f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {top}"
        )
    if top and not body.logprobs:
        raise _refuse("top_logprobs", "top_logprobs needs logprobs to be true")
    return _build(
        body,
        vocab_size=vocab_size,
        max_tokens_name=name,
        logprobs=(top or 0) if body.logprobs else None,
    )


def completion_sampling(body: CompletionRequest, *, vocab_size: int) -> SamplingParams:
    """Return the parameters of a text completion.

    Raises:
        ApiError: 400; `param` names the field.
    """
    _check_common(body)
    if body.suffix:
        raise _refuse("suffix", "suffix is not supported: the model only continues a text")
    if body.echo and body.logprobs is not None:
        raise _refuse(
            "echo", "echo cannot be combined with logprobs: the prompt's logprobs are not kept"
        )
    return _build(
        body,
        vocab_size=vocab_size,
        max_tokens_name="max_tokens",
        logprobs=_whole("logprobs", body.logprobs),
    )


def _build(
    body: SamplingFields, *, vocab_size: int, max_tokens_name: str, logprobs: int | None
) -> SamplingParams:
    max_tokens = _whole(max_tokens_name, getattr(body, max_tokens_name))
    given: dict[str, Any] = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": _whole("top_k", body.top_k),
        "min_p": body.min_p,
        "seed": _whole("seed", body.seed),
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "stop": _stop_strings(body.stop),
        "stop_token_ids": _stop_token_ids(body.stop_token_ids, vocab_size),
        "max_tokens": max_tokens,
        "min_tokens": _whole("min_tokens", body.min_tokens),
        "ignore_eos": body.ignore_eos,
        "logprobs": logprobs,
        "logit_bias": _logit_bias(body.logit_bias, vocab_size),
        "skip_special_tokens": body.skip_special_tokens,
        "grammar": structured_spec(body),
        **_branching(body),
        "priority": _whole("priority", body.priority),
        "timeout_s": body.timeout,
        "cache_priority": _whole("cache_priority", body.cache_priority),
        "cache_pin_ttl": body.cache_pin_ttl,
    }
    try:
        params = SamplingParams(**{k: v for k, v in given.items() if v is not None})
    except RequestRejectedError as error:
        refusal = api_error_from(error).rename_param("max_tokens", max_tokens_name)
        if body.beam_width is not None:
            refusal = refusal.rename_param("best_of", "beam_width")
        raise refusal from error
    if body.stream and params.holds_back and not params.use_beam_search:
        raise _refuse(
            "best_of",
            "best_of must be n in a stream: the best are known only when all are complete",
        )
    if max_tokens is not None and params.min_tokens > max_tokens:
        raise _refuse(
            "min_tokens",
            f"min_tokens must be at most {max_tokens_name} ({max_tokens}), got {params.min_tokens}",
        )
    return params


def _branching(body: SamplingFields) -> dict[str, Any]:
    """Return the fields that say how many answers are looked for, and how."""
    best_of = _whole("best_of", body.best_of)
    beam_width = _whole("beam_width", body.beam_width)
    if not body.use_beam_search:
        for name in ("beam_width", "length_penalty", "early_stopping"):
            if getattr(body, name) is not None:
                raise _refuse(name, f"{name} needs use_beam_search to be true")
    else:
        if None not in (best_of, beam_width) and best_of != beam_width:
            raise _refuse("beam_width", "beam_width and best_of mean the same; set one of them")
        for name, off in BEAM_NEUTRAL.items():
            value = getattr(body, name)
            if value is not None and value not in off:
                raise _refuse(name, f"{name} must be {off[0]} with use_beam_search")
    return {
        "n": _whole("n", body.n),
        "best_of": best_of if beam_width is None else beam_width,
        "use_beam_search": body.use_beam_search,
        "length_penalty": body.length_penalty,
        "early_stopping": body.early_stopping,
    }


def _check_common(body: SamplingFields) -> None:
    for name in UNSUPPORTED:
        if getattr(body, name):
            raise _refuse(name, f"{name} is not supported")
    if body.stream_options is not None and not body.stream:
        raise _refuse("stream_options", "stream_options needs stream to be true")


def _whole(name: str, value: float | int | None) -> int | None:
    if value is None:
        return None
    number = whole_number(value)
    if number is None:
        raise _refuse(name, f"{name} must be a whole number, got {value:g}")
    return number


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...] | None:
    if stop is None:
        return None
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _stop_token_ids(ids: list[int] | None, vocab_size: int) -> tuple[int, ...] | None:
    if not ids:
        return None
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise _refuse("stop_token_ids", f"stop_token_ids must be between 0 and {vocab_size - 1}")
    return tuple(ids)


def _logit_bias(
    bias: dict[str, float] | None, vocab_size: int
) -> tuple[tuple[int, float], ...] | None:
    if not bias:
        return None
    pairs = []
    for key, value in bias.items():
        # `isdecimal` alone would take digits of other scripts; int() alone "1_0" and " 1".
        valid = key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < vocab_size
        if not valid:
            raise _refuse(
                "logit_bias",
                f"logit_bias keys must be token ids between 0 and {vocab_size - 1}, "
                f"got {key[:32]!r}",
            )
        pairs.append((int(key), float(value)))
    return tuple(pairs)


def _refuse(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
