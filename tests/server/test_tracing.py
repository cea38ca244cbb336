"""Traces of requests, in memory and to a collector over HTTP, working and broken."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from fakes import make_engine
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from server_fakes import END, STOP, FakeEngine, FakeTokenizer, read_events, until

from radixkv import __version__
from radixkv.engine import AsyncEngine
from radixkv.errors import ConfigError
from radixkv.server import create_app
from radixkv.server.tracing import RequestTracer, build_tracer, traces_url

MARKER = "xyzzy plugh"
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": MARKER}],
    "max_tokens": 4,
    "temperature": 0,
    "stop": [MARKER],
}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

Traced = Callable[..., Awaitable[Any]]


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def serve_with(aiohttp_client: Any) -> Callable[..., Awaitable[Any]]:
    """Serve an engine with a tracer."""

    async def start(tracer: RequestTracer, engine: Any = None) -> Any:
        if engine is None:
            real = make_engine(256, 16, max_num_batched_tokens=64, eos_token_ids=(END, STOP))
            real.tokenizer = tokenizer = FakeTokenizer()
            engine = AsyncEngine(real, tokenizer, model_name="real")  # type: ignore[arg-type]
        return await aiohttp_client(create_app(engine, tracer=tracer))

    return start


@pytest.fixture
def traced(serve_with: Traced, exporter: InMemorySpanExporter) -> Traced:
    """Serve an engine whose spans go to `exporter`."""

    async def start(engine: Any = None) -> Any:
        return await serve_with(RequestTracer(SimpleSpanProcessor(exporter)), engine)

    return start


async def spans_of(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    """The spans of one request by name, the request's own as "request"."""
    await until(lambda: any(s.kind is SpanKind.SERVER for s in exporter.get_finished_spans()))
    spans = exporter.get_finished_spans()
    names = ["request" if span.kind is SpanKind.SERVER else span.name for span in spans]
    assert len(set(names)) == len(names)
    return dict(zip(names, spans, strict=True))


async def test_a_request_is_a_span_with_its_phases(
    traced: Traced, exporter: InMemorySpanExporter
) -> None:
    client = await traced()
    answer = await (await client.post(CHAT, json=BODY, headers={"X-Request-ID": "r-1"})).json()
    spans = await spans_of(exporter)
    assert spans.keys() == {"request", "queue", "prefill", "decode"}
    request = spans["request"]
    assert request.name == "chat real"
    assert request.parent is None
    at = request.start_time
    for name in ("queue", "prefill", "decode"):
        child = spans[name]
        assert child.parent is not None
        assert child.parent.span_id == request.context.span_id
        assert child.context.trace_id == request.context.trace_id
        assert at <= child.start_time <= child.end_time <= request.end_time
        at = child.end_time
    attributes, usage = dict(request.attributes), answer["usage"]
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "radixkv",
        "gen_ai.request.model": "real",
        "gen_ai.response.model": "real",
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.finish_reasons": (answer["choices"][0]["finish_reason"],),
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "radixkv.request.id": "r-1",
        "radixkv.namespace": "default",
    }
    assert {name: attributes[name] for name in expected} == expected
    queue, e2e = (attributes[f"gen_ai.latency.{n}"] for n in ("time_in_queue", "e2e"))
    assert 0 <= queue <= attributes["gen_ai.latency.time_to_first_token"] <= e2e
    assert request.status.status_code is StatusCode.UNSET
    assert request.resource.attributes["service.name"] == "radixkv"
    assert request.resource.attributes["service.version"] == __version__
    assert MARKER not in "".join(span.to_json() for span in spans.values())


async def test_cached_tokens_and_sessions_are_told(
    traced: Traced, exporter: InMemorySpanExporter
) -> None:
    client = await traced()
    session = (await (await client.post("/v1/sessions")).json())["id"]
    url = f"/v1/sessions/{session}/messages"
    await (await client.post(url, json={"content": "hello there", "max_tokens": 2})).read()
    exporter.clear()
    answer = await (await client.post(url, json={"content": "more", "max_tokens": 2})).json()
    attributes = (await spans_of(exporter))["request"].attributes
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == cached > 0
    assert attributes["gen_ai.conversation.id"] == session


async def test_a_clients_trace_goes_on(traced: Traced, exporter: InMemorySpanExporter) -> None:
    client = await traced()
    headers = {"traceparent": PARENT, "tracestate": "vendor=1"}
    answer = await (await client.post(CHAT, json=BODY, headers=headers)).json()
    request = (await spans_of(exporter))["request"]
    assert f"{request.context.trace_id:032x}" == PARENT[3:35]
    assert request.parent is not None
    assert f"{request.parent.span_id:016x}" == PARENT[36:52]
    assert request.context.trace_state["vendor"] == "1"
    found = await (await client.get(f"/admin/requests/{answer['id']}")).json()
    assert found["trace_id"] == PARENT[3:35]


async def test_a_trace_that_the_client_does_not_sample_is_not_made(
    traced: Traced, exporter: InMemorySpanExporter
) -> None:
    client = await traced()
    response = await client.post(CHAT, json=BODY, headers={"traceparent": PARENT[:-2] + "00"})
    await response.read()
    assert response.status == 200
    assert exporter.get_finished_spans() == ()


@pytest.mark.parametrize("given", ["x", "00-" + "0" * 32 + PARENT[35:], PARENT + "0" * 600])
async def test_a_malformed_parent_is_ignored(
    traced: Traced, exporter: InMemorySpanExporter, given: str
) -> None:
    client = await traced()
    response = await client.post(CHAT, json=BODY, headers={"traceparent": given})
    assert response.status == 200
    assert (await spans_of(exporter))["request"].parent is None


async def test_several_prompts_have_their_phases_in_one_span(
    traced: Traced, exporter: InMemorySpanExporter
) -> None:
    client = await traced()
    body = {"prompt": ["a" * 20, "b" * 30], "max_tokens": 2, "temperature": 0}
    answer = await (await client.post("/v1/completions", json=body)).json()
    spans = exporter.get_finished_spans()
    assert sorted(span.name for span in spans) == sorted(
        ["text_completion real", *["queue", "prefill", "decode"] * 2]
    )
    attributes = spans[-1].attributes
    assert attributes["gen_ai.response.id"] == answer["id"]
    assert attributes["gen_ai.usage.input_tokens"] == 50


async def test_only_what_generates_is_traced(
    traced: Traced, exporter: InMemorySpanExporter
) -> None:
    client = await traced(FakeEngine())
    for url in ("/health", "/metrics", "/v1/models", "/admin/cache", "/nothing"):
        await client.get(url)
    assert exporter.get_finished_spans() == ()


@pytest.mark.parametrize(("url", "status"), [(CHAT, 400), (f"/v1/sessions/{MARKER}/messages", 404)])
async def test_a_refusal_is_a_span_without_error_and_text(
    traced: Traced, exporter: InMemorySpanExporter, url: str, status: int
) -> None:
    client = await traced(FakeEngine())
    body = {"messages": MARKER} if url == CHAT else {"content": MARKER}
    assert (await client.post(url, json=body)).status == status
    spans = await spans_of(exporter)
    assert spans.keys() == {"request"}
    assert spans["request"].attributes["http.response.status_code"] == status
    assert spans["request"].status.status_code is StatusCode.UNSET
    assert MARKER not in spans["request"].to_json()


async def test_a_stream_that_fails_is_an_error(
    traced: Traced, exporter: InMemorySpanExporter
) -> None:
    engine = FakeEngine()
    engine.fail_at = 2
    client = await traced(engine)
    await read_events(await client.post(CHAT, json={**BODY, "stream": True}))
    request = (await spans_of(exporter))["request"]
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["error.type"] == "error"
    assert request.status.status_code is StatusCode.ERROR


async def test_a_client_that_leaves_ends_the_span(
    traced: Traced, exporter: InMemorySpanExporter
) -> None:
    engine = FakeEngine()
    client = await traced(engine)
    engine.gate.clear()
    response = await client.post(CHAT, json={**BODY, "stream": True})
    await until(lambda: engine.waiting)
    response.close()
    spans = await spans_of(exporter)
    assert spans.keys() == {"request", "queue"}
    assert spans["request"].attributes["gen_ai.response.finish_reasons"] == ("abort",)


class BrokenProcessor(SpanProcessor):
    def on_end(self, span: ReadableSpan) -> None:
        raise RuntimeError("injected")


async def test_a_tracer_that_fails_fails_no_request(serve_with: Traced) -> None:
    client = await serve_with(RequestTracer(BrokenProcessor()), FakeEngine())
    assert (await client.post(CHAT, json=BODY)).status == 200
    page = await (await client.get("/metrics")).text()
    assert "radixkv:metrics_failures_total 1.0" in page


class Collector:
    """A collector over HTTP that keeps what it gets, or never answers."""

    def __init__(self) -> None:
        self.got: list[ExportTraceServiceRequest] = []
        self.paths: list[str] = []
        self.open = asyncio.Event()
        self.open.set()

    async def take(self, request: web.Request) -> web.Response:
        self.paths.append(request.path)
        body = await request.read()
        await self.open.wait()
        self.got.append(ExportTraceServiceRequest.FromString(body))
        return web.Response(content_type="application/x-protobuf")


@pytest.fixture
async def collector(aiohttp_server: Any) -> Any:
    collector = Collector()
    app = web.Application()
    app.router.add_post("/{path:.*}", collector.take)
    server = await aiohttp_server(app)
    yield collector, str(server.make_url("")).rstrip("/")
    collector.open.set()


async def test_spans_reach_a_collector_over_http(serve_with: Traced, collector: Any) -> None:
    taken, url = collector
    tracer = build_tracer(url)
    client = await serve_with(tracer, FakeEngine())
    assert (await client.post(CHAT, json=BODY)).status == 200
    await tracer.close()
    assert taken.paths == ["/v1/traces"]
    (batch,) = taken.got
    (resource,) = batch.resource_spans
    names = {span.name for scope in resource.scope_spans for span in scope.spans}
    assert names == {"chat fake", "queue", "prefill", "decode"}
    assert MARKER.encode() not in batch.SerializeToString()


async def test_a_collector_that_never_answers_holds_nothing_up(
    serve_with: Traced, collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, url = collector
    taken.open.clear()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    before = set(threading.enumerate())
    tracer = build_tracer(url)
    (sender,) = set(threading.enumerate()) - before
    client = await serve_with(tracer, FakeEngine())
    for _ in range(5):
        assert (await client.post(CHAT, json=BODY)).status == 200
    await until(lambda: taken.paths)
    await tracer.close(timeout_s=0.05)
    assert taken.got == []
    assert sender.is_alive()


async def test_a_collector_that_is_away_fails_nothing(
    serve_with: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    tracer = build_tracer("http://127.0.0.1:9")
    client = await serve_with(tracer, FakeEngine())
    for _ in range(3):
        assert (await client.post(CHAT, json=BODY)).status == 200
    await tracer.close(timeout_s=0.05)


def test_without_the_extra_the_option_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(ConfigError, match=r"pip install 'radixkv\[otel\]'"):
        build_tracer("http://localhost:4318")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("http://collector:4318/v1/traces", "http://collector:4318/v1/traces"),
        ("http://[::1]:4318/otlp", "http://[::1]:4318/otlp"),
    ],
)
def test_an_endpoint_without_a_path_gets_the_usual_one(given: str, expected: str) -> None:
    assert traces_url(given) == expected


@pytest.mark.parametrize("given", ["collector:4317", "grpc://c:4317", "http://", "http://c:x", ""])
def test_what_is_no_url_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint must be an http or https URL"):
        traces_url(given)
