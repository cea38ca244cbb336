"""Metrics of sessions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from radixkv.server.sessions import SessionStore

if TYPE_CHECKING:
    from radixkv.server.session_saver import SessionSaver

__all__ = ["SessionCollector"]


class SessionCollector(Collector):
    """Counts sessions, and what became of their way to the disk, at each scrape."""

    def __init__(self, store: SessionStore, saver: SessionSaver | None, model_name: str) -> None:
        self._store = store
        self._saver = saver
        self._labels = [model_name]

    def collect(self) -> Iterator[Metric]:
        """Yield every metric; those of the disk are 0 without one."""
        saver = self._saver
        for name, text, value in (
            ("radixkv:sessions", "Sessions", len(self._store)),
            (
                "radixkv:sessions_unsaved",
                "Sessions whose latest state is not in --session-db yet",
                0 if saver is None else saver.num_pending,
            ),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, text, value in (
            (
                "radixkv:session_saves",
                "States of sessions written to --session-db",
                0 if saver is None else saver.num_saved,
            ),
            (
                "radixkv:session_save_failures",
                "Writes to --session-db that failed, and were tried again",
                0 if saver is None else saver.num_failures,
            ),
        ):
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric(self._labels, value)
            yield counter
