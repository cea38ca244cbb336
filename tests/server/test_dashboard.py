"""The files of the dashboard: how they are served, and what may never be in them."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FILES = ROOT / "server" / "dashboard"
KEY = "sk-test"


def sources(suffix: str) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(FILES.glob(f"*{suffix}"))}


async def test_admin_leads_to_the_page_behind_any_prefix(client: Any) -> None:
    response = await client.get("/admin", allow_redirects=False)
    assert (response.status, response.headers["Location"]) == (308, "admin/")
    page = await client.get("/admin")
    assert (page.status, page.content_type) == (200, "text/html")
    assert page.url.path == "/admin/"


async def test_page_needs_no_key_and_its_numbers_do(make_client: Any) -> None:
    client = await make_client(api_key=KEY)
    for path in ("/admin", "/admin/", "/admin/assets/main.js", "/admin/assets/style.css"):
        assert (await client.get(path)).status == 200, path
    assert (await client.get("/admin/timeline")).status == 401
    known = {"Authorization": f"Bearer {KEY}"}
    assert (await client.get("/admin/timeline", headers=known)).status == 200


@pytest.mark.parametrize("path", ["/admin/", "/admin/assets/main.js", "/admin"])
async def test_policy_forbids_all_but_the_servers_own(client: Any, path: str) -> None:
    headers = (await client.get(path, allow_redirects=False)).headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert "script-src" not in policy  # it is that of default-src
    assert "frame-ancestors 'none'" in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"


async def test_each_file_has_its_type_and_is_not_sent_twice(client: Any) -> None:
    types = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    for path in sorted(FILES.iterdir()):
        if path.name == "index.html":
            continue
        response = await client.get(f"/admin/assets/{path.name}")
        assert (response.status, response.content_type) == (200, types[path.suffix])
        assert await response.read() == path.read_bytes()
        again = await client.get(
            f"/admin/assets/{path.name}", headers={"If-None-Match": response.headers["ETag"]}
        )
        assert (again.status, await again.read()) == (304, b"")


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fapp.py", "%2e%2e%2fapp.py", "dashboard", "."])
async def test_nothing_but_the_pages_files_is_served(client: Any, name: str) -> None:
    response = await client.get(f"/admin/assets/{name}")
    assert response.status == 404
    assert (await response.json())["error"]["code"] == "not_found"


def test_everything_that_is_referred_to_is_there() -> None:
    page = sources(".html")["index.html"]
    names = set(re.findall(r'(?:src|href)="assets/([^"]+)"', page))
    assert {"main.js", "theme.js", "style.css", "icon.svg"} <= names
    for name, text in sources(".js").items():
        found = re.findall(r'^(?:import|\} from|import .* from) "([^"]+)";', text, re.MULTILINE)
        assert all(module.startswith("./") for module in found), name
        names.update(module.removeprefix("./") for module in found)
    assert names == {path.name for path in FILES.iterdir()} - {"index.html"}


def test_ids_that_scripts_look_for_are_in_the_page() -> None:
    page = sources(".html")["index.html"]
    ids = set(re.findall(r'\bid="([^"]+)"', page))
    wanted = {
        name for text in sources(".js").values() for name in re.findall(r'byId\("([^"]+)"\)', text)
    }
    assert wanted <= ids
    tiles = re.findall(r'tile\("(\w+)"', sources(".js")["headline.js"])
    assert {f"{name}-{part}" for name in tiles for part in ("value", "note")} <= ids


def test_no_text_can_become_markup_or_code() -> None:
    for name, text in sources(".js").items():
        found = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function"
            r"|createContextualFragment|DOMParser|srcdoc|setTimeout\(\s*[\"'`]",
            text,
        )
        assert not found, (name, found)


def test_page_has_no_inline_code_and_no_other_host() -> None:
    page = sources(".html")["index.html"]
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|javascript:", page)
    for name, text in (sources(".js") | sources(".css") | sources(".html")).items():
        found = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", text))
        assert found <= {"http://www.w3.org/2000/svg"}, name


def test_wheels_will_have_every_file() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    globs = config["tool"]["setuptools"]["package-data"]["radixkv.server"]
    for path in FILES.iterdir():
        assert any(fnmatch.fnmatch(f"dashboard/{path.name}", glob) for glob in globs), path.name


def test_build_has_every_file(tmp_path: Path) -> None:
    try:
        version = int(metadata.version("setuptools").split(".")[0])
    except metadata.PackageNotFoundError:
        version = 0
    if version < 77:
        pytest.skip("a build without a network wants setuptools 77 or newer installed")
    built = tmp_path / "lib"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "import setuptools; setuptools.setup()"]
        + ["-q", "build_py", "--build-lib", str(built), "egg_info", "--egg-base", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    made = {path.name for path in (built / "radixkv" / "server" / "dashboard").iterdir()}
    assert made == {path.name for path in FILES.iterdir()}
