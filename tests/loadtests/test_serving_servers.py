from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from loadtest_fakes import FakeServer, Serve

from loadtests.serving_servers import ManagedServer, server_command

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

ROOT = Path(__file__).parents[2]
# A "vllm" with a child that ignores SIGTERM, as a worker that hangs would.
SCRIPT = """#!{python}
import json, os, subprocess, sys, signal
sys.path.insert(0, {folder!r})
from aiohttp import web
from loadtest_fakes import FakeServer
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf])
with open({pids!r}, "w") as file:
    json.dump([os.getpid(), child.pid], file)
if "--fail" in sys.argv:
    sys.exit("no such model")
port = int(sys.argv[sys.argv.index("--port") + 1])
web.run_app(FakeServer(reset_route="/reset_prefix_cache").app(), host="127.0.0.1", port=port)
"""


@pytest.fixture
def peer(tmp_path: Path) -> dict[str, Any]:
    """What makes `server_command` start the script above; its processes are listed in `pids`."""
    script = tmp_path / "vllm"
    folder = str(Path(__file__).parent)
    pids = tmp_path / "pids"
    script.write_text(SCRIPT.format(python=sys.executable, folder=folder, pids=str(pids)))
    script.chmod(0o755)
    return {"python": str(tmp_path / "python"), "model": str(tmp_path)}


def states(tmp_path: Path) -> list[str]:
    """The states of the script's processes, as in `ps`; none of those that are gone."""
    found = []
    for pid in json.loads((tmp_path / "pids").read_text()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            found += [state] if state != "Z" else []
    return found


async def wait_for_states(tmp_path: Path, expected: set[str]) -> None:
    deadline = time.monotonic() + 20
    while set(states(tmp_path)) != expected:
        assert time.monotonic() < deadline, states(tmp_path)
        await asyncio.sleep(0.02)


@linux_only
async def test_managed_server_runs_only_in_its_turn_and_leaves_nothing(
    tmp_path: Path, peer: dict[str, Any]
) -> None:
    async with ManagedServer(server_command("vllm", **peer), tmp_path / "log") as server:
        server.pause()
        await wait_for_states(tmp_path, {"T"})
        async with server.running():
            await wait_for_states(tmp_path, {"S"})
        await wait_for_states(tmp_path, {"T"})
    await wait_for_states(tmp_path, set())
    assert server.ended_in_order


@linux_only
async def test_managed_server_that_fails_to_start_shows_why_and_leaves_nothing(
    tmp_path: Path, peer: dict[str, Any]
) -> None:
    command = server_command("vllm", **peer, flags="--fail")
    with pytest.raises(RuntimeError, match=r"vllm ended \(1\).*\n.*no such model"):
        async with ManagedServer(command, tmp_path / "log"):
            pass
    await wait_for_states(tmp_path, set())


@linux_only
@pytest.mark.parametrize("ending", [None, signal.SIGTERM, signal.SIGINT])
async def test_bench_serving_stops_its_peer_whatever_happens(
    tmp_path: Path, peer: dict[str, Any], serve: Serve, ending: signal.Signals | None
) -> None:
    url = await serve(FakeServer(burst=2))
    options = ["--peer", "vllm", "--peer-python", peer["python"], "--model", peer["model"]]
    rounds = "2" if ending is None else "100000"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loadtests.bench_serving", url, "--workload", "sessions"),
        *("--tiny", "--rounds", rounds, *options),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    first = json.loads(await process.stdout.readline())
    assert (first["server"], first["errors"], first["requests"]) == (url, {}, 6)
    if ending is not None:
        process.send_signal(ending)
    rest, _ = await process.communicate()
    await wait_for_states(tmp_path, set())
    if ending is not None:
        assert process.returncode != 0
        return
    assert process.returncode == 0
    summary = json.loads(rest.splitlines()[-1])["workloads"]["sessions"]
    order = [json.loads(line)["server"] for line in rest.splitlines()[:3]]
    assert order == ["vllm", "vllm", url]
    assert [r["reset"] for r in summary["runs"]["vllm"]] == ["/reset_prefix_cache"] * 2
    assert summary["runs"][url][0]["tokens_per_chunk"] == 2.0
    assert summary["targets"][0]["target"] == ">= 2"


def test_server_command_of_each_kind() -> None:
    vllm = server_command("vllm", model="/m", python="/v/bin/python", port=1, flags="--x 'a b'")
    assert vllm.arguments == (
        *("/v/bin/vllm", "serve", "/m", "--dtype", "bfloat16", "--enable-prefix-caching"),
        *("--enable-prompt-tokens-details", "--host", "127.0.0.1", "--port", "1", "--x", "a b"),
    )
    assert vllm.environ["VLLM_CPU_KVCACHE_SPACE"] == "4"
    own = server_command("radixkv", port=2)
    assert own.arguments[3:] == ("serve", "--host", "127.0.0.1", "--port", "2")
    peer = server_command("transformers", model="/m", python="/v/bin/python", environ={"A": "b"})
    assert peer.arguments[:4] == ("/v/bin/transformers", "serve", "/m", "--continuous-batching")
    assert (peer.model, peer.environ["A"]) == ("/m", "b")


@pytest.mark.parametrize(
    ("kind", "message"), [("vllm", "needs --model"), ("sglang", "kind must be one of")]
)
def test_server_command_refuses_what_it_can_not_start(kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        server_command(kind)
