"""Replay recorded traffic against any server that speaks OpenAI's API.

    python -m loadtests.replay mooncake_conversation.jsonl --url http://127.0.0.1:8000 \\
        --limit 200 --scale-length 0.0625 --speed 2 --max-output 32
    python -m loadtests.replay airline_agent.jsonl --url http://127.0.0.1:8000 \\
        --concurrency 8 --turns 6 --output-length 32 --records records.jsonl

A trace in Mooncake's form (`timestamp`, `input_length`, `output_length`, `hash_ids`) has no text:
each block id becomes words that it determines, so what was shared is shared, and prompts have the
length they should to the token (counted by the server's /tokenize, or --tokenizer DIR). Requests
are sent at their times, whether earlier ones have ended or not, unless --concurrency is reached.

Recorded conversations (`{"messages": [...]}` a line) are played turn after turn, --concurrency at
a time; the recorded answers are the history. Answers have fixed lengths (`ignore_eos`).

Records go to --records as JSON lines of aiperf's form. A table follows; the last line of the
output is the summary as JSON, with the names of vLLM's `bench serve`. The exit status is 1 if a
request failed or had another length.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import IO, Any

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtests.openai_client import CHAT
from loadtests.replay_report import record, summarize, summary_table
from loadtests.replay_run import Answer, play_trace
from loadtests.replay_text import FolderCounter, ServerCounter, TokenCounter
from loadtests.replay_traces import (
    Trace,
    is_mooncake,
    load_blocks,
    load_recorded,
    write_blocks,
)
from loadtests.serving_run import connect, reset_cache
from radixkv.errors import RadixKVError

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Replay; return the exit status."""
    args = _parser().parse_args(arguments)
    console = Console(stderr=True)
    try:
        summary = asyncio.run(_replay(args, console))
    except (aiohttp.ClientError, OSError, RadixKVError, RuntimeError, ValueError) as error:
        console.print(f"[red]{type(error).__name__}[/red]: {error}", highlight=False)
        return 2
    if summary is None:
        return 0
    Console().print(summary_table(summary, f"{args.trace.name} on {args.url}"))
    print(json.dumps(summary))
    return 1 if summary["failed"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
        prog="python -m loadtests.replay",
    )
    add = parser.add_argument
    add("trace", type=Path)
    add("--url", required=True, help="of the server, without /v1")
    add("--model", help="its name; default: the first that the server lists")
    add("--api-key", help="sent as a bearer token")
    add("--limit", type=_positive, help="requests at most")
    add("--speed", type=_speed, default=1.0, help="times as fast as recorded; inf: all at once")
    add("--concurrency", type=_positive, help="sessions (else requests) open at once at most")
    add("--reset", action="store_true", help="empty the server's cache first")
    add("--records", type=Path, help="write a line per request there")
    add("--summary", type=Path, help="write the summary there, too")
    blocks = parser.add_argument_group("of traces in Mooncake's form").add_argument
    blocks("--trace-block", type=_positive, default=512, help="tokens that an id stands for")
    blocks("--scale-length", type=_share, default=1.0, help="of all lengths, such as 0.0625")
    blocks("--max-input", type=_positive, help="leave out requests with longer prompts")
    blocks("--max-output", type=_positive, help="cut longer answers")
    blocks("--chat", action="store_true", help="as chats; default: as completions")
    blocks("--tokenizer", type=Path, metavar="DIR", help="to count with instead of /tokenize")
    blocks("--export", type=Path, metavar="FILE", help="write the trace as it is played, and end")
    recorded = parser.add_argument_group("of conversations").add_argument
    recorded("--turns", type=_positive, help="of each conversation at most")
    recorded("--output-length", type=_positive, default=64, help="tokens of each answer")
    recorded("--delay", type=float, default=0.0, help="seconds from an answer to the next turn")
    return parser


async def _replay(args: argparse.Namespace, console: Console) -> dict[str, Any] | None:
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    limits = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=limits, connector=connector, headers=headers) as http:
        endpoint = await connect(http, args.url.removesuffix("/v1"), args.model)
        if args.tokenizer is None:
            counter: TokenCounter = ServerCounter(http, endpoint.url, endpoint.model)
        else:
            counter = FolderCounter(args.tokenizer)
        trace = await _load(args, counter)
        console.print(_description(trace), highlight=False)
        if args.export is not None:
            write_blocks(trace, args.export)
            return None
        if args.reset and await reset_cache(http, endpoint.url) == "none":
            raise RuntimeError(f"{endpoint.url} has no route that empties its cache")
        with _Progress(trace, args.records, console) as progress:
            answers, duration = await play_trace(
                http,
                endpoint,
                trace,
                speed=args.speed,
                concurrency=args.concurrency,
                on_answer=progress.on_answer,
            )
    summary = {
        "trace": trace.name,
        "model_id": endpoint.model,
        "skipped": trace.num_skipped,
        **summarize(answers, duration),
    }
    if args.summary is not None:
        args.summary.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return summary


async def _load(args: argparse.Namespace, counter: TokenCounter) -> Trace:
    if not is_mooncake(args.trace):
        return load_recorded(
            args.trace,
            limit=args.limit,
            turns=args.turns,
            output=args.output_length,
            delay=args.delay,
        )
    return await load_blocks(
        args.trace,
        counter,
        limit=args.limit,
        unit=args.trace_block,
        scale=args.scale_length,
        max_output=args.max_output,
        max_input=args.max_input,
        as_chat=args.chat,
    )


class _Progress:
    """Owns the bar of a replay, and the file of its records."""

    def __init__(self, trace: Trace, records: Path | None, console: Console) -> None:
        self._path = records
        self._file: IO[str] | None = None
        self._failed = 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(trace.name, total=trace.num_requests, state="")

    def __enter__(self) -> _Progress:
        if self._path is not None:
            self._file = self._path.open("w", encoding="utf-8")
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        if self._file is not None:
            self._file.close()

    def on_answer(self, answer: Answer) -> None:
        """Count a request, and write its line."""
        self._failed += answer.sample.error is not None
        state = f"TTFT {1e3 * answer.sample.ttft:.0f} ms, {self._failed} failed"
        self._bar.update(self._task, advance=1, state=state)
        if self._file is not None:
            self._file.write(json.dumps(record(answer)) + "\n")
            self._file.flush()


def _description(trace: Trace) -> str:
    how = "chats" if trace.route == CHAT else "completions"
    skipped = f", {trace.num_skipped} left out as too long" if trace.num_skipped else ""
    return f"{trace.name}: {trace.num_requests} {how} in {len(trace.sessions)} sessions{skipped}"


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def _speed(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be greater than 0, got {text}")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be in (0, 1], got {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
