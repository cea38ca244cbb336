"""What the holder of a key may use: requests and tokens a minute, and requests at the same time.

A minute's worth is a bucket that fills steadily, as in OpenAI's API: whoever was quiet for a minute
may use all of it at once. A request is counted when it comes. The tokens of a prompt are taken
before it runs; those of the answer when it ends, whatever ends it, so that what is running may
overdraw a bucket. Until it is in credit again, further prompts have to wait.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from radixkv.request import SamplingParams
from radixkv.server.api_keys import UNLIMITED, ApiKey, KeyLimits
from radixkv.server.errors import ApiError

__all__ = ["Bucket", "KeyUse", "RateLimits"]

MINUTE_S = 60.0
# A request that is refused for those that run has no better guess than a moment.
RUNNING_RETRY_S = 1.0


class Bucket:
    """What is left of an allowance that comes back evenly within a minute."""

    def __init__(self, capacity: int, now: float) -> None:
        self.capacity = capacity
        self._level = float(capacity)
        self._then = now

    def level(self, now: float) -> float:
        """Return what may be taken; negative when more was taken than there was."""
        refill = (now - self._then) * self.capacity / MINUTE_S
        self._level = min(float(self.capacity), self._level + refill)
        self._then = now
        return self._level

    def take(self, amount: float, now: float) -> None:
        """Take, or with a negative amount give back, whatever the level."""
        self._level = min(float(self.capacity), self.level(now) - amount)

    def wait_s(self, level: float, now: float) -> float:
        """Return the seconds until there is so much, 0 if there is."""
        return max(0.0, (level - self.level(now)) * MINUTE_S / self.capacity)


class KeyUse:
    """What is used of one key's limits. Event loop only.

    `begin` and `end` go around a request; in between, `begin_tokens` before its prompt runs and
    `add_tokens` when its answer ends.

    Attributes:
        running: requests between `begin` and `end`.
    """

    def __init__(self, limits: KeyLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.running = 0
        self._clock = clock
        self._requests = _bucket(limits.requests_per_minute, clock())
        self._tokens = _bucket(limits.tokens_per_minute, clock())

    def begin(self) -> None:
        """Count a request.

        Raises:
            ApiError: 429, too many run, or came lately; it isn't counted.
        """
        limit = self.limits.concurrent_requests
        if limit is not None and self.running >= limit:
            raise self._refusal(
                f"This key may have {limit} requests answered at the same time", RUNNING_RETRY_S
            )
        if self._requests is not None:
            now = self._clock()
            wait_s = self._requests.wait_s(1.0, now)
            if wait_s > 0:
                raise self._refusal(
                    f"This key may send {self._requests.capacity} requests a minute", wait_s
                )
            self._requests.take(1.0, now)
        self.running += 1

    def end(self) -> None:
        """Stop counting a request as running."""
        self.running -= 1

    def begin_tokens(self, count: int) -> None:
        """Take the tokens of a request's prompts.

        Raises:
            ApiError: 429, they aren't there yet, or never will be; none are taken.
        """
        bucket = self._tokens
        if bucket is None:
            return
        now, wait_s = self._clock(), 0.0
        if count <= bucket.capacity:
            wait_s = bucket.wait_s(float(count), now)
            if wait_s <= 0:
                bucket.take(count, now)
                return
        refusal = self._refusal(
            f"This key may use {bucket.capacity} tokens a minute; the prompt has {count}, and "
            f"{max(0, math.floor(bucket.level(now)))} are left",
            wait_s or MINUTE_S,
        )
        if not wait_s:
            # OpenAI's clients repeat a 429 unless they are told that it is of no use.
            refusal.headers["x-should-retry"] = "false"
        raise refusal

    def add_tokens(self, count: int) -> None:
        """Take, or give back, tokens that were used anyway."""
        if self._tokens is not None:
            self._tokens.take(count, self._clock())

    def cut(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with no more answer tokens than the key may ask for."""
        limit = self.limits.max_tokens
        if limit is None or (params.max_tokens is not None and params.max_tokens <= limit):
            return params
        return replace(params, max_tokens=limit, min_tokens=min(params.min_tokens, limit))

    def headers(self) -> dict[str, str]:
        """Return the `x-ratelimit-*` headers of an answer, as OpenAI's API has them."""
        now, headers = self._clock(), {}
        for kind, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                left = max(0, math.floor(bucket.level(now)))
                headers[f"x-ratelimit-limit-{kind}"] = str(bucket.capacity)
                headers[f"x-ratelimit-remaining-{kind}"] = str(left)
                headers[f"x-ratelimit-reset-{kind}"] = duration(
                    bucket.wait_s(float(bucket.capacity), now)
                )
        return headers

    def change(self, limits: KeyLimits) -> None:
        """Apply other limits; what runs goes on, and buckets of another size start full."""
        if limits.requests_per_minute != self.limits.requests_per_minute:
            self._requests = _bucket(limits.requests_per_minute, self._clock())
        if limits.tokens_per_minute != self.limits.tokens_per_minute:
            self._tokens = _bucket(limits.tokens_per_minute, self._clock())
        self.limits = limits

    def _refusal(self, message: str, wait_s: float) -> ApiError:
        return ApiError(
            429,
            f"{message}. Try again in {duration(wait_s)}",
            code="rate_limit_exceeded",
            headers={"Retry-After": str(max(1, math.ceil(wait_s)))},
        )


class RateLimits:
    """The use of every key that has limits, by its name."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._uses: dict[str, KeyUse] = {}

    def __len__(self) -> int:
        return len(self._uses)

    def use_of(self, key: ApiKey | None) -> KeyUse | None:
        """Return what is used of a key; None if it has no limits."""
        if key is None or key.limits == UNLIMITED:
            return None
        use = self._uses.get(key.name)
        if use is None:
            use = self._uses[key.name] = KeyUse(key.limits, self._clock)
        elif use.limits != key.limits:
            use.change(key.limits)
        return use

    def forget(self, known: Iterable[str]) -> None:
        """Drop the use of keys that are not among `known`; requests of theirs go on."""
        known = frozenset(known)
        self._uses = {name: use for name, use in self._uses.items() if name in known}


def duration(seconds: float) -> str:
    """Return a time as OpenAI's headers write it.

    >>> duration(0.0), duration(0.0123), duration(7.5), duration(90.0)
    ('0s', '13ms', '7.5s', '1m30s')
    """
    if seconds <= 0:
        return "0s"
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{rest / 1000:g}s"


def _bucket(capacity: int | None, now: float) -> Bucket | None:
    return None if capacity is None else Bucket(capacity, now)
