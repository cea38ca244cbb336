"""A server of its own process that keeps sessions in a file, to be killed: `FILE`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "engine")]

from server_fakes import FakeEngine

from radixkv.server import ServerConfig, create_app, run_server
from radixkv.server.session_db import SessionDb


def main() -> None:
    async def serve() -> None:
        db = SessionDb(sys.argv[1])
        app = create_app(FakeEngine(step_s=0.001), ServerConfig(), session_db=db)  # type: ignore[arg-type]
        await run_server(app, port=0, on_ready=lambda url: print(url, flush=True))

    asyncio.run(serve())


if __name__ == "__main__":
    main()
