"""One trace from the request that submits a job to the stages of its run; off, and nothing is made of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from service.core import tables
from service.core.settings import Settings
from service.jobs import submission
from tests.service.service_kit import client_of, job_body, running
from trainer.launch.driver import execute
from trainer.runs import tracing
from trainer.runs.directory import read_run
from trainer.runs.failures import ResourceError

pytestmark = pytest.mark.anyio


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    for name in ("provider", "_provider"):
        monkeypatch.setattr(tracing, name, lambda: provider)
    yield exporter
    provider.shutdown()


async def test_a_run_belongs_to_the_trace_of_its_request(
    settings: Settings, dataset_body: dict[str, Any], spans: InMemorySpanExporter
) -> None:
    async with running(settings) as app:
        async with client_of(app, settings.admin_key_file.read_text().strip()) as client:
            assert (await client.post("/v1/datasets", json=dataset_body)).status_code == 201
            callers = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
            job = (await client.post("/v1/jobs", json=job_body(), headers=callers)).json()["id"]
            assert (await client.get("/healthz")).status_code == 200
        async with app.state.database.read() as connection:
            row = (await connection.execute(sa.select(tables.job))).mappings().one()
        submission.prepare_run(settings, app.state.store, {**row, "attempt": 1, "lease": "l"})
    run = read_run(settings.run_dir(job))

    def fail(_: object) -> None:
        raise ResourceError("nobody trains in this test")

    assert execute(run, fail) != 0
    found = {span.name: span for span in spans.get_finished_spans()}
    asked = found["POST /v1/jobs"]
    assert f"{asked.context.trace_id:032x}" == "ab" * 16, "a caller's own trace goes on"
    assert found["run"].parent.span_id == asked.context.span_id
    assert {found[name].parent.span_id for name in ("prepare", "train")} == {found["run"].context.span_id}
    assert {span.context.trace_id for span in (found["run"], found["prepare"], found["train"])} == {
        asked.context.trace_id
    }
    assert found["run"].attributes["evenkeel.job"] == job
    assert found["run"].status.status_code == StatusCode.ERROR
    assert "nobody trains" in found["run"].status.description
    assert not any("healthz" in name for name in found)


def test_without_being_asked_for_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tracing.VARIABLE, raising=False)
    tracing.provider.cache_clear()
    tracing._provider.cache_clear()
    with tracing.span("run", f"00-{'ab' * 16}-{'cd' * 8}-01"):
        assert tracing.traceparent() is None
    tracing.flush()


@pytest.mark.parametrize("asked", ["yes", "1"])
def test_what_cannot_be_made_is_said(asked: str, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """The service does not start; a run says so and trains."""
    monkeypatch.setenv(tracing.VARIABLE, asked)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    for cached in (tracing.provider, tracing._provider):
        cached.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="EVENKEEL_TRACES"):
            tracing.provider()
        with tracing.span("run"):
            pass
        assert "no traces: EVENKEEL_TRACES" in capfd.readouterr().err
    finally:
        for cached in (tracing.provider, tracing._provider):
            cached.cache_clear()
