"""`GET /health`: three separate facts, none of which waits for the engine.

That it answers at all says the event loop lives. `engine.state` says whether the step loop is dead,
idle, stepping, or has been in one step for longer than `engine_stuck_s`; a long prefill is not an
outage, so "stuck" is reported with status 200 and left to the one who watches. Only a dead engine
or a server that drains answers 503.
"""

from __future__ import annotations

from aiohttp import web

from radixkv.server.body import json_response
from radixkv.server.state import STATE

__all__ = ["health"]


async def health(request: web.Request) -> web.Response:
    """Say whether this server should get traffic."""
    state = request.app[STATE]
    engine = state.engine.health()
    if not engine.alive:
        status, engine_state = "dead", "dead"
    else:
        stuck = engine.busy and engine.seconds_in_step > state.config.engine_stuck_s
        engine_state = "stuck" if stuck else "stepping" if engine.busy else "idle"
        draining = state.lifecycle.draining or not engine.accepting
        status = "draining" if draining else engine_state if stuck else "ok"
    return json_response(
        {
            "status": status,
            "loop": "alive",
            "engine": {
                "state": engine_state,
                "accepting": engine.accepting,
                "seconds_in_step": round(engine.seconds_in_step, 3),
                "num_running": engine.num_running,
                "num_waiting": engine.num_waiting,
            },
        },
        status=503 if status in ("dead", "draining") else 200,
    )
