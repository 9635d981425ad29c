"""What the tests of rules and dashboards share: the series that a service shows."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from embeddings.sinks.follow import attach
from service.core import tables
from service.core.settings import Settings
from service.jobs import job_records
from tests.service import published
from tests.service.ops.promql import Series
from tests.service.service_kit import client_of, job_body, running


@pytest.fixture
async def shown(settings: Settings, dataset_body: dict[str, Any]) -> Series:
    """Of a service that has seen a job, another that runs, a fetch, a failed round, a webhook, a gate and a sink."""
    async with running(settings) as app:
        async with client_of(app, settings.admin_key_file.read_text().strip()) as client:
            published.publish(settings, gate=[{"metric": "mean_cosine", "value": 0.97, "verdict": "pass"}])
            await client.post("/v1/datasets", json=dataset_body)
            job_id = (await client.post("/v1/jobs", json=job_body())).json()["id"]
            async with app.state.database.write() as connection:
                row = await job_records.locked(connection, job_id)
                await job_records.change(connection, row, state="failed", finished_at=tables.now())
                values = {"job_id": job_id, "epoch": 1, "split": "test", "values": {"auc": 0.7}}
                await connection.execute(tables.job_metric.insert().values(values))
            running_id = (await client.post("/v1/jobs", json=job_body())).json()["id"]
            async with app.state.database.write() as connection:
                row = await job_records.locked(connection, running_id)
                figures = ("examples_per_second", "step_seconds", "waited_seconds", "loss", "epoch")
                now = tables.now()
                changes = {"state": "running", "progress": dict.fromkeys(figures, 1), "started_at": now}
                await job_records.change(connection, row, **changes, heartbeat_at=now)
            await client.post("/v1/collections/items/vectors", json={"ids": [10]})
            attach(app.state.store.collection("items"), ["warehouse"])
            app.state.metrics.background_errors.labels("runner").inc()
            app.state.metrics.webhooks.labels("given_up").inc()
            app.state.store.collection("items")._reader._damaged["v000009"] = "planted"
            text = (await client.get("/metrics")).raise_for_status().text
    found: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found
