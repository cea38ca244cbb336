"""The engine: admits requests, schedules steps, runs the model, samples, and releases.

`Engine` is synchronous, one `step()` at a time. `AsyncEngine` runs one in a thread beside an event
loop. The server needs nothing below this package, so it re-exports the request types.
"""

from radixkv.cache.explain import Explanation
from radixkv.engine.async_engine import AsyncEngine, RequestStream
from radixkv.engine.cache_control import PinReport
from radixkv.engine.engine import Engine
from radixkv.engine.explanations import RequestExplanation
from radixkv.engine.histogram import HistogramData
from radixkv.engine.request_progress import RequestProgress
from radixkv.engine.session_cache import SessionKV, SessionPath, SessionUsage
from radixkv.engine.stats import EngineHealth, EngineStats, namespace_label, namespace_of
from radixkv.request import RequestOutput, RequestTimings, SamplingParams, TokenLogprob

__all__ = [
    "AsyncEngine",
    "Engine",
    "EngineHealth",
    "EngineStats",
    "Explanation",
    "HistogramData",
    "PinReport",
    "RequestExplanation",
    "RequestOutput",
    "RequestProgress",
    "RequestStream",
    "RequestTimings",
    "SamplingParams",
    "SessionKV",
    "SessionPath",
    "SessionUsage",
    "TokenLogprob",
    "namespace_label",
    "namespace_of",
]
