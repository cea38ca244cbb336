"""A bar on stderr for a batch of requests: how many are done, how fast, how much was cached."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from radixkv.outputs import RequestOutput
from radixkv.request import RequestOutput as Increment

__all__ = ["BatchProgress"]


class BatchProgress:
    """Owns the bar, and counts what it shows. May be told from any thread.

    Outside a terminal nothing is shown.
    """

    def __init__(
        self,
        num_requests: int,
        *,
        enabled: bool = True,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        console = console or Console(stderr=True)
        self._clock = clock
        self._begin = clock()
        self._num_generated = 0
        self._num_prompt = 0
        self._num_cached = 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            transient=False,
            disable=not (enabled and console.is_terminal),
        )
        self._task = self._bar.add_task("Requests", total=num_requests, figures="")

    def __enter__(self) -> BatchProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def add(self, increment: Increment) -> None:
        """Count new tokens."""
        self._num_generated += len(increment.token_ids)
        if not self._bar.disable:
            self._bar.update(self._task, figures=self.figures())

    def finish(self, output: RequestOutput) -> None:
        """Count a request that has ended."""
        self._num_prompt += len(output.prompt_token_ids)
        self._num_cached += output.num_cached_tokens
        self._bar.update(self._task, advance=1, figures=self.figures())

    def figures(self) -> str:
        """Return tokens per second, and the share of the prompts of ended requests."""
        seconds = self._clock() - self._begin
        rate = self._num_generated / seconds if seconds > 0 else 0.0
        share = f", {self._num_cached / self._num_prompt:.0%} cached" if self._num_prompt else ""
        return f"{rate:.1f} tokens/s{share}"
