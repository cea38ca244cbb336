"""A headless browser, and a server in a thread for it to look at; `conftest` has the fixtures."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
import pytest
from aiohttp import web
from fakes import make_engine
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait
from server_fakes import END, STOP, FakeTokenizer, chatml_tools

from radixkv.engine import AsyncEngine
from radixkv.server import ServerConfig, create_app
from radixkv.server.state import STATE

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--window-size=1280,900",
    "--lang=en-GB",
)
WAIT_S = 15.0
CELL = "#tree-picture .cell"
SYSTEM = "You are a travel agent who books flights and hotels for people. Now: {}. Be brief."
DEFAULTS = {"max_tokens": 4, "ignore_eos": True, "temperature": 0}


def find_browser() -> tuple[str, str] | None:
    """Return the programs of Chromium and of its driver, if both are installed."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


@contextmanager
def open_browser(programs: tuple[str, str], profile: Path) -> Iterator[webdriver.Chrome]:
    """Start a browser that notes its console and what it loads."""
    os.environ["SE_AVOID_STATS"] = "true"
    options = Options()
    options.binary_location = programs[0]
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(programs[1]))
    try:
        driver.set_page_load_timeout(WAIT_S)
        driver.set_script_timeout(WAIT_S)
        yield driver
    finally:
        driver.quit()


class Served:
    """A server over the real engine with the fake model, on its own thread and a port it keeps.

    `stubs` are answers by path, or None for a route that isn't there.
    """

    def __init__(self, stubs: dict[str, Any] | None = None, **options: Any) -> None:
        self.stubs = stubs or {}
        self.options = options
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.headers: dict[str, str] = {}
        self.asked: list[tuple[str, str]] = []  # path, Authorization
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._runner: web.AppRunner | None = None

    def __enter__(self) -> Served:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._do(self._open())

    def stop(self) -> None:
        """Close connections and the port; `start` makes a new server with an empty cache."""
        loop, thread, runner = self._loop, self._thread, self._runner
        if loop is None or thread is None or runner is None:
            return
        self._do(runner.cleanup())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        self._loop = None

    def post(self, path: str, **body: Any) -> Any:
        """Send a request that generates; return the answer."""
        return self._do(self._post(path, {**DEFAULTS, **body}))

    def chat(self, system: str, user: str, **body: Any) -> Any:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        return self.post("/v1/chat/completions", messages=messages, **body)

    def session(self, *turns: str, system: str | None = None) -> str:
        """Open a session and have its turns answered; return its id."""
        session: str = self.post("/v1/sessions", system=system)["id"]
        for content in turns:
            self.post(f"/v1/sessions/{session}/messages", content=content)
        return session

    async def _open(self) -> None:
        engine = make_engine(
            256, 16, max_num_batched_tokens=256, eos_token_ids=(END, STOP), max_model_len=2048
        )
        engine.tokenizer = tokenizer = FakeTokenizer(chatml_tools, supports_tools=True)
        app = create_app(
            AsyncEngine(engine, tokenizer, model_name="looked-at"), ServerConfig(**self.options)
        )
        app[STATE].timeline.interval_s = 0.25
        app.middlewares.insert(0, self._stub())
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    def _stub(self) -> Any:
        @web.middleware
        async def stub(request: web.Request, handler: Any) -> web.StreamResponse:
            self.asked.append((request.path, request.headers.get("Authorization", "")))
            if request.path not in self.stubs:
                answer: web.StreamResponse = await handler(request)
                return answer
            body = self.stubs[request.path]
            missing = {"error": {"message": f"There is no {request.path}", "code": "not_found"}}
            return web.Response(
                status=404 if body is None else 200,
                body=orjson.dumps(missing if body is None else body),
                content_type="application/json",
            )

        return stub

    async def _post(self, path: str, body: Any) -> Any:
        async with aiohttp.ClientSession(self.url, headers=self.headers) as client:
            response = await client.post(path, json=body)
            assert response.status == 200, await response.text()
            return await response.json()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)


class Page:
    """The dashboard of a server in a browser's tab, as tests look at it."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, served: Served) -> Page:
        self.driver.get(f"{served.url}/admin/")
        return self

    def run(self, script: str, *arguments: Any) -> Any:
        """Return what a script returns."""
        return self.driver.execute_script(script, *arguments)

    def until(self, script: str, *arguments: Any) -> Any:
        """Wait until an expression is true; return it."""
        wait = WebDriverWait(self.driver, WAIT_S, poll_frequency=0.05)
        return wait.until(
            lambda _: self.run(f"return {script}", *arguments), f"{script} of {arguments}"
        )

    def text(self, selector: str) -> str:
        found: str = self.run("return document.querySelector(arguments[0])?.innerText", selector)
        return found

    def until_text(self, selector: str, wanted: str) -> None:
        """Wait until an element is there to be seen and shows a text."""
        self.until(
            "[...document.querySelectorAll(arguments[0])].slice(0, 1).some((one) =>"
            " one.checkVisibility() && one.innerText.includes(arguments[1]))",
            selector,
            wanted,
        )

    def show(self, selector: str) -> None:
        """Scroll an element into view."""
        self.run("document.querySelector(arguments[0]).scrollIntoView()", selector)

    def click(self, selector: str) -> None:
        self.run("document.querySelector(arguments[0]).click()", selector)

    def press(self, key: str) -> None:
        """Press and let go of a key, wherever the focus is."""
        for kind in ("rawKeyDown", "keyUp"):
            self.cdp("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def cdp(self, command: str, **arguments: Any) -> Any:
        return self.driver.execute_cdp_cmd(command, arguments)

    def screen(self, width: int, height: int, *, mobile: bool = False) -> None:
        self.cdp(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )

    def prefer(self, theme: str) -> None:
        """Have the system prefer "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.cdp("Emulation.setEmulatedMedia", features=features)

    def console(self) -> list[str]:
        """Return what was logged since the last call, but notes of no weight."""
        entries = self.driver.get_log("browser")
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def hosts(self) -> set[str]:
        """Return the hosts that were asked for anything since the last call."""
        found = set()
        for entry in self.driver.get_log("performance"):
            message = orjson.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                parts = urlsplit(message["params"]["request"]["url"])
                if parts.scheme not in ("data", "chrome", "about"):
                    found.add(parts.netloc)
        return found


def open_tree(page: Page, served: Served) -> None:
    page.open(served).show("#tree")
    page.until(f"document.querySelectorAll('{CELL}').length > 8")


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    programs = find_browser()
    if programs is None:
        pytest.skip("Chromium and its driver are not installed (apt-get install chromium-driver)")
    with open_browser(programs, tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture
def page(driver: webdriver.Chrome) -> Iterator[Page]:
    """A tab of its own, so that nothing is left of what the one before was told."""
    first = driver.current_window_handle
    driver.switch_to.new_window("tab")
    page = Page(driver)
    page.screen(1280, 900)
    page.prefer("light")
    page.console()
    page.hosts()
    yield page
    page.run("try { localStorage.clear() } catch {}")
    driver.close()
    driver.switch_to.window(first)


@pytest.fixture(scope="session")
def busy() -> Iterator[Served]:
    """A server with sessions, a fork, a pin, two namespaces and a prompt with the time in it."""
    with Served() as served:
        for i in range(3):
            served.session(f"Book flight {i}.", "And a hotel.", system=SYSTEM.format("noon"))
        parent = served.session("Plan a trip.", system=SYSTEM.format("noon"))
        served.post(f"/v1/sessions/{parent}/fork")
        served.post(f"/v1/sessions/{parent}/pin", ttl_seconds=600)
        for time in ("2026-11-29 23:59:58", "2026-11-30 23:59:59", "2026-12-01 00:00:01"):
            served.chat(SYSTEM.format(time), "Hello there.")
        served.chat(SYSTEM.format("noon"), "Another tenant's question.", cache_salt="bob")
        yield served
