"""Prometheus metrics: counters, and the page that shows them together with gauges of :mod:`service.ops.collectors`.

With several workers behind one socket (:mod:`service.ops.workers`), each worker counts into its own file in a shared
directory, and the worker that is scraped adds up all files. So a scrape describes all workers, including those that
have died since.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest, values
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

_DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
"""Histogram buckets: a fetch takes a millisecond or two, and a dry run that counts rows takes minutes."""
NUM_IDS = (1, 10, 100, 1000, 10000)


class Metrics:
    """Metrics in a registry of their own, so that several applications in one process do not share counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "evenkeel_http_requests", "Requests answered.", ["method", "route", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "evenkeel_http_request_seconds",
            "Time to answer a request, including the body.",
            ["method", "route"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.fetch_seconds = Histogram(
            "evenkeel_fetch_seconds",
            "Time to look vectors up and encode them.",
            ["collection", "format"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.fetched_ids = Histogram(
            "evenkeel_fetched_ids", "Ids in a fetch.", ["collection"], buckets=NUM_IDS, registry=self.registry
        )
        self.background_errors = Counter(
            "evenkeel_background_errors", "Failed rounds of a background task.", ["task"], registry=self.registry
        )
        self.webhooks = Counter(
            "evenkeel_webhook_deliveries", "Attempts to deliver a webhook.", ["outcome"], registry=self.registry
        )

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)

    def families(self, gauges: Iterable[Metric] = ()) -> list[Metric]:
        """Return the counts of only this process, then ``gauges``."""
        return [*self.registry.collect(), *gauges]

    def render(self, gauges: Iterable[Metric] = ()) -> bytes:
        """Return Prometheus text: counts of all processes that share this one's directory, if any, then ``gauges``."""
        directory = os.environ.get(_DIRECTORY_VARIABLE)
        if directory is None:
            counted: Collector = self.registry
        else:
            counted = MultiProcessCollector(CollectorRegistry(), path=directory)
        shown = CollectorRegistry()
        shown.register(_Together(counted, gauges))
        return generate_latest(shown)


class _Together(Collector):
    def __init__(self, counted: Collector, gauges: Iterable[Metric]):
        self._counted, self._gauges = counted, gauges

    def collect(self) -> Iterator[Metric]:
        yield from self._counted.collect()
        yield from self._gauges

    def describe(self) -> Iterable[Metric]:
        return ()


@contextlib.contextmanager
def shared_by_workers() -> Iterator[None]:
    """Make metrics of this process and its forks count into one temporary directory until the context ends."""
    with tempfile.TemporaryDirectory(prefix="evenkeel-metrics-") as directory:
        before = values.ValueClass
        os.environ[_DIRECTORY_VARIABLE] = directory
        values.ValueClass = values.MultiProcessValue()
        try:
            yield
        finally:
            del os.environ[_DIRECTORY_VARIABLE]
            values.ValueClass = before
