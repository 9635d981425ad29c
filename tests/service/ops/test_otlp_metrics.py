"""What /metrics shows reaches an OpenTelemetry receiver over HTTP, and nothing else is counted for it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families

from service.core.settings import Settings
from service.ops import otlp_metrics
from tests.service import published
from tests.service.service_kit import client_of, running, until
from tests.support.receiver import Receiver, receiving
from trainer.runs import tracing

pytestmark = pytest.mark.anyio

PATH = "/v1/metrics"


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with receiving() as server:
        monkeypatch.setenv(otlp_metrics.VARIABLE, "1")
        monkeypatch.setenv(otlp_metrics.INTERVAL_VARIABLE, "50")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=shop")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "recommender")
        yield server


async def received(receiver: Receiver) -> tuple[dict[str, str], dict[str, Metric]]:
    """Attributes of the resource, and the metrics by name, of the next export that began after this call."""
    while not receiver.posts.empty():
        receiver.posts.get()
    await asyncio.to_thread(receiver.next, PATH)  # its figures may be from before
    post = await asyncio.to_thread(receiver.next, PATH)
    assert post.headers["x-tenant"] == "shop"
    (resource,) = ExportMetricsServiceRequest.FromString(post.body).resource_metrics
    (scope,) = resource.scope_metrics
    who = {one.key: one.value.string_value for one in resource.resource.attributes}
    return who, {metric.name: metric for metric in scope.metrics}


def attributes(point: Any) -> dict[str, str]:
    return {one.key: one.value.string_value for one in point.attributes}


async def test_what_is_shown_is_what_is_sent(settings: Settings, receiver: Receiver) -> None:
    published.publish(settings)
    async with running(settings) as app:
        async with client_of(app, settings.admin_key_file.read_text().strip()) as client:
            await client.post("/v1/collections/items/vectors", json={"ids": [10, 20]})
            text = (await client.get("/metrics")).text
            who, sent = await received(receiver)
    shown = {family.name: family for family in text_string_to_metric_families(text) if family.samples}
    shown = {name: family for name, family in shown.items() if not name.endswith("_created")}
    assert who["service.name"] == "recommender"
    assert len(who["service.instance.id"]) == 36
    assert set(shown) == set(sent)
    for name, family in shown.items():
        assert sent[name].description == family.documentation
        kind = {"counter": "sum", "histogram": "histogram", "gauge": "gauge"}[family.type]
        assert sent[name].WhichOneof("data") == kind, name
    (age,) = sent["evenkeel_collection_age_seconds"].gauge.data_points
    assert attributes(age) == {"collection": "items"}
    assert age.as_double >= 0
    requests = sent["evenkeel_http_requests"].sum
    assert requests.is_monotonic
    assert requests.aggregation_temporality == AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
    (count,) = (point for point in requests.data_points if attributes(point)["route"].endswith("/vectors"))
    assert (attributes(count)["method"], attributes(count)["status"], count.as_double) == ("POST", "200", 1)
    assert 0 < count.start_time_unix_nano < count.time_unix_nano
    (ids,) = sent["evenkeel_fetched_ids"].histogram.data_points
    assert (ids.count, ids.sum, list(ids.explicit_bounds)) == (1, 2, [1, 10, 100, 1000, 10000])
    assert list(ids.bucket_counts) == [0, 1, 0, 0, 0, 0]
    assert not ids.HasField("min")


def test_buckets_hold_what_lies_between_their_bounds() -> None:
    registry = CollectorRegistry()
    histogram = Histogram("size", "Of things.", buckets=(1, 10, 100), registry=registry)
    for value in (1, 2, 3, 50, 1000, 2000):
        histogram.observe(value)
    (family,) = registry.collect()
    sent = otlp_metrics.converted(family)
    assert sent is not None
    (point,) = sent.data.data_points
    assert point.bucket_counts == [1, 2, 1, 2]
    assert point.explicit_bounds == [1, 10, 100]
    assert (point.count, point.sum) == (6, 3056)


@pytest.mark.parametrize("role", ["scheduler", "vectors"])
async def test_each_role_sends_what_it_shows(settings: Settings, receiver: Receiver, role: Any) -> None:
    async with running(settings):  # makes the database and the first key
        pass
    async with running(dataclasses.replace(settings, role=role)):
        _, sent = await received(receiver)
    assert ("evenkeel_jobs" in sent) == (role == "scheduler")


async def test_a_receiver_that_refuses_is_told_of_and_the_service_goes_on(
    settings: Settings, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.status = 400
    caplog.set_level(logging.WARNING, "evenkeel")
    async with running(settings) as app:
        await received(receiver)
        async with client_of(app) as client:
            assert (await client.get("/readyz")).json()["status"] == "ok"
        receiver.status = 200
        await until(lambda: asyncio.sleep(0.01, "works again" in caplog.text), seconds=60)
    assert "metrics for OpenTelemetry: a round failed" in caplog.text
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in caplog.text


async def test_none_are_sent_unless_asked_for(
    settings: Settings, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(otlp_metrics.VARIABLE)
    assert otlp_metrics.exporter() is None
    async with running(settings):
        await asyncio.sleep(0.2)
    assert receiver.posts.empty()


@pytest.mark.parametrize(
    ("variable", "value"), [(otlp_metrics.VARIABLE, "yes"), (otlp_metrics.INTERVAL_VARIABLE, "1m")]
)
def test_what_cannot_be_sent_is_said(
    variable: str, value: str, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(RuntimeError, match=f"{variable} is '{value}': set it to"):
        otlp_metrics.exporter()


def test_what_is_not_installed_is_named(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.metric_exporter", None)
    with pytest.raises(RuntimeError, match=r"EVENKEEL_METRICS=1, but .* is not installed: pip install"):
        otlp_metrics.exporter()


def test_spans_reach_a_receiver_too(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tracing.VARIABLE, "1")
    for cached in (tracing.provider, tracing._provider):
        cached.cache_clear()
    try:
        with tracing.span("run", job="j1"):
            pass
        tracing.flush()
        body = receiver.next("/v1/traces").body
        provider = tracing.provider()
        assert provider is not None
        provider.shutdown()
    finally:
        for cached in (tracing.provider, tracing._provider):
            cached.cache_clear()
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    (span,) = resource.scope_spans[0].spans
    assert (span.name, attributes(span)) == ("run", {"evenkeel.job": "j1"})
