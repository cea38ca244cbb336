from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from radixkv.simulate.command import add_commands
from radixkv.simulate.managers import MANAGERS
from radixkv.simulate.parallel import map_parallel

APP = typer.Typer()
add_commands(APP)


def invoke(*words: str) -> Any:
    return CliRunner().invoke(APP, list(words))


@pytest.fixture
def trace(tmp_path: Path) -> str:
    rows = [
        {
            "timestamp": 100 * n,
            "input_length": 1100,
            "output_length": 20,
            "hash_ids": [0, n % 3, 10 + n],
        }
        for n in range(12)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_kv_size_prints_the_bytes_and_what_fits() -> None:
    result = invoke("kv-size", "llama-2-70b", "--memory", "1GiB")
    assert result.exit_code == 0
    assert "327,680 bytes a token (320 KiB)" in result.output
    assert "2,621,440 bytes" in result.output
    assert "1GiB holds 3,276 tokens" in result.output


def test_simulate_reports_every_manager_at_eight_memories(trace: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    result = invoke("simulate", trace, "--json", str(report), "--processes", "1")
    assert result.exit_code == 0, result.output
    runs = json.loads(report.read_text())["runs"]
    assert len(runs) == 8 * len(MANAGERS)
    assert len({run["kv_memory"] for run in runs}) == 8
    for run in runs:
        assert run["finished"] == 12
        assert (run["hit_rate"] > 0) == (run["manager"] in ("hash-blocks", "radix"))
        assert run["block_size"] == 512
        assert run["series"]
    assert all(name in result.output for name in MANAGERS)


def test_simulate_repeats_to_the_byte_by_seed(tmp_path: Path) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        path = tmp_path / f"{len(texts)}.json"
        words = ("simulate", "alpaca", "--duration", "20", "--rate", "3", "--memory", "1GiB")
        result = invoke(*words, "--seed", seed, "--json", str(path), "--processes", "1")
        assert result.exit_code == 0, result.output
        texts.append(path.read_text())
    assert texts[0] == texts[1] != texts[2]


def test_simulate_in_processes_gives_the_same(trace: str, tmp_path: Path) -> None:
    texts = []
    for processes in ("1", "2"):
        path = tmp_path / f"{processes}.json"
        words = ("--manager", "radix", "--manager", "paged", "--memory", "1GiB")
        result = invoke(
            "simulate", trace, *words, "--json", str(path), "--processes", processes, "--sustain"
        )
        assert result.exit_code == 0, result.output
        texts.append(path.read_text())
    assert texts[0] == texts[1]
    assert '"sustainable_rate"' in texts[0]


def test_hits_only_reports_the_hit_rate_of_the_cache_alone(trace: str, tmp_path: Path) -> None:
    path = tmp_path / "hits.json"
    words = ("--hits-only", "--manager", "radix", "--memory", "1GiB", "--json", str(path))
    result = invoke("simulate", trace, *words)
    assert result.exit_code == 0, result.output
    (row,) = json.loads(path.read_text())["hits"]
    # Two whole blocks a prompt: the first is new once, the second three times.
    assert row["hit_rate"] == pytest.approx((24 - 1 - 3) / 24)


def test_sessions_limits_how_many_clients_have_open_at_once(tmp_path: Path) -> None:
    rows = []
    for n in range(6):
        first = {"input_length": 600, "output_length": 20, "hash_ids": [n], "session_id": n}
        rows += [first, {**first, "input_length": 700, "delay": 1000}]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    seconds = []
    for sessions in ("1", "6"):
        path = tmp_path / f"{sessions}.json"
        words = ("--manager", "radix", "--memory", "1GiB", "--sessions", sessions)
        result = invoke("simulate", str(trace), *words, "--json", str(path), "--processes", "1")
        assert result.exit_code == 0, result.output
        (run,) = json.loads(path.read_text())["runs"]
        assert run["finished"] == 12
        assert run["hit_rate"] == pytest.approx(512 / 1300)
        seconds.append(run["seconds"])
    # Each session pauses for a second.
    assert seconds[0] > 6.0 > 2.0 > seconds[1] > 1.0


def test_plots_are_written(trace: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "plots"
    words = ("--memory", "1GiB", "--memory", "2GiB", "--rate", "1", "--rate", "9")
    result = invoke("simulate", trace, *words, "--plots", str(folder), "--processes", "1")
    assert result.exit_code == 0, result.output
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert set(sizes) == {"hit_rate.png", "latency.png", "waste.png"}
    assert min(sizes.values()) > 10_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "TRACE is missing"),
        (("none.jsonl",), "can't be read"),
        (("alpaca", "--gpu", "abacus"), "--gpu must be one of"),
        (("alpaca", "--model", "gpt-9"), "neither a directory"),
        (("alpaca", "--manager", "magic"), "--manager must be one of"),
        (("alpaca", "--policy", "magic"), "--policy must be one of"),
        (("alpaca", "--memory", "much"), "--memory: 'much'"),
        (("alpaca", "--memory", "1MiB"), "not one block of 16"),
        (("alpaca", "--page", "0"), "--page must be at least"),
        (("alpaca", "--model", "opt-175b"), "leave no memory"),
        (("alpaca", "--samples", "8", "--max-seqs", "4"), "--samples must be at most"),
        (("alpaca", "--calibrate", "localhost"), "--calibrate must begin with"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(words: tuple[str, ...], message: str) -> None:
    result = invoke("simulate", *words)
    assert result.exit_code == 2
    assert message in result.output


def double(item: int, factor: int) -> int:
    if item < 0:
        raise ValueError(f"bad item {item}")
    return item * factor


@pytest.mark.parametrize("num_processes", [1, 2])
def test_map_parallel_keeps_the_order_and_counts(num_processes: int) -> None:
    counts: list[int] = []
    items = list(range(7))
    results = map_parallel(double, items, 3, num_processes=num_processes, on_done=counts.append)
    assert results == [3 * item for item in items]
    assert counts == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_map_parallel_passes_errors_on(num_processes: int) -> None:
    with pytest.raises(ValueError, match="bad item -1"):
        map_parallel(double, [1, -1, 2], 3, num_processes=num_processes)
