from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from radixkv.errors import ConfigError
from radixkv.simulate.traffic import (
    DATASETS,
    Lengths,
    Synthetic,
    Trace,
    at_rate,
    load_trace,
    refine,
)


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def row(timestamp: float, length: int, ids: list[object], output: int = 5) -> dict[str, object]:
    return {
        "timestamp": timestamp,
        "input_length": length,
        "output_length": output,
        "hash_ids": ids,
    }


@pytest.mark.parametrize("name", ["sharegpt", "alpaca"])
def test_drawn_lengths_have_the_published_means_and_maximum(name: str) -> None:
    lengths = DATASETS[name]
    requests = Synthetic(lengths, rate=100, duration=200).requests(None, 16)
    prompts = np.array([request.prompt_len for request in requests])
    outputs = np.array([request.output_len for request in requests])
    # 20,000 draws: the mean of a geometric distribution is off by 0.7 % in one standard deviation.
    assert prompts.mean() == pytest.approx(lengths.prompt, rel=0.03)
    assert outputs.mean() == pytest.approx(lengths.output, rel=0.03)
    assert (prompts + outputs).max() <= 2048
    assert min(prompts.min(), outputs.min()) >= 1


def test_the_means_are_those_after_the_cut() -> None:
    # Without a correction these would be 177 and 240.
    lengths = Lengths(200, 300, 1000)
    requests = Synthetic(lengths, rate=100, duration=200).requests(None, 16)
    assert np.mean([r.prompt_len for r in requests]) == pytest.approx(200, rel=0.03)
    assert np.mean([r.output_len for r in requests]) == pytest.approx(300, rel=0.03)


def test_arrivals_are_poisson() -> None:
    requests = Synthetic(DATASETS["alpaca"], rate=20, duration=1000).requests(None, 16)
    gaps = np.diff([request.arrival for request in requests])
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)


def test_equal_seeds_give_equal_requests() -> None:
    def lengths(seed: int) -> list[tuple[float, int, int]]:
        requests = Synthetic(DATASETS["sharegpt"], seed=seed, duration=60).requests(2.0, 16)
        return [(r.arrival, r.prompt_len, r.output_len) for r in requests]

    assert lengths(1) == lengths(1)
    assert lengths(1) != lengths(2)


def test_lengths_do_not_depend_on_the_rate() -> None:
    traffic = Synthetic(DATASETS["sharegpt"], duration=60)
    slow, fast = traffic.requests(1.0, 16), traffic.requests(9.0, 16)
    assert [r.prompt_len for r in slow] == [r.prompt_len for r in fast[: len(slow)]]


def test_a_shared_prefix_is_shared_in_whole_blocks_and_nothing_else_is() -> None:
    traffic = Synthetic(DATASETS["alpaca"], duration=50, rate=2, shared_prefix=341)
    requests = traffic.requests(None, 16)
    owned: set[int] = set()
    for request in requests:
        assert request.prompt_len > 341
        assert len(request.keys) == request.prompt_len // 16
        assert request.keys[:21].tolist() == list(range(21))
        own = set(request.keys[21:].tolist())
        assert not own & (owned | set(range(21)))
        owned |= own


def test_load_trace_keeps_ids_of_whole_blocks_and_starts_at_zero(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        [row(3000, 1500, ["a", "b", "c"]), row(2000, 1024, ["a", "b"]), row(4500, 100, ["d"])],
    )
    requests = load_trace(path)
    assert [r.arrival for r in requests] == [0.0, 1.0, 2.5]
    assert [len(r.keys) for r in requests] == [2, 2, 0]
    assert requests[0].keys.tolist() == requests[1].keys.tolist()


def test_load_trace_reads_no_more_than_the_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [row(n, 512, [n]) for n in range(5)])
    assert len(load_trace(path, limit=3)) == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "t.jsonl:1: not a request"),
        ('{"timestamp": 0}', "t.jsonl:1: not a request"),
        (json.dumps(row(0, 1024, [1])), "need at least 2 ids"),
        (json.dumps(row(0, 0, [])), "0 tokens of input"),
        ("", "has no requests"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=message):
        load_trace(path)


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        load_trace(tmp_path / "none.jsonl")


def test_refine_cuts_keys_so_that_equal_prefixes_stay_equal(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [row(0, 1024, [7, 8]), row(1, 1024, [7, 9])])
    first, second = refine(load_trace(path), 512, 128)
    assert len(first.keys) == len(second.keys) == 8
    assert (first.keys == second.keys).tolist() == [True] * 4 + [False] * 4
    assert len(set(first.keys.tolist())) == 8


def test_a_block_size_that_does_not_divide_the_traces_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [row(0, 1024, [7, 8])])
    with pytest.raises(ConfigError, match="must divide 512"):
        Trace(load_trace(path)).requests(None, 96)


def test_at_rate_stretches_the_arrivals(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [row(1000 * n, 512, [n]) for n in range(11)])
    stretched = at_rate(load_trace(path), 0.5)
    assert stretched[-1].arrival == pytest.approx(22.0)
    assert stretched[5].arrival == pytest.approx(11.0)


def test_turns_of_a_session_follow_the_one_before_them(tmp_path: Path) -> None:
    rows = [
        {**row(5000, 10, []), "session_id": "b"},
        {**row(3000, 10, []), "session_id": "a"},
        {**row(0, 11, []), "session_id": "a", "delay": 500},
        row(4000, 12, []),
        {**row(0, 13, []), "session_id": "a", "delay": 0},
        {**row(9000, 14, []), "session_id": "b"},
    ]
    requests = load_trace(write(tmp_path / "trace", rows))
    assert [(r.arrival, r.prompt_len, r.after) for r in requests] == [
        (0.0, 10, None),
        (0.5, 11, 0),
        (0.0, 13, 1),
        (1.0, 12, None),
        (2.0, 10, None),
        # Without a delay, a turn has a time of its own.
        (6.0, 14, None),
    ]


def test_a_rate_is_refused_where_turns_follow_each_other(tmp_path: Path) -> None:
    rows = [{**row(0, 10, []), "session_id": 1, **more} for more in ({}, {"delay": 1})]
    requests = load_trace(write(tmp_path / "trace", rows))
    with pytest.raises(ConfigError, match="the trace has sessions"):
        at_rate(requests, 1.0)


@pytest.mark.parametrize("time", ["NaN", "Infinity"])
def test_a_time_that_is_no_number_is_refused(tmp_path: Path, time: str) -> None:
    path = tmp_path / "trace"
    path.write_text(json.dumps(row(0, 10, [])).replace('"timestamp": 0', f'"timestamp": {time}'))
    with pytest.raises(ConfigError, match="a time must be a number"):
        load_trace(path)
