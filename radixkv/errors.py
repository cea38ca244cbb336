"""The exception tree of RadixKV."""

from __future__ import annotations

__all__ = [
    "CacheCorruptionError",
    "ConfigError",
    "ContextLengthError",
    "EngineClosedError",
    "GrammarError",
    "OutOfBlocksError",
    "QueueFullError",
    "RadixKVError",
    "RequestRejectedError",
]


class RadixKVError(Exception):
    """Base of every error that RadixKV raises on purpose."""


class ConfigError(RadixKVError):
    """An option has a value that cannot be used; the message names the option and the range."""


class RequestRejectedError(RadixKVError):
    """A request that cannot be accepted; the message is safe to show to the client.

    Attributes:
        code: machine-readable reason in OpenAI's vocabulary, or None.
        param: the request field that is wrong, or None.
    """

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class ContextLengthError(RequestRejectedError):
    """The prompt leaves no room for one generated token."""

    def __init__(self, num_tokens: int, limit: int, *, param: str | None = None) -> None:
        super().__init__(
            f"This model's maximum context length is {limit} tokens, and at least one of them must "
            f"be left for the answer. The prompt has {num_tokens} tokens.",
            code="context_length_exceeded",
            param=param,
        )
        self.num_tokens = num_tokens
        self.limit = limit


class QueueFullError(RequestRejectedError):
    """The waiting queue is at its bound.

    Attributes:
        retry_after_s: seconds after which a retry is likely to be accepted.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message, code="queue_full")
        self.retry_after_s = retry_after_s


class EngineClosedError(RequestRejectedError):
    """The engine is shutting down, or its loop has died."""


class GrammarError(RadixKVError):
    """A grammar can't be compiled, or an answer can't follow it; the message is safe to show."""


class OutOfBlocksError(RadixKVError):
    """The pool cannot supply the blocks asked for, even after evicting all it may evict."""


class CacheCorruptionError(RadixKVError):
    """`check_integrity()` found state that breaks a law of the cache."""
