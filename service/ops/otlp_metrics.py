"""The metrics of /metrics, sent to an OpenTelemetry collector over HTTP; off unless ``EVENKEEL_METRICS=1``.

The metrics are read from the registry that /metrics shows (docs/adr/0038-traces.md). OpenTelemetry's own variables set
their destination and interval, such as ``OTEL_EXPORTER_OTLP_ENDPOINT`` and ``OTEL_METRIC_EXPORT_INTERVAL``. Each
process sends its own counts under a ``service.instance.id`` of its own.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from prometheus_client import Metric
from prometheus_client.samples import Sample

from service.core.task_health import TaskHealth, repeat
from trainer.runs import tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import export

VARIABLE = "EVENKEEL_METRICS"
INTERVAL_VARIABLE = "OTEL_METRIC_EXPORT_INTERVAL"
DEFAULT_INTERVAL_MS = "60000"
_NS = 10**9
_BUCKET_LABEL = "le"
Labels = tuple[tuple[str, str], ...]


def exporter() -> export.MetricExporter | None:
    """Return the exporter of metrics; None if metrics are not exported.

    Raises:
        RuntimeError: Metrics are to be exported but the exporter's package is not installed, or a variable is invalid.
    """
    if not tracing.is_on(VARIABLE):
        return None
    with tracing.needed_for(VARIABLE):
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    interval_seconds()
    return OTLPMetricExporter()


def interval_seconds() -> float:
    """Return the time between two exports, in seconds.

    Raises:
        RuntimeError: The variable is not a number of milliseconds.
    """
    text = os.environ.get(INTERVAL_VARIABLE, "").strip() or DEFAULT_INTERVAL_MS
    if not text.isdecimal() or int(text) == 0:
        raise RuntimeError(f"{INTERVAL_VARIABLE} is '{text}': set it to milliseconds, or leave it out")
    return int(text) / 1000


async def run(sender: export.MetricExporter, collect: Callable[[], Awaitable[Iterable[Metric]]]) -> None:
    """Send the metrics of ``collect`` at each interval until cancelled; log it if the receiver cannot be reached."""
    from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData, ResourceMetrics, ScopeMetrics
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    resource = tracing.resource(**{"service.instance.id": str(uuid.uuid4())})

    async def send() -> None:
        metrics = [metric for family in await collect() if (metric := converted(family)) is not None]
        scope = ScopeMetrics(scope=InstrumentationScope(tracing.NAME), metrics=metrics, schema_url="")
        data = MetricsData([ResourceMetrics(resource=resource, scope_metrics=[scope], schema_url="")])
        if await asyncio.to_thread(sender.export, data) is not MetricExportResult.SUCCESS:
            raise ConnectionError(
                "the OpenTelemetry collector did not accept the metrics: check OTEL_EXPORTER_OTLP_ENDPOINT"
            )

    try:
        await repeat(send, interval_seconds(), TaskHealth("metrics for OpenTelemetry"))
    finally:
        sender.shutdown()


def converted(family: Metric) -> export.Metric | None:
    """Convert a Prometheus counter, histogram or gauge to an OpenTelemetry metric; None if it has no samples."""
    from opentelemetry.sdk.metrics import export

    if not family.samples:
        return None
    begun = {
        _labels(sample): int(sample.value * _NS) for sample in family.samples if sample.name == f"{family.name}_created"
    }
    cumulative = export.AggregationTemporality.CUMULATIVE
    data: export.Sum | export.Histogram | export.Gauge
    if family.type == "counter":
        counts = [sample for sample in family.samples if sample.name == f"{family.name}_total"]
        data = export.Sum([_number(sample, begun) for sample in counts], cumulative, is_monotonic=True)
    elif family.type == "histogram":
        series: dict[Labels, list[Sample]] = {}
        for sample in family.samples:
            series.setdefault(_labels(sample), []).append(sample)
        data = export.Histogram([_distribution(labels, ones, begun) for labels, ones in series.items()], cumulative)
    else:
        data = export.Gauge([_number(sample, begun) for sample in family.samples])
    return export.Metric(name=family.name, description=family.documentation, unit=family.unit, data=data)


def _labels(sample: Sample) -> Labels:
    return tuple(sorted((name, value) for name, value in sample.labels.items() if name != _BUCKET_LABEL))


def _number(sample: Sample, begun: dict[Labels, int]) -> export.NumberDataPoint:
    from opentelemetry.sdk.metrics.export import NumberDataPoint

    labels = _labels(sample)
    return NumberDataPoint(dict(labels), begun.get(labels, 0), time.time_ns(), sample.value)


def _distribution(labels: Labels, samples: list[Sample], begun: dict[Labels, int]) -> export.HistogramDataPoint:
    from opentelemetry.sdk.metrics.export import HistogramDataPoint

    up_to = {
        float(sample.labels[_BUCKET_LABEL]): int(sample.value) for sample in samples if _BUCKET_LABEL in sample.labels
    }
    bounds = sorted(up_to)
    counts = [up_to[bound] - up_to.get(before, 0) for before, bound in zip([-math.inf, *bounds], bounds, strict=False)]
    total = next(sample.value for sample in samples if sample.name.endswith("_sum"))
    return HistogramDataPoint(
        dict(labels), begun.get(labels, 0), time.time_ns(), sum(counts), total, counts, bounds[:-1],
        min=None, max=None,  # type: ignore[arg-type]  # optional in the protocol; Prometheus keeps neither
    )  # fmt: skip
