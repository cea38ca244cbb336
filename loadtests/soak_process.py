"""`radixkv serve` with one more route, `/soak/process`: its asyncio tasks, threads and objects.

python -m loadtests.soak_process serve --port 8000
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from aiohttp import web

from radixkv.openmp import set_wait_policy

__all__ = ["add_route", "main"]

MOST_OBJECTS = 30


def main() -> None:
    """Run the command line of RadixKV with applications that have the route."""
    set_wait_policy()
    # What loads torch, which reads the policy.
    import radixkv.server.app as server_app
    from radixkv.cli import main as radixkv_main

    create_app: Callable[..., web.Application] = server_app.create_app

    def create(*args: Any, **options: Any) -> web.Application:
        app = create_app(*args, **options)
        add_route(app)
        return app

    server_app.create_app = create
    radixkv_main()


def add_route(app: web.Application) -> None:
    """Add the route to an application that isn't served yet."""
    app.router.add_get("/soak/process", _process)


async def _process(request: web.Request) -> web.Response:
    tasks = asyncio.all_tasks()
    report: dict[str, Any] = {"tasks": len(tasks)}
    if "names" in request.query:
        report["task_names"] = sorted(str(task.get_coro()) for task in tasks)
        report["threads"] = sorted(thread.name for thread in threading.enumerate())
        gc.collect()
        kinds = Counter(type(item).__qualname__ for item in gc.get_objects())
        report["objects"] = dict(kinds.most_common(MOST_OBJECTS))
    return web.json_response(report)


if __name__ == "__main__":
    main()
