"""The HTTP server: OpenAI API, sessions, admin pages and metrics over an `AsyncEngine`.

`create_app` builds the aiohttp application from an engine and a `ServerConfig`; `run_server` serves
it until a signal asks it to drain. The server knows HTTP, JSON and sessions; what a token costs and
where its KV lives is the engine's business.
"""

from radixkv.server.app import create_app
from radixkv.server.config import ServerConfig
from radixkv.server.run import run_server

__all__ = ["ServerConfig", "create_app", "run_server"]
