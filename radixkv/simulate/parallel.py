"""Runs one function over many items on several cores."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

__all__ = ["map_parallel"]

Item = TypeVar("Item")
Shared = TypeVar("Shared")
Result = TypeVar("Result")


def map_parallel(
    function: Callable[[Item, Shared], Result],
    items: Sequence[Item],
    shared: Shared,
    *,
    num_processes: int = 1,
    on_done: Callable[[int], None] = lambda count: None,
) -> list[Result]:
    """Return `function(item, shared)` of each item, in the items' order.

    Args:
        function: of a module, so that it can be named to another process.
        items: one per call.
        shared: sent once to each process, not with each item.
        num_processes: 1 stays in this process.
        on_done: told how many are done, each time.
    """
    results: dict[int, Result] = {}
    if num_processes <= 1 or len(items) < 2:
        for index, item in enumerate(items):
            results[index] = function(item, shared)
            on_done(len(results))
    else:
        # Fresh processes, since whoever shows progress does it from a thread.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(
            min(num_processes, len(items)),
            mp_context=context,
            initializer=_begin,
            initargs=(function, shared),
        ) as pool:
            futures = {pool.submit(_call, item): index for index, item in enumerate(items)}
            try:
                for future in as_completed(futures):
                    results[futures[future]] = future.result()
                    on_done(len(results))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return [results[index] for index in range(len(items))]


_work: tuple[Callable[[Any, Any], Any], Any]  # of a worker process


def _begin(function: Callable[[Any, Any], Any], shared: Any) -> None:
    global _work
    _work = function, shared


def _call(item: Any) -> Any:
    function, shared = _work
    return function(item, shared)
