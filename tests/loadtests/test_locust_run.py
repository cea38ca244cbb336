"""Locust patches the standard library when it is imported, so it runs in processes of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from loadtest_fakes import FakeServer, Serve

pytest.importorskip("geventhttpclient")

ROOT = Path(__file__).parents[2]
# One after the other, so that a fork's branches and a second turn are seen in two seconds.
FAST = ("--think", "0.05", "--tool", "0.05", "--turns", "2", "--max-tokens", "4")


async def run(*words: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loadtests.run", *words),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_run_ends_with_a_report_and_status_zero_if_levels_are_met(
    serve: Serve, tmp_path: Path
) -> None:
    fake = FakeServer()
    report, shown = tmp_path / "report.html", tmp_path / "figures.json"
    levels = ("--slo", "ttft_p95=20s", "--slo", "error_rate=0", "--slo", "cached_share=25%")
    status, output = await run(
        *("--url", await serve(fake), "--users", "6", "--time", "3s", *FAST, *levels),
        *("--mix", "chat=1,sessions=1,forks=1,samplers=1,documents=1"),
        *("--report", str(report), "--figures", str(shown)),
    )
    assert status == 0, output
    page = report.read_text()
    assert page.count('<td class="pass">') == 3
    assert "Over time" in page
    result = json.loads(shown.read_text())
    # This server has no sessions, so those chat.
    assert set(result["kinds"]) == {"chat", "forks", "samplers", "documents"}
    assert result["all"]["cached_share"] == pytest.approx(0.3)
    assert result["all"]["errors"] == 0
    assert all(slo["met"] for slo in result["slos"])
    assert "/v1/sessions" in output
    assert {body.get("n", 1) for body in fake.bodies} == {1, 4}
    # Whoever ran at the end is not counted.
    assert 10 < result["all"]["requests"] <= len(fake.bodies)


async def test_run_has_status_one_if_a_level_is_missed(serve: Serve, tmp_path: Path) -> None:
    status, output = await run(
        *("--url", await serve(FakeServer(cuts=True)), "--users", "2", "--time", "2s", *FAST),
        *("--mix", "chat", "--slo", "error_rate=50%", "--slo", "request_rate=0"),
        *("--report", str(tmp_path / "report.html")),
    )
    assert status == 1, output
    assert "FAIL" in output
    assert "the stream ended early" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--slo", "speed=1"), "--slo knows"),
        (("--mix", "poets=1"), "--mix must be KIND=WEIGHT"),
        (("--url", "http://127.0.0.1:9"), "can't be reached"),
    ],
)
async def test_run_refuses_what_it_does_not_know(words: tuple[str, ...], message: str) -> None:
    status, output = await run(*words)
    assert status == 2
    assert message in output
