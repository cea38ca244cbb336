"""OpenTelemetry traces: a span per request that generates, with its phases, and no text of any."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from radixkv import __version__
from radixkv.errors import ConfigError
from radixkv.server.scope import RequestScope

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.util.types import AttributeValue

    from radixkv.server.request_log import RequestRecord

__all__ = ["RequestTracer", "build_tracer", "traces_url"]

TRACES_PATH = "/v1/traces"
# At the end, for the spans that no collector has taken yet.
CLOSE_S = 3.0
OPERATIONS = {"completions": "text_completion", "warm": "text_completion"}
MISSING = (
    "--otlp-traces-endpoint needs OpenTelemetry, which is not installed: "
    "pip install 'radixkv[otel]'"
)


class RequestTracer:
    """Owns a tracer provider of its own; what it makes goes to one processor of spans.

    Spans are made when a request has ended, from what was measured on the way, so that a request
    never waits for them: they go into a queue of limited length, which a thread of OpenTelemetry
    empties. Names are those of the semantic conventions for generative AI, and of vLLM for its
    latencies.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        """Make a tracer; needs the extra `otel`.

        Args:
            processor: gets every span that the sampler (OTEL_TRACES_SAMPLER) wants.
        """
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Not at the exit of the process, where a collector that is away could hold it up.
        self._provider = TracerProvider(
            resource=Resource.create(_resource()), shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("radixkv", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, scope: RequestScope, status: int) -> str | None:
        """Make the spans of a request that has ended; return the id of its trace.

        It is a child of the client's span if the header `traceparent` names one. None for routes
        that don't generate.

        Args:
            scope: of the request.
            status: of its answer.
        """
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        if scope.api is None:
            return None
        # Spans have wall-clock times; what was measured are times of the monotonic clock.
        offset = time.time_ns() - time.monotonic_ns()

        def at(seconds: float) -> int:
            return offset + int(seconds * 1e9)

        operation = OPERATIONS.get(scope.api, "chat")
        span = self._tracer.start_span(
            f"{operation} {scope.model}",
            context=self._propagator.extract(scope.headers, Context()),
            kind=SpanKind.SERVER,
            attributes=_attributes(scope, status, operation),
            start_time=at(scope.started),
        )
        error = _error_type(scope, status)
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR))
        if span.is_recording():
            within = set_span_in_context(span, Context())
            for record in scope.records:
                for phase, begin, end in _phases(record):
                    child = self._tracer.start_span(
                        phase,
                        context=within,
                        attributes={"radixkv.engine_request.id": record.engine_id},
                        start_time=at(begin),
                    )
                    child.end(at(end))
        span.end(at(time.monotonic()))
        trace_id = f"{span.get_span_context().trace_id:032x}"
        for record in scope.records:
            record.trace_id = trace_id
        return trace_id

    async def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send what is left, but wait for no collector longer than `timeout_s`."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # nobody has waited; the loop is closed
                loop.call_soon_threadsafe(done.set)

        # A daemon, which may be left behind; a worker thread would be waited for at the exit.
        threading.Thread(target=shut_down, daemon=True).start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), timeout_s)


def build_tracer(endpoint: str) -> RequestTracer:
    """Return a tracer that sends to a collector over HTTP.

    Args:
        endpoint: see `traces_url`.

    Raises:
        ConfigError: OpenTelemetry is not installed, or the endpoint is no URL.
    """
    url = traces_url(endpoint)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError(MISSING) from None
    # One line for each batch that is lost is enough, without those for each attempt.
    logging.getLogger(OTLPSpanExporter.__module__).setLevel(logging.ERROR)
    return RequestTracer(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))


def traces_url(endpoint: str) -> str:
    """Return where an endpoint takes traces: a URL without a path gets the usual one.

    Raises:
        ConfigError: it is no http or https URL.

    >>> traces_url("http://localhost:4318")
    'http://localhost:4318/v1/traces'
    """
    try:
        parts = urlsplit(endpoint)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(
            "--otlp-traces-endpoint must be an http or https URL such as "
            f"http://localhost:4318/v1/traces, got {endpoint[:256]!r}"
        )
    return endpoint if parts.path not in ("", "/") else endpoint.rstrip("/") + TRACES_PATH


def _resource() -> dict[str, str]:
    """Return what tells this server from others, where the environment does not say."""
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    name = {} if named else {"service.name": "radixkv"}
    return {**name, "service.version": __version__}


def _attributes(scope: RequestScope, status: int, operation: str) -> dict[str, AttributeValue]:
    params, records = scope.params, scope.records
    found: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "radixkv",
        "gen_ai.request.model": scope.model,
        # What a path names need not exist.
        "gen_ai.conversation.id": scope.session_id if records else None,
        "http.request.method": scope.method,
        "http.route": scope.route,
        "http.response.status_code": status,
        "radixkv.request.id": scope.request_id,
        "radixkv.tenant": scope.tenant or None,
    }
    if params is not None:
        found |= {
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
            "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
            "gen_ai.request.presence_penalty": params.presence_penalty or None,
            "gen_ai.request.seed": params.seed,
            "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        }
    if records:
        reasons = [record.finish_reason for record in records]
        cached = [record.cached_tokens for record in records]
        found |= {
            "gen_ai.response.id": scope.response_id,
            "gen_ai.response.model": scope.model,
            "gen_ai.response.finish_reasons": [reason for reason in reasons if reason is not None],
            "gen_ai.usage.input_tokens": sum(record.prompt_tokens for record in records),
            "gen_ai.usage.output_tokens": sum(record.output_tokens for record in records),
            "gen_ai.usage.cache_read.input_tokens": sum(count or 0 for count in cached),
            "radixkv.namespace": records[0].namespace,
            "radixkv.preemptions": sum(record.preemptions for record in records),
        }
    if len(records) == 1:
        found |= _latencies(records[0])
    return {name: value for name, value in found.items() if value is not None}


def _latencies(record: RequestRecord) -> dict[str, AttributeValue | None]:
    """Return the latencies of a request, in seconds, under vLLM's names and the conventions'."""
    phases = {name: end - begin for name, begin, end in _phases(record)}
    finished = record.finished
    return {
        "gen_ai.response.time_to_first_chunk": record.ttft_s,
        "gen_ai.latency.time_to_first_token": record.ttft_s,
        "gen_ai.latency.time_in_queue": phases.get("queue"),
        "gen_ai.latency.time_in_model_prefill": phases.get("prefill"),
        "gen_ai.latency.time_in_model_decode": phases.get("decode"),
        "gen_ai.latency.e2e": None if finished is None else finished - record.arrival,
    }


def _phases(record: RequestRecord) -> Iterator[tuple[str, float, float]]:
    """Yield (name, begin, end) of what a request went through; the last ends with it."""
    if record.finished is None:
        return
    marks = [
        ("queue", record.arrival, record.first_scheduled),
        ("prefill", record.first_scheduled, record.first_token),
        ("decode", record.first_token, record.last_token),
    ]
    for name, begin, end in marks:
        if begin is not None:
            yield name, begin, max(begin, record.finished if end is None else end)


def _error_type(scope: RequestScope, status: int) -> str | None:
    """Return why a request failed on the server's side, streams included; None if it did not."""
    if status >= 500:
        return str(status)
    failed = (record.finish_reason for record in scope.records if record.state == "failed")
    return next(failed, None)
