"""Progress bars on stderr, for steps that take longer than a person likes to wonder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

__all__ = ["ProgressTask", "progress"]


class ProgressTask:
    """One bar. Outside a terminal its methods do nothing."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar = bar
        self._task = task

    def advance(self, amount: int = 1) -> None:
        """Add to what is done."""
        self._bar.advance(self._task, amount)

    def update(self, completed: int) -> None:
        """Set what is done."""
        self._bar.update(self._task, completed=completed)


@contextmanager
def progress(
    description: str, total: int, *, in_bytes: bool = False, console: Console | None = None
) -> Iterator[ProgressTask]:
    """Show a bar until the block ends; on a console that is no terminal, print one line instead.

    Args:
        description: what is being done.
        total: units of work; bytes if `in_bytes`.
        console: where to show it; stderr if None.
    """
    console = console or Console(stderr=True)
    amount = DownloadColumn() if in_bytes else MofNCompleteColumn()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        amount,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    if not console.is_terminal:
        console.print(description, highlight=False)
    with bar:
        yield ProgressTask(bar, bar.add_task(description, total=total))
