"""Hundreds of faulty requests harm nobody."""

from __future__ import annotations

from fakes import VOCAB
from live import live_server, tiny_engine

from loadtests.faulty import judge, run_faults
from loadtests.faulty_requests import Fault, Target, faults
from loadtests.raw_http import RawAnswer

LIMIT = 1_000_000
TARGET = Target("s", VOCAB, 256, LIMIT)


def test_there_are_over_500_different_faults_and_all_routes_get_some() -> None:
    found = faults(TARGET)
    assert len({fault.request for fault in found}) == len(found) > 500
    assert len({fault.kind for fault in found}) > 15
    assert len({fault.path for fault in found}) > 40


async def test_faulty_requests_are_refused_and_healthy_ones_unharmed() -> None:
    engine = tiny_engine(max_model_len=256, num_blocks=256)
    async with live_server(engine, max_body_bytes=LIMIT, body_timeout_s=2.0) as live:
        run = await run_faults(
            live.url,
            max_body_bytes=LIMIT,
            vocab_size=VOCAB,
            compiles=False,
            max_tokens=8,
            # Of them all, `python -m loadtests.faulty` takes long enough.
            every=3,
        )
        engine.engine.cache.check_integrity()
    assert run.problems == []
    assert run.answered.total() > 500
    assert len({kind for kind, _ in run.answered}) > 15
    assert run.healthy > 0
    assert run.changed == 0
    assert run.sound
    assert run.referenced == 0


def test_an_answer_that_is_not_as_it_should_be_is_noticed() -> None:
    fault = Fault("field", b"", "/v1/chat/completions", 400, "top_p")
    head = {"content-type": "application/json", "x-content-type-options": "nosniff"}
    error = b'{"error": {"message": "m", "type": "t", "param": "top_p", "code": null}}'
    assert judge(fault, RawAnswer(400, head, error)) is None
    for answer, problem in (
        (RawAnswer(200, head, error), "status 200"),
        (RawAnswer(400, {**head, "content-type": "text/plain"}, error), "no JSON"),
        (RawAnswer(400, {"content-type": "application/json"}, error), "X-Content"),
        (RawAnswer(400, head, b"{}"), "no error object"),
        (RawAnswer(400, head, error.replace(b'"top_p"', b"null")), "not 'top_p'"),
        (
            RawAnswer(400, head, b'{"type": "error", "error": {"type": "t", "message": "m"}}'),
            "form",
        ),
    ):
        assert problem in str(judge(fault, answer))
