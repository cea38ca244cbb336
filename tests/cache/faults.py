"""Makes the n-th allocation, or the n-th call to the operating system, fail."""

from __future__ import annotations

import errno
import os
from typing import Any

from radixkv.cache import RadixCache
from radixkv.errors import OutOfBlocksError

__all__ = ["FailingCache", "FailingOS"]

CALLS = frozenset({"open", "pread", "pwrite", "ftruncate", "fsync", "fstat", "flock", "close"})


class FailingCache(RadixCache):
    """A cache in which an allocation can be made to fail, before it evicts or after.

    Attributes:
        countdown: allocations until the one that fails; 0 is none.
        place: "cache" fails at once, "pool" after the eviction.
        fired: where the last operation failed, or "".
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.countdown = 0
        self.place = "cache"
        self.fired = ""
        self._take = self.pool.allocate
        self.pool.allocate = self._allocate_from_pool  # type: ignore[method-assign]

    def allocate(self, count: int, *args: Any, **kwargs: Any) -> list[int]:
        self._check("cache", count)
        return super().allocate(count, *args, **kwargs)

    def _allocate_from_pool(self, count: int, *args: Any) -> list[int]:
        self._check("pool", count)
        return self._take(count, *args)

    def _check(self, place: str, count: int) -> None:
        if count and self.countdown and place == self.place:
            self.countdown -= 1
            if not self.countdown:
                self.fired = place
                raise OutOfBlocksError("injected")


class FailingOS:
    """Stands in for `os` and `fcntl`, where one call can be made to fail.

    Attributes:
        countdown: calls until the one that fails; 0 is none.
        kind: "error" does nothing and raises OSError; "torn" reads or writes a half and says so;
            "lie" reads a wrong byte, or writes a half and says it was all.
        fired: the call that failed since `reset`, or "".
    """

    def __init__(self, *modules: Any) -> None:
        self._modules = modules
        self.countdown = 0
        self.kind = "error"
        self.fired = ""

    def __getattr__(self, name: str) -> Any:
        real = next(getattr(m, name) for m in self._modules if hasattr(m, name))
        if name not in CALLS:
            return real

        def call(*args: Any) -> Any:
            if self.countdown:
                self.countdown -= 1
                if not self.countdown:
                    self.fired = name
                    return self._fail(name, real, *args)
            return real(*args)

        return call

    def reset(self) -> None:
        """Forget that a call has failed."""
        self.fired = ""

    def _fail(self, name: str, real: Any, *args: Any) -> Any:
        if name == "close":
            real(*args)  # the descriptor is gone even so
        if self.kind != "error":
            if name == "pread":
                data = bytearray(real(*args))
                if self.kind == "torn" or not data:
                    return bytes(data[: len(data) // 2])
                data[len(data) // 2] ^= 1
                return bytes(data)
            if name == "pwrite":
                file, data, offset = args
                written = os.pwrite(file, data[: len(data) // 2], offset)
                return written if self.kind == "torn" else len(data)
        raise OSError(errno.EIO, f"injected into {name}")
