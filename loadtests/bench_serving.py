"""Drives an OpenAI-compatible server with recorded agent traffic and prints what it gave.

    python -m loadtests.bench_serving http://127.0.0.1:8000 [OTHER_URL]

prints one JSON line per run; with a second URL both are driven in turn, and a table of ratios of
the medians follows. The traffic is closed-loop: `--concurrency` conversations at a time, each
sending its next turn when the last has been answered; history is the recorded one, so every
server gets the same prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import Counter
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from loadtests.airline import Conversation, load_conversations
from loadtests.openai_client import Sample, stream_chat

FIGURES = {  # name -> whether more is better
    "output_tokens_per_s": True,
    "ttft_p50_s": False,
    "ttft_p95_s": False,
    "itl_p50_ms": False,
    "itl_p95_ms": False,
    "hit_rate": True,
    "wall_s": False,
}


async def run(
    url: str, conversations: list[Conversation], args: argparse.Namespace
) -> dict[str, Any]:
    """Play all conversations once; return the figures of the run."""
    samples: list[Sample] = []
    queue = list(reversed(conversations))
    timeout = aiohttp.ClientTimeout(total=None)
    console = Console(stderr=True)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        async with session.get(f"{url}/v1/models") as response:
            model = args.model or (await response.json())["data"][0]["id"]
        begin = time.perf_counter()
        with Progress(console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task(url, total=sum(map(len, conversations)))

            async def worker() -> None:
                while queue:
                    for messages in queue.pop():
                        body = {
                            "model": model,
                            "messages": messages,
                            "max_tokens": args.max_tokens,
                            "temperature": 0,
                            "ignore_eos": True,
                        }
                        samples.append(await stream_chat(session, url, body))
                        progress.advance(task)

            await asyncio.gather(*(worker() for _ in range(args.concurrency)))
        wall = time.perf_counter() - begin
    return {"url": url, "model": model, **figures(samples, wall)}


def figures(samples: list[Sample], wall_s: float) -> dict[str, Any]:
    """Return the figures of a run of `wall_s` seconds."""
    good = [s for s in samples if s.error is None]
    gaps = [gap for s in good for gap in s.inter_token]
    prompt = sum(s.prompt_tokens for s in good)
    return {
        "requests": len(samples),
        "errors": dict(Counter(s.error for s in samples if s.error).most_common(5)),
        "prompt_tokens": prompt,
        "cached_tokens": sum(s.cached_tokens for s in good),
        "output_tokens": sum(s.completion_tokens for s in good),
        "hit_rate": round(sum(s.cached_tokens for s in good) / max(prompt, 1), 4),
        "output_tokens_per_s": round(sum(s.completion_tokens for s in good) / wall_s, 2),
        "ttft_p50_s": _percentile([s.ttft for s in good], 50),
        "ttft_p95_s": _percentile([s.ttft for s in good], 95),
        "itl_p50_ms": _percentile([1000 * gap for gap in gaps], 50),
        "itl_p95_ms": _percentile([1000 * gap for gap in gaps], 95),
        "wall_s": round(wall_s, 2),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("url", nargs="+", help="one or two servers")
    parser.add_argument("--model", help="model name; default: the first the server lists")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    conversations = load_conversations(args.conversations, args.turns)
    runs: dict[str, list[dict[str, Any]]] = {url: [] for url in args.url}
    for _ in range(args.rounds):
        for url in args.url:
            result = asyncio.run(run(url.rstrip("/"), conversations, args))
            runs[url].append(result)
            print(json.dumps(result), flush=True)
    _print_table(runs)


def _print_table(runs: dict[str, list[dict[str, Any]]]) -> None:
    medians = {
        url: {name: statistics.median(r[name] for r in results) for name in FIGURES}
        for url, results in runs.items()
    }
    first = next(iter(medians.values()))
    table = Table("figure", *medians, *(["first / second"] if len(medians) > 1 else []))
    for name, more_is_better in FIGURES.items():
        row = [f"{m[name]:.4g}" for m in medians.values()]
        if len(medians) > 1:
            second = list(medians.values())[1][name]
            better = (first[name] > second) == more_is_better
            row.append(f"{first[name] / second:.2f} {'better' if better else 'worse'}")
        table.add_row(name, *row)
    Console().print(table)


def _percentile(values: list[float], percent: int) -> float:
    if len(values) < 2:
        return round(values[0], 4) if values else 0.0
    return round(statistics.quantiles(values, n=100, method="inclusive")[percent - 1], 4)


if __name__ == "__main__":
    main()
