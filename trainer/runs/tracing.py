"""OpenTelemetry traces of requests and runs, off unless ``EVENKEEL_TRACES=1`` (docs/adr/0038-traces.md).

OpenTelemetry's own variables, such as ``OTEL_EXPORTER_OTLP_ENDPOINT``, set the destination. Set them in the environment
of the service, which local runs inherit, and on the nodes of a cluster. If a collector cannot be reached, spans are
lost, but no request or run fails. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

VARIABLE = "EVENKEEL_TRACES"
FLUSH_SECONDS = 5.0
NAME = "evenkeel"


@functools.cache
def provider() -> TracerProvider | None:
    """Return this process's provider of tracers; None if traces are off.

    Raises:
        RuntimeError: traces are on and OpenTelemetry is not installed, or ``EVENKEEL_TRACES`` is neither 0 nor 1.
    """
    if not is_on(VARIABLE):
        return None
    with needed_for(VARIABLE):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    made = TracerProvider(resource=resource())
    made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return made


def is_on(variable: str) -> bool:
    """Return True if an environment variable is 1.

    Raises:
        RuntimeError: it is neither 0 nor 1.
    """
    asked = os.environ.get(variable, "").strip()
    if asked not in ("", "0", "1"):
        raise RuntimeError(f"{variable} is '{asked}': set it to 0 or 1, or leave it out")
    return asked == "1"


@contextlib.contextmanager
def needed_for(variable: str) -> Iterator[None]:
    """Turn a failed import in the block into an error that names the extra to install.

    Raises:
        RuntimeError: the package that ``variable`` needs is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise RuntimeError(f"{variable}=1, but {error.name} is not installed: pip install 'evenkeel[otel]'") from None


def resource(**attributes: str) -> Resource:
    """Return OpenTelemetry's description of this process: the name in OTEL_SERVICE_NAME, or evenkeel."""
    from opentelemetry.sdk.resources import Resource

    return Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", NAME), **attributes})


@functools.cache
def _provider() -> TracerProvider | None:
    """Return the provider; None if traces are off, or if a setting is wrong, after one warning.

    The service calls :func:`provider` instead, so a wrong setting stops its start. A run continues without traces.
    """
    try:
        return provider()
    except RuntimeError as error:
        print(f"no traces: {error}", file=sys.stderr, flush=True)
        return None


def traceparent() -> str | None:
    """Return the current span as the value of a ``traceparent`` header (W3C Trace Context); None without a span."""
    if _provider() is None:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent")


class Outcome:
    """Outcome of a span's work: an error that no exception reports, if any."""

    error: str | None = None


@contextlib.contextmanager
def span(name: str, parent: str | None = None, **attributes: str | int) -> Iterator[Outcome]:
    """Open a span around the block.

    Its parent is ``parent`` (:func:`traceparent` of another process) or the current span. An exception, or the
    outcome's ``error``, sets its status. Without traces nothing happens.
    """
    outcome, maker = Outcome(), _provider()
    if maker is None:
        yield outcome
        return
    from opentelemetry.trace import Status, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = None if parent is None else TraceContextTextMapPropagator().extract({"traceparent": parent})
    tracer = maker.get_tracer(NAME)
    with tracer.start_as_current_span(
        name, context, attributes={f"{NAME}.{key}": one for key, one in attributes.items()}
    ) as opened:
        yield outcome
        if outcome.error is not None:
            opened.set_status(Status(StatusCode.ERROR, outcome.error))


def flush() -> None:
    """Send the waiting spans, for some seconds at most; called before a process ends."""
    maker = _provider()
    if maker is not None:
        maker.force_flush(int(FLUSH_SECONDS * 1000))
