"""What a caller asks of the engine, and what it gets back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import InitVar, dataclass, field
from typing import Any, Literal, Protocol, cast

from radixkv.errors import RequestRejectedError

__all__ = [
    "FinishReason",
    "GrammarSpec",
    "Namespace",
    "RequestOutput",
    "SamplingParams",
    "TokenLogprob",
    "check_pin_ttl",
]

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]

Namespace = tuple[str, ...]
"""Typed fields (tenant, cache salt, adapter) that separate caches; () is the shared default.

Two requests share KV only if every field is equal; the fields are length-prefixed when they are
hashed, so that ("ab", "c") and ("a", "bc") differ.
"""

MAX_STOP_STRINGS = 64
MAX_LOGPROBS = 20
MAX_BRANCHES = 16
MAX_CACHE_PRIORITY = 1000
MAX_PRIORITY = 10**9
MAX_TIMEOUT_S = 86400.0
MAX_PIN_TTL_S = 7 * 86400.0
MAX_GRAMMAR_BYTES = 65536


def _check_range(name: str, value: float, low: float, high: float) -> None:
    # Written so that NaN fails: every comparison with NaN is false.
    if not (low <= value <= high):
        raise RequestRejectedError(
            f"{name} must be between {low:g} and {high:g}, got {value:g}", param=name
        )


def check_pin_ttl(name: str, seconds: float) -> None:
    """Raise RequestRejectedError unless a pin may last so long."""
    if not 0 < seconds <= MAX_PIN_TTL_S:  # NaN fails this too
        raise RequestRejectedError(
            f"{name} must be over 0 and at most {MAX_PIN_TTL_S:.0f} seconds, "
            f"got {repr(seconds)[:32]}",
            param=name,
        )


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What an answer must look like, as the client says it. Validated on construction.

    Attributes:
        kind: how to read `text`.
        text: a JSON schema; a regular expression that the whole answer matches; a JSON list of the
            answers to choose from; a grammar in Lark's notation or, with "::=", in GBNF; or, as
            "tools", one in Lark's notation that the server has made of the tools' schemas, whose
            rules aren't counted. At most 64 KiB.
        param: the request field that it comes from; named when it is refused. Specs that differ in
            nothing else are equal.

    Raises:
        RequestRejectedError: the text is empty or too long, or is no list of choices.
    """

    kind: Literal["json_schema", "regex", "choice", "grammar", "tools"]
    text: str
    param: str = field(default="grammar", compare=False)

    def __post_init__(self) -> None:
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError:
            raise self._refusal("holds half of a surrogate pair") from None
        if not 0 < size <= MAX_GRAMMAR_BYTES:
            raise self._refusal(f"must have 1 to {MAX_GRAMMAR_BYTES} bytes, got {size}")
        if self.kind == "choice":
            try:
                choices = json.loads(self.text)
            except ValueError:
                choices = None
            if not (
                isinstance(choices, list)
                and choices
                and all(isinstance(choice, str) and choice for choice in choices)
            ):
                raise self._refusal("must be a list of texts, none of them empty")

    def _refusal(self, reason: str) -> RequestRejectedError:
        return RequestRejectedError(f"{self.param} {reason}", param=self.param)


class GrammarSource(Protocol):
    """Another way to say what an answer must look like, such as `StructuredOutputsParams`."""

    def spec(self) -> GrammarSpec:
        """Return it as the engine takes it."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Validated on construction.

    Attributes:
        temperature: 0 is greedy; values under 1e-3 are treated as greedy. Range 0 to 2.
        top_p: nucleus mass in (0, 1]. Source: Holtzman et al. 2020, arXiv:1904.09751.
        top_k: number of most likely tokens kept; 0 or -1 keeps all.
        min_p: tokens under min_p times the largest probability are dropped. Range 0 to 1.
            Source: arXiv:2407.01082.
        seed: makes sampling reproducible; None draws a fresh seed.
        repetition_penalty: divides (multiplies) positive (negative) logits of tokens in the prompt
            and the output; 1 is off, range (0, 10]. Source: CTRL, arXiv:1909.05858.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens in the output,
            once or per occurrence; -2 to 2.
        stop: strings that end the answer and are not part of it; one may be given as it is.
        stop_token_ids: token ids that end the answer, beside the model's own end tokens.
        max_tokens: most tokens to generate; None means up to the context length.
        min_tokens: end tokens are masked until this many are generated.
        ignore_eos: the model's end tokens do not end the answer.
        logprobs: number of most likely alternatives to report per token (0: only the chosen
            one); None reports nothing. They are taken before temperature and penalties.
        logit_bias: (token id, bias) pairs, or a mapping, added to the logits, bias -100 to 100.
        skip_special_tokens: leave special tokens out of the text.
        cache_priority: what the request uses of the cache goes after what is lower, under the
            eviction policy "priority"; 0 to 1000.
        cache_pin_ttl: seconds for which the prompt's KV is pinned once it is computed.
        priority: lower runs first, under the scheduling policy "priority"; -1e9 to 1e9.
        timeout_s: seconds from arrival after which the request is ended; None is the server's.
        n: answers to give, 1 to 16. The first of a seeded request is the one that n=1 gives.
        best_of: answers to generate, n to 16; the n of highest mean log-probability are given.
            With beam search, the number of beams. None means n.
        use_beam_search: look for the most likely answers instead of drawing; temperature, top_p,
            top_k and min_p do nothing, and all answers come at the end.
        length_penalty: beams are ranked by log-probability / length ** length_penalty, length being
            the generated tokens, an end token included; -10 to 10.
        early_stopping: of beam search: True ends it with the n-th finished beam, False when the
            best running beam as it stands is no better than the worst finished one, "never" when
            it can't become better at any length.
        grammar: what each answer must look like; None is anything. Log-probabilities stay those
            of the model without it.
        structured_outputs: the same in vLLM's words; it is kept as `grammar`.

    After construction `stop`, `stop_token_ids` and `logit_bias` are tuples; None is an empty one.

    Raises:
        RequestRejectedError: a value is out of range; `param` names the field.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: SequenceOf[str] = ()
    stop_token_ids: SequenceOf[int] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    skip_special_tokens: bool = True
    cache_priority: int = 0
    cache_pin_ttl: float | None = None
    priority: int = 0
    timeout_s: float | None = None
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    grammar: GrammarSpec | None = None
    structured_outputs: InitVar[GrammarSource | None] = None

    def __post_init__(self, structured_outputs: GrammarSource | None) -> None:
        self._normalise()
        if structured_outputs is not None:
            if self.grammar is not None:
                raise RequestRejectedError(
                    "structured_outputs can't be combined with grammar", param="structured_outputs"
                )
            object.__setattr__(self, "grammar", structured_outputs.spec())
        _check_range("temperature", self.temperature, 0.0, 2.0)
        _check_range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestRejectedError("top_p must be greater than 0", param="top_p")
        if self.top_k < -1:
            raise RequestRejectedError(
                f"top_k must be at least -1, got {self.top_k}", param="top_k"
            )
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 10.0)
        if self.repetition_penalty == 0.0:
            raise RequestRejectedError(
                "repetition_penalty must be greater than 0", param="repetition_penalty"
            )
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None and not (-(2**63) <= self.seed < 2**63):
            raise RequestRejectedError("seed must fit in a signed 64-bit integer", param="seed")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestRejectedError(
                f"stop must have at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}",
                param="stop",
            )
        if any(not s for s in self.stop):
            raise RequestRejectedError("stop must not contain an empty string", param="stop")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestRejectedError(
                f"max_tokens must be at least 1, got {self.max_tokens}", param="max_tokens"
            )
        if self.min_tokens < 0:
            raise RequestRejectedError(
                f"min_tokens must be at least 0, got {self.min_tokens}", param="min_tokens"
            )
        if self.logprobs is not None and not (0 <= self.logprobs <= MAX_LOGPROBS):
            raise RequestRejectedError(
                f"logprobs must be between 0 and {MAX_LOGPROBS}, got {self.logprobs}",
                param="logprobs",
            )
        _check_range("cache_priority", self.cache_priority, 0, MAX_CACHE_PRIORITY)
        _check_range("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        if self.timeout_s is not None and not 0 < self.timeout_s <= MAX_TIMEOUT_S:
            raise RequestRejectedError(
                f"timeout must be over 0 and at most {MAX_TIMEOUT_S:g} seconds, "
                f"got {self.timeout_s:g}",
                param="timeout",
            )
        if self.cache_pin_ttl is not None:
            check_pin_ttl("cache_pin_ttl", self.cache_pin_ttl)
        if not 1 <= self.n <= MAX_BRANCHES:
            raise RequestRejectedError(
                f"n must be between 1 and {MAX_BRANCHES}, got {self.n}", param="n"
            )
        if self.best_of is not None and not self.n <= self.best_of <= MAX_BRANCHES:
            raise RequestRejectedError(
                f"best_of must be between n ({self.n}) and {MAX_BRANCHES}, got {self.best_of}",
                param="best_of",
            )
        _check_range("length_penalty", self.length_penalty, -10.0, 10.0)
        if self.early_stopping not in (True, False, "never"):
            raise RequestRejectedError(
                f"early_stopping must be true, false or 'never', got {self.early_stopping!r}",
                param="early_stopping",
            )
        for _, bias in self.logit_bias:
            if not (math.isfinite(bias) and -100.0 <= bias <= 100.0):
                raise RequestRejectedError(
                    f"logit_bias values must be between -100 and 100, got {bias:g}",
                    param="logit_bias",
                )

    def _normalise(self) -> None:
        """Make tuples of what callers of other engines give as a text, lists, a mapping or None."""
        stop, bias = self.stop, cast("Any", self.logit_bias)
        values = {
            "stop": (stop,) if isinstance(stop, str) else tuple(stop or ()),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "logit_bias": tuple(bias.items() if isinstance(bias, Mapping) else bias or ()),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def num_branches(self) -> int:
        """Answers that are generated side by side."""
        return self.n if self.best_of is None else self.best_of

    @property
    def holds_back(self) -> bool:
        """Whether nothing can be told of any answer before all are complete."""
        return self.use_beam_search or self.num_branches > self.n

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < 1e-3


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one generated token and of its most likely alternatives.

    Attributes:
        token_id: the generated token.
        logprob: its natural-log probability.
        top: (token id, logprob) pairs, most likely first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One increment of an answer. The last one, and only it, has a `finish_reason`.

    Attributes:
        index: which of the request's `n` answers it belongs to.
        text: new text; whole characters only, and never a part of a stop string.
        token_ids: newly generated token ids (the ids that produced text still held back too).
        logprobs: one entry per new token id when asked for.
        finish_reason: "stop", "length", "abort", "timeout" or "error" on the last increment.
        stop_reason: the stop string or token id that ended the answer, if one did.
        error: the message when `finish_reason` is "timeout" or "error".
        num_prompt_tokens: tokens of the prompt.
        num_cached_tokens: prompt tokens whose KV was reused, fixed at first admission; at most
            num_prompt_tokens - 1.
        num_completion_tokens: tokens of this answer so far.
        score: on the last increment of an answer that was chosen among others: its mean
            log-probability, or its score as a beam.
        timings: of the request as a whole, on last increments.
    """

    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    score: float | None = None
    timings: RequestTimings | None = None


@dataclass(slots=True)
class RequestTimings:
    """When things happened to a request, in seconds of the monotonic clock; None: not yet.

    The engine's thread writes it while the request lives; others may read.
    """

    arrival: float = 0.0
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    inter_token: list[float] = field(default_factory=list)
    num_preemptions: int = 0
