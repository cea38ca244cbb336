from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from loadtest_fakes import Serve
from replay_fakes import WordServer

from loadtests.openai_client import Sample
from loadtests.replay import main
from loadtests.replay_report import record, summarize
from loadtests.replay_run import Answer, play_trace
from loadtests.replay_traces import COMPLETIONS, Session, Trace, Turn
from loadtests.serving_run import Endpoint


def turn(index: int, delay: float = 0.0, length: int | None = None, output: int = 2) -> Turn:
    return Turn(index, delay, length, output, lambda: {"prompt": f"number {index}"})


def trace(*sessions: Session) -> Trace:
    return Trace("test", COMPLETIONS, sessions)


def single(index: int, arrival: float) -> Session:
    return Session(f"s{index}", arrival, (turn(index),))


async def play(
    http: aiohttp.ClientSession, url: str, played: Trace, **options: Any
) -> list[Answer]:
    answers, _ = await play_trace(http, Endpoint(url, "words"), played, **options)
    return sorted(answers, key=lambda a: a.turn.index)


async def test_requests_are_sent_at_their_times_whether_others_have_ended_or_not(
    session: aiohttp.ClientSession, serve: Serve
) -> None:
    server = WordServer(seconds=0.5)
    played = trace(single(1, 0.2), single(0, 0.0), single(2, 0.4))
    answers = await play(session, await serve(server), played, speed=2.0)
    assert [words[-1] for words in server.prompts] == ["0", "1", "2"]
    assert server.most_running == 3
    waited = server.times[2] - server.times[0]
    assert 0.19 <= waited < 0.45  # 0.4 s at twice the speed, before the first one's end
    assert all(0 <= a.lag < 0.2 for a in answers)


async def test_turns_follow_each_other_after_a_pause(
    session: aiohttp.ClientSession, serve: Serve
) -> None:
    server = WordServer(seconds=0.05)
    chain = Session("chain", 0.0, (turn(0), turn(1, delay=0.2), turn(2)))
    answers = await play(session, await serve(server), trace(chain))
    assert server.most_running == 1
    assert server.times[1] - server.times[0] >= 0.25
    assert [a.turn_index for a in answers] == [0, 1, 2]
    assert answers[1].start >= answers[0].end + 0.19


async def test_no_more_sessions_are_open_than_should_be_and_their_lag_tells(
    session: aiohttp.ClientSession, serve: Serve
) -> None:
    server = WordServer(seconds=0.1)
    played = trace(*(single(n, 0.0) for n in range(6)))
    answers = await play(session, await serve(server), played, speed=float("inf"), concurrency=2)
    assert server.most_running == 2
    assert [words[-1] for words in server.prompts] == ["0", "1", "2", "3", "4", "5"]
    assert answers[5].lag >= 0.15 > 0.05 > answers[0].lag


async def test_an_answer_of_another_length_is_an_error_and_the_session_goes_on(
    session: aiohttp.ClientSession, serve: Serve
) -> None:
    chain = Session("chain", 0.0, (turn(0, length=3), turn(1, length=4)))
    answers = await play(session, await serve(WordServer()), trace(chain))
    assert [a.sample.error for a in answers] == [None, "a prompt of 3 tokens instead of 4"]


def answer(index: int, ttft: float = 1.0, error: str | None = None, cached: int = 6) -> Answer:
    sample = Sample(
        arrivals=[ttft, ttft + 0.1, ttft + 0.3],
        latency=ttft + 0.4,
        prompt_tokens=10,
        cached_tokens=cached,
        tells_cached=True,
        completion_tokens=3,
        error=error,
    )
    return Answer("s", 0, turn(index), 100.0, 0.25, sample)


def test_a_record_has_the_names_of_aiperf() -> None:
    line = record(answer(7))
    metrics = {name: metric["value"] for name, metric in line["metrics"].items()}
    assert metrics == {
        "request_latency": 1400.0,
        "time_to_first_token": 1000.0,
        "inter_token_latency": 150.0,
        "input_sequence_length": 10,
        "output_sequence_length": 3,
        "usage_prompt_cache_read_tokens": 6,
    }
    assert line["metadata"]["session_num"] == 7
    assert (
        line["metadata"]["request_end_ns"] - line["metadata"]["request_start_ns"] == 1_400_000_000
    )
    assert line["error"] is None
    failed = record(answer(8, error="500: no"))
    assert failed["error"] == {"message": "500: no"}
    assert set(failed["metrics"]) == {"request_latency"}


def test_a_summary_has_the_names_of_vllm_and_leaves_failures_out() -> None:
    summary = summarize([answer(0), answer(1, ttft=3.0, cached=2), answer(2, error="no")], 4.0)
    assert (summary["completed"], summary["failed"]) == (2, 1)
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (20, 6)
    assert summary["cached_share"] == pytest.approx(0.4)
    assert summary["output_throughput"] == pytest.approx(1.5)
    assert summary["total_token_throughput"] == pytest.approx(6.5)
    assert summary["mean_ttft_ms"] == summary["median_ttft_ms"] == pytest.approx(2000)
    assert summary["median_tpot_ms"] == pytest.approx(150)
    assert summary["median_itl_ms"] == pytest.approx(150)
    assert summary["errors"] == {"no": 1}


def test_a_summary_of_nothing_but_failures_has_no_times() -> None:
    summary = summarize([answer(0, error="no")], 1.0)
    assert summary["mean_ttft_ms"] is summary["cached_share"] is None


async def command(*words: str) -> int:
    return await asyncio.to_thread(main, list(words))


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    rows = [
        {
            "timestamp": 100 * n,
            "input_length": 1100 + n,
            "output_length": 30,
            "hash_ids": [0, n % 2, 10 + n],
        }
        for n in range(6)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


async def test_replay_of_a_trace_shares_what_was_shared(
    serve: Serve, mooncake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = WordServer()
    records = tmp_path / "records.jsonl"
    words = ("--url", await serve(server), "--limit", "5", "--speed", "inf", "--concurrency", "1")
    words += ("--scale-length", "0.25", "--max-output", "3", "--reset", "--records", str(records))
    assert await command(str(mooncake), *words) == 0
    lines = capsys.readouterr().out.splitlines()
    summary = json.loads(lines[-1])
    lengths = [2 * 128 + round((76 + n) / 4) for n in range(5)]
    assert summary["total_input_tokens"] == sum(lengths)
    # The first shares nothing, the second one block, all others two; BOS is shared as well.
    assert summary["total_cached_tokens"] == pytest.approx(0 + 128 + 3 * 256 + 4, abs=5)
    written = [json.loads(line) for line in records.read_text().splitlines()]
    assert [r["metrics"]["input_sequence_length"]["value"] for r in written] == lengths
    assert {body["max_tokens"] for body in server.bodies} == {3}
    assert any("output tokens/s" in line for line in lines)


async def test_replay_of_conversations_sends_them_as_chats(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"))] * 2
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    server = WordServer(has_tokenize=False)
    words = ("--url", await serve(server), "--output-length", "2", "--summary", str(tmp_path / "s"))
    assert await command(str(path), *words, "--reset") == 0
    assert [len(body["messages"]) for body in server.bodies] == [1, 3]
    assert json.loads((tmp_path / "s").read_text())["completed"] == 2


def refused(text: str) -> Callable[[str], bool]:
    return lambda shown: text in shown.replace("\n", " ")


@pytest.mark.parametrize(
    ("server", "words", "message"),
    [
        (WordServer(has_tokenize=False), (), "give --tokenizer"),
        (WordServer(), ("--tokenizer", "/nowhere"), "is no directory"),
        (WordServer(), ("--trace-block", "128"), "need at least 8 ids"),
    ],
)
async def test_replay_refuses_what_it_cannot_do_exactly(
    serve: Serve,
    mooncake: Path,
    capsys: pytest.CaptureFixture[str],
    server: WordServer,
    words: tuple[str, ...],
    message: str,
) -> None:
    assert await command(str(mooncake), "--url", await serve(server), *words) == 2
    assert refused(message)(" ".join(capsys.readouterr().err.split()))


async def test_replay_has_status_one_if_a_request_fails(serve: Serve, mooncake: Path) -> None:
    # The text was counted with another tokenizer, so to say.
    server = WordServer()
    url = await serve(server)
    original = server.words_of
    server.words_of = lambda body: original(body) + ["!"] * (body.get("max_tokens") == 1)  # type: ignore[method-assign]
    assert await command(str(mooncake), "--url", url, "--speed", "inf", "--max-output", "1") == 1
